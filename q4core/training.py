"""Straight-through-estimator training: full-precision masters, four-bit forward passes.

Forward equals the quantised weight exactly; the gradient of the master weight is the identity's, the input's is exact.
``docs/training.md`` states what a training loop owns and what is kept alive.

Reference:
    Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (straight-through estimator).
"""

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
from q4core.torch_modes import is_forward_mode
from q4core.weight import PackedWeight
from q4core.weight_spec import WeightSpec

if TYPE_CHECKING:
    from q4core.backend import Backend
    from q4core.registry import Registry

__all__ = ["clear_eval_cache", "dequantize_packed", "eval_cache_bytes", "linear_ste", "quantize_packed", "ste_weight"]

_MASTER_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_SAMPLE_SHAPE = (16, 256)


# -- quantising


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
    _check_master(master)
    kind = _find(format)
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


def _find(format_: str | Format) -> Format:
    return find_format(format_, default_registry().formats().values())


def _check_master(master: torch.Tensor) -> None:
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
    sample = torch.randn(_SAMPLE_SHAPE, generator=torch.Generator().manual_seed(4)).to(dense.device, dense.dtype)
    sample[0] = 0.0
    wanted = codec.quantize(sample, request.format)
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


# -- the straight-through estimator


class _StraightThrough(torch.autograd.Function):
    """quantise → dequantise forward, identity backward."""

    @staticmethod
    def forward(master: torch.Tensor, kind: Format) -> torch.Tensor:
        return codec.dequantize(quantize_packed(master, kind), master.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep nothing: the identity's backward needs nothing."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        del ctx
        return tangent.clone()


def ste_weight(master: torch.Tensor, format: str | Format = "nvfp4") -> torch.Tensor:  # noqa: A002  # the contract's name
    """Return the quantised weight as a dense tensor whose gradient goes to ``master`` unchanged.

    Args:
        master: [N, K], float32, bfloat16 or float16.
        format: Name of the format, or a ``Format``.

    Returns:
        [N, K] of the master's dtype: exactly ``dequantize_packed(quantize_packed(master))``. Without gradients it may
        come from the eval cache: do not write to it.

    Raises:
        As ``quantize_packed``.
    """
    _check_master(master)
    kind = _find(format)
    if is_forward_mode() or (torch.is_grad_enabled() and master.requires_grad):
        call: Any = _StraightThrough.apply
        dense: torch.Tensor = call(master, kind)
        return dense
    return _cached(master, kind)


def linear_ste(
    x: torch.Tensor,
    master: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    format: str | Format = "nvfp4",  # noqa: A002  # the contract's name
) -> torch.Tensor:
    """Return ``x @ quantised(master)ᵀ + bias``, with straight-through gradients to ``master``.

    Gradients: to x, ``grad @ quantised(master)``, exact; to ``master``, ``gradᵀ @ x`` as if it were not quantised; to
    the bias, the sum. Double backward works.

    Args:
        x: [..., K] of the master's dtype, on its device.
        master: [N, K], float32, bfloat16 or float16.
        bias: [N] or None.
        format: Name of the format, or a ``Format``.

    Returns:
        [..., N].

    Raises:
        InputError: x or the bias does not fit ``master``.
        As ``quantize_packed``.
    """
    _check_master(master)
    _check_operand("x", x, master, ["...", master.shape[1]])
    if bias is not None:
        _check_operand("bias", bias, master, [master.shape[0]])
    return torch.nn.functional.linear(x, ste_weight(master, format), bias)


def _check_operand(name: str, operand: object, master: torch.Tensor, shape: list[Any]) -> None:
    fits = (
        isinstance(operand, torch.Tensor)
        and operand.dtype == master.dtype
        and operand.device == master.device
        and operand.dim() >= 1
        and operand.shape[-1] == shape[-1]
        and (len(shape) > 1 or operand.dim() == 1)
    )
    if not fits:
        got = type(operand).__name__
        if isinstance(operand, torch.Tensor):
            got = f"{operand.dtype} {list(operand.shape)} on {operand.device}"
        wanted = ", ".join(map(str, shape))
        raise InputError("linear_ste", name=name, rule=f"{master.dtype} [{wanted}] on {master.device}", value=got)


# -- the eval cache


@attrs.frozen(eq=False)
class _Cached:
    master: weakref.ref[torch.Tensor]
    version: int
    address: int
    dense: torch.Tensor


_cache: dict[tuple[int, Format], _Cached] = {}
_cache_lock = threading.Lock()


def _cached(master: torch.Tensor, kind: Format) -> torch.Tensor:
    """Return the quantised weight of a master that needs no gradient, made again when the master's version moved."""
    if master.is_inference():  # has no version to tell a change by
        return codec.dequantize(quantize_packed(master, kind), master.dtype)
    key = (id(master), kind)
    with _cache_lock:
        known = _cache.get(key)
    if (
        known is not None
        and known.master() is master
        and known.version == master._version  # noqa: SLF001  # torch's documented counter of in-place changes
        and known.address == master.data_ptr()
    ):
        return known.dense
    version = master._version  # noqa: SLF001  # as above; read before the data is
    with torch.no_grad(), torch.inference_mode(mode=False):
        dense = codec.dequantize(quantize_packed(master, kind), master.dtype)
    reference = weakref.ref(master, lambda _: _cache.pop(key, None))
    with _cache_lock:
        _cache[key] = _Cached(reference, version, master.data_ptr(), dense)
    return dense


def clear_eval_cache() -> None:
    """Give back every weight that the eval cache holds."""
    with _cache_lock:
        _cache.clear()


def eval_cache_bytes() -> int:
    """Return the bytes that the eval cache holds."""
    with _cache_lock:
        return sum(entry.dense.numel() * entry.dense.element_size() for entry in list(_cache.values()))
