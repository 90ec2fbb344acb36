"""``Reader`` plugin: opens safetensors files, indices of shards, and model folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_safetensors.files import INDEX_SUFFIX, SUFFIX, FileSet, find_files
from q4core import CheckpointError, TensorInfo
from q4core.plugin_api import dialect_of, find_layers, open_regular, read_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from q4core import Dialect, OpenRequest, PackedWeight, Schema

__all__ = ["SafetensorsReader", "SafetensorsSource"]

_HEAD_BYTES = 9


class SafetensorsSource:
    """An open safetensors checkpoint, in one file or several."""

    def __init__(self, files: FileSet, schema: Schema, dialects: Sequence[Dialect]) -> None:
        self._files = files
        self._dialects = dialects
        self.path = files.path
        self.metadata: Mapping[str, Any] = files.metadata
        self.schema = schema
        self.dense: Mapping[str, TensorInfo] = {
            name: TensorInfo(torch.bfloat16, files.infos[name].shape) if name in schema.decoded else files.infos[name]
            for name in schema.dense
        }

    def read(self, module: str) -> PackedWeight:
        """Return one layer, as views of the mapped files where the dialect's order allows."""
        layer = self.schema.layers[module]
        return dialect_of(layer, self._dialects).read(layer, self._files.load)

    def load(self, name: str) -> torch.Tensor:
        """Return one dense tensor as a view of its file; one in FP8 is decoded."""
        layer = self.schema.decoded.get(name)
        if layer is None:
            return self._files.load(name)
        return dialect_of(layer, self._dialects).read_dense(layer, self._files.load)

    def close(self) -> None:
        """Release the files; tensors already returned stay valid."""
        self._files.close()


class SafetensorsReader:
    """Opens safetensors files, indices of shards, and model folders."""

    name = "safetensors"

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a folder, or by its name or first bytes a safetensors file or an index."""
        try:
            if path.is_dir() or path.name.endswith((SUFFIX, INDEX_SUFFIX)):
                return True
            with open_regular(path) as file:
                return file.read(_HEAD_BYTES)[8:] == b"{"
        except (OSError, CheckpointError):
            return False

    def open(self, path: Path, request: OpenRequest) -> SafetensorsSource:
        """Open a checkpoint and decide how each of its layers is stored.

        Raises:
            CheckpointError: A file is missing or malformed.
            SchemaError: Anything is wrong with the layers; ``problems`` has everything at once.
            DialectError: The dialect's name, or an option's, is unknown.
        """
        files = find_files(path, copy=request.copy)
        config = request.config if request.config is not None else read_config(files.path.parent)
        schema = find_layers(
            files.infos, request, metadata=files.metadata, config=config, load=files.load_small, path=path
        )
        return SafetensorsSource(files, schema, request.dialects)
