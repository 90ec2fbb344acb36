"""``Stored``: the temporary file with the bytes of tensors, and a journal by which the next writer can resume.

Bytes are written first, then a line that describes them. The next writer of the same checks the digest of each line. It
resumes behind the last one that holds.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import json
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import torch

__all__ = ["Piece", "Stored"]

_CHUNK_BYTES = 1 << 22
_DIGEST_BYTES = 16


@attrs.frozen(kw_only=True)
class Piece:
    """The bytes of one layer or dense tensor.

    Args:
        name: The layer's or tensor's name.
        is_layer: Whether it is a layer.
        type_name: ggml's name of the type.
        shape: Sizes, slowest first.
        position: First byte in the temporary file.
        nbytes: How many there are.
        factor: A layer's global scale.
        digest: Of the bytes, where there is a journal.
    """

    name: str
    is_layer: bool
    type_name: str
    shape: tuple[int, ...] = attrs.field(converter=tuple[int, ...])
    position: int = 0
    nbytes: int = 0
    factor: float | None = None
    digest: str = ""


class Stored:
    """The temporary file.

    Args:
        folder: Where it is; all else in the folder is removed.
        is_noted: Whether there is a journal.
    """

    def __init__(self, folder: Path, *, is_noted: bool) -> None:
        data, journal = folder / "data", folder / "journal.jsonl"
        for path in folder.iterdir():
            if path not in {data, journal}:
                path.unlink()
        self.data = data.open("rb+" if data.is_file() else "xb+")
        found = [*self._checked(journal)] if is_noted else []
        self._done = collections.deque(found)
        self.nbytes = 0
        if is_noted:
            journal.write_text("".join(f"{_line(piece)}\n" for piece in found), encoding="utf-8")
        self._journal = journal.open("a", encoding="utf-8") if is_noted else None

    def _checked(self, journal: Path) -> Iterator[Piece]:
        """Yield the pieces of a killed writer that hold, in order."""
        lines = journal.read_text(encoding="utf-8", errors="replace").splitlines() if journal.is_file() else []
        for line in lines:
            try:
                piece = Piece(**json.loads(line))
            except (ValueError, TypeError):
                return  # it was cut off
            self.data.seek(piece.position)
            digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            left = piece.nbytes
            while left and (part := self.data.read(min(left, _CHUNK_BYTES))):
                digest.update(part)
                left -= len(part)
            if left or digest.hexdigest() != piece.digest:
                return
            yield piece

    def adopt(self, name: str, *, is_layer: bool) -> Piece | None:
        """Return a piece as a killed writer stored it; None from the first one on that it did not."""
        if self._done and (self._done[0].name, self._done[0].is_layer) == (name, is_layer):
            piece = self._done.popleft()
            self.nbytes = piece.position + piece.nbytes
            return piece
        self._done.clear()
        return None

    def append(self, chunks: Iterable[torch.Tensor]) -> tuple[int, int, str]:
        """Write bytes, and return where they begin, how many they are, and their digest where there is a journal."""
        start = self.nbytes
        self.data.seek(start)
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for chunk in chunks:
            size = chunk.numel() * chunk.element_size()
            # The bytes of the tensor as they lie in memory; torch offers no buffer.
            view = memoryview((ctypes.c_char * size).from_address(chunk.data_ptr()))
            self.data.write(view)
            if self._journal is not None:
                digest.update(view)
            self.nbytes += size
        return start, self.nbytes - start, digest.hexdigest()

    def note(self, piece: Piece) -> None:
        """Note what was written, for the next writer."""
        if self._journal is not None:
            self.data.flush()
            self._journal.write(f"{_line(piece)}\n")
            self._journal.flush()

    def close(self) -> None:
        """Close the files."""
        self.data.close()
        if self._journal is not None:
            self._journal.close()


def _line(piece: Piece) -> str:
    return json.dumps(attrs.asdict(piece))
