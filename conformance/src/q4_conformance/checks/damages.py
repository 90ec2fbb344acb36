"""Damaged layers: whatever is missing, misshapen or mistyped is told by its key, alone and together with all else."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from q4_conformance.contract.case import check, expect
from q4core import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.dialect import DialectSubject
    from q4core import LayerSchema

_MISSING, _SHORT, _EMPTY = "missing", "one row short", "empty"


def _damages(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """Yield (what, key, what stands there now; None for nothing) for each way in which a tensor can be wrong."""
    for key, tensor in tensors.items():
        yield _MISSING, key, None
        if tensor.numel() < 2:  # noqa: PLR2004  # a scalar has no shape to lose
            continue
        yield _SHORT, key, tensor[:-1]
        yield _EMPTY, key, tensor[:0]
        yield "of two ranks more", key, tensor[None, None]
        yield "a scalar", key, torch.zeros((), dtype=tensor.dtype)
        other = torch.int64 if tensor.dtype != torch.int64 else torch.float32
        yield f"of dtype {other}", key, torch.zeros(tensor.shape, dtype=other)


_Look = tuple[list["LayerSchema"], dict[str, str]]


def _look(subject: DialectSubject, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> _Look:
    """Return the layers that are found, and key → code of each problem that is told of them."""
    catalogue = Catalogue(tensors, metadata=metadata)
    layers = subject.find(catalogue)
    return layers, {item.key: item.code for layer in layers for item in subject.problems(layer, catalogue)}


@check("dialect_validate")
def check_validate(case: Case, subject: DialectSubject) -> str:
    """Missing, short, misshapen and mistyped tensors are told by their keys, all at once; nothing is guessed."""
    count = 0
    for name, weight, layer in subject.written(case.format):
        metadata = subject.dialect.merge_metadata({"proj": layer}, ())
        tensors = dict(layer.tensors)
        damages = list(_damages(tensors))
        for changes in _alone_and_together(damages):
            ways = {way for way, _ in changes.values()}
            broken = {key: value for key, (_, value) in changes.items()}
            what = f"{name}: {', '.join(f'{key} is {way}' for key, (way, _) in changes.items())}"
            left = {key: tensor for key, tensor in {**tensors, **broken}.items() if tensor is not None}
            layers, told = _look(subject, left, metadata)
            # One row less may be a smaller layer, and as right as the whole one.
            is_smaller = ways == {_SHORT} and all(item.shape not in {None, weight.shape} for item in layers)
            is_gone = _MISSING in ways and not layers
            expect(told or is_gone or is_smaller, f"{what}, and nothing is told of the layer")
            untold = _untold(changes, told)
            expect(is_gone or not untold, f"{what}, and {untold} is not told")
            count += 1
        unknown = tensors | {"proj.weight_scale_of_tomorrow": torch.ones(3)}
        layers, told = _look(subject, unknown, metadata)
        expect(told or not layers, f"{name}: a scale key that nobody knows is passed over")
        count += 1
    return f"{count} damages"


_Damage = tuple[str, "torch.Tensor | None"]
"""What is wrong, and what stands there."""


def _untold(changes: Mapping[str, _Damage], told: Mapping[str, str]) -> list[str]:
    """Return the damaged keys that are passed over. Of sizes that disagree, either one may be called wrong."""
    gone = {key for key, (way, _) in changes.items() if way == _MISSING}
    wrong = {key for key, (way, _) in changes.items() if way not in {_MISSING, _SHORT, _EMPTY}}
    missed = [key for key, code in told.items() if code == "missing_key"]
    # A name may depend on what has gone beside it (the format, say), so that as many others are asked for.
    is_counted = len(missed) >= len(gone)
    return sorted((wrong if is_counted else wrong | gone) - set(told))


def _alone_and_together(damages: list[tuple[str, str, torch.Tensor | None]]) -> Iterator[dict[str, _Damage]]:
    """Yield key → damage: each one alone, every two of different tensors, and each way for all tensors at once."""
    for way, key, value in damages:
        yield {key: (way, value)}
    for (way, key, value), (second_way, second, other) in itertools.combinations(damages, 2):
        if key != second:
            yield {key: (way, value), second: (second_way, other)}
    for way in dict.fromkeys(way for way, _, _ in damages):
        if way != _MISSING:  # with all of them gone there is no layer
            yield {key: (way, value) for item, key, value in damages if item == way}
