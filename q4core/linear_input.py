"""What ``Q4Linear`` refuses: inputs and outputs that do not fit, each with the rule and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from q4core.errors import InputError
from q4core.floats import FLOATS

if TYPE_CHECKING:
    from q4core.weight_owner import WeightOwner

__all__ = ["check_index", "check_out", "fits_as_bias", "refuse_bias", "refuse_input"]


def refuse_input(layer: WeightOwner, x: Any) -> NoReturn:
    """Say what is wrong with an x that the layer can't take; called only for such a one."""
    label = f"layer {layer.name!r}"
    if not isinstance(x, torch.Tensor):
        hint = "Use torch.as_tensor(x)."
        raise InputError(label, name="x", rule="a tensor", value=type(x).__name__, hint=hint)
    if x.layout is not torch.strided:
        raise InputError(label, name="x", rule="a strided tensor", value=x.layout, hint="Use x.to_dense().")
    if x.dim() < 1 or x.shape[-1] != layer.in_features:
        rule = f"of shape [..., {layer.in_features}]"
        raise InputError(
            label, name="x", rule=rule, value=list(x.shape), hint=f"The layer has {layer.in_features} in-features."
        )
    if x.dtype != layer.dtype:
        raise InputError(
            label,
            name="x",
            rule=f"of dtype {layer.dtype}",
            value=x.dtype,
            hint=f"Use x.to({layer.dtype}), or layer.to(dtype) with float32, bfloat16 or float16.",
        )
    raise InputError(
        label,
        name="x",
        rule=f"on device {layer.device}",
        value=str(x.device),
        hint=f'Use x.to("{layer.device}") or layer.to("{x.device}").',
    )


def fits_as_bias(layer: WeightOwner, bias: object) -> bool:
    """Return whether a bias may go to the backend as it is (but for its stride)."""
    return (
        isinstance(bias, torch.Tensor)
        and bias.dtype is layer.dtype
        and bias.dim() == 1
        and bias.shape[0] == layer.out_features
        and bias.device == layer.device
    )


def refuse_bias(layer: WeightOwner, bias: object) -> NoReturn:
    """Say what is wrong with a bias that does not fit; called only for such a one."""
    got = f"{bias.dtype} {list(bias.shape)} on {bias.device}" if isinstance(bias, torch.Tensor) else type(bias).__name__
    raise InputError(
        f"layer {layer.name!r}",
        name="bias",
        rule=f"None or {layer.dtype} [{layer.out_features}] on {layer.device}",
        value=got,
        hint=f"Give a vector of {layer.out_features} numbers, one for each out-feature.",
    )


def check_index(layer: WeightOwner, index: object) -> torch.Tensor:
    """Return the row numbers as a vector.

    Raises:
        InputError: They are no integer tensor, or one is out of range.
    """
    label, rule = f"layer {layer.name!r}", f"an int64 or int32 tensor of values in 0 … {layer.out_features - 1}"
    if not isinstance(index, torch.Tensor) or index.dtype not in {torch.int64, torch.int32}:
        got = index.dtype if isinstance(index, torch.Tensor) else type(index).__name__
        raise InputError(label, name="index", rule=rule, value=got)
    flat = index.reshape(-1)
    if flat.numel():
        low, high = map(int, torch.aminmax(flat))
        if low < 0 or high >= layer.out_features:
            raise InputError(label, name="index", rule=rule, value=low if low < 0 else high)
    return flat


def check_out(layer: WeightOwner, x: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Refuse an ``out`` or ``out_dtype`` that does not fit x and the layer."""
    label = f"layer {layer.name!r}"
    if out_dtype is not None and out_dtype not in FLOATS:
        raise InputError(label, name="out_dtype", rule="float32, bfloat16 or float16", value=out_dtype)
    if out is None:
        return
    expected = (*x.shape[:-1], layer.out_features)
    wanted = out_dtype or layer.dtype
    if tuple(out.shape) != expected or out.dtype != wanted or out.device != x.device:
        raise InputError(
            label,
            name="out",
            rule=f"{wanted} {list(expected)} on {x.device}",
            value=f"{out.dtype} {list(out.shape)} on {out.device}",
            hint="Give such a tensor, or leave out= away.",
        )
    if any(step == 0 and size > 1 for size, step in zip(out.shape, out.stride(), strict=True)):
        raise InputError(label, name="out", rule="one place in memory for each element", value="an expanded tensor")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise InputError(label, name="out", rule="a tensor that does not require gradients", value="requires_grad=True")
    if not torch.compiler.is_compiling() and out.numel() and _overlap(x, out):
        hint = "Give out= memory of its own, or leave it away."
        raise InputError(label, name="out", rule="apart from x in memory", value="overlapping memory", hint=hint)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device or a.numel() == 0 or a.device.type == "meta":
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    spans = []
    for tensor in (a, b):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
