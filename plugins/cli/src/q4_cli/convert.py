"""``q4 convert``: the same codes and scales in another dialect, exactly or not at all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

import q4core as q4
from q4_cli import options
from q4_cli.files import Target, open_file, require_readable
from q4_cli.output import bytes_text, open_output, say
from q4core.plugin_api import counted, find_dialect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

__all__ = ["convert"]


def convert(  # noqa: PLR0913  # one argument per option
    source: Annotated[str, typer.Argument(metavar="IN", help="A packed checkpoint of any dialect.")],
    out: options.Out,
    *,
    dialect: Annotated[str, typer.Option("--dialect", metavar="NAME", help="The dialect to write.")],
    read_as: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="How to read keys that several dialects use.")
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow the nearest scales where exact ones can't be written.")
    ] = False,
    shard_size: options.ShardSize = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Store a packed checkpoint in another dialect of its format; codes and scales stay exactly what they are."""
    started = time.perf_counter()
    with open_output(as_json=as_json) as output:
        with open_file(source, dialect=read_as) as checkpoint:
            chosen = find_dialect(dialect, q4.dialects())
            target = Target.check(out, checkpoint.path, force=force)
            require_readable(checkpoint, "q4 convert")
            if not len(checkpoint):
                where, hint = str(checkpoint.path), "Use `q4 quantize` to pack a dense checkpoint."
                rule = "a checkpoint with packed layers"
                raise q4.CheckpointError("q4 convert", name="IN", rule=rule, value="none", where=where, hint=hint)
            before = checkpoint.schema
            target.write(
                checkpoint,
                checkpoint.dense,
                checkpoint,
                dialect=chosen.name,
                max_shard_bytes=options.parse_size(shard_size),
                lossy=lossy,
            )
        record: dict[str, Any] = {
            "in": source,
            "out": out,
            "from": list(before.dialects),
            "dialect": chosen.name,
            "lossy": lossy,
            "layers": [
                {"name": name, "format": layer.format, "from": layer.dialect} for name, layer in before.layers.items()
            ],
            "dense_tensors": len(before.dense),
            "bytes_before": sum(layer.nbytes or 0 for layer in before.layers.values()),
            "seconds": round(time.perf_counter() - started, 3),
        }
        output.answer(record, lambda console: _show(console, record))


def _show(console: Console, record: Mapping[str, Any]) -> None:
    text = (
        f"{counted(len(record['layers']), 'layer')} from {', '.join(record['from'])} to {record['dialect']} "
        f"({bytes_text(record['bytes_before'])}), {counted(record['dense_tensors'], 'dense tensor')} unchanged; "
        f"{record['seconds']:.1f} s → {record['out']}"
    )
    say(console, (text, "bold"))
