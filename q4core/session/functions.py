"""The functions on checkpoints that people type, with the registry's plugins filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core import checkpoint
from q4core.plugins.registry import default_registry
from q4core.schema import SIMPLE_DIALECTS

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from q4core.checkpoint import Checkpoint
    from q4core.plugins.registry import Registry
    from q4core.schema import Dialect
    from q4core.weight import PackedWeight


def dialects(registry: Registry | None = None) -> tuple[Dialect, ...]:
    """Return every dialect there is: the two simplified ones, then the plugins', by name.

    Args:
        registry: The plugins. Defaults to the process's.
    """
    return (*SIMPLE_DIALECTS, *(registry or default_registry()).dialects())


def open(  # noqa: A001  # the contract's name: q4.open(path)
    path: str | os.PathLike[str],
    *,
    dialect: str | None = None,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    copy: bool = False,
) -> Checkpoint:
    """Open a checkpoint: a lazy mapping of module name to ``PackedWeight``; ``.dense`` holds the other tensors.

    Headers and small side tensors are read, and every layer is checked by names, shapes and dtypes; a layer's numbers
    are read, and checked, when the layer is asked for. Tensors are views of the mapped file. A file that is cut short
    while it is mapped ends the process (SIGBUS): replace files by renaming, or open with ``copy=True`` what others may
    write into.

    Args:
        path: A safetensors file, an index of shards, a folder with either, or a file that a plugin reads (GGUF).
        dialect: Name of the dialect, where keys alone don't decide.
        config: The model's ``config.json``, taken instead of the one next to the file.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.
        copy: Read each tensor into memory when it is asked for, and keep no mapping.

    Raises:
        CheckpointError: The file can't be read, is malformed, or no installed plugin reads it.
        SchemaError: Something is wrong with the layers, or they are recognised and none can be read.
        DialectError: The dialect's name, or an option's, is unknown.
        ConfigError: ``config`` or ``options`` is no mapping.
    """
    request = checkpoint.OpenRequest(
        dialects=dialects(), dialect=dialect, config=config, options=options, copy=bool(copy)
    )
    readers = default_registry().items("q4_checkpoint_readers").values()
    return checkpoint.open_by(readers, path, request, _plugin_states())


def save_checkpoint(  # noqa: PLR0913  # one argument per fact
    path: str | os.PathLike[str],
    weights: Mapping[str, PackedWeight],
    *,
    dialect: str,
    dense: Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int | None = None,
    lossy: bool = False,
    resume: str | None = None,
) -> Path:
    """Write packed weights, and other tensors, as a checkpoint in one dialect.

    Weights and tensors are taken from their mappings one at a time, so that lazy mappings never hold more than one.
    Whatever was at ``path`` stays until the new checkpoint is on the disk as a whole, and then gives way to it.

    Args:
        path: A file (``….safetensors``, ``….gguf``), or a folder, which also gets an entry in ``config.json`` where
            the dialect's own readers look for one.
        weights: Module → weight.
        dialect: Name of the dialect; ``"gguf"`` for a GGUF file.
        dense: Name → tensor for everything else.
        metadata: Further header metadata by key, such as ``Checkpoint.metadata``; the dialect's own entries come before
            it. safetensors holds texts alone.
        config: The model's ``config.json``, for a folder; None keeps the one that is there.
        max_shard_bytes: Start a new file before this many bytes of tensors; only for a folder and for GGUF. None writes
            one file.
        lossy: Allow what can't be expressed exactly to be rounded or left out.
        resume: A text that says what is written: the next run with the same text resumes where a killed one ended.

    Returns:
        The file, or the index of the shards.

    Raises:
        CheckpointError: An argument is not what it must be, names collide, the files can't be written, or no installed
            plugin writes such. Nothing has changed then.
        DialectError: The dialect is unknown, or can't express a weight; the message names what.
        WeightError: A weight holds illegal numbers.
    """
    request = checkpoint.SaveRequest(
        dialect=dialect, dialects=dialects(), dense=dense, metadata=metadata, config=config,
        max_shard_bytes=max_shard_bytes, lossy=lossy, resume=resume,
    )  # fmt: skip
    writers = default_registry().items("q4_checkpoint_writers").values()
    return checkpoint.save_by(writers, path, weights, request, _plugin_states())


def _plugin_states() -> dict[str, str]:
    return {record.name: record.state for record in default_registry().records()}
