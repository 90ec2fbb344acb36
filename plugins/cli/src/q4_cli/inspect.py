"""``q4 inspect``: contents of a checkpoint, layer by layer, from its headers; one layer of each kind is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

import q4core as q4
from q4_cli.failure import BAD_INPUT, describe
from q4_cli.files import open_file
from q4_cli.output import (
    NO_LAYER,
    bytes_text,
    first_of,
    natural_key,
    open_output,
    print_table,
    say,
    say_unread,
    to_plain,
    unread_types,
)
from q4core.plugin_api import counted

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from rich.console import Console

__all__ = ["inspect"]

_TITLES = ("layer", "format", "N×K", "bits", "bytes", "block", "dialect", "scale")
_LONG = 200


def inspect(
    file: str,
    *,
    dialect: str | None,
    as_json: bool,
) -> None:
    """Show what a checkpoint holds, layer by layer. Only headers are read, however large the file."""
    with open_output(as_json=as_json) as output:
        failure: q4.SchemaError | None = None
        try:
            with open_file(file, dialect=dialect) as checkpoint:
                record = _record(file, checkpoint.schema, checkpoint)
        except q4.SchemaError as error:
            # Something is wrong with the layers: show them with everything that is wrong, and fail.
            if error.schema is None:
                raise
            failure = error
            wrong = {"problems": _problem_facts(error.problems), "error": describe(error)[1]}
            record = _record(file, error.schema, None) | wrong
        output.answer(record, lambda console: _show(console, record))
        if failure is not None:
            if as_json:
                raise typer.Exit(BAD_INPUT)
            raise failure


def _record(file: str, schema: q4.Schema, checkpoint: q4.Checkpoint | None) -> dict[str, Any]:
    """Return the command's document; for a checkpoint that could not be opened, the facts of its schema."""
    infos = {} if checkpoint is None else checkpoint.dense.infos
    known: dict[Hashable, dict[str, Any]] = {}
    by_size = sorted(schema.layers.values(), key=lambda layer: layer.nbytes or 0)
    facts = {layer.module: _layer_facts(layer, known, checkpoint) for layer in by_size}
    layers = [facts[name] for name in sorted(facts, key=natural_key)]
    packed = sum(layer["nbytes"] or 0 for layer in layers)
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in layers if layer["shape"])
    return {
        "file": file,
        "metadata": {} if checkpoint is None else {k: _shortened(v) for k, v in checkpoint.metadata.items()},
        "layers": layers,
        "dense": {
            "by_dtype": dense_totals(infos.values()),
            "tensors": [
                {"name": name, "dtype": info.dtype, "shape": info.shape, "nbytes": info.nbytes}
                for name, info in infos.items()
            ],
            "decoded": [
                {"name": name, "dialect": layer.dialect, "stored_bytes": layer.nbytes}
                for name, layer in schema.decoded.items()
            ],
        },
        "unsupported": _problem_facts(schema.unsupported),
        "totals": {
            "layers": len(layers),
            "weights": weights,
            "packed_bytes": packed,
            "bits_per_weight": round(8 * packed / weights, 4) if weights else None,
            "unread": unread_types(_problem_facts(schema.unsupported)),
            "dense_tensors": len(schema.dense),
            "dense_bytes": sum(info.nbytes for info in infos.values()),
            "decoded_tensors": len(schema.decoded),
            "decoded_stored_bytes": sum(layer.nbytes or 0 for layer in schema.decoded.values()),
            "formats": sorted({layer["format"] for layer in layers}),
            "dialects": list(schema.dialects),
        },
        "problems": [],
    }


