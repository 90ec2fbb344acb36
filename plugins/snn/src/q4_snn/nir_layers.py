"""NIR's nodes without a state as layers of torch's, and back: matrices, convolutions, pooling, scales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from q4_nn import FilledLinear, Q4Conv2d, STEConv2d, STELinear
from q4_snn.maps import Scale, SumPool2d
from q4_snn.nir_graph import NirError, numbers
from q4core import Q4Linear, dequantize

__all__ = ["layer_of", "nodes_of", "shape_after"]


def layer_of(names: tuple[str, ...], nodes: dict[str, Any], *, bias: bool) -> nn.Sequential:
    """Return what a chain of nodes is, each value [B, …]; matrices take values of any shape, row by row.

    Raises:
        NirError: A node's tensors are no such layer.
    """
    layers: list[nn.Module] = []
    for name in names:
        try:
            layers += _layers(nodes[name], bias=bias)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            rule = "one whose tensors and numbers fit"
            raise NirError("from_nir", name="node", rule=rule, value=str(error), where=name) from error
    return nn.Sequential(*layers)


def shape_after(layer: nn.Module, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the shape that a layer makes of a shape, both without a batch.

    Raises:
        NirError: It takes no such shape.
    """
    try:
        with torch.no_grad():
            return tuple(layer(torch.zeros(1, *shape)).shape[1:])
    except (RuntimeError, ValueError) as error:
        rule = f"one that takes {[*shape]}"
        raise NirError("from_nir", name="node", rule=rule, value=str(error), where=where) from error


def _layers(node: Any, *, bias: bool) -> list[nn.Module]:
    kind, form = type(node).__name__, node.metadata.get("q4_format")
    if kind in {"Linear", "Affine"}:
        rows, columns = np.shape(node.weight)
        has_bias = bias and kind == "Affine"
        matrix = nn.Linear(columns, rows, has_bias) if form is None else STELinear(columns, rows, has_bias, format=form)
        return [nn.Flatten(), _loaded(matrix, node)]
    if kind in {"Conv1d", "Conv2d"}:
        is_flat = kind == "Conv1d"
        shape = np.shape(node.weight)
        options: dict[str, Any] = {
            name: _numbers(getattr(node, name), 1 if is_flat else 2) for name in ("stride", "padding", "dilation")
        }
        sizes = shape[1] * int(node.groups), shape[0], tuple(shape[2:])
        if is_flat:
            return [_loaded(nn.Conv1d(*sizes, groups=int(node.groups), bias=bias, **options), node)]
        made = (
            nn.Conv2d(*sizes, groups=int(node.groups), bias=bias, **options)
            if form is None
            else STEConv2d(*sizes, groups=int(node.groups), bias=bias, format=form, **options)
        )
        return [_loaded(made, node)]
    if kind in {"SumPool2d", "AvgPool2d"}:
        window, stride, padding = (_numbers(getattr(node, name), 2) for name in ("kernel_size", "stride", "padding"))
        return [(SumPool2d if kind == "SumPool2d" else nn.AvgPool2d)(window, stride, padding)]
    if kind == "Scale":
        return [Scale(torch.from_numpy(numbers(node.scale, np.float32)))]
    start, end = int(node.start_dim), int(node.end_dim)  # a Flatten's, without the batch
    return [nn.Flatten(start + (start >= 0), end + (end >= 0))]


def _loaded(layer: nn.Module, node: Any) -> nn.Module:
    state = {"weight": torch.from_numpy(numbers(node.weight, np.float32))}
    if getattr(layer, "bias", None) is not None:
        state["bias"] = torch.from_numpy(numbers(node.bias, np.float32))
    layer.load_state_dict(state)
    return layer


def _numbers(value: Any, count: int) -> Any:
    """Return a word as it is, and one number or several as that many."""
    if isinstance(value, (str, bytes)):
        return value if isinstance(value, str) else value.decode()
    found = [int(item) for item in np.asarray(value).reshape(-1)]
    return tuple(found * count if len(found) == 1 else found)


