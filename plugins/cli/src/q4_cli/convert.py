"""``q4 convert``: the same numbers in another dialect or kind of file, exactly, or with a loss that it lists."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import q4core as q4
from q4_cli import values
from q4_cli.conversion import Contents, Conversion, find_asked, find_sink, note_losses
from q4_cli.files import (
    GGUF,
    SUFFIX,
    Target,
    config_of,
    identity_of,
    open_file,
    own_metadata,
    require_readable,
)
from q4_cli.output import bytes_text, natural_key, open_output, print_table, say
from q4core.plugin_api import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from q4_cli.output import Output

__all__ = ["convert"]

_TITLES = ("layer", "relative error", "largest", "how", "to", "from")
_PLAN = "plan.json"


def convert(  # noqa: PLR0913  # one argument per option
    source: str,
    out: str,
    *,
    dialect: str,
    read_as: str | None,
    requantize: bool,
    format: str | None,  # noqa: A002  # the option's name
    skip: list[str] | None,
    shard_size: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Store a packed checkpoint in another dialect; codes and scales stay exactly what they are.

    For example: q4 convert Qwen3-0.6B-AWQ Qwen3-0.6B-GPTQ --dialect gptq. A run that was killed resumes where it ended.
    """
    started = time.perf_counter()
    with open_output(as_json=as_json) as output, open_file(source, dialect=read_as) as checkpoint:
        sink = find_sink(dialect)
        if format is not None and not requantize:
            raise values.illegal("--format", "given with --requantize, which it belongs to", format)
        asked_format = find_asked(sink, format)
        is_gguf = sink.name == GGUF[1:]
        target = Target.check(out, checkpoint.path, force=force, suffixes=(GGUF,) if is_gguf else (SUFFIX,))
        if is_gguf and target.is_folder:
            rule = "a file named *.gguf"
            raise q4.CheckpointError("output", name="OUT", rule=rule, value=out, hint="GGUF is one file, or its parts.")
        shard_bytes = values.parse_size(shard_size)
        require_readable(checkpoint, "q4 convert")
        if not len(checkpoint):
            where, hint = str(checkpoint.path), "Use `q4 quantize` to pack a dense checkpoint."
            rule = "a checkpoint with packed layers"
            raise q4.CheckpointError("q4 convert", name="IN", rule=rule, value="none", where=where, hint=hint)
        contents = _contents(checkpoint, target, is_gguf=is_gguf)
        conversion = Conversion(contents, sink, requantize, asked_format, tuple(skip or ()))
        for pattern in conversion.idle:
            output.note(f"no layer matches {pattern!r}")
        asked = {"dialect": dialect, "from": read_as, "requantize": requantize, "format": format}
        identity = identity_of(checkpoint.path, **asked, skip=skip, shard_bytes=shard_bytes)
        with target.locked(resumable=True):
            _plan(conversion, target, identity, output, str(checkpoint.path))
            note_losses(conversion)
            _write(conversion, target, checkpoint, identity, output, shard_bytes)
        record = {"in": source, "out": out, **_record(checkpoint, conversion)}
        record["seconds"] = round(time.perf_counter() - started, 3)
        output.answer(record, lambda console: _show(console, record))


def _contents(checkpoint: q4.Checkpoint, target: Target, *, is_gguf: bool) -> Contents:
    """Return what is converted: under its own names, or those of the other kind of model's files."""
    home = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    names = dict(zip(checkpoint, checkpoint, strict=True))
    metadata = own_metadata(checkpoint)
    if checkpoint.reader == GGUF[1:] and is_gguf:
        return Contents(checkpoint, checkpoint.dense, names, dict(checkpoint.metadata))
    known = q4.default_registry().items("q4_architectures")
    if is_gguf and {"model_type", "text_config"} & {*(config_of(home) or ())}:
        # Each architecture of q4-lm finds the one that the folder's own kind of model is.
        to_file = next((item.from_folder for item in known.values() if getattr(item, "from_folder", None)), None)
        if to_file is not None:
            found = to_file(checkpoint, home)
            return Contents(found.weights, found.dense, found.stored, found.metadata)
    if checkpoint.reader != GGUF[1:]:
        return Contents(checkpoint, checkpoint.dense, names, metadata, config_of(home), home)
    if not target.is_folder:
        return Contents(checkpoint, checkpoint.dense, names, metadata)
    kind = str(checkpoint.metadata.get("general.architecture", ""))
    to_folder = getattr(known.get(kind), "to_folder", None)
    if to_folder is None:
        rule = f"one of {', '.join(sorted(known))}" if known else "known, by the plugin q4-lm"
        hint = "Name a file, OUT.safetensors, to convert the tensors alone under the names that they have."
        where = str(checkpoint.path)
        raise q4.CheckpointError(
            "q4 convert", name="general.architecture", rule=rule, value=kind, where=where, hint=hint
        )
    model = to_folder(checkpoint)
    return Contents(model.weights, model.dense, model.stored, {}, model.config, files=model.files)


