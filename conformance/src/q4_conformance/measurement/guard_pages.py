"""Tensors that end where readable memory ends, so that a read past their end kills the process."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

from q4_conformance.outcome import NotTestableError

_FORBIDDEN = 0
_ALLOWED = 3  # reading and writing


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if not all(hasattr(library, name) for name in ("mmap", "munmap", "mprotect")):
        raise NotTestableError("this system has no mprotect")
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def on_last_page(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU copy whose last byte is the last one before a page that is not accessible.

    Raises:
        NotTestableError: The system has no such pages.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return tensor
    library = _library()
    page = mmap.PAGESIZE
    readable = -(-size // page) * page
    start = library.mmap(None, readable + page, _ALLOWED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if start in {None, ctypes.c_void_p(-1).value} or library.mprotect(start + readable, page, _FORBIDDEN):
        raise NotTestableError("no page could be taken away")
    area = (ctypes.c_uint8 * size).from_address(start + readable - size)
    weakref.finalize(area, library.munmap, start, readable + page).atexit = False
    placed = torch.frombuffer(area, dtype=tensor.dtype).view(tensor.shape)  # which keeps the area
    return placed.copy_(tensor)
