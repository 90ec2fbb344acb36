"""The C library's heap, for as long as memory is measured: what is large comes from the system and goes back to it.

Resident memory says little about one call of a process that has run for long. glibc serves a block of megabytes from
memory that was freed before, and keeps its pages afterwards; of many freed pieces of one size it takes the oldest
first, so that a loop that holds one small buffer at a time touches all of them, and pages that had been given back to
the system become resident one after the other. Neither is what the call holds.

So while memory is measured, each block of ``LARGE_BYTES`` or more is a mapping of its own, as in a young process: it
is resident while it is held, and no longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE_BYTES = 1 << 17
"""glibc's own threshold when a process starts; each large block that is freed raises it."""
_HIGHEST_BYTES = 1 << 25
"""As far as glibc itself raises it; there it is left, because what it was can't be asked."""
_M_MMAP_THRESHOLD = -3
_IS_MAPPED = 2
"""The flag of a mapping of its own, in the word before a block of glibc's."""
_MOST_BLOCKS = 1 << 15


def _glibc() -> Any:
    """Return the C library where it is glibc, else None."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library


def _fill(library: Any) -> list[int]:
    """Take every free piece of the heap that could hold a large block, untouched, and return the blocks."""
    blocks: list[int] = []
    while len(blocks) < _MOST_BLOCKS:
        block = library.malloc(LARGE_BYTES)
        if not block:
            break
        blocks.append(block)
        if ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MAPPED:
            break
    return blocks


@contextlib.contextmanager
def own_mappings() -> Iterator[None]:
    """Let large blocks be mappings of their own in this thread, where the C library can; elsewhere change nothing."""
    library = _glibc()
    if library is None or library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) != 1:
        yield
        return
    blocks = _fill(library)
    try:
        yield
    finally:
        for block in blocks:
            library.free(block)
        library.mallopt(_M_MMAP_THRESHOLD, _HIGHEST_BYTES)