def _plan(conversion: Conversion, target: Target, identity: str, output: Output, where: str) -> None:
    """Check every layer, unless a run that was killed did so."""
    path, digest = target.partial / _PLAN, hashlib.sha256(identity.encode()).hexdigest()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["identity"] == digest:
            conversion.recipes.update(found["recipes"])
            conversion.facts.update(found["layers"])
            output.note("going on where the last run ended")
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none, or one that was cut off
    with output.progress("checking", len(conversion.modules)) as step:
        conversion.check(step, where)
    plan = {"identity": digest, "layers": conversion.facts, "recipes": conversion.recipes}
    path.write_text(json.dumps(plan), encoding="utf-8")


def _write(  # noqa: PLR0913  # the facts of one checkpoint
    conversion: Conversion,
    target: Target,
    checkpoint: q4.Checkpoint,
    identity: str,
    output: Output,
    shard_bytes: int | None,
) -> None:
    contents, sizes = conversion.contents, checkpoint.schema.layers
    shares = {name: sizes[stored].nbytes or 1 for name, stored in contents.stored.items()}
    total = sum(shares.values()) + len(contents.dense)
    with output.progress("writing", total) as step:
        target.write(
            conversion.weights(lambda name: step(name, shares.get(name, 1))),
            conversion.dense(lambda name: step(name, shares.get(name.removesuffix(".weight"), 1))),
            contents.home,
            dialect=conversion.sink.name,
            metadata=contents.metadata,
            config=contents.config,
            max_shard_bytes=shard_bytes,
            files=contents.files,
            resume=identity,
        )


def _record(checkpoint: q4.Checkpoint, conversion: Conversion) -> dict[str, Any]:
    schema, contents = checkpoint.schema, conversion.contents
    layers = []
    for name in contents.weights:
        layer = schema.layers[contents.stored[name]]
        facts = conversion.facts.get(
            name, {"how": "dense", "to": "float32", "relative_rms_error": 0.0, "max_error": 0.0}
        )
        layers.append({"name": name, "format": layer.format, "from": layer.dialect, "type": layer.type, **facts})
    return {
        "from": list(schema.dialects),
        "dialect": conversion.sink.name,
        "requantize": conversion.requantize,
        "layers": sorted(layers, key=lambda item: natural_key(item["name"])),
        "dense_tensors": len(contents.dense),
        "bytes_before": sum(layer.nbytes or 0 for layer in schema.layers.values()),
    }


def _show(console: Console, record: Mapping[str, Any]) -> None:
    changed = [item for item in record["layers"] if item["how"] not in {"exact", "dense"}]
    if changed:
        rows = [
            [
                item["name"],
                f"{100 * item['relative_rms_error']:.3g} %",
                f"{item['max_error']:.3g}",
                item["how"],
                item["to"],
                f"{item['from']} {item['type'] or item['format']}",
            ]
            for item in changed
        ]
        print_table(console, _TITLES, rows)
        say(console)
    exact = sum(item["how"] == "exact" for item in record["layers"])
    parts = [
        f"{counted(exact, 'layer')} from {', '.join(record['from'])} to {record['dialect']} exactly",
        *([f"{counted(len(changed), 'layer')} with a loss"] if changed else []),
        *([f"{dense} written dense"] if (dense := len(record["layers"]) - exact - len(changed)) else []),
        f"{counted(record['dense_tensors'], 'dense tensor')} unchanged",
    ]
    size = bytes_text(record["bytes_before"])
    say(console, (f"{', '.join(parts)} ({size}); {record['seconds']:.1f} s → {record['out']}", "bold"))
