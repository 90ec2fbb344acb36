"""Opening a checkpoint by the one reader that knows it, and saving one by the one writer that takes it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from q4core.checkpoint.contract import OpenRequest, SaveRequest
from q4core.checkpoint.files import open_regular, require_regular, unreadable
from q4core.checkpoint.opened import Checkpoint
from q4core.diagnostics.describe_exception import said
from q4core.errors import PLUGIN_FAULTS, CheckpointError, DialectError, PluginError, Q4Error, Q4PluginWarning
from q4core.schema import SIMPLE_DIALECTS, require_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from q4core.checkpoint.contract import CheckpointReader, CheckpointWriter
    from q4core.schema import Dialect
    from q4core.weight import PackedWeight

__all__ = ["open_by", "open_checkpoint", "save_checkpoint"]

_SAFETENSORS = (".safetensors", ".safetensors.index.json")


def open_checkpoint(  # noqa: PLR0913  # the contract's arguments
    path: str | os.PathLike[str],
    *,
    dialect: str | None = None,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    copy: bool = False,
    readers: Iterable[CheckpointReader] = (),
    dialects: Iterable[Dialect] = SIMPLE_DIALECTS,
    plugins: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open a checkpoint as a lazy mapping of module names to packed weights.

    Headers and small side tensors are read, and every layer is checked by names, shapes and dtypes; a layer's numbers
    are read, and checked, when the layer is asked for. Tensors are views of the mapped file. Who cuts the file short
    while it is mapped ends this process (SIGBUS); ``copy=True`` reads into memory instead.

    Args:
        path: A file, an index of shards, or a folder.
        dialect: Name of the dialect to prefer wherever the keys allow several.
        config: The model's ``config.json``; None looks for it beside the file.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.
        copy: Read each tensor into memory when it is asked for, and keep no mapping.
        readers: The readers to ask.
        dialects: The dialects to look for.
        plugins: Name → state of the plugins there are, for the hint of an error.

    Raises:
        CheckpointError: No reader knows the file, or it is missing or malformed.
        SchemaError: Something is wrong with the layers; ``problems`` has everything at once.
        DialectError: The dialect's name, or an option's, is unknown.
        ConfigError: ``config`` or ``options`` is no mapping.
    """
    require_arguments({}, config=config, options=options)
    request = OpenRequest(
        dialects=tuple(dialects), dialect=dialect, config=config, options=dict(options or {}), copy=bool(copy)
    )
    return open_by(readers, path, request, plugins or {})


