"""Opening checkpoints: the reader that knows the file, and the built-in one for safetensors."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q4core.checkpoint.access import open_regular, require_regular
from q4core.checkpoint.files import INDEX_SUFFIX, SUFFIX, FileSet, find_files, read_config
from q4core.checkpoint.opened import Checkpoint
from q4core.dialect import Problem, find_dialect, require_arguments
from q4core.dialects_simple import SIMPLE_DIALECTS
from q4core.errors import CheckpointError, DialectError, PluginError, Q4Error, Q4PluginWarning
from q4core.faults import said, where
from q4core.schema import Schema, detect_in, make_catalogue, problems_error, validate_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from q4core.checkpoint.source import CheckpointReader, CheckpointSource
    from q4core.dialect import Dialect, TensorInfo
    from q4core.weight import PackedWeight

__all__ = ["SafetensorsReader", "SafetensorsSource", "open_checkpoint"]

_HEAD_BYTES = 9


class SafetensorsSource:
    """An open safetensors checkpoint, in one file or several."""

    def __init__(self, files: FileSet, schema: Schema, dialects: Sequence[Dialect]) -> None:
        self._files = files
        self._dialects = dialects
        self.path = files.path
        self.metadata: Mapping[str, Any] = files.metadata
        self.schema = schema
        self.dense: Mapping[str, TensorInfo] = {name: files.infos[name] for name in schema.dense}

    def read(self, module: str) -> PackedWeight:
        """Return one layer, as views of the mapped files where the dialect's order allows."""
        layer = self.schema.layers[module]
        return find_dialect(layer.dialect, self._dialects).read(layer, self._files.load)

    def load(self, name: str) -> torch.Tensor:
        """Return one dense tensor as a view of its file."""
        return self._files.load(name)

    def close(self) -> None:
        """Let go of the files; tensors already given stay valid."""
        self._files.close()


class SafetensorsReader:
    """Opens safetensors files, indices of shards, and model folders.

    Args:
        dialects: The dialects to look for.
        dialect: Name of the dialect to prefer wherever the keys allow several.
        config: The model's ``config.json``; None looks for it beside the file.
    """

    name = "safetensors"

    def __init__(
        self,
        dialects: Iterable[Dialect] = SIMPLE_DIALECTS,
        *,
        dialect: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._dialects = tuple(dialects)
        self._dialect = dialect
        self._config = config

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a folder, or by its name or first bytes a safetensors file or an index."""
        try:
            if path.is_dir() or path.name.endswith((SUFFIX, INDEX_SUFFIX)):
                return True
            with open_regular(path) as file:
                return file.read(_HEAD_BYTES)[8:] == b"{"
        except (OSError, CheckpointError):
            return False

    def open(self, path: Path, *, options: Mapping[str, Any]) -> SafetensorsSource:
        """Open a checkpoint and decide how each of its layers is stored.

        Raises:
            CheckpointError: A file is missing or malformed.
            SchemaError: Anything is wrong with the layers; ``problems`` has everything at once.
            DialectError: The dialect's name, or an option's, is unknown.
        """
        files = find_files(path)
        config = self._config if self._config is not None else read_config(files.path.parent)
        catalogue = make_catalogue(files.infos, files.metadata, config, files.load, options, self._dialects)
        schema = detect_in(catalogue, self._dialects, self._dialect)
        if schema is None:
            asked = [Problem("dialect", "dialect", "one of the file, which has no 4-bit layer", self._dialect)]
            schema = Schema(dense=files.infos, problems=asked if self._dialect is not None else ())
        problems = validate_in(schema, catalogue, self._dialects)
        if problems:
            raise problems_error("checkpoint", problems, str(path), schema)
        return SafetensorsSource(files, schema, self._dialects)


def open_checkpoint(  # noqa: PLR0913  # the contract's arguments
    path: str | os.PathLike[str],
    *,
    dialect: str | None = None,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    readers: Iterable[CheckpointReader] = (),
    dialects: Iterable[Dialect] = SIMPLE_DIALECTS,
) -> Checkpoint:
    """Open a checkpoint as a lazy mapping of module names to packed weights.

    Headers and small side tensors are read, and every layer is checked by names, shapes and dtypes; a layer's numbers
    are read, and checked, when the layer is asked for.

    Args:
        path: A file, an index of shards, or a folder.
        dialect: Name of the dialect to prefer wherever the keys allow several.
        config: The model's ``config.json``; None looks for it beside the file.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.
        readers: Readers of further kinds of files.
        dialects: The dialects to look for in safetensors files.

    Raises:
        CheckpointError: No reader knows the file, or it is missing or malformed.
        SchemaError: Something is wrong with the layers; ``problems`` has everything at once.
        DialectError: The dialect's name, or an option's, is unknown.
        ConfigError: ``config`` or ``options`` is no mapping.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError("checkpoint", name="path", rule="a path", value=path)
    require_arguments({}, config=config, options=options)
    target = Path(path)
    known = tuple(dialects)
    require_regular(target, or_folder=True)  # before readers look: opening a pipe waits for who writes into it
    own = SafetensorsReader(known, dialect=dialect, config=config)
    reader = _reader_for(target, tuple(readers), own)
    try:
        source: CheckpointSource = reader.open(target, options=dict(options or {}))
    except Q4Error:
        raise
    except Exception as error:
        if reader is own:
            raise
        raise PluginError(
            f"checkpoint reader {reader.name!r}",
            name="open",
            rule="free of errors that are not q4core's own",
            value=said(error),
            where=str(target),
        ) from error
    if dialect is not None and reader is not own and dialect not in source.schema.dialects:
        source.close()
        raise DialectError(
            "checkpoint",
            name="dialect",
            rule=f"the file's own ({', '.join(source.schema.dialects) or 'none'})",
            value=dialect,
            where=str(target),
        )
    return Checkpoint(source)


def _reader_for(path: Path, readers: Sequence[CheckpointReader], own: SafetensorsReader) -> CheckpointReader:
    """Return the one reader that knows a file; the built-in one is asked last."""
    fitting = [reader for reader in readers if _recognises(reader, path)]
    if not fitting and own.recognises(path):
        fitting = [own]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(reader.name for reader in fitting or (*readers, own))
    raise CheckpointError(
        "checkpoint",
        name="file",
        rule="one that exactly one reader knows",
        value=names if fitting else f"none of {names}",
        where=str(path),
    )


def _recognises(reader: CheckpointReader, path: Path) -> bool:
    try:
        return reader.recognises(path)
    except Exception as error:  # noqa: BLE001  # the plugin boundary
        message = (
            f"checkpoint reader {reader.name!r} raised {type(error).__name__} and is left out: {error}{where(error)}"
        )
        warnings.warn(Q4PluginWarning(message), stacklevel=4)
        return False
