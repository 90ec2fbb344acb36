"""Opening a checkpoint by the one reader that knows it, and finding the layers in it."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q4core.checkpoint.files import open_regular, require_regular
from q4core.checkpoint.opened import Checkpoint
from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit, warn_once
from q4core.errors import (
    PLUGIN_FAULTS,
    CheckpointError,
    DialectError,
    PluginError,
    Q4Error,
    Q4PluginWarning,
    SchemaError,
    UnknownDialectError,
    closest_name,
    counted,
)
from q4core.schema import Problem, Schema, catalogue_of, detect_in, problems_error, require_arguments, validate_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from q4core.checkpoint.contract import CheckpointReader, OpenRequest
    from q4core.schema import TensorInfo


_SAFETENSORS = (".safetensors", ".safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LEAST_BYTES = 4
"""The bytes that name a kind of file."""
_NAMED = 3
"""Layers of a kind that an error names; the schema has them all."""
_INSTEAD = "`q4 doctor` lists the dialects read here; or pack the original weights by `q4 quantize`."
_SAVE = "Save the model as safetensors; save_pretrained of transformers does, and safetensors.torch.save_file."


def open_by(
    readers: Iterable[CheckpointReader], path: object, request: OpenRequest, plugins: Mapping[str, str]
) -> Checkpoint:
    """Open a checkpoint by the one reader that knows it; see ``q4core.open``.

    ``plugins`` is name → state of the plugins there are, for the hint of an error.

    Raises:
        PluginError: The reader raised something that is no error of q4core.
    """
    require_arguments({}, config=request.config, options=request.options)
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError("checkpoint", name="path", rule="a path", value=path)
    target = Path(path)
    try:
        opened = _open(tuple(readers), target, request, plugins)
    except CheckpointError as error:
        better = _path_error(target)
        if better is None:
            raise
        raise better from error
    try:
        _check_schema(opened.schema, request, str(target))
    except Q4Error:
        opened.close()
        raise
    emit("q4.open", level=logging.INFO, reader=opened.reader, **_facts(opened))
    return opened


def _facts(opened: Checkpoint) -> dict[str, Any]:
    """Return what was decided about a file: which layers are read in which dialects, and which are not."""
    layers = collections.Counter(f"{layer.format} as {layer.dialect}" for layer in opened.schema.layers.values())
    unread = collections.Counter(problem.type for problem in opened.schema.unsupported)
    return {
        "path": str(opened.path), "layers": dict(layers), "dense": len(opened.dense), "unread": dict(unread),
        "decoded": len(opened.schema.decoded),
    }  # fmt: skip


def _open(
    readers: Sequence[CheckpointReader], path: Path, request: OpenRequest, plugins: Mapping[str, str]
) -> Checkpoint:
    require_regular(path, or_folder=True)  # before readers look: opening a pipe waits for who writes into it
    fitting = [reader for reader in readers if _recognises(reader, path)]
    if len(fitting) != 1:
        raise _file_error(path, [item.name for item in fitting], [item.name for item in readers], plugins)
    reader = fitting[0]
    try:
        return Checkpoint(reader.open(path, request), reader.name)
    except Q4Error:
        raise
    except PLUGIN_FAULTS as error:
        message = f"checkpoint reader {reader.name!r} raised {describe_exception(error)}"
        raise PluginError(message, where=str(path)) from error


def _check_schema(schema: Schema, request: OpenRequest, path: str) -> None:
    """Refuse a file without the dialect asked for, and one whose layers are recognised, of which none can be read."""
    if request.dialect is not None and request.dialect not in schema.dialects:
        rule = f"the file's own ({', '.join(schema.dialects) or 'none'})"
        hint = "Leave dialect= out, or name one of these."
        raise DialectError("checkpoint", name="dialect", rule=rule, value=request.dialect, where=path, hint=hint)
    if schema.layers or not schema.unsupported:
        return
    groups: dict[tuple[str, str, str], list[str]] = {}
    for item in schema.unsupported:
        groups.setdefault((item.code, item.rule, str(item.value)), []).append(item.key)
    problems = []
    for (code, rule, value), modules in sorted(groups.items(), key=lambda group: -len(group[1])):
        first = ", ".join(modules[:_NAMED]) + (", …" if len(modules) > _NAMED else "")
        count = counted(len(modules), "layer")
        problems.append(Problem(code, f"{count} ({first})", rule, value))
    kind, what = SchemaError, "its packed layers are recognised, and none can be read"
    if any(code == "unexplained" for code, *_ in groups):
        kind, what = UnknownDialectError, "it holds packed layers that no dialect here explains"
    raise kind(f"checkpoint: {what}", where=path, hint=_INSTEAD, problems=problems, schema=schema)


def _file_error(path: Path, fitting: list[str], asked: list[str], plugins: Mapping[str, str]) -> CheckpointError:
    """Return the error for a file that no reader knows, or several do; it names the plugin that is missing."""
    value = ", ".join(fitting) or (f"one unknown to {' and '.join(asked)}" if asked else "no reader at all")
    kind = None if fitting else _kind(path)
    hint = None if kind is None or kind in asked else way_to(kind, plugins)
    if asked and not fitting and kind is None and path.stat().st_size < _LEAST_BYTES:
        value, hint = f"{path.stat().st_size} bytes", "Copy or download it again: it ends before it says what it is."
    rule = "one that exactly one installed reader knows"
    return CheckpointError("checkpoint", name="file", rule=rule, value=value, where=str(path), hint=hint)


def _kind(path: Path) -> str | None:
    """Return the plugin that reads such files: ``safetensors``, ``gguf`` or ``onnx``; None for others."""
    if path.is_dir() or path.name.endswith(_SAFETENSORS):
        return "safetensors"
    with open_regular(path) as file:
        head = file.read(9)
    if head[:4] == b"GGUF":
        return "gguf"
    return "safetensors" if head[8:] == b"{" else "onnx" if path.suffix == ".onnx" else None


def way_to(plugin: str, plugins: Mapping[str, str]) -> str:
    """Return how to get a plugin that is not loaded: install it, enable it, or see why it failed."""
    state = plugins.get(plugin, "unknown")
    if state == "disabled":
        return f"Add {plugin!r} to Q4_PLUGINS, or take it out of Q4_DISABLE_PLUGINS: it is installed and left out."
    if state == "unknown":
        return f"Install the package that brings it: pip install q4-{plugin}."
    return f"See `q4 doctor`: the plugin {plugin!r} is installed and does not work."


def _recognises(reader: CheckpointReader, path: Path) -> bool:
    try:
        return reader.recognises(path)
    except PLUGIN_FAULTS as error:
        message = f"checkpoint reader {reader.name!r} is left out: it raised {describe_exception(error)}"
        emit("q4.plugin", level=logging.WARNING, reader=reader.name, error=message)
        warn_once(message, Q4PluginWarning, message)
        return False


def _path_error(path: Path) -> CheckpointError | None:
    """Return what a path that could not be opened is, and what to do, or None where there is nothing to add."""
    what: str | None = None
    with contextlib.suppress(OSError, ValueError):
        if not path.exists():
            what = "the path does not exist"
            hint = "Name a safetensors file, an index of shards, a model folder, or a GGUF file."
            if close := closest_name(path.name, [item.name for item in path.parent.iterdir()]):
                hint = f"Did you mean {str(path.with_name(close))!r}?"
        elif path.is_dir():
            suffixes = {item.suffix for item in path.iterdir()}
            if ".safetensors" not in suffixes and not any(path.glob("*.safetensors.index.json")):
                what, hint = "the folder holds no weights", "Name a folder with a safetensors file in it."
                if ".gguf" in suffixes:
                    what, hint = "the folder holds GGUF files", "Name the file that you mean."
                elif suffixes & {*_PICKLES}:
                    what, hint = "the folder holds pickles, which may run code while they are read", _SAVE
        elif path.is_file() and not path.stat().st_size:
            what, hint = "the file is empty", "Copy or download it again."
        elif path.is_file() and path.suffix in _PICKLES:
            what, hint = "the file is a pickle, which may run code while it is read", _SAVE
    return None if what is None else CheckpointError(f"checkpoint: {what}", where=str(path), hint=hint)


def find_layers(  # noqa: PLR0913  # the facts of one file
    tensors: Mapping[str, TensorInfo],
    request: OpenRequest,
    *,
    metadata: Mapping[str, str],
    config: Mapping[str, Any] | None,
    load: Callable[[str], torch.Tensor] | None,
    path: Path,
) -> Schema:
    """Return what a file's tensors are: layers in a dialect of the request, and dense tensors.

    Arguments are those of ``Catalogue``; the path is named in errors.

    Raises:
        SchemaError: Something is wrong with the layers; ``problems`` has everything.
        DialectError: The dialect's name, or an option's, is unknown.
    """
    facts = {"metadata": metadata, "config": config, "load": load, "options": request.options}
    catalogue, dialects = catalogue_of(tensors, request.dialects, **facts)
    schema = detect_in(catalogue, dialects, request.dialect)
    if schema is None:
        asked = [Problem("dialect", "dialect", "one of the file, which has no 4-bit layer", request.dialect)]
        schema = Schema(dense=tuple(tensors), problems=asked if request.dialect is not None else ())
    problems = validate_in(schema, catalogue, dialects)
    if problems:
        raise problems_error("checkpoint", problems, str(path), schema)
    return schema
