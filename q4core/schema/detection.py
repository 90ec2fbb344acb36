"""Detection of the layers that a mapping of names to tensors holds, and of their dialects."""

from __future__ import annotations

import itertools
import logging
import re
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit, warn_once
from q4core.errors import PLUGIN_FAULTS, DialectError, Q4Error, Q4PluginWarning
from q4core.schema.catalogue import Catalogue, LayerSchema, Problem, as_dict, as_tuple
from q4core.schema.dialect import Dialect, find_dialect

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from q4core.schema.catalogue import TensorInfo

MARKER = "q4core.dialect"
"""Header metadata key under which a file of ours names its dialect, where other dialects use the same keys."""
AMBIGUOUS = "told apart by metadata, config.json or dialect=..., as its keys fit several dialects alike"
"""The rule that a layer breaks of which several readings count."""
_PACKED_KEYS = {"qweight": "gptq or awq", "W_q": "hqq", "weight_packed": "compressed-tensors"}
"""Last part of a key → what stores packed codes under it, where no config names a method."""
_PACKAGED = ("bitsandbytes", "compressed-tensors", "modelopt", "torchao")
"""Methods that q4-dialects reads."""
_PACKED_DTYPES = {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.uint32}
_SIDE = re.compile(
    r"(?i)scal|absmax|amax|zero|shift|codebook|centroid|table|quant_map|delta|^alpha$|norms$|^[sd]$|^s[uv]h?$"
)
"""Part of a name that speaks of scales, zero points or code books."""
_MOST_BARE = 64  # tensors of a file whose names without a module are taken for those of one layer
_UNEXPLAINED = "in a dialect that is known; these keys hold packed integers and scales that none explains"
_NO_CODES = re.compile(
    r"(mask|ind(ex|ices)|_idxs?|ids?|positions?|lengths?|counts?|bias|tracked|buckets?|sizes?|shapes?|inited|enabled|steps?"
    r"|images?|pixels|frames|labels?|tokens?|faces|edges|coords)$|:"
)
"""Names of integers that are themselves; q4_nn's own folders have a colon in theirs."""


@attrs.frozen(kw_only=True)
class Schema:
    """What a checkpoint holds.

    Args:
        layers: Module → how its weight is stored, in the order of the file.
        dense: Names of the tensors that belong to no layer, those that are decoded among them.
        decoded: Name of a dense tensor → how it is stored, where bfloat16 is decoded from FP8 and its scales.
        problems: What is wrong with the checkpoint as a whole; each layer has its own ``problems``.
        unsupported: Tensors and layers that can be listed but not read, each with the reason; ``key`` is the name. The
            code is ``unexplained`` where no dialect knows the keys, which are the value then.
    """

    layers: Mapping[str, LayerSchema] = attrs.field(factory=dict, converter=as_dict, hash=False)
    dense: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    decoded: Mapping[str, LayerSchema] = attrs.field(factory=dict, converter=as_dict, hash=False)
    problems: tuple[Problem, ...] = attrs.field(default=(), converter=as_tuple)
    unsupported: tuple[Problem, ...] = attrs.field(default=(), converter=as_tuple)

    @property
    def dialects(self) -> tuple[str, ...]:
        """Names of the dialects that occur, in the order of the file."""
        return tuple(dict.fromkeys(layer.dialect for layer in self.layers.values()))


def catalogue_of(
    tensors: Mapping[str, Any], dialects: Iterable[Dialect], **facts: Any
) -> tuple[Catalogue, tuple[Dialect, ...]]:
    """Return the catalogue of tensors, and the dialects to look for.

    Raises:
        DialectError: No dialect has an option of that name.
        SchemaError, ConfigError: As ``Catalogue``, whose other arguments are the facts.
    """
    known = tuple(dialects)
    catalogue = Catalogue(tensors, **facts)
    legal = sorted({name for dialect in known for name in dialect.options})
    for name in catalogue.options:
        if name not in legal:
            raise DialectError("options", name="option", rule=f"one of {', '.join(legal) or 'none'}", value=name)
    return catalogue, known


