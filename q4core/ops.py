"""The registered torch ops, their fake kernels and autograd: written once, here, for every backend.

``q4core::linear(x, buffers, bias, plan)`` and ``q4core::linear_out`` compute y; ``q4core::linear_input_grad`` is their
exact gradient to x, and ``q4core::linear_exact`` that one's own gradient. ``buffers`` are the layer's uint8 buffers:
the backend's, then the source's where the backend has no export, then the layer's tag, whose address tells the counters
which layer ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.codec import dequantize
from q4core.errors import PLUGIN_FAULTS, InputError
from q4core.plan import plan_by_key, raise_broken_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from q4core.backend import Prepared
    from q4core.plan import Plan

__all__ = ["LiveLayer", "forget_layer", "input_gradient", "register_layer", "run_plan"]

_GRADIENT_ROWS_BYTES = 16 << 20


@attrs.define(eq=False)
class LiveLayer:
    """What the op finds by the address of a layer's tag: its counters, and its own view of its buffers.

    Args:
        plan: The layer's plan.
        prepared: The backend's view of the layer's buffers.
        addresses: Addresses of its buffers but the tag; others are somebody else's (a functional call's).
        counts: Calls by segment of M.
    """

    plan: Plan
    prepared: Prepared
    addresses: list[int]
    counts: list[int]


_LIVE: dict[int, LiveLayer] = {}


def register_layer(tag: torch.Tensor, layer: LiveLayer) -> None:
    """Let the op find a layer by its tag."""
    _LIVE[tag.data_ptr()] = layer


def forget_layer(address: int, layer: LiveLayer) -> None:
    """Undo ``register_layer``, unless the address has a new owner."""
    if _LIVE.get(address) is layer:
        del _LIVE[address]


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

    Flattens leading dimensions, copies what a backend may not see (rows that are not contiguous), guards the device,
    and treats M = 0.

    Returns:
        Index of the segment of M that ran; None where M = 0 and nothing had to.
    """
    rows = x.numel() // plan.in_features
    if rows == 0:
        return None
    index = plan.segment_index(rows)
    if index is None:
        raise _range_error(plan, rows)
    path = plan.segments[index].path.name
    flat = x if x.dim() == 2 else x.reshape(rows, plan.in_features)  # noqa: PLR2004  # [M, K] as it is
    if flat.stride(1) != 1 or (rows > 1 and flat.stride(0) < plan.in_features):
        flat = flat.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if out.is_contiguous():
        target = out if out.dim() == 2 else out.view(rows, plan.out_features)  # noqa: PLR2004  # [M, N] as it is
    else:
        target = torch.empty((rows, plan.out_features), dtype=out.dtype, device=out.device)
    try:
        if x.is_cuda and x.get_device() != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                plan.backend.linear(prepared, flat, target, bias=bias, path=path)
        else:
            plan.backend.linear(prepared, flat, target, bias=bias, path=path)
    except PLUGIN_FAULTS as error:
        raise_broken_call(error, plan.backend, path)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return index


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
    for start, stop in _row_chunks(plan):
        dense = dequantize(weight, torch.float32, rows=slice(start, stop))
        total.addmm_(flat[:, start:stop].to(torch.float32), dense)
    return total.to(plan.dtype).reshape(*grad.shape[:-1], plan.in_features)


