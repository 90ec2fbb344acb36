"""Yardsticks of the machine, measured in the same run: reading memory, and dense products."""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.candidate import YARDSTICK, Calls, Candidate
from benchmarks.problem import rotation_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READER", "candidates", "products"]

READER = "read"
"""The format of every reader."""
_WINDOWS = 4
"""Readers go round as many parts of memory: what the cache keeps of one is gone before its turn comes again. Reading
three caches' worth over and over is 13 % faster than memory is."""
_SIDE = 1536
_WORD = 0x3F3F3F3F3F3F3F3F  # no subnormal number, and equal bytes: memcmp finds two equal halves
_ABSENT = 7


@functools.cache
def _windows() -> tuple[torch.Tensor, ...]:
    """Return memory that was written, so that it is not one page of zeros, in parts of ``rotation_bytes`` each."""
    words = rotation_bytes() // 8
    whole = torch.full((_WINDOWS * words,), _WORD, dtype=torch.int64)
    return tuple(whole[start : start + words] for start in range(0, whole.numel(), words))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=torch.get_num_threads())


def _split(read: Callable[[int, int], object], threads: int, size: int) -> Callable[[], object]:
    """Return a call of ``read(start, length)`` over parts of a window, one to a thread."""
    part = size // threads // 64 * 64
    parts = [(index * part, part) for index in range(threads)]
    if threads == 1:
        return functools.partial(read, *parts[0])

    def all_parts() -> None:
        waiting = [_threads().submit(read, *item) for item in parts[1:]]
        read(*parts[0])
        for future in waiting:
            future.result()

    return all_parts


def _readers(window: torch.Tensor) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Return what makes each reader of a window, for a number of threads."""
    size, address = window.numel() * 8, window.data_ptr()
    floats, array = window.view(torch.float32), window.numpy()
    libc: Any = ctypes.CDLL(None)
    libc.memchr.argtypes, libc.memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    half = size // 2

    def numpy_sum(start: int, length: int) -> object:
        return array[start // 8 : (start + length) // 8].sum()

    def memchr(start: int, length: int) -> None:
        if libc.memchr(address + start, _ABSENT, length):
            raise SystemExit("memchr stopped early, so it measures nothing")

    def memcmp(start: int, length: int) -> None:
        if libc.memcmp(address + start, address + half + start, length):
            raise SystemExit("memcmp stopped early, so it measures nothing")

    return {
        "torch sum int64": lambda _: window.sum,
        "torch amax int64": lambda _: window.amax,
        "torch dot float32": lambda _: functools.partial(torch.dot, floats, floats),
        "torch amax float32": lambda _: floats.amax,
        "numpy sum int64": lambda threads: _split(numpy_sum, threads, size),
        "libc memchr": lambda threads: _split(memchr, threads, size),
        "libc memcmp": lambda threads: _split(memcmp, threads, half),
    }


def candidates() -> list[Candidate]:
    """Return the readers; the best of them is the read bandwidth."""
    windows = [_readers(window) for window in _windows()]

    def made(name: str) -> Callable[[torch.Tensor, int, bool], Calls]:
        return lambda _, threads, __: Calls([readers[name](threads) for readers in windows])

    return [
        Candidate(
            name=f"read: {name}",
            library="numpy and libc" if name.startswith(("numpy", "libc")) else "torch",
            role=YARDSTICK,
            format=READER,
            precision="none",
            weight_bytes=rotation_bytes() // 8 * 8,
            make=made(name),
        )
        for name in windows[0]
    ]


def products() -> list[Candidate]:
    """Return dense products large enough to show what the cores compute: float32, and int8 as torch has it."""
    dense = torch.randn(_SIDE, _SIDE)
    codes = torch.randint(-127, 127, (_SIDE, _SIDE), dtype=torch.int8)
    found: dict[str, Callable[[], object]] = {
        "fp32": functools.partial(torch.mm, dense, dense, out=torch.empty_like(dense)),
        "int8": functools.partial(torch._int_mm, codes, codes),  # noqa: SLF001  # its only name
    }
    return [
        Candidate(
            name=f"matmul {_SIDE}³: torch {name}",
            library="torch",
            role=YARDSTICK,
            format="matmul",
            precision=name,
            weight_bytes=0,
            make=lambda _, __, ___, call=call: Calls([call]),  # type: ignore[misc]  # bound
            operations=2 * _SIDE**3,
        )
        for name, call in found.items()
    ]
