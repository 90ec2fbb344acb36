"""The derivatives of the registered ops: backward, forward mode and ``torch.func``, exact and written once.

The gradient to x is ``linear_input_grad``, whose own gradient is ``linear_exact`` and the other way round; so is the
tangent of y. A batch axis is one more leading axis.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch

from q4core.errors import InputError
from q4core.machine.torch_state import below_autograd, dispatch_modes, is_forward_mode, is_transformed
from q4core.ops.registration import LIBRARY, run_op

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXACT_OPS = {True: torch.ops.q4core.linear_input_grad.default, False: torch.ops.q4core.linear_exact.default}
"""By whether they compute the gradient to the input."""


def linear_function(
    x: torch.Tensor, buffers: Sequence[torch.Tensor], bias: torch.Tensor | None, plan: str
) -> torch.Tensor:
    """Call the op with its derivatives, forward and backward, and its batching rule; for ``torch.func``."""
    call: Any = _LinearFunction.apply
    return cast("torch.Tensor", call(x, bias, plan, *buffers))


def _require_unbatched(dims: Sequence[Any]) -> None:
    if any(dim is not None for dim in dims):
        raise InputError("q4core::linear", name="buffers", rule="the same for the whole batch", value="a batch of them")


class _LinearFunction(torch.autograd.Function):
    """The op with its backward: exact dequantised weights for x, a sum for the bias."""

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor | None, plan: str, *buffers: torch.Tensor) -> torch.Tensor:
        with below_autograd():
            return cast("torch.Tensor", torch.ops.q4core.linear.default(x, list(buffers), bias, plan))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        _, bias, ctx.plan, *buffers = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*buffers)
        ctx.save_for_forward(*buffers)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        buffers = list(ctx.saved_tensors)
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _differentiable(grad, ctx.plan, buffers, to_input=True)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (grad_x, grad_bias, None, *([None] * len(buffers)))

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, *_: None) -> torch.Tensor:
        """Take the tangents of x and of the bias: torch fills in zeros for one of them, and None is no bias at all."""
        tangent = _differentiable(x, ctx.plan, list(ctx.saved_tensors), to_input=False)
        return tangent if bias is None else tangent + bias

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, bias: torch.Tensor | None, plan: str, *buffers: Any
    ) -> tuple[torch.Tensor, int | None]:
        """Take a batch axis of x for one more leading axis; one of the bias is added afterwards."""
        del info
        x_dim, bias_dim, _, *buffer_dims = in_dims
        _require_unbatched(buffer_dims)
        call: Any = _LinearFunction.apply
        x = x if x_dim is None else x.movedim(x_dim, 0)
        if bias_dim is None or bias is None:
            return call(x, bias, plan, *buffers), None if x_dim is None else 0
        y = call(x, None, plan, *buffers)
        y = y if x_dim is not None else y.unsqueeze(0)
        bias = bias.movedim(bias_dim, 0)
        return y + bias.reshape(len(bias), *([1] * (y.dim() - 2)), bias.shape[-1]), 0


def _linear_autograd(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str
) -> torch.Tensor:
    """Record a backward only where one is needed.

    ``register_autograd`` would cost 6 µs more per call. With plain tensors and nothing that watches dispatch, the
    kernel below is called straight away, which saves a second round through the dispatcher (5 µs).
    """
    if is_transformed():
        raise InputError(
            "q4core::linear",
            name="the op",
            rule="called through Q4Linear under torch.func",
            hint="Call the layer; it has rules for grad, jvp and vmap.",
        )
    if is_forward_mode() or (
        torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    ):
        return linear_function(x, buffers, bias, plan)
    if type(x) is torch.Tensor and not dispatch_modes() and not x.is_meta:
        return run_op(x, buffers, bias, plan, None)
    with below_autograd():
        return cast("torch.Tensor", torch.ops.q4core.linear.default(x, buffers, bias, plan))


LIBRARY.impl("linear", _linear_autograd, "Autograd")


class _ExactFunction(torch.autograd.Function):
    """``linear_input_grad`` and ``linear_exact``, each the other's gradient, so that backward can be differentiated."""

    @staticmethod
    def forward(tensor: torch.Tensor, plan: str, to_input: bool, *buffers: torch.Tensor) -> torch.Tensor:  # noqa: FBT001  # autograd passes arguments by position
        with below_autograd():
            return cast("torch.Tensor", _EXACT_OPS[to_input](tensor, list(buffers), plan))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        _, ctx.plan, ctx.to_input, *buffers = inputs
        ctx.save_for_backward(*buffers)
        ctx.save_for_forward(*buffers)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        buffers = list(ctx.saved_tensors)
        return (_differentiable(grad, ctx.plan, buffers, to_input=not ctx.to_input), *([None] * (2 + len(buffers))))

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return _differentiable(tangent, ctx.plan, list(ctx.saved_tensors), to_input=ctx.to_input)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        tensor: torch.Tensor,
        plan: str,
        to_input: bool,  # noqa: FBT001  # as above
        *buffers: Any,
    ) -> tuple[torch.Tensor, int | None]:
        """Take the batch axis for one more leading axis."""
        del info
        dim, _, _, *buffer_dims = in_dims
        _require_unbatched(buffer_dims)
        tensor = tensor if dim is None else tensor.movedim(dim, 0)
        return _differentiable(tensor, plan, buffers, to_input=to_input), None if dim is None else 0


_apply_exact: Any = _ExactFunction.apply


def _differentiable(
    tensor: torch.Tensor, plan: str, buffers: Sequence[torch.Tensor], *, to_input: bool
) -> torch.Tensor:
    """Compute exactly: by the function under torch.func, which has rules for it, else by the op, for tracing."""
    if is_transformed():
        return cast("torch.Tensor", _apply_exact(tensor, plan, to_input, *buffers))
    return cast("torch.Tensor", _EXACT_OPS[to_input](tensor, list(buffers), plan))


def _exact_autograd(tensor: torch.Tensor, buffers: list[torch.Tensor], plan: str, *, to_input: bool) -> torch.Tensor:
    if is_forward_mode() or (torch.is_grad_enabled() and tensor.requires_grad):
        return cast("torch.Tensor", _apply_exact(tensor, plan, to_input, *buffers))
    with below_autograd():
        return cast("torch.Tensor", _EXACT_OPS[to_input](tensor, buffers, plan))


LIBRARY.impl("linear_input_grad", functools.partial(_exact_autograd, to_input=True), "Autograd")
LIBRARY.impl("linear_exact", functools.partial(_exact_autograd, to_input=False), "Autograd")
