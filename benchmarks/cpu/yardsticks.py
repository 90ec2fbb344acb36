"""What the machine itself can do in the same run: reading memory, and dense products."""

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
_SIDE = 1536
_WORD = 0x3F3F3F3F3F3F3F3F  # no subnormal number, and equal bytes: memcmp finds two equal halves
_ABSENT = 7


@functools.cache
def _buffer() -> torch.Tensor:
    """Return memory that was written, so that it is not one page of zeros."""
    return torch.full((rotation_bytes() // 8,), _WORD, dtype=torch.int64)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=torch.get_num_threads())


def _split(read: Callable[[int, int], object], threads: int, size: int) -> Callable[[], object]:
    """Return a call of ``read(start, length)`` over parts of a buffer, one to a thread."""
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


def _readers() -> dict[str, Callable[[int], Callable[[], object]]]:
    """Return what makes each reader of the whole buffer, for a number of threads."""
    whole = _buffer()
    size, address = whole.numel() * 8, whole.data_ptr()
    floats, array = whole.view(torch.float32), whole.numpy()
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
        "torch sum int64": lambda _: whole.sum,
        "torch amax int64": lambda _: whole.amax,
        "torch dot float32": lambda _: functools.partial(torch.dot, floats, floats),
        "torch amax float32": lambda _: floats.amax,
        "numpy sum int64": lambda threads: _split(numpy_sum, threads, size),
        "libc memchr": lambda threads: _split(memchr, threads, size),
        "libc memcmp": lambda threads: _split(memcmp, threads, half),
    }


def candidates() -> list[Candidate]:
    """Return the readers; the best of them is the read bandwidth."""

    def made(reader: Callable[[int], Callable[[], object]]) -> Callable[[torch.Tensor, int, bool], Calls]:
        return lambda _, threads, __: Calls([reader(threads)])

    return [
        Candidate(
            name=f"read: {name}",
            library="numpy and libc" if name.startswith(("numpy", "libc")) else "torch",
            role=YARDSTICK,
            format=READER,
            precision="none",
            weight_bytes=rotation_bytes() // 8 * 8,
            make=made(reader),
        )
        for name, reader in _readers().items()
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
