"""The straight-through estimator: forward by the quantised weight, backward past it; and the eval cache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.autograd import forward_ad

from q4_nn.quantising import check_master, dequantize_packed, named_format, quantize_packed
from q4core import InputError

if TYPE_CHECKING:
    from q4core import Format

__all__ = ["clear_eval_cache", "eval_cache_bytes", "linear_ste", "ste_weight"]


class _StraightThrough(torch.autograd.Function):
    """quantise → dequantise forward, identity backward."""

    @staticmethod
    def forward(master: torch.Tensor, kind: Format) -> torch.Tensor:
        return dequantize_packed(quantize_packed(master, kind), master.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save nothing: the identity's backward needs nothing."""

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
    check_master(master)
    kind = named_format(format)
    has_tangent = forward_ad.unpack_dual(master).tangent is not None
    if has_tangent or (torch.is_grad_enabled() and master.requires_grad):
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
    check_master(master)
    _check_operand("x", x, master, ["...", master.shape[1]])
    if bias is not None:
        _check_operand("bias", bias, master, [master.shape[0]])
    return torch.nn.functional.linear(x, ste_weight(master, format), bias)


def _check_operand(name: str, operand: object, master: torch.Tensor, shape: list[Any]) -> None:
    got = type(operand).__name__
    if isinstance(operand, torch.Tensor):
        got = f"{operand.dtype} {list(operand.shape)} on {operand.device}"
        fits = operand.shape[-1:] == (shape[-1],) and (len(shape) > 1 or operand.dim() == 1)
        if fits and (operand.dtype, operand.device) == (master.dtype, master.device):
            return
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


def _cached(master: torch.Tensor, kind: Format) -> torch.Tensor:
    """Return the quantised weight of a master that needs no gradient, made again when the master's version moved."""
    if master.is_inference():  # has no version that shows a change
        return dequantize_packed(quantize_packed(master, kind), master.dtype)
    key = (id(master), kind)
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
        dense = dequantize_packed(quantize_packed(master, kind), master.dtype)
    reference = weakref.ref(master, lambda _: _cache.pop(key, None))
    _cache[key] = _Cached(reference, version, master.data_ptr(), dense)
    return dense


def clear_eval_cache() -> None:
    """Release every weight that the eval cache holds."""
    _cache.clear()


def eval_cache_bytes() -> int:
    """Return the bytes that the eval cache holds."""
    return sum(entry.dense.numel() * entry.dense.element_size() for entry in list(_cache.values()))
