"""Conversion of tensors that hold E weights, one for each expert of a layer, to E layers.

The experts of ``name`` are the layers ``name.0`` … ``name.E-1``. A dialect writes a layer at a time, so that experts
are written as modules of their own, by the names they are read under; the weights are the same when read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from q4core import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from q4core import Catalogue, LayerSchema

__all__ = ["expert_layers", "expert_of", "has_experts", "own_number"]

_RANK = 3
_MOST = 4096
_NOTE = "an expert that shares its tensors with others; it is written as a module of its own"


def has_experts(catalogue: Catalogue, key: str) -> bool:
    """Return whether a tensor is there and of 3 dimensions."""
    info = catalogue.get(key)
    return info is not None and len(info.shape) == _RANK


def expert_layers(layer: LayerSchema, experts: int, catalogue: Catalogue) -> Iterator[LayerSchema]:
    """Yield a layer for each expert; where they can't be separated, the layer as a whole, with its problems.

    Args:
        layer: How the experts are stored; its shape is one expert's.
        experts: How many the codes hold.
        catalogue: Where the tensors are.
    """
    if any(problem.code == "unsupported" for problem in layer.problems) or not all(
        key in catalogue for key in layer.keys.values()
    ):
        yield layer  # one problem, not one for each expert
        return
    if experts > _MOST:
        problem = Problem("unsupported", layer.module, f"of at most {_MOST} experts", experts)
        yield attrs.evolve(layer, problems=(*layer.problems, problem))
        return
    if not experts:
        problem = Problem("shape", layer.keys["qdata"], "of at least 1 expert", experts)
        yield attrs.evolve(layer, problems=(*layer.problems, problem))
        return
    codes = catalogue.get(layer.keys["qdata"])
    if codes is not None and codes.nbytes < experts:  # a few bytes of header must not become thousands of layers
        rule = f"of at least a byte for each of {experts} experts"
        problem = Problem("shape", layer.keys["qdata"], rule, list(codes.shape))
        yield attrs.evolve(layer, problems=(*layer.problems, problem))
        return
    infos = [catalogue.get(key) for key in set(layer.keys.values())]
    nbytes = sum(info.nbytes for info in infos if info is not None)
    for index in range(experts):
        name = f"{layer.module}.{index}"
        other = next(iter(catalogue.children(name).values()), None)
        problems = layer.problems
        if other is not None:
            rule = f"the name of one layer; it is that of an expert of {layer.module} too"
            problems = (*problems, Problem("ambiguous", name, rule, other))
        yield attrs.evolve(
            layer,
            module=name,
            problems=problems,
            notes=(*layer.notes, _NOTE),
            extras=(*layer.extras, ("expert", index)),
            nbytes=nbytes // experts,
        )


def expert_of(layer: LayerSchema) -> int | None:
    """Return which of the weights in its tensors a layer is, or None for a matrix."""
    found: int | None = dict(layer.extras).get("expert")
    return found


def own_number(number: torch.Tensor | None, expert: int | None) -> torch.Tensor | None:
    """Return an expert's number [] of one for each, or of one for all; a matrix's as it is."""
    if number is None or expert is None:
        return number
    flat = number.reshape(-1)
    return flat[0 if flat.numel() == 1 else expert]