def detect_in(catalogue: Catalogue, dialects: Sequence[Dialect], wanted: str | None = None) -> Schema | None:
    """Do what ``q4core.detect`` does, over a catalogue."""
    if wanted is not None:
        find_dialect(wanted, dialects)
    found = readings(catalogue, dialects)
    used = {key for group in found.values() for layer in group for key in layer.keys.values()}
    dense_layers = [layer for item in dialects for layer in _found(item.find_dense, catalogue, item)]
    others = {layer.module: _sized(layer, catalogue) for layer in dense_layers if layer.module not in found}
    used.update(key for layer in others.values() for key in layer.keys.values())
    unread = _find_unread(catalogue, dialects, used)
    if not found and not unread and not others:
        return None
    chosen = {module: choose(group, wanted, catalogue.metadata.get(MARKER)) for module, group in found.items()}
    layers = {module: layer for module, layer in chosen.items() if not is_unsupported(layer)}
    layers = {module: _sized(layer, catalogue) for module, layer in layers.items()}
    decoded = {layer.keys["qdata"]: layer for layer in others.values() if not is_unsupported(layer)}
    problems = []
    if wanted is not None and found and all(layer.dialect != wanted for layer in layers.values()):
        names = ", ".join(sorted({layer.dialect for group in found.values() for layer in group}))
        problems = [Problem("dialect", "dialect", f"one that the keys allow ({names})", wanted)]
    every = [*chosen.values(), *others.values()]
    refused = [problem for layer in every for problem in layer.problems if problem.code == "unsupported"]
    used.update(key for _, keys in unread for key in keys)
    dense = [name for name in catalogue.tensors if name not in used or name in decoded]
    refused += [problem for problem, _ in unread]
    return Schema(layers=layers, dense=dense, decoded=decoded, problems=problems, unsupported=refused)


def _sized(layer: LayerSchema, catalogue: Catalogue) -> LayerSchema:
    """Return a layer with the bytes of its tensors, where its dialect does not say them."""
    infos = [catalogue.get(key) for key in set(layer.keys.values())]
    nbytes = sum(info.nbytes for info in infos if info is not None)
    return layer if layer.nbytes is not None else attrs.evolve(layer, nbytes=nbytes)


def is_unsupported(layer: LayerSchema) -> bool:
    """Return whether a layer is recognised but can't be read."""
    return any(problem.code == "unsupported" for problem in layer.problems)


def readings(catalogue: Catalogue, dialects: Sequence[Dialect]) -> dict[str, list[LayerSchema]]:
    """Return module → its readings, by the dialects' names, modules in the order in which the file has their codes."""
    found: dict[str, list[LayerSchema]] = {}
    for dialect in sorted(dialects, key=lambda item: item.name):
        for layer in _found(dialect.find, catalogue, dialect):
            found.setdefault(layer.module, []).append(layer)

    places = {name: index for index, name in enumerate(catalogue.tensors)}

    def first(group: tuple[str, list[LayerSchema]]) -> int:
        return min(places.get(key, len(places)) for layer in group[1] for key in layer.keys.values())

    return dict(sorted(found.items(), key=first))


def _found(
    find: Callable[[Catalogue], Iterable[LayerSchema]], catalogue: Catalogue, dialect: Dialect
) -> list[LayerSchema]:
    """Return what a dialect finds; one that raises is left out, with a warning."""
    try:
        return list(find(catalogue))
    except Q4Error:
        raise
    except PLUGIN_FAULTS as error:
        message = f"dialect {dialect.name!r} raised {describe_exception(error)}, and is left out"
        emit("q4.plugin", level=logging.WARNING, dialect=dialect.name, error=message)
        warn_once(message, Q4PluginWarning, message)
        return []


def countable(candidates: Sequence[LayerSchema]) -> Sequence[LayerSchema]:
    """Return the readings that metadata or config.json name, if there are any, else all."""
    return [layer for layer in candidates if layer.named] or candidates


