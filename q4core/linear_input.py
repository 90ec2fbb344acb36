"""What ``Q4Linear`` refuses: inputs and outputs that do not fit, each with the rule and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from q4core.errors import InputError

if TYPE_CHECKING:
    from q4core.linear import Q4Linear

__all__ = ["FLOATS", "check_out", "refuse_input"]

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes that a layer may take and give."""


def refuse_input(layer: Q4Linear, x: Any) -> NoReturn:
    """Say what is wrong with an x that the layer can't take; called only for such a one."""
    label = f"layer {layer.name!r}"
    if not isinstance(x, torch.Tensor):
        raise InputError(label, name="x", rule="a tensor", value=type(x).__name__)
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


def check_out(layer: Q4Linear, x: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> None:
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
        )
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise InputError(label, name="out", rule="a tensor that does not require gradients", value="requires_grad=True")
    if not torch.compiler.is_compiling() and out.numel() and _overlap(x, out):
        raise InputError(label, name="out", rule="apart from x in memory", value="overlapping memory")


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
