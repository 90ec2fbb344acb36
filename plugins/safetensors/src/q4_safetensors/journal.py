"""``Journal``: what a writer has stored so far, a line for each layer or tensor, so that the next one can resume.

A line is written once its bytes are. The next writer checks every byte against its digest, drops all from the first
line on that does not hold, and resumes there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import TensorInfo, WrittenLayer

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["DIGEST_BYTES", "Entry", "Journal"]

DIGEST_BYTES = 16
_FINISHED = "finished"


@attrs.frozen
class Entry:
    """A layer, or another tensor, that is stored.

    Args:
        name: The module's name, or the tensor's.
        shard: Number of the file that has it, from 0.
        tensors: Name → dtype, shape and digest.
        metadata: What the dialect has of it for the header; None for a tensor that is no layer's.
        spec: A layer's layout, as JSON.
    """

    name: str
    shard: int
    tensors: dict[str, tuple[str, list[int], str]]
    metadata: dict[str, str] | None = None
    spec: str = ""

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """dtype and shape of each tensor."""
        return {key: TensorInfo(getattr(torch, dtype), shape) for key, (dtype, shape, _) in self.tensors.items()}

    @property
    def layer(self) -> WrittenLayer:
        """What the dialect wrote, without its tensors."""
        return WrittenLayer(tensors={}, metadata=self.metadata or {})


class Journal:
    """The journal of one folder of temporary files.

    Args:
        folder: The folder; what it holds of a killed writer is checked, and what does not hold is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "journal.jsonl"
        self.entries: list[Entry] = []
        lines = self._checked()
        self._path.write_text("".join(lines), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, entry: Entry) -> None:
        """Note what was stored."""
        self._write(json.dumps(attrs.asdict(entry)))

    def finish(self, shard: int) -> None:
        """Note that a file is complete."""
        self._write(json.dumps({_FINISHED: shard, "digest": _digest_of(self._folder / f"{shard}.safetensors")}))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _checked(self) -> list[str]:
        """Return the lines that hold, with ``entries`` filled; files that no line describes are removed."""
        found: list[tuple[str, dict[str, Any]]] = []
        with contextlib.suppress(OSError, ValueError):  # no journal, or its last line was cut off
            stored = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            found.extend((line, json.loads(line)) for line in stored)
        complete = {facts[_FINISHED]: facts["digest"] for _, facts in found if _FINISHED in facts}
        whole = {shard for shard, digest in complete.items() if self._is_whole(shard, digest)}
        lines, used = [], set()
        opened: dict[int, BinaryIO] = {}
        try:
            for line, facts in found:
                if _FINISHED in facts:
                    if facts[_FINISHED] in whole:
                        lines.append(line)
                    continue
                entry = Entry(**facts)
                if entry.shard not in whole and not self._holds(entry, opened):
                    break
                used.add(entry.shard)
                self.entries.append(entry)
                lines.append(line)
        finally:
            for file in opened.values():
                file.close()
        needed = {f"{shard}.safetensors" for shard in used & whole} | {f"{shard}.data" for shard in used - whole}
        for path in self._folder.iterdir():
            if path.name not in needed | {self._path.name}:
                path.unlink()
        return [line for line in lines if json.loads(line).get(_FINISHED, -1) in used | {-1}]

    def _is_whole(self, shard: int, digest: str) -> bool:
        path = self._folder / f"{shard}.safetensors"
        return path.is_file() and _digest_of(path) == digest

    def _holds(self, entry: Entry, opened: dict[int, BinaryIO]) -> bool:
        """Return whether the next bytes of a shard's data are an entry's."""
        path = self._folder / f"{entry.shard}.data"
        if entry.shard not in opened:
            if not path.is_file():
                return False
            opened[entry.shard] = path.open("rb")
        sizes = {key: info.nbytes for key, info in entry.infos.items()}
        return all(
            _digest_next(opened[entry.shard], sizes[key]) == digest for key, (_, _, digest) in entry.tensors.items()
        )


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return _digest_next(file, path.stat().st_size)


def _digest_next(file: BinaryIO, size: int) -> str:
    """Return the digest of a file's next bytes; nothing of it stays in memory."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    while size > 0 and (part := file.read(min(size, 1 << 22))):
        digest.update(part)
        size -= len(part)
    return digest.hexdigest() if not size else ""