def choose(candidates: Sequence[LayerSchema], wanted: str | None, marked: str | None) -> LayerSchema:
    """Return the one reading that counts, or the first one with the problem that several do."""
    for name in (wanted, marked):
        named = [layer for layer in candidates if name is not None and layer.dialect == name]
        if len(named) == 1:
            return named[0]
    left = countable(candidates)
    if len(left) == 1:
        return left[0]
    problem = Problem("ambiguous", left[0].module, AMBIGUOUS, " or ".join(layer.dialect for layer in left))
    return attrs.evolve(left[0], problems=(*left[0].problems, problem))


def _find_unread(
    catalogue: Catalogue, dialects: Iterable[Dialect], used: Collection[str]
) -> list[tuple[Problem, list[str]]]:
    """Return a problem, with the keys, for each module that holds packed codes and in which no dialect found a layer.

    In a file in which no dialect found any, the config's ``quant_method`` and the names of keys say whose they are.
    Other integers are taken for codes where the same module has scales that fit them, and no dense weight.
    """
    method = None if used else catalogue.quantization_config.get("quant_method")
    found: dict[str, tuple[Problem, list[str]]] = {}
    bare = {name: name for name in catalogue.tensors if "." not in name} if len(catalogue.tensors) <= _MOST_BARE else {}
    for name, info in catalogue.tensors.items():
        if name in used or info.dtype not in _PACKED_DTYPES or len(info.shape) < 2:  # noqa: PLR2004  # a matrix at least
            continue
        module, _, suffix = name.partition(".weight.") if ".weight." in name else name.rpartition(".")
        if (not module and name not in bare) or module in found:
            continue
        own = {
            key: item
            for key, item in (catalogue.children(module) if module else bare).items()
            if item not in used and ("." not in key or key.startswith("weight.")) and key != "bias"
        }
        owner = method if isinstance(method, str) else None if used else _PACKED_KEYS.get(suffix)
        if owner is not None:
            found[module] = _owned(module or name, owner, dialects), [*own.values()]
        elif _are_codes(name[len(module) :].lstrip("."), info, {key: catalogue.tensors[own[key]] for key in own}):
            problem = Problem("unexplained", module or name, _UNEXPLAINED, ", ".join(sorted(own)))
            found[module] = problem, [*own.values()]
    return [*found.values()]


def _are_codes(suffix: str, info: TensorInfo, own: Mapping[str, TensorInfo]) -> bool:
    """Return whether integers are codes of a weight, by their own name and by what else their module has."""
    if "weight" in own and own["weight"].dtype.is_floating_point:
        return False
    name = suffix.rpartition(".")[2]
    sides = [item for key, item in own.items() if key != suffix and _SIDE.search(key.rpartition(".")[2])]
    if name.endswith(("indices", "idx")) and any(item.shape[:1] == info.shape[:1] != (1,) for item in sides):
        return True  # of a code book: each row has scales of its own
    if _NO_CODES.search(name) or _SIDE.search(name):
        return False
    # A weight may have one scale; what is called otherwise has scales of its rows, columns or blocks.
    return bool(sides) if "weight" in suffix else any(_fit(item, info) for item in sides)


def _fit(side: TensorInfo, codes: TensorInfo) -> bool:
    """Return whether numbers may be scales of codes: one for as many codes in a row, or as many codes in one integer.

    Block scales may be floating-point numbers that are stored as bytes.
    """
    if not side.dtype.is_floating_point and not (side.dtype.itemsize == 1 and len(side.shape) > 1):
        return False
    pairs = itertools.product(side.shape, codes.shape)
    return any(min(pair) > 1 and max(pair) % min(pair) == 0 for pair in pairs)


def _owned(module: str, owner: str, dialects: Iterable[Dialect]) -> Problem:
    """Return the problem of a module whose owner is known by name."""
    rule = "in a dialect that is read; this one is known, but nothing here reads it yet"
    if owner in _PACKAGED:
        rule = "in a dialect that is installed; the package q4-dialects brings this one"
        if any(dialect.name.startswith(owner) for dialect in dialects):
            rule = "stored as an installed dialect has it"
    return Problem("unsupported", module, rule, owner)
