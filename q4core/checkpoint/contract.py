"""The contract of readers and writers of checkpoint files, which plugins bring by file type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from q4core.schema import Dialect, Schema, TensorInfo
    from q4core.weight import PackedWeight


@attrs.frozen(kw_only=True)
class OpenRequest:
    """How a checkpoint is to be opened.

    Args:
        dialects: The dialects to look for, where the file type does not decide.
        dialect: Name of the dialect to prefer wherever the keys allow several.
        config: The model's ``config.json``; None looks for it next to the file.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.
        copy: Read tensors into memory, and keep no mapping of the file.
    """

    dialects: tuple[Dialect, ...] = ()
    dialect: str | None = None
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None
    copy: bool = False


@attrs.frozen(kw_only=True)
class SaveRequest:
    """What is to be saved besides the weights, and how; see ``q4core.save_checkpoint``."""

    dialect: str
    dialects: tuple[Dialect, ...]
    dense: Mapping[str, torch.Tensor] | None = None
    metadata: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    max_shard_bytes: int | None = None
    lossy: bool = False
    resume: str | None = None


@runtime_checkable
class CheckpointSource(Protocol):
    """One open file, or several that belong together. Opening reads headers and small side tensors only.

    Where ``read`` computes codes, a source may have ``peek(module)``: the same facts, over codes of any one row.
    """

    @property
    def path(self) -> Path:
        """What was opened."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The header's metadata by key."""

    @property
    def schema(self) -> Schema:
        """The layers, the dense tensors, and what can be listed but not read."""

    @property
    def dense(self) -> Mapping[str, TensorInfo]:
        """dtype and shape of each tensor in ``schema.dense``, as ``load`` would give it."""

    def read(self, module: str) -> PackedWeight:
        """Return one layer of ``schema.layers``, as views of the mapped file where possible."""

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor of ``schema.dense``, as a view of the mapped file where possible."""

    def close(self) -> None:
        """Close the file; tensors already given stay valid."""


@runtime_checkable
class CheckpointReader(Protocol):
    """Opens one kind of file. Readers come from plugins through the hook ``q4_checkpoint_readers``."""

    @property
    def name(self) -> str:
        """A unique name, such as ``"gguf"``."""

    def recognises(self, path: Path) -> bool:
        """Return whether the file is of this kind, by its first bytes; cheap, and never raises for odd files."""

    def open(self, path: Path, request: OpenRequest) -> CheckpointSource:
        """Open a file that ``recognises`` took.

        Raises:
            CheckpointError: The file is malformed; the message names file, key, rule and value.
        """


@runtime_checkable
class CheckpointWriter(Protocol):
    """Writes one kind of file. Writers come from plugins through the hook ``q4_checkpoint_writers``."""

    @property
    def name(self) -> str:
        """A unique name, such as ``"safetensors"``."""

    def accepts(self, path: Path) -> bool:
        """Return whether a file or folder of that name is of this kind; it need not be there."""

    def write(self, path: Path, weights: Mapping[str, PackedWeight], request: SaveRequest) -> Path:
        """Write a checkpoint, all of it or nothing, and return the file that opens it.

        Raises:
            CheckpointError, DialectError, WeightError: As ``q4core.save_checkpoint``.
        """
