"""What ``q4 convert`` decides before it writes: how each layer gets into the target's form, and at what loss."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_cli.values import illegal
from q4core.plugin_api import counted, emit, find_dialect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Contents", "Conversion", "Steps", "find_asked", "find_sink", "note_losses"]

_CHUNK_ELEMENTS = 1 << 22
_ALIKE = {"q4_0": "int4", "q8_0": "int8"}
"""Format of signed codes → the format of integers that says the same by its middle code."""
_OWN = ("Q4_K", "Q4_1")
"""Types of a kind of file that are tried first, where it has types of its own and none is asked for."""
_RULES = ("affine", "q4_1", "absmax", "e2m1", "q4_0", "q8_0")
"""Rules that pack again, by what is tried first where a dialect holds several formats."""


def find_sink(name: str) -> q4.Dialect:
    """Return a dialect that is written here, or a writer that has types of its own, by name.

    Raises:
        DialectError: There is none; the message names the closest, or the dialect is only read.
    """
    writers = q4.default_registry().items("q4_checkpoint_writers").values()
    own = [writer.dialect for writer in writers if hasattr(writer, "dialect")]
    found = find_dialect(name, [*q4.dialects(), *own])
    if type(found).write is q4.Dialect.write:
        raise found.refusal("*", "--dialect", "one that is written here", name, "It is read only.")
    return found


@attrs.frozen
class Contents:
    """A checkpoint's layers and tensors under the names that the target gives them, all lazy.

    Args:
        weights: Module → weight.
        dense: Name → tensor.
        stored: Module → its name in the source.
        metadata: What the file's header is to say.
        config: What ``config.json`` is to say; None for none.
        home: A model folder, whose small files are copied.
        files: Name → text of further files of a model folder.
    """

    weights: Mapping[str, q4.PackedWeight]
    dense: Mapping[str, torch.Tensor]
    stored: Mapping[str, str]
    metadata: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    home: Path | None = None
    files: Mapping[str, str] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Conversion:
    """The plan of a conversion; ``check`` makes it, and then ``weights`` and ``dense`` give what is to be written.

    Args:
        contents: What is converted.
        sink: Where it goes.
        requantize: Whether a loss is allowed.
        format_name: Format of layers that are packed again; None takes one that the sink holds.
        skip: Globs of modules that become dense.
    """

    contents: Contents
    sink: q4.Dialect
    requantize: bool = False
    format_name: str | None = None
    skip: Sequence[str] = ()
    facts: dict[str, dict[str, Any]] = attrs.field(factory=dict, init=False)
    """Module → ``how`` (``exact``, ``rounded``, ``packed again``, ``dense``), ``to`` and the errors."""
    recipes: dict[str, dict[str, Any]] = attrs.field(factory=dict, init=False)
    """Module → options of ``q4core.quantize`` by which it is packed again, as JSON has them."""
    _known: dict[tuple[str, int], dict[str, Any]] = attrs.field(factory=dict, init=False)

    @property
    def modules(self) -> list[str]:
        """The modules that stay packed."""
        return [name for name in self.contents.weights if not self._is_skipped(name)]

    @property
    def idle(self) -> list[str]:
        """The globs that match no module."""
        return [glob for glob in self.skip if not any(_is_match(module, glob) for module in self.contents.weights)]

    def _is_skipped(self, module: str) -> bool:
        return any(_is_match(module, glob) for glob in self.skip)

    def check(self, step: Callable[[str], None], where: str) -> None:
        """Decide on every layer, and measure what is lost.

        Raises:
            DialectError: Some can't be written; the message has them all, and the ways out.
        """
        self._check_stacks()
        refused: dict[str, q4.Q4Error] = {}
        for module in self.modules:
            weight = self.contents.weights[module]
            try:
                found, how = self._fit(module, weight)
            except (q4.DialectError, q4.FormatError) as error:
                refused[module] = error
            else:
                self.facts[module] = {"how": how, "to": found.format.name, **_errors(weight, found, how)}
            step(module)
        if refused:
            raise self._refusal(refused, where)

    def _stacks(self) -> dict[str, dict[int, str]]:
        """Return the layers that the sink joins: name of the tensor → number → module."""
        stacks: dict[str, dict[int, str]] = {}
        find: Any = getattr(self.sink, "stack_of", None)
        for module in self.contents.weights if find is not None else ():
            if (found := find(module)) is not None:
                stacks.setdefault(found[0], {})[found[1]] = module
        return stacks

    def _check_stacks(self) -> None:
        for stem, numbered in self._stacks().items():
            missing = len({*range(max(numbered) + 1)} - numbered.keys())
            count = sum(map(self._is_skipped, numbered.values()))
            if count and (missing or count < len(numbered)):
                rule = f"all experts of {stem}, or none, as {self.sink.name} has one tensor for them"
                raise illegal("--skip", rule, f"{count} of {len(numbered) + missing}")

    def _refusal(self, refused: Mapping[str, q4.Q4Error], where: str) -> q4.DialectError:
        names, first = [*refused], next(iter(refused.values()))
        if len(names) == len(self.modules) == 1 and not self.requantize and isinstance(first, q4.DialectError):
            return first
        hints = [] if first.hint is None else [first.hint]
        if not self.requantize:
            hints.append("--requantize allows the nearest values, and says how far off they are.")
        hints.append("--skip GLOB writes such layers dense.")
        what = f"{self.sink.name}: layer {names[0]!r}" + (
            f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
        )
        facts: dict[str, Any] = {"name": first.name, "rule": first.rule or str(first), "where": where}
        if first.has_value:
            facts["value"] = first.value
        layers = {name: str(error) for name, error in refused.items()}
        return q4.DialectError(what, hint=" ".join(dict.fromkeys(hints)), layers=layers, **facts)

    def weights(self, step: Callable[[str], None]) -> Mapping[str, q4.PackedWeight]:
        """Return the layers as they are written, one at a time."""
        weights = self.contents.weights
        return Steps(self.modules, lambda module: self._fit(module, weights[module])[0], step)

    def dense(self, step: Callable[[str], None]) -> Mapping[str, torch.Tensor]:
        """Return the dense tensors, those of skipped layers among them."""
        weights, dense = self.contents.weights, self.contents.dense
        skipped = {f"{module}.weight": [module] for module in weights if self._is_skipped(module)}
        stacks: dict[str, list[str]] = {}
        for stem, numbered in self._stacks().items():
            if self._is_skipped(numbered[0]):
                stacks[f"{stem}.weight"] = [skipped.pop(f"{numbered[number]}.weight")[0] for number in sorted(numbered)]
        skipped |= stacks

        def get(name: str) -> torch.Tensor:
            if name not in skipped:
                return dense[name]
            parts = [q4.dequantize(weights[module], torch.float32) for module in skipped[name]]
            return torch.stack(parts) if name in stacks else parts[0]

        return Steps([*dense, *skipped], get, step)

    def _fit(self, module: str, weight: q4.PackedWeight) -> tuple[q4.PackedWeight, str]:
        """Return what is written of a weight, and how it came about."""
        first: q4.DialectError | None = None
        exact = [weight, *_alike(weight, self.sink.formats)]
        for candidate in exact:
            try:
                self.sink.write(module, candidate)
            except q4.DialectError as error:
                first = first or error
            else:
                if self._is_asked(module, candidate):
                    return candidate, "exact"
        if first is not None and not self.requantize:
            raise first
        for candidate in [*map(self.sink.approximate, exact), *_flattened(weight)]:
            try:
                self.sink.write(module, candidate)
            except q4.DialectError:
                continue
            if self._is_asked(module, candidate):
                return candidate, "rounded"
        return self._packed_again(module, weight, first), "packed again"

    def _is_asked(self, module: str, weight: q4.PackedWeight) -> bool:
        """Return whether a weight that the sink takes has the format that the user named, if any."""
        own: Mapping[str, Any] = getattr(self.sink, "recipes", {})
        if self.format_name in own:
            return bool(self.sink.type_of(module, weight) == self.format_name)  # type: ignore[attr-defined]
        return self.format_name in {None, weight.format.name}

    def _packed_again(self, module: str, weight: q4.PackedWeight, first: q4.DialectError | None) -> q4.PackedWeight:
        """Return the weight's values in a format that the sink holds: by its own recipe, or one of its like."""
        dense = q4.dequantize(weight, torch.float32)
        reason: q4.Q4Error | None = first
        name, alike = weight.format.name, (weight.format.name, weight.in_features)
        known = self._known.get(alike)
        choices = (
            [self.recipes[module]] if module in self.recipes else [*([known] if known else []), *self._choices(name)]
        )
        for recipe in choices:
            kind = recipe.get("scale_kind")
            options = recipe | ({} if kind is None else {"scale_kind": q4.ScaleKind(kind)})
            try:
                found = attrs.evolve(q4.quantize(dense, name=module, **options), dtype=weight.dtype)
                self.sink.write(module, found)
            except q4.Q4Error as error:
                reason = error if self.format_name or reason is None else reason
                continue
            self._known[alike] = self.recipes[module] = recipe
            return found
        raise reason or AssertionError

    def _choices(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield options of ``q4core.quantize`` for weights of a format, the likeliest first."""
        own: Mapping[str, Mapping[str, Any]] = getattr(self.sink, "recipes", {})
        asked = self.format_name
        for key in _OWN if asked is None else (asked,):
            if key in own:
                kind = own[key].get("scale_kind")
                yield {**own[key]} if kind is None else {**own[key], "scale_kind": kind.value}
        if asked in own:
            return
        formats = _packable(self.sink)
        names = sorted(
            (other for other in formats if formats[other].rule in _RULES),
            key=lambda other: (other != name, formats[other].bits, _RULES.index(formats[other].rule)),
        )
        for found in names if asked is None else [asked]:
            kinds = sorted(formats[found].scale_kinds, key=lambda kind: kind is not formats[found].scale_kind)
            for kind in kinds:
                for symmetric in (False, True) if found == "int4" else (False,):
                    yield {"format": found, "scale_kind": kind.value, "symmetric": symmetric}


def _packable(sink: q4.Dialect) -> dict[str, q4.Format]:
    """Return the formats of a sink that weights are packed into."""
    formats = {**q4.BUILTIN_FORMATS, **q4.default_registry().formats()}
    return {name: item for name, item in formats.items() if name in sink.formats and item.rule}


def find_asked(sink: q4.Dialect, name: str | None) -> str | None:
    """Return the sink's own spelling of what ``--format`` names.

    Raises:
        ConfigError: The sink has none of that name; the message lists those that it has.
    """
    own, formats = [*getattr(sink, "recipes", {})], [*_packable(sink)]
    if name is None or name.upper() in own:
        return name and name.upper()
    if name not in formats:
        choices = own or formats
        raise illegal("--format", f"one that {sink.name} is written in ({', '.join(choices)})", name, choices)
    return name


def _is_match(module: str, glob: str) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in (module, module.rpartition(".")[2]))


def _alike(weight: q4.PackedWeight, formats: frozenset[str]) -> Iterator[q4.PackedWeight]:
    """Yield the weight in other forms that give each code the same number, bit for bit."""
    other = q4.BUILTIN_FORMATS.get(_ALIKE.get(weight.format.name, ""))
    is_plain = weight.scale_kind is q4.ScaleKind.PLAIN and weight.codebook is None
    if other is not None and other.name in formats and is_plain:
        codes = weight.qdata ^ other.middle if other.bits == 8 else weight.qdata  # noqa: PLR2004  # of two's complement
        yield attrs.evolve(weight, format=other, qdata=codes)
    if weight.zero is None:
        return
    if bool((weight.zero == weight.format.middle).all()):
        yield attrs.evolve(weight, zero=None)
    if weight.zero.is_floating_point():
        whole = weight.zero.clamp(0, 2**weight.format.bits - 1).round().to(torch.uint8)
        if torch.equal(whole.to(weight.zero.dtype), weight.zero):
            yield attrs.evolve(weight, zero=whole)


def _flattened(weight: q4.PackedWeight) -> Iterator[q4.PackedWeight]:
    """Yield the weight with one level of float32 scales in place of two; every value stays what it is."""
    if weight.scale_kind is not q4.ScaleKind.SUPER_BLOCK:
        return
    shape = weight.scale.shape
    plain: dict[str, Any] = {"scale_kind": q4.ScaleKind.PLAIN, "nested_scale": None, "nested_offset": None}
    plain |= {"scale": weight.resolved_scale().reshape(shape), "nested_block_size": 256}
    if weight.offset is not None:
        offset = weight.resolved_offset()
        plain["offset"] = None if offset is None else offset.reshape(shape)
    yield attrs.evolve(weight, **plain)


def _errors(before: q4.PackedWeight, after: q4.PackedWeight, how: str) -> dict[str, Any]:
    """Return how far two weights are apart: ‖ŵ - w‖ / ‖w‖ and the largest difference, some rows at a time."""
    if how == "exact":
        return {"relative_rms_error": 0.0, "max_error": 0.0}
    rows, columns = before.shape
    chunk = max(1, _CHUNK_ELEMENTS // columns)
    error = norm = largest = 0.0
    for start in range(0, rows, chunk):
        some = slice(start, start + chunk)
        old, new = (q4.dequantize(weight, torch.float32, rows=some) for weight in (before, after))
        difference = new.to(torch.float64) - old
        error += float(difference.square().sum())
        norm += float(old.to(torch.float64).square().sum())
        largest = max(largest, float(difference.abs().max()))
    return {"relative_rms_error": (error / norm) ** 0.5 if norm else float(error > 0), "max_error": largest}


@attrs.frozen(eq=False)
class Steps(Mapping[str, Any]):
    """A lazy mapping that reports each item after it was used.

    Args:
        names: The keys, in order.
        find: Key → item.
        step: Called with each key.
    """

    names: Sequence[str]
    find: Callable[[str], Any]
    step: Callable[[str], None]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        for name in self.names:
            yield name
            self.step(name)

    def __getitem__(self, name: str) -> Any:
        """Return one item."""
        return self.find(name)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.names)


def note_losses(conversion: Conversion) -> None:
    """Send an event for each layer that is not written exactly."""
    for module, facts in conversion.facts.items():
        if facts["how"] != "exact":
            why = f"{facts['how']}, relative error {facts['relative_rms_error']:.3g}"
            emit("q4.approximate", level=logging.WARNING, layer=module, dialect=conversion.sink.name, why=why)
