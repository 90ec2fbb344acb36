"""Target of a checkpoint: its folder and its file names."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NoReturn

import attrs

from q4_safetensors.files import INDEX_SUFFIX, SUFFIX, read_index
from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from q4core import SaveRequest

__all__ = ["FOREIGN_SUFFIXES", "INDEX", "SINGLE", "Target"]

_STEM = "model"
SINGLE = f"{_STEM}{SUFFIX}"
"""Name of a folder's only file of tensors."""
INDEX = f"{_STEM}{INDEX_SUFFIX}"
"""Name of the index of a folder's shards."""
FOREIGN_SUFFIXES = frozenset({".gguf", ".bin", ".pt", ".pth", ".json", ".st", ".npz"})  # no folder's


@attrs.frozen
class Target:
    """Where a checkpoint goes: one file of a folder, or the folder."""

    folder: Path
    file: Path | None

    @classmethod
    def of(cls, path: Path, request: SaveRequest) -> Target:
        """Return what a path means.

        Raises:
            CheckpointError: ``max_shard_bytes`` is not legal, or an argument fits a folder only.
        """

        def fail(name: str, rule: str, value: object) -> NoReturn:
            raise CheckpointError("save_checkpoint", name=name, rule=rule, value=value, where=str(path))

        for key, text in (request.metadata or {}).items():
            if not isinstance(text, str):
                fail(f"metadata[{key!r}]", "a text, as safetensors holds no other values", text)
        limit = request.max_shard_bytes
        if limit is not None and not (isinstance(limit, int) and limit > 0):
            fail("max_shard_bytes", "a positive integer", limit)
        if path.is_dir() or not path.name.endswith(SUFFIX):
            return cls(path, None)
        if request.config is not None or limit is not None:
            fail("path", "a folder, where config or max_shard_bytes is given", path.name)
        return cls(path.parent, path)

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
                return  # a broken index is no proof that its shards may be replaced

    def free_names(self, count: int) -> list[str]:
        """Return names for shards that no file of the folder has, so that an old index never finds a new shard."""
        stem = _STEM
        while True:
            names = [f"{stem}-{index:05d}-of-{count:05d}{SUFFIX}" for index in range(1, count + 1)]
            if not any((self.folder / name).exists() for name in names):
                return names
            stem = f"{_STEM}-{secrets.token_hex(4)}"
