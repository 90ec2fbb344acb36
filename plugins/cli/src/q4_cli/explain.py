"""``q4 explain``: which backend and paths would run each layer of a checkpoint here, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from rich.text import Text

import q4core as q4
from q4_cli import options
from q4_cli.explain_report import explain_layers, grouped, name_patterns
from q4_cli.failure import CANT_SERVE, describe
from q4_cli.opening import open_file
from q4_cli.output import clean, counted, open_output, path_text, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

__all__ = ["explain"]


def explain(  # noqa: PLR0913  # one argument per option
    file: Annotated[str, typer.Argument(metavar="FILE", help="A checkpoint: a file, an index of shards or a folder.")],
    *,
    device: options.Device = None,
    compute_path: options.ComputePath = None,
    backend: options.Backend = None,
    m: Annotated[str, typer.Option("--m", metavar="LOW:HIGH", help="Rows of x to serve; LOW: has no end.")] = "1:",
    dtype: options.Dtype = None,
    precision: options.Precision = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Ask for gradients to the input too.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Prepare one layer of each kind, so that its paths prove themselves.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Repeat equal answers, layer by layer.")] = False,
    dialect: options.Dialect = None,
    as_json: options.Json = False,
) -> None:
    """Show which backend and paths would run each layer here, and why each other one would not."""
    rows = options.parse_rows(m)
    asked = options.make_config(
        device=device, backend=backend, compute_path=compute_path, precision=precision, dtype=dtype
    )
    config = q4.resolve_config(attrs.evolve(asked, gradients=True) if gradients else asked)
    with open_output(as_json=as_json) as output, open_file(file, dialect=dialect) as checkpoint:
        with output.progress("asking", len(checkpoint)) as step:
            layers, refusal = explain_layers(checkpoint, config, q4.default_registry(), m=rows, prove=prove, step=step)
        record: dict[str, Any] = {"file": file, "m": rows, "config": config, "layers": layers}
        record["unsupported"] = [str(problem) for problem in checkpoint.schema.unsupported]
        if refusal is not None:
            record |= describe(refusal).to_dict()
        output.answer(record, lambda console: _show(console, record, show_all=show_all))
    if refusal is not None:
        raise typer.Exit(CANT_SERVE)


def _show(console: Console, record: Mapping[str, Any], *, show_all: bool) -> None:
    layers = record["layers"]
    for group in [[layer] for layer in layers] if show_all else grouped(layers):
        _show_group(console, group)
    for problem in record["unsupported"]:
        say(console, Text(f"can't be read: {clean(problem)}", style="yellow"))
    refused = sum(1 for layer in layers if layer["backend"] is None)
    total = counted(len(layers), "packed layer") if layers else "no 4-bit layer"
    end = f", {refused} of them without a backend" if refused else ""
    console.print(Text(f"{total}{end}", style="bold red" if refused else "bold"))


def _show_group(console: Console, group: Sequence[Mapping[str, Any]]) -> None:
    head = group[0]
    count = f"{len(group)} layers" if len(group) > 1 else clean(head["layer"])
    what = f"  {head['format']} on {head['device']}, x {head['dtype']}  →  "
    if head["backend"] is None:
        say(console, Text.assemble((count, "bold"), what, ("nobody", "bold red")))
    else:
        proven = ("proven", "green") if head["proven"] else ("not proven yet", "yellow")
        state = f" ({clean(head['native_load_state'])}; "
        say(console, Text.assemble((count, "bold"), what, (clean(head["backend"]), "bold green"), state, proven, ")"))
    names = [layer["layer"] for layer in group] if len(group) > 1 else []
    shapes = [f"{layer['shape'][0]}×{layer['shape'][1]}" for layer in group]
    for texts in filter(None, (names, shapes)):
        say(console, Text(_counted(name_patterns(texts)), style="dim"), label="  ")
    _show_reasons(console, head)


def _show_reasons(console: Console, head: Mapping[str, Any]) -> None:
    for path in head["paths"]:
        say(console, path_text(path), label="  ")
    for word, style in (("fallback_reason", "yellow"), ("error", "red")):
        if head[word]:
            say(console, clean(head[word]), label=Text(f"  {word.partition('_')[0]}  ", style=style))
    for item in head["rejections"]:
        asked = (f" ({clean(item['native_load_state'])})", "dim")
        say(console, Text.assemble(("not ", "dim"), clean(item["backend"]), asked), label="  ")
        for reason in item["reasons"]:
            say(console, clean(reason["message"]), label=f"      {reason['code']}: ")
    for note in head["notes"]:
        say(console, Text(clean(note), style="yellow"), label=Text("  note  ", style="yellow"))
    console.print()


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(clean(name) if count == 1 else f"{clean(name)} ({count})" for name, count in counts.items())
