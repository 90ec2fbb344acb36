"""``Cursor``: reads little-endian numbers and texts from a mapped file, each checked against the file's end first."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NoReturn

from q4core import CheckpointError

if TYPE_CHECKING:
    from mmap import mmap

__all__ = ["Cursor"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a mapped file that never leaves it.

    Args:
        data: The file's bytes.
        where: The file's name, for messages.
        what: What is being read, for messages.
    """

    def __init__(self, data: mmap | bytes, *, where: str, what: str) -> None:
        self.data: Any = data
        self.size = len(self.data)
        self.where = where
        self.what = what
        self.position = 0

    @property
    def left(self) -> int:
        """Bytes from the position to the end of the file."""
        return self.size - self.position

    def fail(self, name: str, rule: str, value: object, hint: str | None = None) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file, the field, the rule and the value."""
        raise CheckpointError(self.what, name=name, rule=rule, value=value, where=self.where, hint=hint)

    def skip(self, count: int, name: str) -> int:
        """Step over ``count`` bytes and return the position before them.

        Raises:
            CheckpointError: The file ends before.
        """
        if count > self.left:
            self.fail(
                name,
                f"at most {self.left} bytes long (the rest of the file)",
                count,
                "Copy or download it again: the file is truncated or damaged.",
            )
        start = self.position
        self.position += count
        return start

    def unpack(self, kind: struct.Struct, name: str) -> Any:
        """Return the one number of a ``struct`` format."""
        return kind.unpack_from(self.data, self.skip(kind.size, name))[0]

    def u32(self, name: str) -> int:
        """Return an unsigned 32-bit number."""
        value: int = self.unpack(_U32, name)
        return value

    def u64(self, name: str) -> int:
        """Return an unsigned 64-bit number."""
        value: int = self.unpack(_U64, name)
        return value

    def text(self, name: str, limit: int) -> str:
        """Return a UTF-8 text that is stored after its length (unsigned, 64 bits).

        Args:
            name: The field's name, for messages.
            limit: The greatest legal number of bytes.

        Raises:
            CheckpointError: It is longer than the limit or the file, or it is not UTF-8.
        """
        length = self.u64(f"length of {name}")
        if length > limit:
            self.fail(f"length of {name}", f"at most {limit}", length, "The file is damaged.")
        start = self.skip(length, name)
        raw = bytes(self.data[start : start + length])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(name, "UTF-8", raw[:64])
