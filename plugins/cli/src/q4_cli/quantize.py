"""``q4 quantize``: a dense checkpoint into four bits, in any dialect that is written here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import q4core as q4
from q4_cli import values
from q4_cli.files import Target, config_of, open_file, own_metadata, require_readable
from q4_cli.output import bytes_text, first_of, open_output, print_table, say, say_first
from q4_cli.packing import Others, Packing, make_recipe, nothing_to_pack, split_tensors
from q4core.plugin_api import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

__all__ = ["quantize"]

_TITLES = ("layer", "error", "N×K", "after", "bytes before", "from")


def quantize(  # noqa: PLR0913  # one argument per option
    source: str,
    out: str,
    *,
    format: str,  # noqa: A002  # the option's name
    dialect: str | None,
    skip: list[str] | None,
    include: list[str] | None,
    block_size: int | None,
    scale_kind: str | None,
    symmetric: bool,
    shard_size: str | None,
    strict: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Pack the 2-D weights of a dense checkpoint; biases, norms, embeddings and the head stay as they are."""
    started = time.perf_counter()
    with open_output(as_json=as_json) as output, open_file(source) as checkpoint:
        shard_bytes = values.parse_size(shard_size)
        target = Target.check(out, checkpoint.path, force=force)
        require_readable(checkpoint, "q4 quantize")
        where = str(checkpoint.path)
        if len(checkpoint):
            value = f"{counted(len(checkpoint), 'packed layer')} ({', '.join(checkpoint.schema.dialects)})"
            hint = "Use `q4 convert` to store packed layers in another dialect."
            rule = "a dense checkpoint"
            raise q4.CheckpointError("q4 quantize", name="IN", rule=rule, value=value, where=where, hint=hint)
        names, remaining, idle = split_tensors(checkpoint.dense.infos, skip=skip or (), include=include or ())
        for pattern in idle:
            output.note(f"no tensor matches {pattern!r}")
        if not names:
            raise nothing_to_pack(remaining, where)
        recipe = make_recipe(
            format,
            dialect=dialect,
            scale_kind=scale_kind,
            options={"block_size": block_size, "symmetric": symmetric},
            module=names[0].removesuffix(".weight"),
        )
        with output.progress("packing", len(names)) as step, target.locked():
            packing = Packing(checkpoint.dense, names, remaining, recipe, where=where, strict=strict, step=step)
            home = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
            target.write(
                packing,
                Others(packing),
                home,
                dialect=recipe.dialect.name,
                metadata=own_metadata(checkpoint),
                config=config_of(home),
                max_shard_bytes=shard_bytes,
            )
        packed = packing.packed
        record = {
            "in": source,
            "out": out,
            "format": recipe.format.name,
            "dialect": recipe.dialect.name,
            "block_size": recipe.options["block_size"],
            "scale_kind": recipe.options["scale_kind"],
            "layers": packed,
            "dense": remaining,
            "totals": {
                "layers": len(packed),
                "bytes_before": sum(item["bytes_before"] for item in packed),
                "bytes_after": sum(item["bytes_after"] for item in packed),
                "dense_bytes": sum(item.nbytes for item in remaining),
                "worst_relative_error": max(item["relative_error"] for item in packed),
                "seconds": round(time.perf_counter() - started, 3),
            },
        }
        output.answer(record, lambda console: _show(console, record))


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
    say(console)
    reasons: dict[str, list[str]] = {}
    for item in record["dense"]:
        if item.notable:
            reasons.setdefault(item.reason, []).append(item.name)
    lines = [f"{first_of(names)}: {reason}" for reason, names in reasons.items()]
    say_first(console, lines, label="left dense: ")
    totals = record["totals"]
    size = f"{bytes_text(totals['bytes_before'])} → {bytes_text(totals['bytes_after'])}"
    what = f"{record['format']}, {record['dialect']}, block {record['block_size']}, scale {record['scale_kind'].value}"
    left = f"{counted(len(record['dense']), 'tensor')} left dense"
    text = (
        f"{counted(totals['layers'], 'layer')} packed ({what}): {size}; {left} "
        f"({bytes_text(totals['dense_bytes'])}); {totals['seconds']:.1f} s → {record['out']}"
    )
    say(console, (text, "bold"))
