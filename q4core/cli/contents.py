"""What a checkpoint holds, as ``q4 inspect`` tells it: by names, shapes and dtypes; a layer of each kind is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4core.cli.output import to_plain
from q4core.errors import Q4Error

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from q4core.checkpoint import Checkpoint
    from q4core.dialect import LayerSchema, Problem, TensorInfo
    from q4core.schema import Schema

__all__ = ["DenseTotals", "LayerFacts", "dense_totals", "layer_facts", "problem_facts", "short_metadata"]

_LONG = 200


@attrs.frozen(kw_only=True)
class LayerFacts:
    """One layer.

    Args:
        name: The module's name.
        format: Name of the format.
        dialect: Name of the dialect, or of those that the keys fit alike.
        shape: (N, K), or None where it can't be told.
        block_size: In-features per scale, or None.
        scale_kind: How scales are stored; None where no layer of this kind could be read.
        packing: Nibble order; None as for ``scale_kind``.
        nbytes: Stored bytes of codes, scales and side tensors.
        bits_per_weight: 8 · nbytes / (N · K).
        keys: Role → key of every tensor.
        notes: What is assumed.
    """

    name: str
    format: str
    dialect: str
    shape: tuple[int, int] | None
    block_size: int | None
    scale_kind: str | None
    packing: str | None
    nbytes: int | None
    bits_per_weight: float | None
    keys: Mapping[str, str]
    notes: tuple[str, ...]


@attrs.frozen
class DenseTotals:
    """Dense tensors of one dtype: how many, and their bytes."""

    dtype: str
    count: int
    nbytes: int


def layer_facts(schema: Schema, checkpoint: Checkpoint | None) -> list[LayerFacts]:
    """Return the facts of every layer.

    The scale kind stands in no name or shape alone, so one layer of each kind is read (as views of the mapped file, its
    numbers unchecked): layers are of a kind when dialect, format, block, roles, shape and bytes are equal.

    Args:
        schema: What was found.
        checkpoint: The open checkpoint; None where it could not be opened.
    """
    known: dict[Hashable, _Read] = {}
    return [_facts(layer, known, checkpoint) for layer in schema.layers.values()]


@attrs.frozen
class _Read:
    scale_kind: str | None = None
    packing: str | None = None
    shape: tuple[int, int] | None = None
    block_size: int | None = None
    nbytes: int | None = None
    notes: tuple[str, ...] = ()


def _facts(layer: LayerSchema, known: dict[Hashable, _Read], checkpoint: Checkpoint | None) -> LayerFacts:
    kind: Hashable = (
        layer.dialect,
        layer.format,
        layer.block_size,
        tuple(sorted(layer.keys)),
        layer.shape or layer.module,
        layer.nbytes,
    )
    if kind not in known:
        known[kind] = _Read() if checkpoint is None else _read(checkpoint, layer.module)
    read = known[kind]
    shape = layer.shape or read.shape
    nbytes = read.nbytes if layer.nbytes is None else layer.nbytes
    count = shape[0] * shape[1] if shape else 0
    return LayerFacts(
        name=layer.module,
        format=layer.format,
        dialect=next((str(item.value) for item in layer.problems if item.code == "ambiguous"), layer.dialect),
        shape=shape,
        block_size=layer.block_size or read.block_size,
        scale_kind=read.scale_kind,
        packing=read.packing,
        nbytes=nbytes,
        bits_per_weight=round(8 * nbytes / count, 4) if nbytes is not None and count else None,
        keys=layer.keys,
        notes=tuple(dict.fromkeys((*layer.notes, *read.notes))),
    )


def _read(checkpoint: Checkpoint, module: str) -> _Read:
    try:
        weight = checkpoint.source.read(module)
    except Q4Error as error:
        return _Read(notes=(f"can't be read: {error}",))
    notes = tuple(note for note in weight.notes if not note.startswith("stored "))
    return _Read(weight.scale_kind.value, str(weight.packing), weight.shape, weight.block_size, weight.nbytes, notes)


def dense_totals(infos: Iterable[TensorInfo]) -> list[DenseTotals]:
    """Return number and bytes of dense tensors by dtype, most bytes first."""
    totals: dict[str, tuple[int, int]] = {}
    for info in infos:
        dtype = to_plain(info.dtype)
        count, nbytes = totals.get(dtype, (0, 0))
        totals[dtype] = count + 1, nbytes + info.nbytes
    rows = [DenseTotals(dtype, count, nbytes) for dtype, (count, nbytes) in totals.items()]
    return sorted(rows, key=lambda row: (-row.nbytes, row.dtype))


def problem_facts(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems as plain dictionaries."""
    return [{"code": item.code, "key": item.key, "rule": item.rule, "value": to_plain(item.value)} for item in problems]


def short_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header's metadata with long entries (vocabularies, JSON) told by their length only."""
    short: dict[str, Any] = {}
    for key, value in metadata.items():
        try:
            length = len(value)
        except TypeError:
            short[key] = to_plain(value)
            continue
        short[key] = to_plain(value) if isinstance(value, str) and length <= _LONG else f"({length} long)"
    return short
