"""Everything that is wrong with layers: keys, dtypes and shapes, and the values of the tensors that are at hand."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit, warn_once
from q4core.errors import PLUGIN_FAULTS, Q4Error, Q4PluginWarning, SchemaError, counted
from q4core.formats import FLOATS
from q4core.schema.catalogue import Problem
from q4core.schema.dialect import dialect_of
from q4core.weight import first_illegal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from q4core.schema.catalogue import Catalogue, LayerSchema
    from q4core.schema.detection import Schema
    from q4core.schema.dialect import Dialect

_COMPARED = frozenset({*FLOATS, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu})


def problems_error(
    what: str, problems: Sequence[Problem], where: str | None = None, schema: Schema | None = None
) -> SchemaError:
    """Return the error that says how many problems there are, and each of them."""
    return SchemaError(f"{what}: {counted(len(problems), 'problem')}", problems=problems, where=where, schema=schema)


def validate_in(schema: Schema, catalogue: Catalogue, dialects: Sequence[Dialect]) -> tuple[Problem, ...]:
    """Return every problem of a schema that was made from a catalogue: of keys, shapes, dtypes and values at hand."""
    known = (*schema.layers.values(), *schema.decoded.values())
    layers = [(dialect_of(layer, dialects), layer) for layer in known]
    found = [(pair, _layer_problems(*pair, catalogue)) for pair in layers]
    illegal = list(_number_problems(layers, catalogue))
    problems = [*schema.problems, *(problem for _, some in found for problem in some), *illegal]
    bad_keys = {problem.key for problem in illegal}
    for (dialect, layer), some in found:
        if not some and layer.module in schema.layers and bad_keys.isdisjoint(layer.keys.values()):
            problems += _weight_problems(dialect, layer, catalogue)
    return tuple(dict.fromkeys(problems))


def _layer_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> list[Problem]:
    """Return the problems of keys, shapes and dtypes of one layer."""
    problems = list(layer.problems)
    known = {problem.key for problem in problems}
    problems += [
        Problem("missing_key", key, f"there, as the {role} of {layer.module!r} in {layer.dialect}")
        for role, key in layer.keys.items()
        if key not in catalogue and key not in known
    ]
    if not any(problem.code == "ambiguous" for problem in problems):
        problems += dialect.validate(layer, catalogue)
    return problems


def _number_problems(layers: Iterable[tuple[Dialect, LayerSchema]], catalogue: Catalogue) -> Iterator[Problem]:
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


def _weight_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
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
        message = f"dialect {dialect.name!r} raised {describe_exception(error)} as it read {layer.module!r}"
        emit("q4.plugin", level=logging.WARNING, dialect=dialect.name, error=message)
        warn_once(message, Q4PluginWarning, message)
