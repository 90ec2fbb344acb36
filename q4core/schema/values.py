"""The numbers of layers whose tensors are at hand: scales, code books and the like, never those of a lazy file."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from q4core.diagnostics.describe_exception import where
from q4core.errors import PLUGIN_FAULTS, Q4Error, Q4PluginWarning
from q4core.formats import FLOATS
from q4core.schema.catalogue import Problem
from q4core.weight import first_illegal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from q4core.schema.catalogue import Catalogue, LayerSchema
    from q4core.schema.dialect import Dialect

__all__ = ["number_problems", "weight_problems"]

_COMPARED = frozenset({*FLOATS, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu})


def number_problems(layers: Iterable[tuple[Dialect, LayerSchema]], catalogue: Catalogue) -> Iterator[Problem]:
    """Yield what is wrong with each tensor that is at hand: its layout, and the first of its numbers that is illegal.

    A tensor that several layers share (experts) is looked at once.
    """
    seen: set[tuple[str, str]] = set()
    for dialect, layer in layers:
        for role, key in layer.keys.items():
            stored = None if (dialect.name, key) in seen else catalogue.held(key)
            seen.add((dialect.name, key))
            if stored is None:
                continue
            if stored.layout is not torch.strided:
                yield Problem("value", key, "a strided tensor", str(stored.layout))
                continue
            rule = dialect.numbers.get(role)
            numbers = None if rule is None else dialect.stored_numbers(layer, role, stored.detach(), catalogue)
            if rule is None or numbers is None or numbers.dtype not in _COMPARED:
                continue
            bad = first_illegal(numbers, rule)
            if bad is not None:
                place, value = bad
                yield Problem("value", key, rule, f"{value} at {place}" if place else str(value))


def weight_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield what reading a layer, without other problems, finds to be wrong with its values; nothing where it can't be.

    The whole layer must be at hand.
    """
    tensors = {key: catalogue.held(key) for key in layer.keys.values()}
    held = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    if len(held) < len(tensors):
        return
    try:
        dialect.read(layer, held.__getitem__).check_values()
    except Q4Error as error:
        field, bracket, place = (error.name or "").partition("[")
        value = f"{error.value} at [{place}" if bracket else error.value
        yield Problem("value", layer.keys.get(field, layer.module), error.rule or str(error), value)
    except NotImplementedError:
        return  # a dialect that says what is there, and reads nothing
    except PLUGIN_FAULTS as error:
        message = (
            f"dialect {dialect.name!r} raised {type(error).__name__} as it read {layer.module!r}: {error}{where(error)}"
        )
        warnings.warn(Q4PluginWarning(message), stacklevel=6)
