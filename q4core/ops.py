"""The registered torch ops, their fake kernels and autograd: written once, here, for every backend.

``q4core::linear(x, buffers, bias, plan)`` and ``q4core::linear_out`` compute y; ``q4core::linear_input_grad`` is their
exact gradient to x. ``buffers`` are the layer's uint8 buffers: the backend's, then the source's where the backend has no
export, then the layer's tag, whose address tells the counters which layer ran.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from q4core.codec import dequantize
from q4core.errors import InputError
from q4core.plan import plan_by_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.backend import Prepared
    from q4core.plan import Plan

__all__ = ["count_by_tag", "forget_tag", "input_gradient", "run_plan"]

_GRADIENT_ROWS_BYTES = 16 << 20
_COUNTS: dict[int, list[int]] = {}


def count_by_tag(address: int, counts: list[int]) -> None:
    """Let the op add to ``counts`` (calls by segment of M) whenever it sees the tag at ``address``."""
    _COUNTS[address] = counts


def forget_tag(address: int, counts: list[int]) -> None:
    """Undo ``count_by_tag``, unless the address has a new owner."""
    if _COUNTS.get(address) is counts:
        del _COUNTS[address]


def _range_error(plan: Plan, rows: int) -> InputError:
    first, last = plan.segments[0].low, plan.segments[-1].high
    return InputError(
        "q4.linear",
        name="rows of x",
        rule=f"between {first} and {'∞' if last is None else last}, the range that was asked for",
        value=rows,
        hint="Ask for a wider range of M when the layer is made.",
    )


def run_plan(
    plan: Plan, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> int | None:
    """Run a checked call: x [..., K] and out [..., N] of the plan's dtypes, on one device.

    Flattens leading dimensions, copies what a backend may not see (rows that are not contiguous), guards the device, and
    treats M = 0.

    Returns:
        Index of the segment of M that ran; None where M = 0 and nothing had to.
    """
    rows = x.numel() // plan.in_features
    if rows == 0:
        return None
    index = plan.segment_index(rows)
    if index is None:
        raise _range_error(plan, rows)
    flat = x.reshape(rows, plan.in_features)
    if flat.stride(1) != 1 or (rows > 1 and flat.stride(0) < plan.in_features):
        flat = flat.contiguous()
    direct = out.is_contiguous()
    target = (
        out.view(rows, plan.out_features)
        if direct
        else torch.empty((rows, plan.out_features), dtype=out.dtype, device=out.device)
    )
    with _device_guard(x.device):
        plan.backend.linear(prepared, flat, target, bias=bias, path=plan.segments[index].path.name)
    if not direct:
        out.copy_(target.view(out.shape))
    return index


def _device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def input_gradient(plan: Plan, buffers: Sequence[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad @ w`` with exactly dequantised weights, accumulated in float32, chunk by chunk of out-features.

    Args:
        plan: The layer's plan.
        buffers: The layer's buffers.
        grad: [..., N].

    Returns:
        [..., K] of the plan's x dtype.
    """
    weight = plan.weight(buffers)
    flat = grad.reshape(-1, plan.out_features)
    total = torch.zeros((flat.shape[0], plan.in_features), dtype=torch.float32, device=grad.device)
    step = max(1, _GRADIENT_ROWS_BYTES // (4 * plan.in_features))
    for start in range(0, plan.out_features, step):
        stop = min(start + step, plan.out_features)
        dense = dequantize(weight, torch.float32, rows=slice(start, stop))
        total.addmm_(flat[:, start:stop].to(torch.float32), dense)
    return total.to(plan.dtype).reshape(*grad.shape[:-1], plan.in_features)


# -- registration

_LIBRARY = torch.library.Library("q4core", "DEF")
_LIBRARY.define("linear(Tensor x, Tensor[] buffers, Tensor? bias, str plan) -> Tensor")
_LIBRARY.define("linear_out(Tensor x, Tensor[] buffers, Tensor? bias, str plan, Tensor(a!) out) -> ()")
_LIBRARY.define("linear_input_grad(Tensor grad, Tensor[] buffers, str plan) -> Tensor")


def _tick(buffers: Sequence[torch.Tensor], segment: int | None) -> None:
    if segment is not None:
        counts = _COUNTS.get(buffers[-1].data_ptr())
        if counts is not None:
            counts[segment] += 1


def _linear(x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str) -> torch.Tensor:
    call = plan_by_key(plan)
    out = torch.empty((*x.shape[:-1], call.out_features), dtype=call.out_dtype, device=x.device)
    _tick(buffers, run_plan(call, call.prepared(buffers), x, out, bias))
    return out


def _linear_out(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str, out: torch.Tensor
) -> None:
    call = plan_by_key(plan)
    _tick(buffers, run_plan(call, call.prepared(buffers), x, out, bias))


def _linear_input_grad(grad: torch.Tensor, buffers: list[torch.Tensor], plan: str) -> torch.Tensor:
    return input_gradient(plan_by_key(plan), buffers, grad)


for _name, _function in (
    ("linear", _linear),
    ("linear_out", _linear_out),
    ("linear_input_grad", _linear_input_grad),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _key)


@torch.library.register_fake("q4core::linear", lib=_LIBRARY)
def _linear_fake(
    x: torch.Tensor,
    buffers: list[torch.Tensor],
    bias: torch.Tensor | None,  # noqa: ARG001  # the op's schema
    plan: str,
) -> torch.Tensor:
    del buffers
    call = plan_by_key(plan)
    return torch.empty((*x.shape[:-1], call.out_features), dtype=call.out_dtype, device=x.device)


@torch.library.register_fake("q4core::linear_out", lib=_LIBRARY)
def _linear_out_fake(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str, out: torch.Tensor
) -> None:
    del x, buffers, bias, plan, out


@torch.library.register_fake("q4core::linear_input_grad", lib=_LIBRARY)
def _linear_input_grad_fake(grad: torch.Tensor, buffers: list[torch.Tensor], plan: str) -> torch.Tensor:
    del buffers
    call = plan_by_key(plan)
    return torch.empty((*grad.shape[:-1], call.in_features), dtype=call.dtype, device=grad.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    x, buffers, bias, plan = inputs
    ctx.plan = plan
    ctx.has_bias = bias is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.needs_x = x.requires_grad
    ctx.save_for_backward(*buffers)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    buffers = list(ctx.saved_tensors)
    grad_x = torch.ops.q4core.linear_input_grad(grad, buffers, ctx.plan) if ctx.needs_input_grad[0] else None
    grad_bias = None
    if ctx.has_bias and ctx.needs_input_grad[2]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return grad_x, [None] * len(buffers), grad_bias, None


torch.library.register_autograd("q4core::linear", _backward, setup_context=_setup_context, lib=_LIBRARY)