def open_by(
    readers: Iterable[CheckpointReader], path: object, request: OpenRequest, plugins: Mapping[str, str]
) -> Checkpoint:
    """Open a checkpoint by the one reader that knows it.

    Raises:
        CheckpointError, SchemaError, DialectError: As ``open_checkpoint``.
        PluginError: The reader raised something else.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError("checkpoint", name="path", rule="a path", value=path)
    target = Path(path)
    require_regular(target, or_folder=True)  # before readers look: opening a pipe waits for who writes into it
    asked = tuple(readers)
    fitting = [reader for reader in asked if _recognises(reader, target)]
    if len(fitting) != 1:
        _refuse_file(target, asked, fitting, plugins)
    reader = fitting[0]
    try:
        source = reader.open(target, request)
    except Q4Error:
        raise
    except PLUGIN_FAULTS as error:
        raise PluginError(
            f"checkpoint reader {reader.name!r}",
            name="open",
            rule="free of errors that are not q4core's own",
            value=said(error),
            where=str(target),
        ) from error
    if request.dialect is not None and request.dialect not in source.schema.dialects:
        source.close()
        names = ", ".join(source.schema.dialects) or "none"
        rule = f"the file's own ({names})"
        raise DialectError("checkpoint", name="dialect", rule=rule, value=request.dialect, where=str(target))
    return Checkpoint(source, reader.name)


def save_checkpoint(  # noqa: PLR0913  # the contract's arguments
    path: str | os.PathLike[str],
    weights: Mapping[str, PackedWeight],
    *,
    dialect: str,
    dense: Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int | None = None,
    lossy: bool = False,
    writers: Iterable[CheckpointWriter] = (),
    dialects: Iterable[Dialect] = SIMPLE_DIALECTS,
    plugins: Mapping[str, str] | None = None,
) -> Path:
    """Write packed weights, and other tensors, as a checkpoint in one dialect.

    Weights and tensors are taken from their mappings one at a time, so that lazy mappings never hold more than one.
    Whatever was at ``path`` stays until the new checkpoint is on the disk as a whole, and then gives way to it.

    Args:
        path: A file (``….safetensors``), or a folder, which also gets an entry in ``config.json`` where the dialect's
            own readers look for one.
        weights: Module → weight.
        dialect: Name of the dialect.
        dense: Name → tensor for everything else.
        metadata: Further header metadata, text by key; the dialect's own entries come before it.
        config: The model's ``config.json``, for a folder; None keeps the one that is there.
        max_shard_bytes: Start a new file before this many bytes of tensors; only for a folder.
        lossy: Allow what can't be expressed exactly to be rounded or left out.
        writers: The writers to choose from.
        dialects: The dialects to look among.
        plugins: Name → state of the plugins there are, for the hint of an error.

    Returns:
        The file, or the index of the shards.

    Raises:
        DialectError: The dialect is unknown, or can't express a weight; the message names what.
        WeightError: A weight holds illegal numbers.
        CheckpointError: An argument is not what it must be, names collide, or the files can't be written. Nothing has
            changed then.
    """
    target = _checked_path(path)
    request = SaveRequest(
        dialect=dialect, dialects=tuple(dialects), dense=dense, metadata=metadata, config=config,
        max_shard_bytes=max_shard_bytes, lossy=lossy,
    )  # fmt: skip
    known = tuple(writers)
    try:
        fitting = [writer for writer in known if writer.accepts(target)]
    except OSError as error:
        raise unwritable(target, error) from error
    if len(fitting) == 1:
        return fitting[0].write(target, weights, request)
    names = ", ".join(writer.name for writer in fitting or known)
    raise CheckpointError(
        "save_checkpoint",
        name="path",
        rule="a file or folder that exactly one installed writer takes",
        value=names if fitting else f"none of {names}" if known else f"{target.name}, and no writer is installed",
        where=str(target),
        hint="Name a folder, or a file that ends in .safetensors." if known else _hint("safetensors", plugins or {}),
    )


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a place that the system won't have written."""
    reason = error.strerror or str(error)
    return CheckpointError("save_checkpoint", name="file", rule="writable", value=reason, where=str(path))


def _checked_path(path: object) -> Path:
    try:
        text = os.fspath(path)  # type: ignore[call-overload]  # what it raises for other things is the question
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return Path(text)
    except (TypeError, UnicodeEncodeError):
        pass
    raise CheckpointError("save_checkpoint", name="path", rule="a path", value=path, hint="Nothing was written.")


def _refuse_file(
    path: Path, readers: Sequence[CheckpointReader], fitting: Sequence[CheckpointReader], plugins: Mapping[str, str]
) -> NoReturn:
    """Say that no reader knows a file, or several do, and which plugin is missing."""
    names = ", ".join(reader.name for reader in fitting or readers)
    kind = _kind(path)
    is_missing = not fitting and kind is not None and kind not in {reader.name for reader in readers}
    raise CheckpointError(
        "checkpoint",
        name="file",
        rule="one that exactly one installed reader knows",
        value=names if fitting else f"none of {names}" if names else "no reader at all",
        where=str(path),
        hint=_hint(kind, plugins) if is_missing and kind is not None else None,
    )


def _kind(path: Path) -> str | None:
    """Return the plugin that reads such files: ``safetensors`` or ``gguf``; None for others."""
    try:
        if path.is_dir() or path.name.endswith(_SAFETENSORS):
            return "safetensors"
        with open_regular(path) as file:
            head = file.read(9)
    except OSError as error:
        raise unreadable(path, error) from error
    if head[:4] == b"GGUF":
        return "gguf"
    return "safetensors" if head[8:] == b"{" else None


def _hint(plugin: str, plugins: Mapping[str, str]) -> str:
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
        message = f"checkpoint reader {reader.name!r} is left out: it raised {said(error)}"
        warnings.warn(Q4PluginWarning(message), stacklevel=4)
        return False
