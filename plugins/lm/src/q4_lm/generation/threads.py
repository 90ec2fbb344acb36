"""How many threads torch's operations take, in the thread that calls and in no other one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["one_thread", "set_threads"]


@functools.cache
def _set_of_openmp() -> Callable[[int], object] | None:
    """Return OpenMP's own function, which torch has loaded; None where torch runs without it."""
    if sys.platform == "win32" or not torch.backends.openmp.is_available():
        return None
    found: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    return found


def set_threads(count: int) -> None:
    """Set ``torch.get_num_threads()`` of the calling thread; nothing happens where OpenMP can't be asked.

    ``torch.set_num_threads`` would set that of threads which begin later, too.
    """
    if (set_count := _set_of_openmp()) is not None:
        set_count(count)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operations inside the block run on the calling thread alone.

    An operation on the logits of a token takes microseconds, and milliseconds where another thread is waited for on a
    core that has something else to do.
    """
    count = torch.get_num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(count)
