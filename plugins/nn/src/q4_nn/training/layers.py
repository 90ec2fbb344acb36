"""Layers that train with four-bit weights: each forward pass sees the quantised weight, each gradient its master.

A matrix whose in-features are no whole number of blocks is filled up with zeros, which change no result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_nn.registry.layer_type import keep_options
from q4_nn.training.quantising import named_format, quantize_packed
from q4_nn.training.straight_through import ste_weight
from q4core import ConfigError

if TYPE_CHECKING:
    from q4core import Format, PackedWeight

__all__ = ["STEConv2d", "STELinear", "STERecurrent", "pack_matrix", "ste_matrix", "to_ste_"]


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, out_channels, H', W'] from [B, in_channels, H, W]."""
        kernels = ste_matrix(self.weight.flatten(1), self.format).view_as(self.weight)
        return nn.functional.conv2d(x, kernels, self.bias, self.stride, self.padding, self.dilation)


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
        """Return what torch prints beside the inner layer."""
        return f"format={self.format}"

    def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return (y, state) as the inner layer does."""
        values = {
            name: ste_matrix(value, self.format) if value.dim() == 2 else value  # noqa: PLR2004  # matrices
            for name, value in self.inner.named_parameters()
        }
        found: tuple[torch.Tensor, Any] = torch.func.functional_call(self.inner, values, (x, state))
        return found


def to_ste_(model: nn.Module, format: str = "nvfp4", *, skip: tuple[str, ...] = ()) -> list[str]:  # noqa: A002
    """Let the linear, convolution and recurrent layers of a model train with four-bit weights, in place.

    The layers keep their parameters, so that an optimizer that was made before goes on.

    Args:
        model: A module that contains such layers.
        format: Name of the format.
        skip: Names, or last parts of names, of layers to leave alone.

    Returns:
        The names of the layers that were changed.

    Raises:
        ConfigError: A name of ``skip`` is no layer's.
        FormatError: There is no such format.
    """
    named_format(format)
    kinds = (nn.Linear, nn.Conv2d, nn.RNN, nn.LSTM, nn.GRU)
    found = {name: module for name, module in model.named_modules() if name and type(module) in kinds}
    for name in skip:
        if not any(name in {full, full.rpartition(".")[2]} for full in found):
            raise ConfigError("to_ste_", name="skip", rule="names of the model's layers", value=name)
    changed = []
    for name, module in found.items():
        if {name, name.rpartition(".")[2]}.isdisjoint(skip) and getattr(module, "groups", 1) == 1:
            model.set_submodule(name, keep_options(module, _ste_of(module, format), format=format))
            changed.append(name)
    return changed


def _ste_of(module: nn.Module, kind: str) -> nn.Module:
    """Return the layer that trains a layer's own parameters in four bits."""
    if isinstance(module, nn.RNNBase):
        return STERecurrent(module, kind).train(module.training)
    names: tuple[str, ...] = ("in_features", "out_features")
    if isinstance(module, nn.Conv2d):
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
    options: dict[str, Any] = {name: getattr(module, name) for name in names}
    with torch.device("meta"):
        layer = STEConv2d if isinstance(module, nn.Conv2d) else STELinear
        made = layer(**options, bias=module.bias is not None, format=kind)
    for name, parameter in module.named_parameters():
        setattr(made, name, parameter)
    return made.train(module.training)
