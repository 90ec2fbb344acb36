"""Opening a checkpoint by the one reader that knows it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from q4core.checkpoint.files import open_regular, require_regular
from q4core.checkpoint.opened import Checkpoint
from q4core.diagnostics.describe_exception import describe_exception
from q4core.errors import PLUGIN_FAULTS, CheckpointError, DialectError, PluginError, Q4Error, Q4PluginWarning
from q4core.schema import require_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from q4core.checkpoint.contract import CheckpointReader, OpenRequest


__all__ = ["open_by", "way_to"]

_SAFETENSORS = (".safetensors", ".safetensors.index.json")


def open_by(
    readers: Iterable[CheckpointReader], path: object, request: OpenRequest, plugins: Mapping[str, str]
) -> Checkpoint:
    """Open a checkpoint by the one reader that knows it.

    Args:
        readers: The readers to ask.
        path: A file, an index of shards, or a folder.
        request: How.
        plugins: Name → state of the plugins there are, for the hint of an error.

    Raises:
        CheckpointError, SchemaError, DialectError: As ``q4core.open``.
        ConfigError: ``config`` or ``options`` is no mapping.
        PluginError: The reader raised something else.
    """
    require_arguments({}, config=request.config, options=request.options)
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError("checkpoint", name="path", rule="a path", value=path)
    target = Path(path)
    require_regular(target, or_folder=True)  # before readers look: opening a pipe waits for who writes into it
    asked = tuple(readers)
    fitting = [reader for reader in asked if _recognises(reader, target)]
    if len(fitting) != 1:
        raise _file_error(target, asked, fitting, plugins)
    reader = fitting[0]
    try:
        source = reader.open(target, request)
    except Q4Error:
        raise
    except PLUGIN_FAULTS as error:
        message = f"checkpoint reader {reader.name!r} raised {describe_exception(error)}"
        raise PluginError(message, where=str(target)) from error
    if request.dialect is not None and request.dialect not in source.schema.dialects:
        source.close()
        names = ", ".join(source.schema.dialects) or "none"
        rule = f"the file's own ({names})"
        raise DialectError("checkpoint", name="dialect", rule=rule, value=request.dialect, where=str(target))
    return Checkpoint(source, reader.name)


def _file_error(
    path: Path, readers: Sequence[CheckpointReader], fitting: Sequence[CheckpointReader], plugins: Mapping[str, str]
) -> CheckpointError:
    """Return the error for a file that no reader knows, or several do; it names the plugin that is missing."""
    names = ", ".join(reader.name for reader in fitting or readers)
    value = names if fitting else f"none of {names}" if names else "no reader at all"
    kind = None if fitting else _kind(path)
    is_missing = kind is not None and kind not in {reader.name for reader in readers}
    hint = way_to(kind, plugins) if is_missing and kind is not None else None
    rule = "one that exactly one installed reader knows"
    return CheckpointError("checkpoint", name="file", rule=rule, value=value, where=str(path), hint=hint)


def _kind(path: Path) -> str | None:
    """Return the plugin that reads such files: ``safetensors`` or ``gguf``; None for others."""
    if path.is_dir() or path.name.endswith(_SAFETENSORS):
        return "safetensors"
    with open_regular(path) as file:
        head = file.read(9)
    return "gguf" if head[:4] == b"GGUF" else "safetensors" if head[8:] == b"{" else None


def way_to(plugin: str, plugins: Mapping[str, str]) -> str:
    """Return how to get a plugin that is not at work: install it, let it in, or see why it failed."""
    state = plugins.get(plugin, "unknown")
    if state == "disabled":
        return f"The plugin {plugin!r} is installed; Q4_PLUGINS or Q4_DISABLE_PLUGINS leaves it out."
    if state == "unknown":
        return f'Install q4-{plugin}: pip install "q4core[io]".'
    return f"The plugin {plugin!r} is installed and does not work; `q4 doctor` says why."


def _recognises(reader: CheckpointReader, path: Path) -> bool:
    try:
        return reader.recognises(path)
    except PLUGIN_FAULTS as error:
        message = f"checkpoint reader {reader.name!r} is left out: it raised {describe_exception(error)}"
        warnings.warn(Q4PluginWarning(message), stacklevel=4)
        return False
