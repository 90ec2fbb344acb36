"""``Form``: the content that a segment is made for, and the header that states it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_actors.tensors.arguments import MutableMode
from q4core import LifecycleError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CAUSE", "CLOSED", "CURRENT", "MAX_RANK", "MAX_SLOTS", "PAGE", "ROWS", "START", "TAINTED", "WRITER", "Form"]

MAGIC = b"q4mutabl"
LAYOUT = 4
ROWS, ROW_BYTES = 256, 64
"""Number of handles whose holds are recorded, each on its own cache line, and the bytes of each."""
PAGE = 4096  # also where pages are larger: what matters is that no two slots share a cache line
START = PAGE + ROWS * ROW_BYTES
FORM = struct.Struct("8s6q16s32q")
MAX_RANK = 32
MAX_SLOTS = 64

# Words of the header that change; ``native/src/cells.hpp`` has the others. All stores are of whole, aligned words.
CURRENT = 64
"""Version and state: ``version << 8 | low``; ``low`` is the slot (VERSIONED) or the state (IN_PLACE)."""
CLOSED, TAINTED = 72, 73
"""Whether the maker closed it; and, VERSIONED, 1 + the version that was changed outside ``write()``."""
WRITER = 96
"""The process that writes, or wrote last."""
CAUSE = slice(1024, 1536)
"""Bytes: words 128 … 191."""


@attrs.frozen
class Form:
    """The content that a segment is made for.

    Args:
        mode: How updates and readers are isolated from each other.
        dtype: Of the tensor.
        shape: Of the tensor.
        slots: How many copies of the content there is room for.
    """

    mode: MutableMode
    dtype: torch.dtype
    shape: tuple[int, ...]
    slots: int

    @property
    def content_bytes(self) -> int:
        """Size of one content."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def stride(self) -> int:
        """Bytes from slot to slot."""
        return -(-self.content_bytes // PAGE) * PAGE

    @property
    def total(self) -> int:
        """Size of the file."""
        return START + self.slots * self.stride

    def pack(self) -> bytes:
        """Return the header that says so."""
        shape = (*self.shape, *(0,) * (MAX_RANK - len(self.shape)))
        mode = list(MutableMode).index(self.mode)
        numbers = (LAYOUT, mode, self.slots, self.stride, self.content_bytes, len(self.shape))
        return FORM.pack(MAGIC, *numbers, str(self.dtype).removeprefix("torch.").encode(), *shape)

    @classmethod
    def unpack(cls, label: str, header: bytes, size: int) -> Self:
        """Return what a header says, once all of it has been checked."""

        def check(name: str, rule: str, value: object, *, holds: bool) -> None:
            if not holds:
                hint = "Attach to a segment that this version of q4-actors made."
                raise LifecycleError(f"segment of {label}", name=name, rule=rule, value=value, hint=hint)

        check("size", f"{PAGE} bytes or more", size, holds=len(header) >= PAGE)
        magic, layout, mode, slots, stride, content_bytes, rank, name, *shape = FORM.unpack_from(header)
        check("magic", repr(MAGIC), magic, holds=magic == MAGIC)
        check("layout", f"number {LAYOUT}", layout, holds=layout == LAYOUT)
        check("mode", "0 or 1", mode, holds=mode in {0, 1})
        check("rank", f"0 … {MAX_RANK}", rank, holds=0 <= rank <= MAX_RANK)
        check("shape", "0 or more everywhere", shape[:rank], holds=all(length >= 0 for length in shape[:rank]))
        dtype: Any = getattr(torch, name.rstrip(b"\0").decode("ascii", "replace"), None)
        check("dtype", "one of torch's", name, holds=isinstance(dtype, torch.dtype))
        legal = (1, 1) if mode else (3, MAX_SLOTS)
        check("slots", f"{legal[0]} … {legal[1]}", slots, holds=legal[0] <= slots <= legal[1])
        form = cls(list(MutableMode)[mode], dtype, tuple(shape[:rank]), slots)
        check("slot size", f"{form.stride} bytes", stride, holds=stride == form.stride)
        check("content size", f"{form.content_bytes} bytes", content_bytes, holds=content_bytes == form.content_bytes)
        check("size", f"{form.total} bytes", size, holds=size == form.total)
        (word,) = struct.unpack_from("q", header, CURRENT * 8)
        check("current word", "legal", word, holds=word >= 0 and (word & 255) < max(slots, 3))
        return form
