"""``SpikeProduct``: a layer's product with spikes, sparse where they are rare and dense where they are not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from q4core.diagnostics.events import warn_once
from q4core.errors import PLUGIN_FAULTS, InputError, Q4ProbeWarning
from q4core.layers.diagnosis import SpikeRecord
from q4core.layers.linear import Q4Linear
from q4core.machine import on_device, outside_inference
from q4core.ops.plan import raise_broken_call
from q4core.probes.spikes import find_spike_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4core.ops.registration import LiveLayer
    from q4core.plugins.registry import Registry

_faults: weakref.WeakKeyDictionary[Registry, dict[tuple[str, str], str | None]] = weakref.WeakKeyDictionary()
"""What probes showed, by backend and the key of a plan: None where it is right."""
_records: weakref.WeakKeyDictionary[Q4Linear, SpikeRecord] = weakref.WeakKeyDictionary()
_ONE = 0x3F800000
"""The bits of 1.0."""
_HINT = "Call the layer itself for other numbers, and for gradients."


def spike_records(layers: Iterable[Q4Linear]) -> tuple[SpikeRecord, ...]:
    """Return the records of spikes of these layers."""
    return tuple(_records[layer] for layer in layers if layer in _records)


class SpikeProduct:
    """``y = x @ wᵀ + bias`` for an x of 0 and 1, at the cost of the ones where these are rare.

    The backend that prepared the layer computes it where it declares spikes and has been proven right; up to the share
    of ones that it states, which is measured anew in each call. Above that, and where it declares none, the layer's own
    dense product runs. No gradients are recorded.

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
        self.record = _records.setdefault(layer, SpikeRecord(layer.name))
        """Who runs it, why not sparsely, and how often each product ran."""
        self._live: LiveLayer | None = None
        self._sparse: Any = None
        self._ready()

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
        live, ones = self._checked(x)
        if not len(ones):
            return torch.empty((*x.shape[:-1], live.plan.out_features), device=live.device)
        y = self._run(live, ones, int(ones.count_nonzero()))
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], live.plan.out_features)  # noqa: PLR2004  # rows already

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
        live, ones = self._checked(x)
        if x.dim() != 3:  # noqa: PLR2004  # [T, M, K]
            raise self._refusal("x", "of shape [T, M, K]", list(x.shape))
        steps = ones.view(x.shape)
        counts = steps.flatten(1).count_nonzero(1).tolist() if x.numel() else []
        y = torch.empty((*x.shape[:-1], live.plan.out_features), device=live.device)
        few = [step for step, count in enumerate(counts) if self._is_sparse(x.shape[1], count)]
        if few:
            every = len(few) == len(counts)
            result = self._run_sparse(live, (steps if every else steps[few]).flatten(0, 1)).view(len(few), *y.shape[1:])
            self.record.sparse += len(few)
            if every:
                return result
            y[few] = result
        for step in sorted({*range(len(counts))} - {*few}):
            y[step] = self._run(live, steps[step], counts[step])
        return y

    def _checked(self, x: torch.Tensor) -> tuple[LiveLayer, torch.Tensor]:
        """Return what the layer runs by, and x as bool rows [M, K], contiguous."""
        live, width = self._ready(), self.layer.in_features
        facts = isinstance(x, torch.Tensor) and (
            x.dim() > 0 and x.shape[-1] == width and x.dtype in {torch.bool, torch.float32} and x.device == live.device
        )
        if not facts or (x.requires_grad and torch.is_grad_enabled()):
            rule = f"bool or float32 of 0 and 1, [..., {width}] on {live.device}, without gradients"
            value = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise self._refusal("x", rule, value)
        flat = x.reshape(x.numel() // width, width)
        ones = flat.to(torch.bool).contiguous()
        if x.dtype is torch.float32 and len(flat) and not _is_binary(flat, int(ones.count_nonzero())):
            wrong = (flat != 0) & (flat != 1)
            if bool(wrong.any()):
                raise self._refusal("x", "0 and 1 alone", float(flat[wrong][0]))
        return live, ones

    def events(self, columns: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the product with rows whose ones are told by their columns.

        Args:
            columns: int64 [S]: row m's are ``columns[starts[m]:starts[m + 1]]``, in 0 … K - 1; one that is there twice
                counts once.
            starts: int64 [M + 1], from 0 to S, never falling.

        Returns:
            float32 [M, N].

        Raises:
            InputError: One of them has the wrong shape, dtype or device, or a column is out of range.
            LifecycleError: The layer is closed, or waits for its state.
        """
        live, width = self._ready(), self.layer.in_features
        for name, tensor in (("columns", columns), ("starts", starts)):
            if tensor.dtype is not torch.int64 or tensor.dim() != 1 or tensor.device != live.device:
                value = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                raise self._refusal(name, f"an int64 vector on {live.device}", value)
        ends = starts.tolist()
        if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(columns) or sorted(ends) != ends:  # noqa: PLR2004  # a row
            raise self._refusal("starts", f"of at least 2, rising from 0 to {len(columns)}", ends[:8])
        wrong = (columns < 0) | (columns >= width)
        if bool(wrong.any()):
            raise self._refusal("columns", f"in 0 … {width - 1}", int(columns[wrong][0]))
        rows = len(ends) - 1
        ones = torch.zeros((rows, width), dtype=torch.bool, device=live.device)
        row = torch.repeat_interleave(torch.arange(rows, device=live.device), starts.diff())
        ones.view(-1).index_fill_(0, row * width + columns, value=True)
        return self._run(live, ones, len(columns))

    def _refusal(self, name: str, rule: str, value: object) -> InputError:
        return InputError(f"spikes of layer {self.layer.name!r}", name=name, rule=rule, value=value, hint=_HINT)

    def _run(self, live: LiveLayer, ones: torch.Tensor, count: int) -> torch.Tensor:
        """Return the product with bool rows [M, K], contiguous, by the way that their number of ones asks for."""
        if self._is_sparse(len(ones), count):
            y = self._run_sparse(live, ones)
            self.record.sparse += 1
            return y
        self.record.dense += 1
        with torch.no_grad():
            dense: torch.Tensor = self.layer(ones.to(torch.float32))
        return dense

    def _is_sparse(self, rows: int, count: int) -> bool:
        """Say whether so many ones in so many rows are rare enough for the sparse product."""
        sparse, width = self._sparse, self.layer.in_features
        return sparse is not None and count <= sparse.spike_limit(rows) * rows * width

    def _run_sparse(self, live: LiveLayer, ones: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(ones), live.plan.out_features), dtype=torch.float32, device=live.device)
        bias = self.layer.bias
        try:
            with on_device(live.device):
                self._sparse.spikes(live.prepared, ones, out, bias=None if bias is None else bias.detach().contiguous())
        except PLUGIN_FAULTS as error:
            raise_broken_call(error, live.plan.backend, "spikes")
        return out

    def _ready(self) -> LiveLayer:
        """Return what the layer runs by; what its backend can do is looked up where that is new."""
        live = self.layer._require_ready()  # noqa: SLF001  # own class
        if live is not self._live:
            backend = live.plan.backend
            registry = self.layer._plugins()  # noqa: SLF001
            self.record.backend, self.record.reason = backend.name, _reason(registry, backend, live)
            self._sparse = backend if self.record.reason is None else None
            self._live = live
        return live


def _is_binary(x: torch.Tensor, count: int) -> bool:
    """Return whether an x of so many numbers beside 0 is of 0 and 1, by its bits: no temporary of its size is made."""
    bits = x.view(torch.int32)
    low, high = torch.aminmax(bits)
    return int(low) >= 0 and int(high) <= _ONE and int(bits.sum()) == count * _ONE


def _reason(registry: Registry, backend: Any, live: LiveLayer) -> str | None:
    """Return why a backend's sparse product is not used, or None: probed once for a kind of weight, warned of once."""
    declared = backend.capabilities
    if "spikes" not in declared.ops or live.device.type not in declared.devices:
        return "not declared"
    shown, kind = _faults.setdefault(registry, {}), (backend.name, live.plan.key)
    if kind not in shown:
        with outside_inference(), torch.no_grad():
            shown[kind] = find_spike_fault(backend, live.prepared, live.plan.weight(live.buffers))
    if (fault := shown[kind]) is not None:
        told = f"backend {backend.name!r} is not used for spikes: {fault}"
        warn_once((backend.name, fault), Q4ProbeWarning, told)
    return fault
