"""Everything that is wrong with layers: keys, dtypes and shapes, and the values of the tensors that are at hand."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit, warn_once
from q4core.errors import PLUGIN_FAULTS, Q4Error, Q4PluginWarning, SchemaError, counted
from q4core.formats import FLOATS
from q4core.schema.catalogue import Problem
from q4core.schema.detection import (
    AMBIGUOUS,
    MARKER,
    Schema,
    catalogue_of,
    choose,
    detect_in,
    is_unsupported,
    readings,
)
from q4core.schema.dialect import find_dialect
from q4core.weight import first_illegal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from q4core.schema.catalogue import Catalogue, LayerSchema
    from q4core.schema.dialect import Dialect

_COMPARED = frozenset({*FLOATS, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu})


def detect_or_fail(  # noqa: PLR0913  # the contract's arguments
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    dialect: str | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> Schema:
    """Return what a mapping of names to tensors holds, once nothing is wrong with it.

    Arguments are those of ``detect``.

    Raises:
        SchemaError: No layer can be read, or something is wrong; ``problems`` has everything at once, illegal numbers
            of the tensors that hold data as well.
        DialectError: The dialect's name, or an option's, is unknown.
        ConfigError: An argument is not what it must be.
    """
    catalogue, known = catalogue_of(tensors, dialects, metadata=metadata, config=config, load=load, options=options)
    schema = detect_in(catalogue, known, dialect)
    if schema is None:
        names = ", ".join(sorted(item.name for item in known))
        rule = f"a checkpoint with at least one layer in a known dialect ({names})"
        raise SchemaError("schema", name="tensors", rule=rule, value=f"{len(tensors)} tensors without one")
    problems = validate_in(schema, catalogue, known)
    if problems or not schema.layers:
        raise problems_error("schema", problems or schema.unsupported)
    return schema


def problems_error(
    what: str, problems: Sequence[Problem], where: str | None = None, schema: Schema | None = None
) -> SchemaError:
    """Return the error that says how many problems there are, and each of them."""
    return SchemaError(f"{what}: {counted(len(problems), 'problem')}", problems=problems, where=where, schema=schema)


def validate(  # noqa: PLR0913  # the contract's arguments
    schema: Schema,
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> tuple[Problem, ...]:
    """Return every problem of a schema over tensors, or () when all is well.

    These are the problems that ``detect_or_fail`` has with the tensors, and what of the schema they do not hold. The
    schema is what ``detect`` gave, for these tensors or for others with the same names. Which dialect each layer is in
    is taken from it; all else is looked at anew. Other arguments and errors are those of ``detect``.

    Raises:
        DialectError: The schema names a dialect that is not among the dialects.
        SchemaError: ``schema`` is no schema.
    """
    if not isinstance(schema, Schema):
        raise SchemaError("validate", name="schema", rule="a Schema, as detect gives it", value=type(schema).__name__)
    catalogue, known = catalogue_of(tensors, dialects, metadata=metadata, config=config, load=load, options=options)
    return validate_in(_renewed(schema, catalogue, known), catalogue, known)


def validate_in(schema: Schema, catalogue: Catalogue, dialects: Sequence[Dialect]) -> tuple[Problem, ...]:
    """Return every problem of a schema that was made from a catalogue: of keys, shapes, dtypes and values at hand."""
    known = {name: find_dialect(name, dialects) for name in schema.dialects}
    layers = [(known[layer.dialect], layer) for layer in schema.layers.values()]
    found = [(pair, _layer_problems(*pair, catalogue)) for pair in layers]
    illegal = list(_number_problems(layers, catalogue))
    problems = [*schema.problems, *(problem for _, some in found for problem in some), *illegal]
    bad_keys = {problem.key for problem in illegal}
    for (dialect, layer), some in found:
        if not some and bad_keys.isdisjoint(layer.keys.values()):
            problems += _weight_problems(dialect, layer, catalogue)
    return tuple(dict.fromkeys(problems))


def _layer_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> list[Problem]:
    """Return the problems of keys, shapes and dtypes of one layer."""
    problems = list(layer.problems)
    told = {problem.key for problem in problems}
    problems += [
        Problem("missing_key", key, f"there, as the {role} of {layer.module!r} in {layer.dialect}")
        for role, key in layer.keys.items()
        if key not in catalogue and key not in told
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


def _renewed(schema: Schema, catalogue: Catalogue, dialects: Sequence[Dialect]) -> Schema:
    """Return a schema anew from a catalogue, with a problem for each layer that its tensors have no place for.

    What the tensors show goes by the dialect of the layer that had its module or one of its keys, if any: experts come
    and go as one layer or as many, with the same keys. A layer of which the keys tell nothing any more stays as the
    schema has it, so that what is missing can be said.

    Raises:
        DialectError: The schema names a dialect that is not among the dialects.
    """
    owners = {key: layer for layer in schema.layers.values() for key in layer.keys.values()}
    layers: dict[str, LayerSchema] = {}
    heirs: dict[tuple[str, str], list[str]] = {}  # (dialect, key) → modules
    for module, group in readings(catalogue, dialects).items():
        keys = [key for layer in group for key in layer.keys.values()]
        old = schema.layers.get(module) or next((owners[key] for key in keys if key in owners), None)
        is_open = old is not None and any((item.code, item.rule) == ("ambiguous", AMBIGUOUS) for item in old.problems)
        wanted = None if old is None or is_open else old.dialect
        chosen = choose(group, wanted, catalogue.metadata.get(MARKER))
        if wanted not in {None, chosen.dialect} or (old is None and is_unsupported(chosen)):
            continue
        if old is not None:
            chosen = find_dialect(chosen.dialect, dialects).recall(chosen, old, catalogue)
        layers[module] = chosen
        for key in chosen.keys.values():
            heirs.setdefault((chosen.dialect, key), []).append(module)
    problems = list(schema.problems)
    gone: dict[frozenset[str], LayerSchema] = {}
    for module, old in schema.layers.items():
        find_dialect(old.dialect, dialects)
        if module in layers:
            continue
        kin = {name for key in old.keys.values() for name in heirs.get((old.dialect, key), ())}
        if not kin:  # of experts that are gone, the first speaks for all
            gone.setdefault(frozenset(old.keys.values()), old)
        elif not any(f"{module}.".startswith(f"{name}.") or f"{name}.".startswith(f"{module}.") for name in kin):
            info = catalogue.get(old.keys["qdata"])
            rule = f"of a shape that holds the layer {module!r}"
            problems.append(Problem("shape", old.keys["qdata"], rule, info and list(info.shape)))
    return attrs.evolve(schema, layers={**layers, **{old.module: old for old in gone.values()}}, problems=problems)
