"""Where a checkpoint goes, and under which names."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from q4_safetensors.files import INDEX_SUFFIX, SUFFIX, read_index
from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["INDEX", "SINGLE", "Target", "is_target"]

_STEM = "model"
SINGLE = f"{_STEM}{SUFFIX}"
"""Name of a folder's only file of tensors."""
INDEX = f"{_STEM}{INDEX_SUFFIX}"
"""Name of the index of a folder's shards."""
_FILE_SUFFIXES = frozenset({".gguf", ".bin", ".pt", ".pth", ".json", ".st", ".npz"})


def is_target(path: Path) -> bool:
    """Return whether a path is a safetensors file's or a folder's, by its name or by what is there."""
    if path.is_dir() or path.name.endswith(SUFFIX):
        return True
    return path.suffix not in _FILE_SUFFIXES and not path.exists()


@attrs.frozen
class Target:
    """Where a checkpoint goes: one file of a folder, or the folder."""

    folder: Path
    file: Path | None
    config: Mapping[str, Any] | None
    max_shard_bytes: int | None

    @classmethod
    def at(cls, path: Path, *, config: Mapping[str, Any] | None, max_shard_bytes: int | None) -> Target:
        """Return what a path means.

        Raises:
            CheckpointError: An argument is not legal, or fits a folder only.
        """

        def fail(name: str, rule: str, value: object) -> NoReturn:
            raise CheckpointError("save_checkpoint", name=name, rule=rule, value=value, where=str(path))

        if max_shard_bytes is not None and not (isinstance(max_shard_bytes, int) and max_shard_bytes > 0):
            fail("max_shard_bytes", "a positive integer", max_shard_bytes)
        if path.is_dir() or not path.name.endswith(SUFFIX):
            return cls(path, None, config, max_shard_bytes)
        if config is not None or max_shard_bytes is not None:
            fail("path", "a folder, where config or max_shard_bytes is given", path.name)
        return cls(path.parent, path, None, None)

    def members(self) -> Iterator[Path]:
        """Yield the files of the checkpoint that the folder holds under the usual names."""
        single, index = self.folder / SINGLE, self.folder / INDEX
        if single.is_file():
            yield single
        if index.is_file():
            yield index
            try:
                yield from (self.folder / shard for shard in set(read_index(index).values()))
            except CheckpointError:
                return  # a broken index gives its shards away to nobody

    def free_names(self, count: int) -> list[str]:
        """Return names for shards that no file of the folder has, so that an old index never finds a new shard."""
        stem = _STEM
        while True:
            names = [f"{stem}-{index:05d}-of-{count:05d}{SUFFIX}" for index in range(1, count + 1)]
            if not any((self.folder / name).exists() for name in names):
                return names
            stem = f"{_STEM}-{secrets.token_hex(4)}"
