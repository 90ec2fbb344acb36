"""GGUF files in vLLM, which reads folders: one with config, tokenizer, what is dense, and a link to the file."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

import q4core as q4

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GgufFolder", "make_folder", "open_folder", "source_of"]

_WHAT = "a GGUF file for vLLM"
_LINK, _DENSE = "model.gguf", "model.safetensors"


class GgufFolder(Mapping[str, q4.PackedWeight]):
    """The packed weights of a GGUF file, as the model of a folder has them: its names, and its order of rows.

    Args:
        path: The folder; ``model.gguf`` in it is the file.

    Raises:
        CheckpointError: As ``q4_lm.exchange.gguf_to_hf.to_hf_folder``.
        ConfigError: q4-lm is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = q4.open(path / _LINK)
        try:
            found = _folder_of(self._file)
            self._weights: Mapping[str, q4.PackedWeight] = found.weights
            self.dense = found.dense
            layers = self._file.schema.layers
            own = {name: attrs.evolve(layers[stored], keys={}) for name, stored in found.stored.items()}
            self.schema = attrs.evolve(self._file.schema, layers=own)
        except BaseException:
            self._file.close()
            raise

    def __getitem__(self, name: str) -> q4.PackedWeight:
        """Return a layer's weight."""
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the layers' names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._weights)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> GgufFolder:  # noqa: PYI034  # Self needs Python 3.11
        """Return the weights."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


def _folder_of(checkpoint: q4.Checkpoint) -> Any:
    """Return q4-lm's ``HfFolder``; the package is asked for here alone."""
    try:
        exchange = importlib.import_module("q4_lm.exchange.gguf_to_hf")
    except ModuleNotFoundError as error:
        hint = "pip install q4-lm"
        raise q4.ConfigError(_WHAT, name="package", rule="q4-lm", value="none", hint=hint) from error
    return exchange.to_hf_folder(checkpoint, for_engine=True)


def open_folder(folder: Path) -> q4.Checkpoint | GgufFolder:
    """Return the packed weights of a folder: of the GGUF file that it links to, or of its own.

    Raises:
        CheckpointError, SchemaError: As a file or folder that can't be read raises them.
    """
    return q4.open(folder) if source_of(folder) == folder else GgufFolder(folder)


def source_of(folder: Path) -> Path:
    """Return where a folder's packed weights are: the GGUF file that it links to, or the folder."""
    link = folder / _LINK
    return link.resolve() if link.is_symlink() or link.exists() else folder


def make_folder(file: Path, folder: Path) -> Path:
    """Make the folder that vLLM serves of a GGUF file, and return it.

    It has ``config.json``, the tokenizer, what is dense (the embedding too, in which rows are looked up) and a symbolic
    link to the file, which must stay where it is. A head that shares the embedding's matrix stays packed.

    Args:
        file: The GGUF file.
        folder: One that is not there yet.

    Raises:
        CheckpointError: The folder is there, the file can't be read, or transformers has no such model.
        ConfigError: q4-lm is not installed.
    """
    save_file = importlib.import_module("safetensors.torch").save_file
    if folder.exists():
        raise q4.CheckpointError(_WHAT, name="folder", rule="not there yet", value=str(folder), where=str(file))
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    with q4.open(file) as checkpoint:
        found = _folder_of(checkpoint)
        partial.mkdir(parents=True)
        try:
            save_file(
                {name: found.dense[name].contiguous() for name in found.dense}, partial / _DENSE, {"format": "pt"}
            )
            files: dict[str, Any] = {**found.files, "config.json": json.dumps(dict(found.config), indent=2) + "\n"}
            for name, text in files.items():
                (partial / name).write_text(text, encoding="utf-8")
            (partial / _LINK).symlink_to(file.resolve())
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder
