"""What a reader of checkpoint files is: it recognises a file, opens it, and gives one layer or tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from q4core.dialect import TensorInfo
    from q4core.schema import Schema
    from q4core.weight import PackedWeight

__all__ = ["CheckpointReader", "CheckpointSource"]


@runtime_checkable
class CheckpointSource(Protocol):
    """One open file, or several that belong together. Opening reads headers and small side tensors only."""

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
        """Let go of the file; tensors already given stay valid."""


@runtime_checkable
class CheckpointReader(Protocol):
    """Opens one kind of file. Readers come from plugins through the hook ``q4_checkpoint_readers``."""

    @property
    def name(self) -> str:
        """A unique name, such as ``"gguf"``."""

    def recognises(self, path: Path) -> bool:
        """Return whether the file is of this kind, by its first bytes; cheap, and never raises for odd files."""

    def open(self, path: Path, *, options: Mapping[str, Any]) -> CheckpointSource:
        """Open a file that ``recognises`` took.

        Raises:
            CheckpointError: The file is malformed; the message names file, key, rule and value.
        """
