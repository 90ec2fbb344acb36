"""Everything that is wrong with layers: keys, dtypes and shapes, and the values of the tensors that are at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4core.errors import SchemaError
from q4core.schema.catalogue import Problem
from q4core.schema.detection import AMBIGUOUS, MARKER, Schema, choose, detect_in, make_catalogue, readings
from q4core.schema.dialect import find_dialect
from q4core.schema.simple_dialects import chosen_dialects
from q4core.schema.values import number_problems, weight_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from q4core.schema.catalogue import Catalogue, LayerSchema
    from q4core.schema.dialect import Dialect

__all__ = ["detect_or_fail", "problems_error", "validate", "validate_in"]


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
    known = chosen_dialects(dialects)
    catalogue = make_catalogue(tensors, metadata, config, load, options, known)
    schema = detect_in(catalogue, known, dialect)
    if schema is None:
        names = ", ".join(sorted(item.name for item in known))
        raise SchemaError(
            "schema",
            name="tensors",
            rule=f"a checkpoint with at least one layer in a known dialect ({names})",
            value=f"{len(tensors)} tensors without one",
        )
    problems = validate_in(schema, catalogue, known)
    if problems or not schema.layers:
        raise problems_error("schema", problems or schema.unsupported)
    return schema


def problems_error(
    what: str, problems: Sequence[Problem], where: str | None = None, schema: Schema | None = None
) -> SchemaError:
    """Return the error that says how many problems there are, and each of them."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return SchemaError(f"{what}: {count}", problems=problems, where=where, schema=schema)


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
    known = chosen_dialects(dialects)
    catalogue = make_catalogue(tensors, metadata, config, load, options, known)
    return validate_in(_renewed(schema, catalogue, known), catalogue, known)


def validate_in(schema: Schema, catalogue: Catalogue, dialects: Sequence[Dialect]) -> tuple[Problem, ...]:
    """Return every problem of a schema that was made from a catalogue: of keys, shapes, dtypes and values at hand."""
    problems = list(schema.problems)
    layers = [(find_dialect(layer.dialect, dialects), layer) for layer in schema.layers.values()]
    sound = []
    illegal = list(number_problems(layers, catalogue))
    bad_keys = {problem.key for problem in illegal}
    for dialect, layer in layers:
        found = _layer_problems(dialect, layer, catalogue)
        if not found and bad_keys.isdisjoint(layer.keys.values()):
            sound.append((dialect, layer))
        problems += found
    problems += illegal
    for dialect, layer in sound:
        problems += weight_problems(dialect, layer, catalogue)
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


def _renewed(schema: Schema, catalogue: Catalogue, dialects: Sequence[Dialect]) -> Schema:
    """Return a schema anew from a catalogue, with a problem for each layer that its tensors have no place for.

    A layer of which the keys tell nothing any more stays as the schema has it, so that what is missing can be said;
    layers that the schema lacks are added.

    Raises:
        DialectError: The schema names a dialect that is not among the dialects.
    """
    found = readings(catalogue, dialects)
    marked = catalogue.metadata.get(MARKER)
    by_key = _by_key(found)
    layers: dict[str, LayerSchema] = {}
    problems = list(schema.problems)
    told: set[frozenset[tuple[str, str]]] = set()  # the keys of the layers so far
    for module, old in schema.layers.items():
        dialect = find_dialect(old.dialect, dialects)
        chosen = _same(found.get(module, ()), old, marked)
        if chosen is not None:
            layers[module] = find_dialect(chosen.dialect, dialects).recall(chosen, old, catalogue)
            told.add(frozenset(layers[module].keys.items()))
            continue
        # Experts come and go as one layer or as many, with the same keys.
        kin = {name: layer for key in old.keys.values() for name, layer in by_key.get((old.dialect, key), {}).items()}
        for name, layer in kin.items():
            told.add(frozenset(layers.setdefault(name, dialect.recall(layer, old, catalogue)).keys.items()))
        if not kin:  # of experts that are gone, the first speaks for all
            keys = frozenset(old.keys.items())
            if keys not in told:
                told.add(keys)
                layers[module] = old
        elif not any(f"{module}.".startswith(f"{name}.") or f"{name}.".startswith(f"{module}.") for name in kin):
            info = catalogue.get(old.keys["qdata"])
            rule = f"of a shape that holds the layer {module!r}"
            problems.append(Problem("shape", old.keys["qdata"], rule, info and list(info.shape)))
    return attrs.evolve(schema, layers={**layers, **_added(found, layers, marked)}, problems=problems)


def _by_key(found: Mapping[str, Sequence[LayerSchema]]) -> dict[tuple[str, str], dict[str, LayerSchema]]:
    """Return (dialect, key) → the readings that have the key, by module."""
    by_key: dict[tuple[str, str], dict[str, LayerSchema]] = {}
    for layer in (layer for group in found.values() for layer in group):
        for key in layer.keys.values():
            by_key.setdefault((layer.dialect, key), {})[layer.module] = layer
    return by_key


def _same(group: Sequence[LayerSchema], old: LayerSchema, marked: str | None) -> LayerSchema | None:
    """Return the reading of a module that is in the schema's dialect; any, where the schema left the dialect open."""
    if not group:
        return None
    is_open = any((problem.code, problem.rule) == ("ambiguous", AMBIGUOUS) for problem in old.problems)
    chosen = choose(group, None if is_open else old.dialect, marked)
    return chosen if is_open or chosen.dialect == old.dialect else None


def _added(
    found: Mapping[str, Sequence[LayerSchema]], layers: Mapping[str, LayerSchema], marked: str | None
) -> dict[str, LayerSchema]:
    """Return the layers whose tensors no layer of the schema has, but for those that can only be listed."""
    taken = {key for layer in layers.values() for key in layer.keys.values()}
    others = {module: choose(group, None, marked) for module, group in found.items()}
    return {
        module: layer
        for module, layer in others.items()
        if module not in layers
        and taken.isdisjoint(layer.keys.values())
        and not any(problem.code == "unsupported" for problem in layer.problems)
    }
