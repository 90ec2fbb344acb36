"""``SpikeProduct``: a layer's product with spikes, sparse where they are rare and dense where they are not.

The backend that prepared the layer computes the sparse product, by the methods of ``RunsSpikes``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from q4core import InputError, Precision, Q4Linear
from q4core.extension import (
    LayerHandle,
    Record,
    attach_record,
    find_product_fault,
    find_refusal,
    prove_once,
    raise_broken_call,
    record_of,
)
from q4core.plugin_api import PLUGIN_FAULTS, note_fault, on_device

if TYPE_CHECKING:
    from q4core import PackedWeight, Prepared

__all__ = ["RunsSpikes", "SpikeProduct", "SpikeRecord"]

_ONE = 0x3F800000
"""The bits of 1.0."""
_HINT = "Call the layer itself for other numbers, and for gradients."
_RATES = (0.0, 0.02, 0.2, 1.0)
"""Share of ones in each row of the self-probe."""


class RunsSpikes(Protocol):
    """The methods of a backend whose manifest declares the op ``"spikes"``."""

    def spikes(self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None) -> None:
        """Write ``x @ wᵀ + bias`` to ``out``, with exact weights.

        Args:
            prepared: What ``prepare`` gave for a request of float32.
            x: bool [M, K], contiguous; M ≥ 1.
            out: float32 [M, N], contiguous; written completely, never read.
            bias: float32 [N], contiguous, or None.
        """
        ...

    def spike_limit(self, rows: int) -> float:
        """Return the share of ones, from 0 to 1, above which the dense product of ``rows`` rows is faster."""
        ...


@attrs.define(eq=False)
class SpikeRecord(Record):
    """Counts of a layer's sparse and dense products with spikes.

    Args:
        layer: Its name.
        backend: Who runs them.
        reason: Why none is sparse; None where the backend's sparse product is used.
        sparse: Calls of the sparse product.
        dense: Calls of the dense one.
    """

    section = "spikes"

    layer: str
    backend: str = ""
    reason: str | None = None
    sparse: int = 0
    dense: int = 0

    def __str__(self) -> str:
        """Return the record as a line."""
        why = "" if self.reason is None else f"; not sparsely: {self.reason}"
        return f"spikes of {self.layer} on {self.backend}: {self.sparse} × sparse, {self.dense} × dense{why}"


class SpikeProduct:
    """``y = x @ wᵀ + bias`` for an x of 0 and 1, at the cost of the ones where these are rare.

    The backend that prepared the layer computes it where it declares spikes and passed the self-probe; up to the share
    of ones that it states, which is measured in each call. Above that the layer's own dense product runs, unless it
    rounds x, which would change bits; and always where the backend declares none. No gradients are recorded.

    Args:
        layer: A layer of float32; it may be moved and loaded afterwards.

    Raises:
        InputError: ``layer`` is no ``Q4Linear`` of float32.
        LifecycleError: The layer is closed, or waits for its state.
    """

    def __init__(self, layer: Q4Linear) -> None:
        if not isinstance(layer, Q4Linear) or layer.dtype is not torch.float32:
            value = f"{layer.dtype} layer" if isinstance(layer, Q4Linear) else type(layer).__name__
            raise InputError("SpikeProduct", name="layer", rule="a Q4Linear of float32", value=value)
        self.layer = layer
        known = record_of(layer, SpikeRecord.section)
        self.record = known if isinstance(known, SpikeRecord) else SpikeRecord(layer.name)
        """The backend that runs it, reasons against sparse products, and the count of each product."""
        attach_record(self.record, [layer])
        self._sparse: Any = None
        self._handle = self._new_handle()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ wᵀ + bias``.

        Args:
            x: [..., K], bool, or float32 of 0 and 1, on the layer's device.

        Returns:
            float32 [..., N].

        Raises:
            InputError: x has the wrong shape, dtype or device, requires gradients, or holds another number.
            LifecycleError: The layer is closed, or waits for its state.
        """
        handle, ones = self._checked(x)
        if not len(ones):
            return torch.empty((*x.shape[:-1], self.layer.out_features), device=handle.device)
        y = self._run(handle, ones, int(ones.count_nonzero()))
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.layer.out_features)  # noqa: PLR2004  # rows already

    def steps(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a call for each ``x[t]`` gives, bit for bit, with all sparse ones in one run.

        Args:
            x: [T, M, K], as of a call.

        Returns:
            float32 [T, M, N].

        Raises:
            InputError: As of a call, or x has other than three dimensions.
            LifecycleError: As of a call.
        """
        handle, ones = self._checked(x)
        if x.dim() != 3:  # noqa: PLR2004  # [T, M, K]
            raise self._refusal("x", "of shape [T, M, K]", list(x.shape))
        steps = ones.view(x.shape)
        counts = steps.flatten(1).count_nonzero(1).tolist() if x.numel() else []
        y = torch.empty((*x.shape[:-1], self.layer.out_features), device=handle.device)
        few = [step for step, count in enumerate(counts) if self._is_sparse(x.shape[1], count)]
        if few:
            every = len(few) == len(counts)
            result = self._run_sparse(handle, (steps if every else steps[few]).flatten(0, 1)).view(
                len(few), *y.shape[1:]
            )
            self.record.sparse += len(few)
            if every:
                return result
            y[few] = result
        for step in sorted({*range(len(counts))} - {*few}):
            y[step] = self._run(handle, steps[step], counts[step])
        return y

    def _checked(self, x: torch.Tensor) -> tuple[LayerHandle, torch.Tensor]:
        """Return what the layer runs by, and x as bool rows [M, K], contiguous."""
        handle, width = self._ready(), self.layer.in_features
        facts = isinstance(x, torch.Tensor) and (
            x.dim() > 0
            and x.shape[-1] == width
            and x.dtype in {torch.bool, torch.float32}
            and x.device == handle.device
        )
        if not facts or (x.requires_grad and torch.is_grad_enabled()):
            rule = f"bool or float32 of 0 and 1, [..., {width}] on {handle.device}, without gradients"
            value = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise self._refusal("x", rule, value)
        flat = x.reshape(x.numel() // width, width)
        ones = flat.to(torch.bool).contiguous()
        if x.dtype is torch.float32 and len(flat) and not _is_binary(flat, int(ones.count_nonzero())):
            wrong = (flat != 0) & (flat != 1)
            if bool(wrong.any()):
                raise self._refusal("x", "0 and 1 alone", float(flat[wrong][0]))
        return handle, ones

    def _refusal(self, name: str, rule: str, value: object) -> InputError:
        return InputError(f"spikes of layer {self.layer.name!r}", name=name, rule=rule, value=value, hint=_HINT)

    def _run(self, handle: LayerHandle, ones: torch.Tensor, count: int) -> torch.Tensor:
        """Return the product with bool rows [M, K], contiguous, by the path that their number of ones selects."""
        if self._is_sparse(len(ones), count):
            y = self._run_sparse(handle, ones)
            self.record.sparse += 1
            return y
        self.record.dense += 1
        with torch.no_grad():
            dense: torch.Tensor = self.layer(ones.to(torch.float32))
        return dense

    def _is_sparse(self, rows: int, count: int) -> bool:
        """Return whether a number of ones in a number of rows is low enough for the sparse product."""
        sparse, width = self._sparse, self.layer.in_features
        if sparse is None or count <= sparse.spike_limit(rows) * rows * width:
            return sparse is not None
        index = self._handle.segment_index(rows)  # a dense product that rounds x has other bits
        return index is not None and self._handle.segments[index].path.precision is not Precision.W4A32

    def _run_sparse(self, handle: LayerHandle, ones: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(ones), self.layer.out_features), dtype=torch.float32, device=handle.device)
        bias = self.layer.bias
        try:
            with on_device(handle.device):
                self._sparse.spikes(
                    handle.prepared, ones, out, bias=None if bias is None else bias.detach().contiguous()
                )
        except PLUGIN_FAULTS as error:
            raise_broken_call(error, handle.backend, "spikes")
        return out

    def _ready(self) -> LayerHandle:
        """Return what the layer runs by; what its backend can do is looked up where that is new."""
        if not self._handle.is_current:
            self._handle = self._new_handle()
        return self._handle

    def _new_handle(self) -> LayerHandle:
        handle = LayerHandle(self.layer)
        self.record.backend, self.record.reason = handle.backend.name, _reason(handle)
        self._sparse = handle.backend if self.record.reason is None else None
        return handle


def _is_binary(x: torch.Tensor, count: int) -> bool:
    """Return whether an x with so many numbers other than 0 is of 0 and 1, by its bits and without a copy."""
    bits = x.view(torch.int32)
    low, high = torch.aminmax(bits)
    return int(low) >= 0 and int(high) <= _ONE and int(bits.sum()) == count * _ONE


def _reason(handle: LayerHandle) -> str | None:
    """Return why the sparse product of a layer's backend is not used, or None."""
    backend: Any = handle.backend
    if refusal := find_refusal(backend, "spikes", handle.device, ("spikes", "spike_limit")):
        return refusal
    spec = handle.layer.weight.spec
    if spec is not None and "input_channel_scale" in spec.fields:  # what it multiplies is no spike
        return "in-features have factors of their own"

    def probe() -> str | None:
        with torch.no_grad():
            return _find_fault(backend, handle.prepared, handle.weight())

    return prove_once(handle.registry, backend, "spikes", handle.kind, probe)


def _find_fault(backend: Any, prepared: Prepared, weight: PackedWeight) -> str | None:
    """Return what is wrong with a backend's sparse product of a weight, compared with float64, or None."""
    device, count = prepared.tensors[0].device, weight.in_features
    random = torch.rand((len(_RATES), count), generator=torch.Generator().manual_seed(0x51), dtype=torch.float64)
    ones = random < torch.tensor(_RATES, dtype=torch.float64)[:, None]
    ones[1, [0, -1]] = True
    given = ones.to(device)
    lent = given.clone()
    out = torch.full((len(_RATES), weight.out_features), math.nan, dtype=torch.float32, device=device)
    try:
        with on_device(device):
            backend.spikes(prepared, lent, out, bias=None)
    except PLUGIN_FAULTS as error:
        return f"spikes raised {note_fault(backend.name, error)}"
    if not torch.equal(lent.view(torch.uint8), given.view(torch.uint8)):
        return "spikes wrote to x"
    wrong = find_product_fault(ones, out, weight)
    return None if wrong is None else f"spikes computed wrong numbers: {wrong}"
