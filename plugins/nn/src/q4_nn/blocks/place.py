"""Placement of packed or dense matrices as a model's linear layers, those that share their x joined."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from q4_nn.blocks.joined import JoinedLinear
from q4_nn.layer_type import keep_options
from q4core import BlockOrder, PackedWeight, WeightSpec, cat

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from q4core import Session

__all__ = ["Part", "place_linears_"]

_BLOCK_FIELDS = frozenset({"qdata", "scale", "offset", "zero"})


@attrs.frozen(eq=False)
class Part:
    """A matrix with its bias, before it is a layer.

    Args:
        name: The layer's name in reports.
        weight: [N, K].
        bias: [N] float, or None.
    """

    name: str
    weight: PackedWeight | torch.Tensor
    bias: torch.Tensor | None

    def join_key(self) -> Hashable:
        """Return what two neighbours must share to be one matrix of the very same numbers; itself where none can."""
        weight = self.weight
        if not isinstance(weight, PackedWeight):
            return self
        spec = attrs.evolve(WeightSpec.of(weight), out_features=1)
        if not _BLOCK_FIELDS.issuperset(spec.fields) or spec.blocks is not BlockOrder.ROW:
            return self  # what belongs to the whole matrix would have to change its form
        return spec, weight.scale.dtype, self.bias is None


def place_linears_(model: nn.Module, parts: Mapping[str, Part], session: Session) -> None:
    """Replace linear layers of a model by layers over given matrices.

    Layers that share their x (a module's ``joins``) become one call wherever their formats are equal.

    Args:
        model: The model.
        parts: Module name → matrix, of the layers to replace.
        session: Makes the 4-bit layers.
    """
    left = dict(parts)
    changes: list[tuple[nn.Module, str, nn.Module | None]] = []  # all are made before the first takes its place
    for at, module in list(model.named_modules()):
        for joined, names in getattr(module, "joins", {}).items():
            full = [f"{at}.{name}" if at else name for name in names]
            own = [left[name] for name in full if name in left]
            if len(own) < len(full) or not any(isinstance(part.weight, PackedWeight) for part in own):
                continue  # dense ones keep their names
            groups = [list(group) for _, group in itertools.groupby(own, Part.join_key)]
            layers = [_layer(_join(group), session) for group in groups]
            sizes = [tuple(part.weight.shape[0] for part in group) for group in groups]
            changes.append((module, joined, JoinedLinear(layers, sizes).train(module.training)))
            changes += [(module, name, None) for name in names]
            for name in full:
                del left[name]
    for name, part in left.items():
        parent, _, attribute = name.rpartition(".")
        owner = model.get_submodule(parent)
        made = keep_options(getattr(owner, attribute), _layer(part, session))
        changes.append((owner, attribute, made.train(owner.training)))
    for owner, attribute, layer in changes:
        setattr(owner, attribute, layer)


def _join(parts: list[Part]) -> Part:
    """Return one matrix of all rows; its name is the first one's, with the last words of the others."""
    if len(parts) == 1:
        return parts[0]
    name = "+".join([parts[0].name, *(part.name.rpartition(".")[2] for part in parts[1:])])
    weights = [part.weight for part in parts if isinstance(part.weight, PackedWeight)]
    biases = [part.bias for part in parts if part.bias is not None]
    return Part(name, cat(weights, name=name), torch.cat(biases) if biases else None)


def _layer(part: Part, session: Session) -> nn.Module:
    if isinstance(part.weight, PackedWeight):
        return session.linear(part.weight, bias=part.bias, name=part.name)
    rows, columns = part.weight.shape
    with torch.device("meta"):
        layer = nn.Linear(columns, rows, bias=part.bias is not None)
    layer.weight = nn.Parameter(part.weight, requires_grad=False)
    if part.bias is not None:
        layer.bias = nn.Parameter(part.bias, requires_grad=False)
    return layer