def _layer_facts(
    layer: q4.LayerSchema, known: dict[Hashable, dict[str, Any]], checkpoint: q4.Checkpoint | None
) -> dict[str, Any]:
    """Return the facts of one layer; unknown ones are None.

    Names and shapes alone don't determine the scale kind, so the first layer of each kind is read (as views of the
    mapped file where its dialect allows, its numbers unchecked), and ``known`` stores the result. Layers are of a kind
    when dialect, format, block and roles are equal, and blocks divide them alike; where the schema leaves shape, block
    or bytes open, each is a kind of its own.
    """
    place: Hashable = layer.module
    if layer.shape is not None and layer.block_size and layer.nbytes is not None:
        place = (layer.shape[1] <= layer.block_size, layer.shape[1] % layer.block_size == 0)
    kind = (
        layer.dialect,
        layer.type,
        layer.format,
        layer.block_size,
        tuple(sorted(layer.keys)),
        place,
    )
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
        "type": layer.type,
        "scale_kind": read.get("scale_kind"),
        "packing": read.get("packing"),
        "nbytes": nbytes,
        "bits_per_weight": round(8 * nbytes / count, 4) if nbytes is not None and count else None,
        "keys": layer.keys,
        "notes": list(dict.fromkeys((*layer.notes, *read.get("notes", ())))),
    }


def _read(checkpoint: q4.Checkpoint, module: str) -> dict[str, Any]:
    try:
        weight = getattr(checkpoint.source, "peek", checkpoint.source.read)(module)
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


def _problem_facts(problems: Iterable[q4.Problem]) -> list[dict[str, Any]]:
    return [
        {"code": item.code, "key": item.key, "type": item.type, "rule": item.rule, "value": to_plain(item.value)}
        for item in problems
    ]


def _shortened(value: Any) -> Any:
    """Return a value of the header's metadata; of a long one (a vocabulary, JSON) only how long it is."""
    is_long = hasattr(value, "__len__") and not (isinstance(value, str) and len(value) <= _LONG)
    return f"({len(value)} long)" if is_long else to_plain(value)


def _show(console: Console, record: Mapping[str, Any]) -> None:
    layers: Sequence[Mapping[str, Any]] = record["layers"]
    if layers:
        print_table(console, _TITLES, [_row(layer) for layer in layers])
        say(console)
    notes: dict[str, list[str]] = {}
    for layer in layers:
        for note in layer["notes"]:
            notes.setdefault(note, []).append(layer["name"])
    for note, names in notes.items():
        say(console, (f"note: {note} ({first_of(names)})", "yellow"))
    unread = say_unread(console, record["unsupported"])
    totals = record["totals"]
    text = "no layer that can be read" if unread else NO_LAYER
    if layers:
        bits = totals["bits_per_weight"]
        size = f"{bytes_text(totals['packed_bytes'])}{'' if bits is None else f', {bits:.2f} bits each'}"
        text = f"{counted(totals['layers'], 'packed layer')}, {counted(totals['weights'], 'weight')}: {size} "
        text += f"({', '.join(totals['formats'])}; {', '.join(totals['dialects'])})"
    text += f"; {unread}" if unread else ""
    say(console, (text, "bold"))
    by_dtype = record["dense"]["by_dtype"]
    kinds = ", ".join(f"{item['count']} {item['dtype']} ({bytes_text(item['nbytes'])})" for item in by_dtype)
    say(console, f"{counted(totals['dense_tensors'], 'dense tensor')}{': ' if kinds else ''}{kinds}")
    if totals["decoded_tensors"]:
        stored, owners = (
            bytes_text(totals["decoded_stored_bytes"]),
            {item["dialect"] for item in record["dense"]["decoded"]},
        )
        say(
            console, f"{totals['decoded_tensors']} of them decoded from {', '.join(sorted(owners))}: {stored} as stored"
        )


def _row(layer: Mapping[str, Any]) -> list[str]:
    shape, nbytes, bits = layer["shape"], layer["nbytes"], layer["bits_per_weight"]
    return [
        layer["name"],
        layer["format"],
        f"{shape[0]}×{shape[1]}" if shape else "?",
        "?" if bits is None else f"{bits:.2f}",
        "?" if nbytes is None else f"{nbytes:,}",
        str(layer["block_size"] or "?"),
        f"{layer['dialect']} {layer['type'] or ''}".rstrip(),
        layer["scale_kind"] or "?",
    ]
