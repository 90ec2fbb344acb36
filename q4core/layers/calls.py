"""Parts of the checked call of a layer, through the registered op: for all that the fast path leaves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

import torch

from q4core.diagnostics.events import bound
from q4core.errors import InputError, LifecycleError
from q4core.formats import FLOATS
from q4core.layers.preparation import placer_for, record_placement
from q4core.machine.torch_state import is_forward_mode, is_transformed
from q4core.ops.autograd import linear_function

if TYPE_CHECKING:
    from q4core.ops.prepared_weight import PreparedWeight
    from q4core.plugins.registry import Registry

_NO_GRAD = "Call under torch.no_grad(), or leave out= away."
_LINEAR = torch.ops.q4core.linear.default
_LINEAR_OUT = torch.ops.q4core.linear_out.default


def argument_error(layer: str, name: str, rule: str, value: object, hint: str | None = None) -> InputError:
    """Return the error for an argument of a layer."""
    return InputError(f"layer {layer!r}", name=name, rule=rule, value=value, hint=hint)


def check_options(layer: str, own: torch.dtype, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Raise an ``InputError`` for an out_dtype or out that does not fit a layer's own dtype."""
    dtype = out_dtype or own
    if out_dtype is not None and out_dtype not in FLOATS:
        rule, hint = "float32, bfloat16 or float16", "Leave out_dtype= away for the layer's own."
        raise argument_error(layer, "out_dtype", rule, out_dtype, hint)
    if out is not None and out.dtype is not dtype:
        hint = "Give a tensor of that dtype, name its dtype by out_dtype=, or leave out= away."
        raise argument_error(layer, "out", f"of dtype {dtype}", out.dtype, hint)
    if out is not None and out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        rule, value = "a tensor that does not require gradients", "requires_grad=True"
        raise argument_error(layer, "out", rule, value, _NO_GRAD)


def call_op(  # noqa: PLR0913  # the facts of one call
    layer: str,
    x: torch.Tensor,
    buffers: list[torch.Tensor],
    bias: torch.Tensor | None,
    plan: str,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    *,
    tracing: bool,
) -> torch.Tensor:
    """Call the op, or the function that has its rules under ``torch.func``; return y, or ``out``."""
    by_function = not tracing and is_transformed()
    if out is None:
        call = linear_function if by_function else _LINEAR
        y: torch.Tensor = call(x, buffers, bias, plan)
        return y if out_dtype is None or out_dtype is y.dtype else y.to(out_dtype)
    if by_function or (not tracing and is_forward_mode()):
        raise argument_error(layer, "out", "None under torch.func and in forward mode", "a tensor")
    if tracing or out.dtype is not x.dtype:
        out.copy_(_LINEAR(x, buffers, bias, plan))
        return out
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        rule = "None where gradients are recorded"
        raise argument_error(layer, "out", rule, "a tensor", _NO_GRAD)
    _LINEAR_OUT(x, buffers, bias, plan, out)
    return out


def raise_unplaceable() -> NoReturn:
    """Raise for a graph that can't place activations, as REQUIRE_UNIFIED asks."""
    what = "a compiled graph can't place activations, as REQUIRE_UNIFIED asks"
    if torch.compiler.is_dynamo_compiling():  # no error of ours can be made there: torch gives this text
        torch._dynamo.graph_break(msg=what)  # noqa: SLF001  # documented in all but its name
    raise LifecycleError(what, hint="Ask for PREFER_UNIFIED, and give the graph activations in managed memory.")


def place_input(
    weight: PreparedWeight, x: torch.Tensor, registry: Registry, layer: str, session: str | None
) -> torch.Tensor:
    """Return x where the unified-memory policy wants it; a temporary goes with its last reference."""
    placed, decision = placer_for(weight.config, registry, weight.device).input(x)
    line = f"{decision.action}: {decision.reason}"
    weight.input_memory[line] = weight.input_memory.get(line, 0) + 1
    level = logging.INFO if weight.input_memory[line] == 1 else logging.DEBUG  # not a line for each call
    with bound(session=session):
        record_placement(decision, "activation", weight.config, layer, level=level)
    return placed
