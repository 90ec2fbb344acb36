"""A heap as a long process has it: many freed pieces of each size between blocks that are held, given back by pages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from q4_conformance.measurement.allocations import own_mappings, taken_bytes, trim

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECES = 400
_SIZES = (1 << 13, 1 << 15, 1 << 16)
_LARGE = 10 << 20
_HIGHEST = 20 << 20


@contextlib.contextmanager
def bloated() -> Iterator[None]:
    """Fragment the heap for as long as this lasts: pieces of 8 to 64 KiB, and one of 10 MiB."""
    np.ones(_HIGHEST, np.uint8)  # freed, it lets the C library serve smaller blocks from the heap
    held, freed = [], []
    freed.append(np.ones(_LARGE, np.uint8))
    for _ in range(_PIECES):
        for size in _SIZES:
            freed.append(np.ones(size, np.uint8))
            held.append(np.ones(3000, np.uint8))
    freed.clear()
    trim()
    yield
    held.clear()


def small_blocks() -> None:
    """Hold one block at a time, of sizes that the bloated heap has many free pieces of."""
    for _ in range(_PIECES):
        for size in _SIZES:
            np.ones(size, np.uint8)


def taken_while_bloated() -> tuple[int | None, int | None, int | None]:
    """Return what a bloated process has taken before 8 MiB are held, while they are, and afterwards."""
    cpu = torch.device("cpu")
    with bloated(), own_mappings():
        before = taken_bytes(cpu)
        held = np.ones(8 << 20, np.uint8)
        np.ones(8 << 20, np.float32)
        small_blocks()
        after = taken_bytes(cpu)
        del held
        return before, after, taken_bytes(cpu)
