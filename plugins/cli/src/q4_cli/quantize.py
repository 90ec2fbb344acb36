"""``q4 quantize``: a dense checkpoint into four bits, in any dialect that is written here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import q4core as q4
from q4_cli import options  # noqa: TC001  # typer reads annotations at run time
from q4_cli.opening import open_file, require_readable
from q4_cli.output import bytes_text, clean, counted, open_output, print_table, say
from q4_cli.packing_plan import Kept, Recipe, make_recipe, split_tensors
from q4_cli.quantize_job import Others, Packing
from q4_cli.writing import Target, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

__all__ = ["quantize"]

_TITLES = ("layer", "error", "N×K", "after", "bytes before", "from")
_MOST = 20


def quantize(  # noqa: PLR0913  # one argument per option
    source: Annotated[str, typer.Argument(metavar="IN", help="A dense checkpoint: a file, an index or a folder.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file named *.safetensors, or a folder.")],
    *,
    format: Annotated[  # noqa: A002  # the option's name
        str,
        typer.Option("--format", metavar="FORMAT", help="nf4, fp4, nvfp4, mxfp4, or another that a dialect writes."),
    ],
    dialect: Annotated[
        str | None,
        typer.Option("--dialect", metavar="NAME", help="How to store it; the format's usual one unless told."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="GLOB", help="Keep these dense; may be repeated.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="GLOB", help="Pack these embeddings too; may be repeated.")
    ] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", metavar="N", help="In-features per scale.")] = None,
    scale_kind: Annotated[
        str | None, typer.Option("--scale-kind", metavar="KIND", help="plain, double_quant, e4m3, e4m3_mul, …")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="int4 without zero points.")] = False,
    shard_size: Annotated[
        str | None, typer.Option("--shard-size", metavar="SIZE", help="Split a folder's weights, such as 5GB.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where a tensor can't be packed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    as_json: options.Json = False,
) -> None:
    """Pack the 2-D weights of a dense checkpoint; biases, norms and embeddings stay as they are."""
    started = time.perf_counter()
    with open_output(as_json=as_json) as output:
        shard_bytes = None if shard_size is None else parse_size(shard_size)
        with open_file(source) as checkpoint:
            target = Target.check(out, checkpoint.path, force=force)
            require_readable(checkpoint, "q4 quantize")
            _require_dense(checkpoint)
            names, kept, idle = split_tensors(checkpoint.dense.infos, skip=skip or (), include=include or ())
            for pattern in idle:
                output.note(f"no tensor matches {pattern!r}")
            _require_work(names, kept, checkpoint)
            recipe = make_recipe(
                format,
                dialect=dialect,
                block_size=block_size,
                scale_kind=scale_kind,
                symmetric=symmetric,
                formats=q4.default_registry().formats(),
                module=names[0].removesuffix(".weight"),
            )
            with output.progress("packing", len(names)) as step:
                packing = Packing(checkpoint.dense, names, recipe, strict=strict, step=step)
                others = Others(packing)
                target.write(packing, others, checkpoint, dialect=recipe.dialect.name, max_shard_bytes=shard_bytes)
            kept += packing.failed
            packed = packing.packed
        record = _record(source, out, recipe, packed, kept, time.perf_counter() - started)
        output.answer(record, lambda console: _show(console, record))


def _require_dense(checkpoint: q4.Checkpoint) -> None:
    if len(checkpoint):
        raise q4.CheckpointError(
            "q4 quantize",
            name="IN",
            rule="a dense checkpoint",
            value=f"{counted(len(checkpoint), 'packed layer')} ({', '.join(checkpoint.schema.dialects)})",
            where=str(checkpoint.path),
            hint="Use `q4 convert` to store packed layers in another dialect.",
        )


def _require_work(names: Sequence[str], kept: Sequence[Kept], checkpoint: q4.Checkpoint) -> None:
    if names:
        return
    reasons = [f"{item.name}: {item.reason}" for item in kept if item.notable] or ["no matrix named <module>.weight"]
    raise q4.CheckpointError(
        "q4 quantize",
        name="IN",
        rule="a checkpoint with at least one tensor to pack",
        value=f"{len(kept)} tensors to keep",
        where=str(checkpoint.path),
        hint=f"{reasons[0]}.",
        reasons=reasons,
    )


def _record(  # noqa: PLR0913  # the facts of one run
    source: str, out: str, recipe: Recipe, packed: Sequence[Mapping[str, Any]], kept: Sequence[Kept], seconds: float
) -> dict[str, Any]:
    return {
        "in": source,
        "out": out,
        "format": recipe.format.name,
        "dialect": recipe.dialect.name,
        "block_size": recipe.options["block_size"],
        "scale_kind": recipe.options["scale_kind"],
        "layers": packed,
        "kept": kept,
        "totals": {
            "layers": len(packed),
            "bytes_before": sum(item["bytes_before"] for item in packed),
            "bytes_after": sum(item["bytes_after"] for item in packed),
            "kept_bytes": sum(item.nbytes for item in kept),
            "worst_relative_error": max(item["relative_error"] for item in packed),
            "seconds": round(seconds, 3),
        },
    }


def _show(console: Console, record: Mapping[str, Any]) -> None:
    rows = [
        [
            item["name"].removesuffix(".weight"),
            f"{100 * item['relative_error']:.2f} %",
            f"{item['shape'][0]}×{item['shape'][1]}",
            f"{item['bytes_after']:,}",
            f"{item['bytes_before']:,}",
            item["dtype"],
        ]
        for item in record["layers"]
    ]
    print_table(console, _TITLES, rows)
    console.print()
    reasons: dict[str, list[str]] = {}
    for item in record["kept"]:
        if item.notable:
            reasons.setdefault(item.reason, []).append(item.name)
    for reason, names in list(reasons.items())[:_MOST]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(console, Text(clean(f"{names[0]}{more}: {reason}"), style="yellow"), label="kept dense: ")
    if len(reasons) > _MOST:
        say(console, f"{len(reasons) - _MOST} more reasons; --json lists all", label="kept dense: ")
    totals = record["totals"]
    size = f"{bytes_text(totals['bytes_before'])} → {bytes_text(totals['bytes_after'])}"
    what = f"{record['format']}, {record['dialect']}, block {record['block_size']}, scale {record['scale_kind'].value}"
    text = (
        f"{counted(totals['layers'], 'layer')} packed ({what}): {size}; {counted(len(record['kept']), 'tensor')} kept "
        f"({bytes_text(totals['kept_bytes'])}); {totals['seconds']:.1f} s → {record['out']}"
    )
    say(console, Text(clean(text), style="bold"))
