"""``check_linear_call``: the one rule for what a layer may be called with, in real and fake kernels and the layer.

Native kernels read and write as many bytes as the plan says, so what passes here must have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from q4core.errors import InputError, LifecycleError
from q4core.selection.plan import shapes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.selection.plan import Shapes

_OP = "q4core::linear"
_STRIDED = torch.strided


def check_linear_call(  # noqa: PLR0913  # the arguments of one call
    plan: Shapes,
    device: torch.device,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    is_fake: bool = False,
    label: str | None = None,
) -> None:
    """Refuse an x [..., K], bias [N] or out [..., N] that does not fit a plan and its buffers' device.

    All are strided, of the plan's dtype unless ``out_dtype`` says otherwise of out, and out has a place in memory of
    its own for each element, which fake tensors can't be asked. ``label`` says who is called, by default the op.

    Raises:
        InputError: One does not fit.
    """
    shape = x.shape
    if (
        x.dtype is not plan.dtype
        or x.layout is not _STRIDED
        or not shape
        or shape[-1] != plan.in_features
        or x.device != device
    ):
        _refuse_x(plan, device, x, label or _OP)
    if bias is not None and (
        bias.dtype is not plan.dtype
        or bias.layout is not _STRIDED
        or bias.shape != (plan.out_features,)
        or bias.device != device
    ):
        refuse_bias(label or _OP, bias, plan.dtype, plan.out_features, device)
    if out is not None:
        _check_out(plan, x, out, out_dtype or plan.dtype, label or _OP, is_fake=is_fake)


def refuse_bias(label: str, bias: object, dtype: torch.dtype, out_features: int, device: torch.device) -> NoReturn:
    """Say what is wrong with a bias; called only for one that does not fit."""
    got = f"{bias.dtype} {list(bias.shape)} on {bias.device}" if isinstance(bias, torch.Tensor) else type(bias).__name__
    raise InputError(
        label,
        name="bias",
        rule=f"None or {dtype} [{out_features}] on {device}",
        value=got,
        hint=f"Give a vector of {out_features} numbers, one for each out-feature.",
    )


def _refuse_x(plan: Shapes, device: torch.device, x: torch.Tensor, label: str) -> NoReturn:
    """Say what is wrong with an x; called only for one that does not fit."""
    if x.layout is not _STRIDED:
        raise InputError(label, name="x", rule="a strided tensor", value=x.layout, hint="Use x.to_dense().")
    if x.dim() < 1 or x.shape[-1] != plan.in_features:
        rule, hint = f"of shape [..., {plan.in_features}]", f"Give x {plan.in_features} features, as the layer takes."
        raise InputError(label, name="x", rule=rule, value=list(x.shape), hint=hint)
    if x.dtype is not plan.dtype:
        hint = f"Use x.to({plan.dtype}), or layer.to(dtype) with float32, bfloat16 or float16."
        raise InputError(label, name="x", rule=f"of dtype {plan.dtype}", value=x.dtype, hint=hint)
    hint = f'Use x.to("{device}") or layer.to("{x.device}").'
    raise InputError(label, name="x", rule=f"on device {device}", value=str(x.device), hint=hint)


def _check_out(  # noqa: PLR0913  # the facts of one out
    plan: Shapes, x: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, label: str, *, is_fake: bool
) -> None:
    expected = (*x.shape[:-1], plan.out_features)
    is_fit = out.dtype is dtype and out.layout is _STRIDED and out.device == x.device
    if not is_fit or tuple(out.shape) != expected:
        raise InputError(
            label,
            name="out",
            rule=f"{dtype} {list(expected)} on {x.device}",
            value=f"{out.dtype} {list(out.shape)} on {out.device}",
            hint="Give such a tensor, or leave out= away.",
        )
    if any(step == 0 and size > 1 for size, step in zip(out.shape, out.stride(), strict=True)):
        raise InputError(label, name="out", rule="one place in memory for each element", value="an expanded tensor")
    if is_fake or x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr() or not x.numel():
        return  # the storages first: the spans cost 1.4 µs
    spans = []
    for tensor in (x, out):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    if spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]:
        hint = "Give out= memory of its own, or leave it away."
        raise InputError(label, name="out", rule="apart from x in memory", value="overlapping memory", hint=hint)


def check_operand(plan: Shapes, device: torch.device, tensor: torch.Tensor, *, to_input: bool) -> None:
    """Refuse a grad (``to_input``) or an x of the exact ops that is not floating-point [..., N or K] on that device.

    Raises:
        InputError: It does not fit.
    """
    op, name, width = ("input_grad", "grad", plan.out_features) if to_input else ("exact", "x", plan.in_features)
    is_fit = tensor.is_floating_point() and tensor.layout is _STRIDED and tensor.device == device
    if not is_fit or tensor.dim() < 1 or tensor.shape[-1] != width:
        rule = f"floating-point [..., {width}] on {device}"
        value = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise InputError(f"{_OP}_{op}", name=name, rule=rule, value=value)


def check_buffers(key: str, buffers: Sequence[torch.Tensor]) -> tuple[Shapes, torch.device]:
    """Return the shapes of a plan and where a layer's buffers are, once these have the sizes that the plan reads.

    Raises:
        LifecycleError: The layer was closed, or there is no such plan.
        InputError: The buffers are those of another kind of layer, cut, or spread over devices.
    """
    if not buffers:
        hint = "Make it again from its weight, and compile that."
        raise LifecycleError("the layer of this graph is closed", hint=hint, plan=key)
    plan = shapes_of(key)
    if len(buffers) != len(plan.layouts):
        raise InputError(_OP, name="buffers", rule=f"{len(plan.layouts)} tensors", value=len(buffers))
    device = buffers[-1].device
    for index, (buffer, (shape, stride)) in enumerate(zip(buffers, plan.layouts, strict=True)):
        is_fit = buffer.dtype is torch.uint8 and buffer.layout is _STRIDED and buffer.device == device
        if not is_fit or tuple(buffer.shape) != shape or not (buffer.is_contiguous() or buffer.stride() == stride):
            layout = "" if buffer.layout is not _STRIDED or buffer.is_contiguous() else ", not contiguous"
            raise InputError(
                _OP,
                name=f"buffers[{index}]",
                rule=f"torch.uint8 {list(shape)} on {device}, contiguous",
                value=f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}{layout}",
                hint="Give the buffers of a layer of the same plan.",
            )
    return plan, device
