"""A schema over other tensors: the dialects that it says, and all else from what is there now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from q4core.schema.catalogue import Problem
from q4core.schema.detection import AMBIGUOUS, MARKER, Schema, choose, readings
from q4core.schema.dialect import find_dialect

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from q4core.schema.catalogue import Catalogue, LayerSchema
    from q4core.schema.dialect import Dialect

__all__ = ["renewed"]


def renewed(schema: Schema, catalogue: Catalogue, dialects: Sequence[Dialect]) -> Schema:
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
        elif not _has_place(module, kin):
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


def _has_place(module: str, kin: Collection[str]) -> bool:
    """Return whether one of the layers that have a module's keys is the module, holds it, or is a part of it."""
    return any(f"{module}.".startswith(f"{name}.") or f"{name}.".startswith(f"{module}.") for name in kin)


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