def exact_product(plan: Plan, buffers: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return ``x @ wᵀ`` with exactly dequantised weights, as ``input_gradient`` is computed; its own gradient.

    Args:
        plan: The layer's plan.
        buffers: The layer's buffers.
        x: [..., K].

    Returns:
        [..., N] of the plan's y dtype.
    """
    weight = plan.weight(buffers)
    flat = x.reshape(-1, plan.in_features).to(torch.float32)
    y = torch.empty((flat.shape[0], plan.out_features), dtype=torch.float32, device=x.device)
    for start, stop in _row_chunks(plan):
        y[:, start:stop] = flat @ dequantize(weight, torch.float32, rows=slice(start, stop)).T
    return y.to(plan.out_dtype).reshape(*x.shape[:-1], plan.out_features)


def _row_chunks(plan: Plan) -> Iterator[tuple[int, int]]:
    step = max(1, _GRADIENT_ROWS_BYTES // (4 * plan.in_features))
    for start in range(0, plan.out_features, step):
        yield start, min(start + step, plan.out_features)


# -- registration

_LIBRARY = torch.library.Library("q4core", "DEF")
_LIBRARY.define("linear(Tensor x, Tensor[] buffers, Tensor? bias, str plan) -> Tensor")
_LIBRARY.define("linear_out(Tensor x, Tensor[] buffers, Tensor? bias, str plan, Tensor(a!) out) -> ()")
_LIBRARY.define("linear_input_grad(Tensor grad, Tensor[] buffers, str plan) -> Tensor")
_LIBRARY.define("linear_exact(Tensor x, Tensor[] buffers, str plan) -> Tensor")


def _run(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, key: str, out: torch.Tensor | None
) -> torch.Tensor:
    live = _LIVE.get(buffers[-1].data_ptr())
    if live is not None and live.plan.key == key and live.addresses == [buffer.data_ptr() for buffer in buffers[:-1]]:
        plan, prepared = live.plan, live.prepared
    else:
        plan = plan_by_key(key)
        prepared = plan.prepared(buffers)
    if out is None:
        if x.dim() == 2:  # noqa: PLR2004  # [M, K]; sizes one by one are 1 µs faster than a tuple of them
            out = torch.empty(x.shape[0], plan.out_features, dtype=plan.out_dtype, device=x.device)
        else:
            out = torch.empty((*x.shape[:-1], plan.out_features), dtype=plan.out_dtype, device=x.device)
    segment = run_plan(plan, prepared, x, out, bias)
    if live is not None and segment is not None and live.plan is plan:
        live.counts[segment] += 1
    return out


def _linear(x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str) -> torch.Tensor:
    return _run(x, buffers, bias, plan, None)


def _linear_out(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str, out: torch.Tensor
) -> None:
    _run(x, buffers, bias, plan, out)


def _linear_input_grad(grad: torch.Tensor, buffers: list[torch.Tensor], plan: str) -> torch.Tensor:
    return input_gradient(plan_by_key(plan), buffers, grad)


def _linear_exact(x: torch.Tensor, buffers: list[torch.Tensor], plan: str) -> torch.Tensor:
    return exact_product(plan_by_key(plan), buffers, x)


for _name, _function in (
    ("linear", _linear),
    ("linear_out", _linear_out),
    ("linear_input_grad", _linear_input_grad),
    ("linear_exact", _linear_exact),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _key)


def _linear_fake(
    x: torch.Tensor,
    buffers: list[torch.Tensor],
    bias: torch.Tensor | None,
    plan: str,
) -> torch.Tensor:
    call = plan_by_key(plan)
    device = buffers[0].device
    if x.dim() < 1 or x.shape[-1] != call.in_features or x.dtype != call.dtype or x.device != device:
        raise InputError(
            "q4core::linear",
            name="x",
            rule=f"{call.dtype} [..., {call.in_features}] on {device}",
            value=f"{x.dtype} {list(x.shape)} on {x.device}",
        )
    if bias is not None and (
        bias.dtype != call.out_dtype or tuple(bias.shape) != (call.out_features,) or bias.device != device
    ):
        raise InputError(
            "q4core::linear",
            name="bias",
            rule=f"{call.out_dtype} [{call.out_features}] on {device}",
            value=f"{bias.dtype} {list(bias.shape)} on {bias.device}",
        )
    return torch.empty((*x.shape[:-1], call.out_features), dtype=call.out_dtype, device=x.device)


def _linear_out_fake(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str, out: torch.Tensor
) -> None:
    del x, buffers, bias, plan, out


def _linear_input_grad_fake(grad: torch.Tensor, buffers: list[torch.Tensor], plan: str) -> torch.Tensor:
    del buffers
    call = plan_by_key(plan)
    return torch.empty((*grad.shape[:-1], call.in_features), dtype=call.dtype, device=grad.device)


def _linear_exact_fake(x: torch.Tensor, buffers: list[torch.Tensor], plan: str) -> torch.Tensor:
    del buffers
    call = plan_by_key(plan)
    return torch.empty((*x.shape[:-1], call.out_features), dtype=call.out_dtype, device=x.device)


torch.library.register_fake("q4core::linear", _linear_fake, lib=_LIBRARY)
torch.library.register_fake("q4core::linear_out", _linear_out_fake, lib=_LIBRARY)
torch.library.register_fake("q4core::linear_input_grad", _linear_input_grad_fake, lib=_LIBRARY)
torch.library.register_fake("q4core::linear_exact", _linear_exact_fake, lib=_LIBRARY)


class _LinearFunction(torch.autograd.Function):
    """The op with its backward: exact dequantised weights for x, a sum for the bias."""

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor | None, plan: str, *buffers: torch.Tensor) -> torch.Tensor:
        with _below_autograd():
            y: torch.Tensor = torch.ops.q4core.linear.default(x, list(buffers), bias, plan)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        _, bias, ctx.plan, *buffers = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*buffers)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        buffers = list(ctx.saved_tensors)
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.q4core.linear_input_grad.default(grad, buffers, ctx.plan)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (grad_x, grad_bias, None, *([None] * len(buffers)))


def _linear_autograd(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str
) -> torch.Tensor:
    """Record a backward only where one is needed.

    ``register_autograd`` would cost 6 µs more per call. With plain tensors and nothing that watches dispatch, the
    kernel below is called straight away, which saves a second round through the dispatcher (5 µs).
    """
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        call: Any = _LinearFunction.apply
        recorded: torch.Tensor = call(x, bias, plan, *buffers)
        return recorded
    if type(x) is torch.Tensor and not _dispatch_modes() and _transforms() is None and not x.is_meta:
        return _run(x, buffers, bias, plan, None)
    with _below_autograd():
        y: torch.Tensor = torch.ops.q4core.linear.default(x, buffers, bias, plan)
    return y


# There are no public ways to go below autograd, or to ask who watches dispatch.
_below_autograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001
_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_LIBRARY.impl("linear", _linear_autograd, "Autograd")


class _ExactFunction(torch.autograd.Function):
    """``linear_input_grad`` and ``linear_exact``, each the other's gradient, so that backward can be differentiated."""

    @staticmethod
    def forward(tensor: torch.Tensor, plan: str, to_input: bool, *buffers: torch.Tensor) -> torch.Tensor:  # noqa: FBT001  # autograd passes arguments by position
        with _below_autograd():
            result: torch.Tensor = _exact_op(to_input)(tensor, list(buffers), plan)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        _, ctx.plan, ctx.to_input, *buffers = inputs
        ctx.save_for_backward(*buffers)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        buffers = list(ctx.saved_tensors)
        return (_exact_op(not ctx.to_input)(grad, buffers, ctx.plan), None, None, *([None] * len(buffers)))


def _exact_op(to_input: bool) -> Any:  # noqa: FBT001  # one of two ops
    return torch.ops.q4core.linear_input_grad.default if to_input else torch.ops.q4core.linear_exact.default


def _exact_autograd(to_input: bool) -> Callable[[torch.Tensor, list[torch.Tensor], str], torch.Tensor]:  # noqa: FBT001  # as above
    def run(tensor: torch.Tensor, buffers: list[torch.Tensor], plan: str) -> torch.Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad:
            call: Any = _ExactFunction.apply
            recorded: torch.Tensor = call(tensor, plan, to_input, *buffers)
            return recorded
        with _below_autograd():
            result: torch.Tensor = _exact_op(to_input)(tensor, buffers, plan)
        return result

    return run


_LIBRARY.impl("linear_input_grad", _exact_autograd(to_input=True), "Autograd")
_LIBRARY.impl("linear_exact", _exact_autograd(to_input=False), "Autograd")
