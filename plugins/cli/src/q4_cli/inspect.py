"""``q4 inspect``: what a checkpoint holds, layer by layer, from its headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import q4core as q4
from q4_cli import options  # noqa: TC001  # typer reads annotations at run time
from q4_cli.failure import BAD_INPUT, describe
from q4_cli.inspect_report import dense_totals, layer_facts, problem_facts, short_metadata
from q4_cli.opening import open_file
from q4_cli.output import bytes_text, clean, counted, open_output, print_table, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

__all__ = ["inspect"]

_TITLES = ("layer", "format", "N×K", "bits", "bytes", "block", "dialect", "scale")
_MOST = 20


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A checkpoint: a file, an index of shards or a folder.")],
    *,
    dialect: options.Dialect = None,
    as_json: options.Json = False,
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
            record = _record(file, error.schema, None) | describe(error).to_dict()
            record["problems"] = problem_facts(error.problems)
        output.answer(record, lambda console: _show(console, record))
        if failure is not None:
            if as_json:
                raise typer.Exit(BAD_INPUT)
            raise failure


def _record(file: str, schema: q4.Schema, checkpoint: q4.Checkpoint | None) -> dict[str, Any]:
    infos = {} if checkpoint is None else checkpoint.dense.infos
    layers = layer_facts(schema, checkpoint)
    packed = sum(layer["nbytes"] or 0 for layer in layers)
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in layers if layer["shape"])
    return {
        "file": file,
        "metadata": {} if checkpoint is None else short_metadata(checkpoint.metadata),
        "layers": layers,
        "dense": {
            "by_dtype": dense_totals(infos.values()),
            "tensors": [
                {"name": name, "dtype": info.dtype, "shape": info.shape, "nbytes": info.nbytes}
                for name, info in infos.items()
            ],
        },
        "unsupported": problem_facts(schema.unsupported),
        "totals": {
            "layers": len(layers),
            "weights": weights,
            "packed_bytes": packed,
            "bits_per_weight": round(8 * packed / weights, 4) if weights else None,
            "dense_tensors": len(schema.dense),
            "dense_bytes": sum(info.nbytes for info in infos.values()),
            "formats": sorted({layer["format"] for layer in layers}),
            "dialects": list(schema.dialects),
        },
        "problems": [],
    }


def _show(console: Console, record: Mapping[str, Any]) -> None:
    layers: Sequence[Mapping[str, Any]] = record["layers"]
    if layers:
        print_table(console, _TITLES, [_row(layer) for layer in layers])
        console.print()
    notes: dict[str, list[str]] = {}
    for layer in layers:
        for note in layer["notes"]:
            notes.setdefault(note, []).append(layer["name"])
    for note, names in notes.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(console, Text(f"note: {clean(note)} ({clean(names[0])}{more})", style="yellow"))
    unsupported = record["unsupported"]
    for item in unsupported[:_MOST]:
        got = "" if item["value"] is None else f", got {item['value']!r}"
        say(console, Text(clean(f"can't be read: {item['key']} must be {item['rule']}{got}"), style="yellow"))
    if len(unsupported) > _MOST:
        console.print(Text(f"can't be read: {len(unsupported) - _MOST} more; --json lists all", style="yellow"))
    _show_totals(console, record["totals"], record["dense"]["by_dtype"], len(unsupported))


def _row(layer: Mapping[str, Any]) -> list[str]:
    shape, nbytes, bits = layer["shape"], layer["nbytes"], layer["bits_per_weight"]
    return [
        layer["name"],
        layer["format"],
        f"{shape[0]}×{shape[1]}" if shape else "?",
        "?" if bits is None else f"{bits:.2f}",
        "?" if nbytes is None else f"{nbytes:,}",
        str(layer["block_size"] or "?"),
        layer["dialect"],
        layer["scale_kind"] or "?",
    ]


def _show_totals(console: Console, totals: Mapping[str, Any], dense: Sequence[Mapping[str, Any]], unread: int) -> None:
    text = "no layer that can be read" if unread else "no 4-bit layer"
    if totals["layers"]:
        head = f"{counted(totals['layers'], 'packed layer')}, {counted(totals['weights'], 'weight')}"
        bits = totals["bits_per_weight"]
        size = f"{bytes_text(totals['packed_bytes'])}{'' if bits is None else f', {bits:.2f} bits each'}"
        text = f"{head}: {size} ({', '.join(totals['formats'])}; {', '.join(totals['dialects'])})"
        text += f"; {counted(unread, 'layer')} can't be read" if unread else ""
    say(console, Text(clean(text), style="bold"))
    kinds = ", ".join(f"{item['count']} {item['dtype']} ({bytes_text(item['nbytes'])})" for item in dense)
    say(console, Text(f"{counted(totals['dense_tensors'], 'dense tensor')}{': ' if kinds else ''}{kinds}"))
