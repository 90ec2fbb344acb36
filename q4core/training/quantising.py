"""Quantises masters: by a backend's native quantiser that gives the reference's very bytes, else by the reference."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import codec
from q4core.backend import Request
from q4core.dispatch import select_backend
from q4core.errors import PLUGIN_FAULTS, BackendUnavailableError, InputError, Q4ProbeWarning
from q4core.events import emit, warn_once
from q4core.formats import Format, find_format
from q4core.plan import as_bytes
from q4core.registry import default_registry
from q4core.weight import PackedWeight
from q4core.weight_spec import WeightSpec

if TYPE_CHECKING:
    from q4core.backend import Backend
    from q4core.registry import Registry

__all__ = ["check_master", "dequantize_packed", "named_format", "quantize_packed"]

_MASTER_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_SAMPLE_SHAPE = (16, 256)


def quantize_packed(master: torch.Tensor, format: str | Format = "nvfp4") -> PackedWeight:  # noqa: A002  # the contract's name
    """Return ``master`` in four bits: by a backend's native quantiser where there is one, else by the reference codec.

    A native quantiser is compared with the reference, byte by byte, before its first use on a device; one that differs
    is not used, loudly.

    Args:
        master: [N, K], float32, bfloat16 or float16.
        format: Name of the format, or a ``Format``.

    Raises:
        InputError: ``master`` is no such tensor.
        FormatError: The format is unknown, or does not take K.
        WeightError: ``master`` holds NaN or infinity.
    """
    check_master(master)
    kind = named_format(format)
    dense = master.detach()
    if dense.device.type != "cpu":
        native = _native_quantizer(kind, dense)
        if native is not None:
            backend, request = native
            packed: PackedWeight = backend.quantize(dense, request)  # type: ignore[attr-defined]  # declared by op "quantize"
            return packed
    return codec.quantize(dense, kind)


def dequantize_packed(weight: PackedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the dense weight [N, K], in ``dtype`` or the weight's own; the same as ``q4.dequantize``."""
    return codec.dequantize(weight, dtype)


def named_format(format_: str | Format) -> Format:
    """Return a format by name, the plugins' among them."""
    return find_format(format_, default_registry().formats().values())


def check_master(master: torch.Tensor) -> None:
    """Refuse what can't be a master."""
    if not isinstance(master, torch.Tensor) or master.dim() != 2 or master.dtype not in _MASTER_DTYPES:  # noqa: PLR2004  # [N, K]
        value = f"{master.dtype} {list(master.shape)}" if isinstance(master, torch.Tensor) else type(master).__name__
        raise InputError(
            "training",
            name="master",
            rule="a float32, bfloat16 or float16 tensor [N, K]",
            value=value,
            hint="Integer tensors carry no gradients; keep the master in floating point.",
        )


_native: weakref.WeakKeyDictionary[Registry, dict[Request, tuple[Backend, Request] | None]] = (
    weakref.WeakKeyDictionary()
)
_native_lock = threading.Lock()


def _native_quantizer(kind: Format, dense: torch.Tensor) -> tuple[Backend, Request] | None:
    request = _quantize_request(kind, dense)
    registry = default_registry()
    with _native_lock:
        known = _native.setdefault(registry, {})
        if request not in known:
            known[request] = _find_native(request, dense)
        return known[request]


def _quantize_request(kind: Format, dense: torch.Tensor) -> Request:
    sample = codec.quantize(torch.zeros(1, kind.block_size), kind)  # the reference says which levels the format has
    rows, columns = dense.shape
    return attrs.evolve(
        Request.for_weight(sample, device=dense.device, dtype=dense.dtype),
        op="quantize",
        out_features=rows,
        in_features=columns,
    )


def _find_native(request: Request, dense: torch.Tensor) -> tuple[Backend, Request] | None:
    registry = default_registry()
    try:
        selection = select_backend(request, registry.backends(), refused=registry.refused_backends())
    except BackendUnavailableError:
        return None
    backend = registry.backends()[selection.backend]
    return (backend, request) if _is_right(backend, request, dense) else None


def _is_right(backend: Backend, request: Request, dense: torch.Tensor) -> bool:
    """Compare a native quantiser with the reference, byte by byte, on a sample with a row of zeros."""
    rows, columns = _SAMPLE_SHAPE
    sample = torch.randn(_SAMPLE_SHAPE, generator=torch.Generator().manual_seed(4)).to(dense.dtype)
    sample[0] = 0.0
    # The CPU's bytes are the reference: torch's operations may round otherwise on another device.
    wanted = codec.quantize(sample, request.format).to(dense.device)
    sample = sample.to(dense.device)
    try:
        native: Any = backend.quantize  # type: ignore[attr-defined]  # declared by op "quantize"
        got: PackedWeight = native(sample, attrs.evolve(request, out_features=rows, in_features=columns))
        fault = _difference(wanted, got)
    except PLUGIN_FAULTS as error:
        fault = f"it raised {type(error).__name__}: {error}"
    emit(
        "q4.probe",
        level=logging.DEBUG if fault is None else logging.ERROR,
        backend=backend.name,
        path="quantize",
        format=request.format.name,
        passed=fault is None,
        fault=fault,
    )
    if fault is not None:
        message = f"the native quantiser of {backend.name!r} is not used for {request.format.name}: {fault}"
        warn_once((backend.name, "quantize", request.format.name), Q4ProbeWarning, message)
    return fault is None


def _difference(wanted: PackedWeight, got: object) -> str | None:
    """Say how a quantiser's result differs from the reference's, or None."""
    if not isinstance(got, PackedWeight):
        return f"it gave {type(got).__name__} instead of a PackedWeight"
    if WeightSpec.of(got) != WeightSpec.of(wanted):
        return f"its layout {WeightSpec.of(got)} is not the reference's {WeightSpec.of(wanted)}"
    for (field, ours), (_, theirs) in zip(wanted.tensors(), got.tensors(), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.device != theirs.device:
            return f"its {field} is {theirs.dtype} {list(theirs.shape)} on {theirs.device}"
        if not torch.equal(as_bytes(ours), as_bytes(theirs)):
            return f"the bytes of its {field} differ from the reference's"
    return None
