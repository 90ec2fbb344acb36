"""What ``Q4Linear`` refuses before it calls the op: row numbers, and a bias that it is to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from q4core.errors import InputError

if TYPE_CHECKING:
    from q4core.layers.prepared_module import WeightOwner

__all__ = ["check_index", "fits_as_bias", "refuse_bias"]


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
