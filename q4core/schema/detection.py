"""Which layers a mapping of names to tensors holds, and in which dialects."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import attrs

from q4core.diagnostics.describe_exception import where
from q4core.errors import PLUGIN_FAULTS, DialectError, Q4Error, Q4PluginWarning
from q4core.schema.catalogue import Catalogue, LayerSchema, Problem, as_dict, as_tuple
from q4core.schema.dialect import Dialect, find_dialect
from q4core.schema.simple_dialects import chosen_dialects
from q4core.schema.unread import find_unread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

__all__ = ["AMBIGUOUS", "MARKER", "Schema", "choose", "detect", "detect_all", "detect_in", "make_catalogue", "readings"]

MARKER = "q4core.dialect"
"""Header metadata key under which a file of ours names its dialect, where other dialects use the same keys."""
AMBIGUOUS = "told apart by metadata, config.json or dialect=..., as its keys fit several dialects alike"
"""The rule that a layer breaks of which several readings count."""


@attrs.frozen(kw_only=True)
class Schema:
    """What a checkpoint holds.

    Args:
        layers: Module → how its weight is stored, in the order of the file.
        dense: Names of the tensors that belong to no layer.
        problems: What is wrong with the checkpoint as a whole; each layer has its own ``problems``.
        unsupported: Tensors and layers that can be listed but not read, each with the reason; ``key`` is the name.
    """

    layers: Mapping[str, LayerSchema] = attrs.field(factory=dict, converter=as_dict, hash=False)
    dense: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    problems: tuple[Problem, ...] = attrs.field(default=(), converter=as_tuple)
    unsupported: tuple[Problem, ...] = attrs.field(default=(), converter=as_tuple)

    @property
    def dialects(self) -> tuple[str, ...]:
        """Names of the dialects that occur, in the order of the file."""
        return tuple(dict.fromkeys(layer.dialect for layer in self.layers.values()))


def detect(  # noqa: PLR0913  # the contract's arguments
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    dialect: str | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> Schema | None:
    """Return what a mapping of names to tensors holds, or None where nothing in it is 4-bit.

    Layers may carry problems; ``validate`` and ``detect_or_fail`` say all of them, those of values too.

    Args:
        tensors: Name → tensor, meta tensor or ``TensorInfo``.
        metadata: Header metadata (text by key).
        config: The model's ``config.json``.
        dialect: Name of the dialect to prefer wherever the keys allow several.
        load: Loads a small side tensor by name; None takes them from the tensors that hold data.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.
        dialects: The dialects to look for; None for the two simplified ones and the installed plugins'.

    Raises:
        DialectError: The dialect's name, or an option's, is unknown.
        SchemaError: ``tensors`` is no mapping of names to tensors.
        ConfigError: Another argument is not what it must be.
    """
    known = chosen_dialects(dialects)
    return detect_in(make_catalogue(tensors, metadata, config, load, options, known), known, dialect)


def detect_all(  # noqa: PLR0913  # the contract's arguments
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> tuple[LayerSchema, ...]:
    """Return every reading of every layer; a module whose keys fit several dialects comes once for each.

    Arguments and errors are those of ``detect``.
    """
    known = chosen_dialects(dialects)
    found = readings(make_catalogue(tensors, metadata, config, load, options, known), known)
    return tuple(layer for group in found.values() for layer in _countable(group))


def detect_in(catalogue: Catalogue, dialects: Sequence[Dialect], wanted: str | None = None) -> Schema | None:
    """Do what ``detect`` does, over a catalogue."""
    if wanted is not None:
        find_dialect(wanted, dialects)
    found = readings(catalogue, dialects)
    if not found:
        unread = find_unread(catalogue, dialects)
        owners = {problem.key for problem in unread}
        dense = [name for name in catalogue.tensors if name.rpartition(".")[0] not in owners]
        return Schema(dense=dense, unsupported=unread) if unread else None
    layers: dict[str, LayerSchema] = {}
    unsupported: list[Problem] = []
    used: set[str] = set()
    for module, candidates in found.items():
        layer = choose(candidates, wanted, catalogue.metadata.get(MARKER))
        used.update(key for candidate in candidates for key in candidate.keys.values())
        refused = [problem for problem in layer.problems if problem.code == "unsupported"]
        if refused:
            unsupported += refused
        else:
            infos = [catalogue.get(key) for key in set(layer.keys.values())]
            total = sum(info.nbytes for info in infos if info is not None)
            layers[module] = attrs.evolve(layer, nbytes=total if layer.nbytes is None else layer.nbytes)
    problems: list[Problem] = []
    if wanted is not None and not any(layer.dialect == wanted for layer in layers.values()):
        names = ", ".join(sorted({item.dialect for group in found.values() for item in group}))
        problems.append(Problem("dialect", "dialect", f"one that the keys allow ({names})", wanted))
    return Schema(
        layers=layers,
        dense=[name for name in catalogue.tensors if name not in used],
        problems=problems,
        unsupported=unsupported,
    )


def make_catalogue(  # noqa: PLR0913  # the contract's arguments, without their defaults
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None,
    config: Mapping[str, Any] | None,
    load: Callable[[str], torch.Tensor] | None,
    options: Mapping[str, Any] | None,
    dialects: Sequence[Dialect],
) -> Catalogue:
    """Index tensors, after a look at the options' names; arguments and errors are those of ``detect``."""
    catalogue = Catalogue(tensors, metadata=metadata, config=config, load=load, options=options)
    legal = sorted({name for dialect in dialects for name in dialect.options})
    for name in catalogue.options:
        if name not in legal:
            raise DialectError("options", name="option", rule=f"one of {', '.join(legal) or 'none'}", value=name)
    return catalogue


