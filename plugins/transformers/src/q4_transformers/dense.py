"""Packed layers made dense again: one of them, or a whole model's with transformers' own experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import q4core as q4
from q4_transformers.experts import Q4Experts, merged_experts
from q4_transformers.linear import HfLinear
from q4core import ConfigError

__all__ = ["dense_layer", "fill_parameter", "forget_quantizer", "hide_parameter", "make_dense", "plain_layer"]

_BASE = ".base_layer"
"""PEFT's name of the layer below its adapters."""
_TURNED = "_q4_is_transposed"
"""The mark of a dense layer that replaces a ``Conv1D``."""


def dense_layer(packed: HfLinear, dtype: torch.dtype) -> nn.Linear:
    """Return a packed layer with its weight dequantised."""
    return plain_layer(packed, q4.dequantize(packed.packed_weight(), dtype))


def plain_layer(packed: HfLinear, weight: torch.Tensor) -> nn.Linear:
    """Return a dense layer in place of a packed one, with a weight."""
    linear = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if packed.bias is not None:
        linear.bias = nn.Parameter(packed.bias.detach().to(weight.dtype, copy=True), requires_grad=False)
    setattr(linear, _TURNED, packed.is_transposed)
    return linear.train(packed.training)


def hide_parameter(model: Any, name: str) -> list[tuple[nn.Module, str]]:
    """Make a parameter, and those tied to it, buffers that transformers loads nothing into; return where they were.

    They are not tied before ``fill_parameter``.
    """
    tied = [target for target, source in model.all_tied_weights_keys.items() if source == name]
    rooms = []
    for path in (name, *tied):
        model.all_tied_weights_keys.pop(path, None)
        holder, _, leaf = path.rpartition(".")
        module = model.get_submodule(holder)
        shape = module._parameters.pop(leaf).shape  # noqa: SLF001  # torch's own way to remove one
        module.register_buffer(leaf, torch.empty((), device="meta").expand(shape), persistent=False)
        module.__dict__["_is_hf_initialized"] = True  # transformers' mark: nothing is to be drawn at random
        rooms.append((module, leaf))
    return rooms


def fill_parameter(model: Any, name: str, rooms: list[tuple[nn.Module, str]], weight: torch.Tensor) -> None:
    """Make what ``hide_parameter`` hid parameters again, all of them one."""
    parameter = nn.Parameter(weight, requires_grad=False)
    for module, leaf in rooms:
        del module._buffers[leaf]  # noqa: SLF001  # as above
        module.register_parameter(leaf, parameter)
    paths = [path for path, item in model.named_parameters(remove_duplicate=False) if item is parameter]
    model.all_tied_weights_keys |= {path: name for path in paths if path != name}


def make_dense(model: Any, dtype: torch.dtype | None = None) -> None:
    """Make every packed layer dense, and experts transformers' own again.

    Args:
        model: A model of transformers.
        dtype: Of the weights. Defaults to each layer's own.

    Raises:
        ConfigError: A packed layer has adapters.
    """
    modules = list(model.named_modules())
    adapted = next((name for name, item in modules if isinstance(item, HfLinear) and name.endswith(_BASE)), None)
    if adapted is not None:
        hint = "Merge its adapters first: q4_transformers.merge(model, exact=True)."
        value = adapted.removesuffix(_BASE)
        raise ConfigError("dequantize", name="layer", rule="without adapters", value=value, hint=hint)
    experts = {name: item for name, item in modules if isinstance(item, Q4Experts)}
    for name, module in modules:
        if isinstance(module, HfLinear):
            model.set_submodule(name, dense_layer(module, dtype or module.dtype))
    for name, module in list(model.named_modules()):
        if name and getattr(module, _TURNED, False):
            model.set_submodule(name, _conv1d(module))
    for name, module in experts.items():
        model.set_submodule(name, merged_experts(module))
        model._weight_conversions = None  # noqa: SLF001  # so that transformers finds its own again, as it saves


def forget_quantizer(model: Any) -> None:
    """Remove from a model of transformers what says that it was quantised."""
    model.hf_quantizer = None
    model.is_quantized = False
    for holder in (model, model.config):
        for name in ("quantization_method", "quantization_config"):
            if hasattr(holder, name):
                delattr(holder, name)


def _conv1d(linear: nn.Linear) -> Conv1D:
    module = Conv1D(0, 0)
    module.nf, module.nx, module.bias = linear.out_features, linear.in_features, linear.bias
    module.weight = nn.Parameter(linear.weight.detach().T.contiguous(), requires_grad=False)
    return module.train(linear.training)
