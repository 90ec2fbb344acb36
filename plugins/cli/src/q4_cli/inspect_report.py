"""What a checkpoint holds, as ``q4 inspect`` shows it: by names, shapes and dtypes; a layer of each kind is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import q4core as q4
from q4_cli.explain_report import natural_key
from q4_cli.output import to_plain

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

__all__ = ["dense_totals", "layer_facts", "problem_facts", "short_metadata"]

_LONG = 200


def layer_facts(schema: q4.Schema, checkpoint: q4.Checkpoint | None) -> list[dict[str, Any]]:
    """Return the facts of every layer, in the natural order of their names.

    They are: name, format, dialect (or those that the keys fit alike), shape (N, K), block_size (in-features per
    scale), scale_kind, packing, nbytes (codes, scales and side tensors), bits_per_weight, keys (role → key), notes
    (what is assumed). A fact that can't be told is None.

    The scale kind stands in no name or shape alone, so one layer of each kind is read (as views of the mapped file, its
    numbers unchecked): layers are of a kind when dialect, format, block, roles, shape and bytes are equal.

    Args:
        schema: What was found.
        checkpoint: The open checkpoint; None where it could not be opened.
    """
    known: dict[Hashable, dict[str, Any]] = {}
    return [_facts(schema.layers[name], known, checkpoint) for name in sorted(schema.layers, key=natural_key)]


def _facts(
    layer: q4.LayerSchema, known: dict[Hashable, dict[str, Any]], checkpoint: q4.Checkpoint | None
) -> dict[str, Any]:
    place = layer.shape or layer.module
    kind = (layer.dialect, layer.format, layer.block_size, tuple(sorted(layer.keys)), place, layer.nbytes)
    if kind not in known:
        known[kind] = {} if checkpoint is None else _read(checkpoint, layer.module)
    read = known[kind]
    shape = layer.shape or read.get("shape")
    nbytes = read.get("nbytes") if layer.nbytes is None else layer.nbytes
    count = shape[0] * shape[1] if shape else 0
    return {
        "name": layer.module,
        "format": layer.format,
        "dialect": next((str(item.value) for item in layer.problems if item.code == "ambiguous"), layer.dialect),
        "shape": shape,
        "block_size": layer.block_size or read.get("block_size"),
        "scale_kind": read.get("scale_kind"),
        "packing": read.get("packing"),
        "nbytes": nbytes,
        "bits_per_weight": round(8 * nbytes / count, 4) if nbytes is not None and count else None,
        "keys": layer.keys,
        "notes": list(dict.fromkeys((*layer.notes, *read.get("notes", ())))),
    }


def _read(checkpoint: q4.Checkpoint, module: str) -> dict[str, Any]:
    try:
        weight = checkpoint.source.read(module)
    except q4.Q4Error as error:
        return {"notes": (f"can't be read: {error}",)}
    return {
        "scale_kind": weight.scale_kind.value,
        "packing": str(weight.packing),
        "shape": weight.shape,
        "block_size": weight.block_size,
        "nbytes": weight.nbytes,
        "notes": [note for note in weight.notes if not note.startswith("stored ")],
    }


def dense_totals(infos: Iterable[q4.TensorInfo]) -> list[dict[str, Any]]:
    """Return number and bytes of dense tensors by dtype, most bytes first."""
    totals: dict[str, dict[str, Any]] = {}
    for info in infos:
        name = to_plain(info.dtype)
        row = totals.setdefault(name, {"dtype": name, "count": 0, "nbytes": 0})
        row["count"] += 1
        row["nbytes"] += info.nbytes
    return sorted(totals.values(), key=lambda row: (-row["nbytes"], row["dtype"]))


def problem_facts(problems: Iterable[q4.Problem]) -> list[dict[str, Any]]:
    """Return problems as plain dictionaries."""
    return [{"code": item.code, "key": item.key, "rule": item.rule, "value": to_plain(item.value)} for item in problems]


def short_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header's metadata with long entries (vocabularies, JSON) as their length only."""
    short: dict[str, Any] = {}
    for key, value in metadata.items():
        is_long = hasattr(value, "__len__") and not (isinstance(value, str) and len(value) <= _LONG)
        short[key] = f"({len(value)} long)" if is_long else to_plain(value)
    return short