def nodes_of(nir: Any, layer: nn.Module, shape: tuple[int, ...], where: str) -> list[Any]:
    """Return a layer as a chain of nodes, from values of a shape.

    Raises:
        NirError: NIR has no such node.
    """
    if isinstance(layer, nn.Sequential):
        nodes = []
        for part in layer:
            nodes += nodes_of(nir, part, shape, where)
            shape = shape_after(part, shape, where)
        return nodes
    if isinstance(layer, nn.Identity) or (isinstance(layer, nn.Flatten) and len(shape) == 1):
        return []
    make = _matrix_node
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, Q4Conv2d)):
        make = _conv_node
    elif isinstance(layer, (SumPool2d, nn.AvgPool2d)):
        make = _pool_node
    elif isinstance(layer, Scale):
        return [nir.Scale(np.broadcast_to(layer.scale.cpu().numpy(), shape).copy())]
    elif isinstance(layer, nn.Flatten) and layer.start_dim != 0:
        start, end = (dim - (dim > 0) for dim in (layer.start_dim, layer.end_dim))
        return [nir.Flatten({"input": np.array(shape)}, start, end)]
    return [make(nir, layer, shape, where)]


def _matrix_node(nir: Any, layer: Any, shape: tuple[int, ...], where: str) -> Any:
    packed, metadata = _packed(layer)
    weight, bias = _weight(layer, packed), getattr(packed or layer, "bias", None)
    if weight is None or len(shape) != 1:
        rule = "one of Conv1d, Conv2d, SumPool2d, AvgPool2d, Scale, Flatten, and Linear over flat values, which NIR has"
        raise NirError("to_nir", name="layer", rule=rule, value=str(layer), where=where)
    weight = weight[:, : shape[0]]
    if bias is None:
        return nir.Linear(weight.cpu().numpy(), metadata=metadata)
    return nir.Affine(weight.cpu().numpy(), bias.detach().cpu().numpy(), metadata=metadata)


def _pool_node(nir: Any, layer: Any, shape: tuple[int, ...], where: str) -> Any:
    del shape  # any
    window, stride, padding = (
        np.array(_numbers(getattr(layer, name), 2)) for name in ("kernel_size", "stride", "padding")
    )
    if isinstance(layer, SumPool2d):
        return nir.SumPool2d(window, stride, padding)
    if layer.ceil_mode or layer.divisor_override is not None or (padding.any() and not layer.count_include_pad):
        rule = "one without ceil_mode, divisor_override and count_include_pad=False, which NIR does not state"
        raise NirError("to_nir", name="layer", rule=rule, value=str(layer), where=where)
    return nir.AvgPool2d(window, stride, padding)


def _conv_node(nir: Any, layer: Any, shape: tuple[int, ...], where: str) -> Any:
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        rule = "one padded with zeros, as NIR's are"
        raise NirError("to_nir", name="layer", rule=rule, value=str(layer), where=where)
    packed, metadata = _packed(layer)
    weight, bias = _weight(layer, packed), getattr(packed or layer, "bias", None)
    if weight is None:
        raise TypeError("a convolution has weights")
    if packed is not None:
        kernels = (layer.in_channels, *layer.kernel_size)
        weight = weight[:, : math.prod(kernels)].reshape(-1, *kernels)
    is_flat = isinstance(layer, nn.Conv1d)
    options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation")}
    if is_flat:
        options = {name: value if isinstance(value, str) else value[0] for name, value in options.items()}
    return (nir.Conv1d if is_flat else nir.Conv2d)(
        input_shape=shape[1] if is_flat else tuple(shape[1:]),
        weight=weight.cpu().numpy(),
        groups=getattr(layer, "groups", 1),
        bias=np.zeros(len(weight), np.float32) if bias is None else bias.detach().cpu().numpy(),
        metadata=metadata,
        **options,
    )


def _packed(layer: nn.Module) -> tuple[Q4Linear | None, dict[str, str]]:
    """Return the packed layer that a layer is or holds, or None; and the 4-bit format for metadata."""
    inner = layer.layer if isinstance(layer, (FilledLinear, Q4Conv2d)) else layer
    if isinstance(inner, Q4Linear):
        return inner, {"q4_format": inner.weight.format}
    return None, {"q4_format": layer.format} if isinstance(layer, (STELinear, STEConv2d)) else {}


def _weight(layer: nn.Module, packed: Q4Linear | None) -> torch.Tensor | None:
    """Return the numbers that a layer computes with, as float."""
    with torch.no_grad():
        if packed is not None:
            return dequantize(packed.packed_weight())
        if isinstance(layer, (STELinear, STEConv2d)):
            return layer.quantised().clone()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            return layer.weight.detach().clone()
    return None
