"""Layers that train with four-bit weights: quantised weights in forward passes, masters for gradients.

A matrix whose in-features are no whole number of blocks is filled up with zeros, which change no result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_nn.convert.candidates import (
    find_candidates,
    reasons_against,
    reasons_by_layer,
    replace_layers_,
    skipped_by_caller,
)
from q4_nn.convert.table import Conversion, ConversionTable, row_of, table_of
from q4_nn.layer_type import keep_options
from q4_nn.quantising import check_master, named_format, quantize_packed
from q4_nn.training.straight_through import ste_weight
from q4core import ConfigError, InputError, Q4Error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_nn.convert.candidates import Candidate
    from q4core import Format, PackedWeight

__all__ = ["DENSE_KINDS", "STEConv2d", "STELinear", "STERecurrent", "pack_matrix", "ste_matrix", "to_ste_"]

DENSE_KINDS = (nn.Linear, nn.Conv2d, nn.RNN, nn.LSTM, nn.GRU)


def filled(master: torch.Tensor, kind: Format) -> torch.Tensor:
    """Return a matrix [N, K] with zero columns up to a whole number of blocks."""
    missing = -master.shape[1] % kind.block_size
    return nn.functional.pad(master, (0, missing)) if missing else master


def ste_matrix(master: torch.Tensor, format: str | Format) -> torch.Tensor:  # noqa: A002  # the contract's name
    """Return the quantised matrix [N, K] of a master of any K, as a dense tensor with gradients to the master."""
    kind = named_format(format)
    return ste_weight(filled(master, kind), kind)[:, : master.shape[1]]


def pack_matrix(master: torch.Tensor, format: str | Format) -> PackedWeight:  # noqa: A002  # the contract's name
    """Return the packed weight [N, K'] whose first K columns are ``ste_matrix(master)``; the others are zero."""
    kind = named_format(format)
    return quantize_packed(filled(master, kind), kind)


class STELinear(nn.Linear):
    """``nn.Linear`` whose forward pass uses its weight in four bits.

    Args:
        in_features: K.
        out_features: N.
        bias: Whether there is one, which stays as it is.
        format: Name of the format.
        device: As ``nn.Linear`` takes it.
        dtype: float32, bfloat16 or float16.

    Raises:
        FormatError: There is no such format.

    Reference:
        Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (straight-through estimator).
    """

    def __init__(  # noqa: PLR0913  # those of nn.Linear, and one
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001, FBT002  # as nn.Linear takes it
        *,
        format: str = "nvfp4",  # noqa: A002  # the contract's name
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.format = named_format(format).name

    def extra_repr(self) -> str:
        """Return what torch prints."""
        return f"{super().extra_repr()}, format={self.format}"

    def quantised(self) -> torch.Tensor:
        """Return the weight that ``forward`` uses, [N, K] with gradients to the master: for many products by one."""
        return ste_matrix(self.weight, self.format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ quantised(weight)ᵀ + bias``: [..., N] from [..., K]."""
        return nn.functional.linear(x, self.quantised(), self.bias)


class STEConv2d(nn.Conv2d):
    """``nn.Conv2d`` whose forward pass uses its kernels in four bits, each a row of channels · height · width.

    Args:
        *args: As ``nn.Conv2d`` takes them; one group, zero padding.
        format: Name of the format.
        **options: As ``nn.Conv2d`` takes them.

    Raises:
        ConfigError: Several groups, or another padding than zeros.
        FormatError: There is no such format.
    """

    def __init__(self, *args: Any, format: str = "nvfp4", **options: Any) -> None:  # noqa: A002  # the contract's name
        super().__init__(*args, **options)
        if self.groups != 1:
            raise ConfigError("4-bit convolution", name="groups", rule="1", value=self.groups)
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            value = self.padding if isinstance(self.padding, str) else self.padding_mode
            raise ConfigError("4-bit convolution", name="padding", rule="numbers, of zeros", value=value)
        self.format = named_format(format).name

    def extra_repr(self) -> str:
        """Return what torch prints."""
        return f"{super().extra_repr()}, format={self.format}"  # type: ignore[no-untyped-call]  # torch's

    def quantised(self) -> torch.Tensor:
        """Return the kernels that ``forward`` uses, of the shape of ``weight``."""
        return ste_matrix(self.weight.flatten(1), self.format).view_as(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, out_channels, H', W'] from [B, in_channels, H, W]."""
        return nn.functional.conv2d(x, self.quantised(), self.bias, self.stride, self.padding, self.dilation)


class STERecurrent(nn.Module):
    """torch's RNN, LSTM or GRU whose forward pass uses its matrices in four bits.

    Args:
        inner: An ``nn.RNN``, ``nn.LSTM`` (without projections) or ``nn.GRU``; its parameters are the masters.
        format: Name of the format.

    Raises:
        ConfigError: ``inner`` is none of these.
        FormatError: There is no such format.
    """

    def __init__(self, inner: nn.RNNBase, format: str = "nvfp4") -> None:  # noqa: A002  # the contract's name
        super().__init__()
        if not isinstance(inner, (nn.RNN, nn.LSTM, nn.GRU)) or inner.proj_size:
            rule = "an RNN, GRU, or LSTM without projections"
            raise ConfigError("4-bit recurrent layer", name="inner", rule=rule, value=type(inner).__name__)
        self.inner = inner
        self.format = named_format(format).name

    def extra_repr(self) -> str:
        """Return the options that torch prints before the inner layer."""
        return f"format={self.format}"

    def forward(self, x: torch.Tensor, hx: Any = None) -> tuple[torch.Tensor, Any]:
        """Return (y, state) as the inner layer does."""
        values = {
            name: ste_matrix(value, self.format) if value.dim() == 2 else value  # noqa: PLR2004  # matrices
            for name, value in self.inner.named_parameters()
        }
        found: tuple[torch.Tensor, Any] = torch.func.functional_call(self.inner, values, (x, hx))
        return found


def to_ste_(
    model: nn.Module,
    format: str = "nvfp4",  # noqa: A002  # the contract's name
    *,
    skip: Sequence[str] | Callable[[str, Any], bool] = (),
) -> ConversionTable:
    """Make the linear, convolution and recurrent layers of a model train with four-bit weights, in place.

    The layers keep their parameters, so that an existing optimizer stays valid, and shared weights stay shared.
    A layer stays as it is, with the reason in the table, where more would be lost: hooks, a forward of its own,
    parametrizations, weight norms, pruning, what a subclass adds. So does one that has no four-bit form. After an
    error the model is as it was.

    Args:
        model: A module that contains such layers.
        format: Name of the format.
        skip: Names or glob patterns (matched against the full name and its last part), each of which must match some
            layer; or a function of name and layer.

    Returns:
        A table of what was done; its ``names`` are those of the layers that were changed.

    Raises:
        InputError: ``model`` is no module, or such a layer itself, which can't replace itself.
        ConfigError: A pattern of ``skip`` matches nothing.
        FormatError: There is no such format.
    """
    named_format(format)
    if isinstance(model, DENSE_KINDS) or not isinstance(model, nn.Module):
        rule, value = "a module that contains linear, convolution or recurrent layers", type(model).__name__
        hint = "STELinear, STEConv2d and STERecurrent make a single layer."
        raise InputError("to_ste_", name="model", rule=rule, value=value, hint=hint)
    candidates = find_candidates(model, DENSE_KINDS)
    chosen = skipped_by_caller("to_ste_", skip, model, candidates)
    reasons = reasons_by_layer(candidates, lambda item: chosen.get(item.name) or _reason_against(item))
    rows: dict[nn.Module, Conversion] = {}
    made: dict[nn.Module, nn.Module] = {}
    for candidate in candidates:
        name, layer = candidate.name, candidate.layer
        if layer in rows:
            continue
        if layer in reasons:
            rows[layer] = row_of(name, layer, "skipped", reasons[layer])
            continue
        try:
            made[layer] = keep_options(layer, _ste_of(layer, format), format=format)
        except Q4Error as error:
            rows[layer] = row_of(name, layer, "failed", str(error))
            continue
        rows[layer] = row_of(name, layer, "converted")
    replace_layers_(model, made)
    return table_of(((item.name, item.layer) for item in candidates), rows)


def _reason_against(candidate: Candidate) -> str | None:
    """Return why a layer is left as it is, or None."""
    if isinstance(candidate.layer, (STELinear, STEConv2d)) or isinstance(candidate.parent, STERecurrent):
        return "it trains in four bits already"
    return next(reasons_against(candidate, None), None)


def _ste_of(module: nn.Module, kind: str) -> nn.Module:
    """Return the layer that trains a layer's own parameters in four bits."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            check_master(parameter.flatten(1))
    if isinstance(module, nn.RNNBase):
        return STERecurrent(module, kind).train(module.training)
    names: tuple[str, ...] = ("in_features", "out_features")
    if isinstance(module, nn.Conv2d):
        names = (
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        )
    options: dict[str, Any] = {name: getattr(module, name) for name in names}
    with torch.device("meta"):
        layer = STEConv2d if isinstance(module, nn.Conv2d) else STELinear
        made = layer(**options, bias=module.bias is not None, format=kind)
    for name, parameter in module.named_parameters():
        setattr(made, name, parameter)
    return made.train(module.training)
