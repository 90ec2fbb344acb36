"""``q4 explain``: the backend and paths that would run each layer here, and the reasons against the others."""

from __future__ import annotations

import collections
import logging
import re
from typing import TYPE_CHECKING, Any

import typer

import q4core as q4
from q4_cli import values
from q4_cli.failure import CANT_SERVE, describe
from q4_cli.files import open_file
from q4_cli.output import NO_LAYER, natural_key, open_output, say, say_path, say_unread, unread_types
from q4core.plugin_api import Proofs, counted, emit, emit_selection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.console import Console

__all__ = ["explain"]


def explain(  # noqa: PLR0913  # one argument per option
    file: str,
    *,
    device: str | None,
    compute_path: str | None,
    backend: str | None,
    m: str,
    dtype: str | None,
    precision: str | None,
    gradients: bool,
    prove: bool,
    show_all: bool,
    dialect: str | None,
    as_json: bool,
) -> None:
    """Show which backend and paths would run each layer here, and why each other one would not.

    Ends with 1 where a layer has no backend or can't be read.
    """
    rows = values.parse_rows(m)
    config = values.resolve_config(
        device=device,
        backend=backend,
        compute_path=compute_path,
        precision=precision,
        dtype=dtype,
        gradients=gradients or None,
    )
    if prove and (remembered := Proofs.here(q4.default_registry())):
        remembered.forget()
    with open_output(as_json=as_json) as output, open_file(file, dialect=dialect) as checkpoint:
        with output.progress("asking", len(checkpoint)) as step:
            layers, refusal = _explain_layers(checkpoint, config, rows, prove=prove, step=step)
        record: dict[str, Any] = {"file": file, "m": rows, "config": config, "layers": layers}
        record["unsupported"] = [
            {"key": problem.key, "type": problem.type, "rule": problem.rule}
            for problem in checkpoint.schema.unsupported
        ]
        record["unread"] = unread_types(record["unsupported"])
        if refusal is not None:
            record["error"] = describe(refusal)[1]
        output.answer(record, lambda console: _show(console, record, show_all=show_all))
    if refusal is not None or record["unread"]:
        raise typer.Exit(CANT_SERVE)


def _explain_layers(
    checkpoint: q4.Checkpoint,
    config: q4.SessionConfig,
    m: tuple[int, int | None],
    *,
    prove: bool,
    step: Callable[[str], None],
) -> tuple[list[dict[str, Any]], q4.BackendUnavailableError | None]:
    """Return ``Selection.to_dict()`` of each layer with its name, notes and error, and the first refusal.

    Layers are read one at a time. With ``prove`` one of each kind is prepared first, so that the self-probes run.
    """
    registry = q4.default_registry()
    layers: list[dict[str, Any]] = []
    first: q4.BackendUnavailableError | None = None
    proved: set[q4.Request] = set()
    for name in sorted(checkpoint, key=natural_key):
        weight = checkpoint[name]
        request = q4.Request.for_weight(weight, m=m, dtype=config.compute_dtype or weight.dtype)
        record = {"layer": name, "error": None, "notes": [n for n in weight.notes if not n.startswith("stored ")]}
        try:
            if prove and request not in proved:
                proved.add(request)
                with q4.Session(config, registry=registry) as session:
                    session.linear(weight, m=m)
            selection = q4.select(request, config, registry=registry)
            emit_selection(selection, name, weight.format.name)
            layers.append(record | selection.to_dict())
        except q4.BackendUnavailableError as error:
            first = first or error
            why = [str(item) for item in error.rejections]
            emit(
                "q4.select", level=logging.WARNING, layer=name, format=weight.format.name, backend=None, rejections=why
            )
            layers.append(record | _refusal(request, config, error))
        del weight
        step(name)
    return layers, first


def _refusal(request: q4.Request, config: q4.SessionConfig, error: q4.BackendUnavailableError) -> dict[str, Any]:
    """Return the keys of ``Selection.to_dict()`` where nothing was selected."""
    return {
        "format": request.format.name,
        "shape": [request.out_features, request.in_features],
        "device": str(request.device) if config.device in {None, "auto"} else config.device,
        "dtype": str(request.dtype).removeprefix("torch."),
        "compute_path": config.compute_path.value if config.compute_path else "auto",
        **dict.fromkeys(("backend", "native_load_state", "path_name", "fallback_reason")),
        **{key: [] for key in ("paths", "gradients", "gradients_refused", "disqualified")},
        "proven": False,
        "rejections": [item.to_dict() for item in error.rejections],
        "error": str(error).partition("\n")[0],
    }


def _show(console: Console, record: Mapping[str, Any], *, show_all: bool) -> None:
    layers = record["layers"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for layer in layers:  # equal answers form one group
        size = "{}×{}".format(*layer["shape"])  # a refusal names the shape
        same = {**layer, "layer": "", "shape": (), "error": str(layer["error"]).replace(size, "N×K")}
        groups.setdefault(layer["layer"] if show_all else repr(sorted(same.items())), []).append(layer)
    for group in groups.values():
        _show_group(console, group)
    unread = say_unread(console, record["unsupported"])
    refused = sum(1 for layer in layers if layer["backend"] is None)
    total = counted(len(layers), "packed layer") if layers else "no layer that can be read" if unread else NO_LAYER
    end = f", {refused} of them without a backend" if refused else ""
    end += f"; {unread}" if unread else ""
    say(console, (f"{total}{end}", "bold red" if end else "bold"))


def _show_group(console: Console, group: list[Mapping[str, Any]]) -> None:
    head = group[0]
    count = f"{len(group)} layers" if len(group) > 1 else head["layer"]
    what = f"  {head['format']} on {head['device']}, x {head['dtype']}  →  "
    if head["backend"] is None:
        say(console, (count, "bold"), what, ("no backend", "bold red"))
    else:
        proven = ("proven", "green") if head["proven"] else ("not proven yet", "yellow")
        state = f" ({head['native_load_state']}; "
        say(console, (count, "bold"), what, (head["backend"], "bold green"), state, proven, ")")
    if len(group) > 1:
        say(console, (_patterns(layer["layer"] for layer in group), "dim"), label="  ")
    say(console, (_patterns("{}×{}".format(*layer["shape"]) for layer in group), "dim"), label="  ")
    for path in head["paths"]:
        say_path(console, path, label="  ")
    for word, style in (("fallback_reason", "yellow"), ("error", "red")):
        if head[word]:
            say(console, head[word], label=(f"  {word.partition('_')[0]}  ", style))
    for item in head["rejections"]:
        state = item["native_load_state"]
        words = "refused by what it declares" if state == "not asked" else state
        say(console, ("not ", "dim"), item["backend"], (f" ({words})", "dim"), label="  ")
        for reason in item["reasons"]:
            say(console, reason["message"], label=f"      {reason['code']}: ")
    for note in head["notes"]:
        say(console, (note, "yellow"), label=("  note  ", "yellow"))
    say(console)


def _patterns(names: Iterable[str]) -> str:
    """Return names with their numbers as ``*``, and how many there are of each, in order of appearance."""
    counts = collections.Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
    return ", ".join(pattern if count == 1 else f"{pattern} ({count})" for pattern, count in counts.items())