def readings(catalogue: Catalogue, dialects: Sequence[Dialect]) -> dict[str, list[LayerSchema]]:
    """Return module → its readings, by the dialects' names, modules in the order in which the file has their codes."""
    found: dict[str, list[LayerSchema]] = {}
    for dialect in sorted(dialects, key=lambda item: item.name):
        for layer in _found(dialect, catalogue):
            found.setdefault(layer.module, []).append(layer)
    place = {name: index for index, name in enumerate(catalogue.tensors)}

    def first(module: str) -> int:
        keys = [key for layer in found[module] for key in layer.keys.values()]
        return min((place[key] for key in keys if key in place), default=len(place))

    return {module: found[module] for module in sorted(found, key=first)}


def _found(dialect: Dialect, catalogue: Catalogue) -> list[LayerSchema]:
    """Return what a dialect finds; one that raises is left out, with a warning."""
    try:
        return list(dialect.find(catalogue))
    except Q4Error:
        raise
    except PLUGIN_FAULTS as error:
        message = f"dialect {dialect.name!r} raised {type(error).__name__} and is left out: {error}{where(error)}"
        warnings.warn(Q4PluginWarning(message), stacklevel=5)
        return []


def _countable(candidates: Sequence[LayerSchema]) -> Sequence[LayerSchema]:
    """Return the readings that metadata or config.json name, if there are any, else all."""
    return [layer for layer in candidates if layer.named] or candidates


def choose(candidates: Sequence[LayerSchema], wanted: str | None, marked: str | None) -> LayerSchema:
    """Return the one reading that counts, or the first one with the problem that several do."""
    for name in (wanted, marked):
        told = [layer for layer in candidates if name is not None and layer.dialect == name]
        if len(told) == 1:
            return told[0]
    left = _countable(candidates)
    if len(left) == 1:
        return left[0]
    problem = Problem("ambiguous", left[0].module, AMBIGUOUS, " or ".join(layer.dialect for layer in left))
    return attrs.evolve(left[0], problems=(*left[0].problems, problem))
