"""``q4 inspect``: what a checkpoint holds, layer by layer, from its headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from q4core import api
from q4core.checkpoint.files import find_files, read_config
from q4core.cli import options  # noqa: TC001  # typer reads annotations at run time
from q4core.cli.contents import LayerFacts, dense_totals, layer_facts, problem_facts, short_metadata
from q4core.cli.failure import BAD_INPUT, describe
from q4core.cli.opening import input_path, open_file
from q4core.cli.output import clean, open_output, say
from q4core.cli.table import Column, bytes_text, counted, print_table
from q4core.errors import SchemaError
from q4core.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from q4core.dialect import TensorInfo

__all__ = ["inspect"]

_COLUMNS = (
    Column("layer", elastic=True),
    Column("format", style="cyan"),
    Column("dialect", drop=2),
    Column("N×K", "right", drop=6),
    Column("block", "right", drop=3),
    Column("scale", drop=1),
    Column("bytes", "right", drop=5),
    Column("bits", "right", drop=4),
)
_MOST = 20


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A checkpoint: a file, an index of shards or a folder.")],
    *,
    dialect: options.Dialect = None,
    as_json: options.Json = False,
) -> None:
    """Show what a checkpoint holds, layer by layer. Only headers are read, however large the file."""
    with open_output(as_json=as_json) as output:
        failure: SchemaError | None = None
        try:
            with open_file(file, dialect=dialect) as checkpoint:
                schema, infos = checkpoint.schema, dict(checkpoint.dense.infos)
                metadata = checkpoint.metadata
                layers = layer_facts(schema, checkpoint)
        except SchemaError as error:
            # Something is wrong with the layers: show them with everything that is wrong, and fail.
            found = _look_only(file, dialect)
            if found is None:
                raise
            failure, (schema, infos, metadata), layers = error, found, layer_facts(found[0], None)
        problems = () if failure is None else failure.problems
        record = _record(file, schema, infos, metadata, layers)
        record["problems"] = problem_facts(problems)
        if failure is not None:
            record |= describe(failure).to_dict()
        output.answer(record, lambda console: _show(console, record, layers))
        if failure is not None:
            if as_json:
                raise typer.Exit(BAD_INPUT)
            raise failure


def _look_only(file: str, dialect: str | None) -> tuple[Schema, dict[str, TensorInfo], Mapping[str, Any]] | None:
    """Detect without validating; None where that can't be done (a file that a plugin reads, say)."""
    try:
        files = find_files(input_path(file))
        config = read_config(files.path.parent)
        schema = api.detect(files.infos, metadata=files.metadata, config=config, dialect=dialect, load=files.load)
    except (SchemaError, OSError, ValueError):
        return None
    if schema is None:
        schema = Schema(dense=tuple(files.infos))
    return schema, {name: files.infos[name] for name in schema.dense}, files.metadata


def _record(
    file: str,
    schema: Schema,
    infos: Mapping[str, TensorInfo],
    metadata: Mapping[str, Any],
    layers: Sequence[LayerFacts],
) -> dict[str, Any]:
    packed = sum(layer.nbytes or 0 for layer in layers)
    weights = sum(layer.shape[0] * layer.shape[1] for layer in layers if layer.shape)
    dense = sum(info.nbytes for info in infos.values())
    return {
        "file": file,
        "metadata": short_metadata(metadata),
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
            "dense_tensors": len(infos),
            "dense_bytes": dense,
            "formats": sorted({layer.format for layer in layers}),
            "dialects": list(schema.dialects),
        },
    }


def _show(console: Console, record: Mapping[str, Any], layers: Sequence[LayerFacts]) -> None:
    if layers:
        print_table(console, _COLUMNS, [_row(layer) for layer in layers])
        console.print()
    notes: dict[str, list[str]] = {}
    for layer in layers:
        for note in layer.notes:
            notes.setdefault(note, []).append(layer.name)
    for note, names in notes.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(console, Text(f"note: {clean(note)} ({clean(names[0])}{more})", style="yellow"))
    _show_list(console, "can't be read", record["unsupported"], "yellow")
    _show_totals(console, record["totals"], record["dense"]["by_dtype"])


def _row(layer: LayerFacts) -> list[str]:
    return [
        layer.name,
        layer.format,
        layer.dialect,
        f"{layer.shape[0]}×{layer.shape[1]}" if layer.shape else "?",
        str(layer.block_size or "?"),
        layer.scale_kind or "?",
        "?" if layer.nbytes is None else f"{layer.nbytes:,}",
        "?" if layer.bits_per_weight is None else f"{layer.bits_per_weight:.2f}",
    ]


def _show_list(console: Console, label: str, items: Sequence[Mapping[str, Any]], style: str) -> None:
    for item in items[:_MOST]:
        got = "" if item["value"] is None else f", got {item['value']!r}"
        text = f"{label} [{item['code']}]: {item['key']} must be {item['rule']}{got}"
        say(console, Text(clean(text), style=style))
    if len(items) > _MOST:
        console.print(Text(f"{label}: {len(items) - _MOST} more; --json lists all", style=style))


def _show_totals(console: Console, totals: Mapping[str, Any], dense: Sequence[Any]) -> None:
    if totals["layers"]:
        head = f"{counted(totals['layers'], 'packed layer')}, {counted(totals['weights'], 'weight')}"
        size = f"{bytes_text(totals['packed_bytes'])}, {totals['bits_per_weight']:.2f} bits each"
        text = f"{head}: {size} ({', '.join(totals['formats'])}; {', '.join(totals['dialects'])})"
    else:
        text = "no 4-bit layer"
    say(console, Text(clean(text), style="bold"))
    kinds = ", ".join(f"{item.count} {item.dtype} ({bytes_text(item.nbytes)})" for item in dense)
    say(console, Text(f"{counted(totals['dense_tensors'], 'dense tensor')}{': ' if kinds else ''}{kinds}"))
