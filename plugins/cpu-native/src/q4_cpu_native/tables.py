"""How a codebook's values stand in 8 bits for the w4a8 kernels: level, centre and step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Table", "table_of"]

_MOST_LEVEL = 24
"""Unsigned levels up to this leave the 16-bit sums of AVX2 in range, so that the fast instruction serves."""
_PEAKS = range(96, 125)
"""Largest levels to choose from, by the squared error.

A value is off by half a step at most, 1 / (2 peak) of the largest. FP4's are, but for one, multiples of 1 / 120.
"""


@attrs.frozen
class Table:
    """value[q] = step * (level[q] - center), exactly or nearly.

    Args:
        level: 16 unsigned bytes.
        center: The level that stands for zero.
        step: Value of one level.
        values: The values that these levels stand for, where they differ from the codebook's; else None.
    """

    level: tuple[int, ...]
    center: float
    step: float
    values: tuple[float, ...] | None


def _squared_error(codebook: Sequence[float], step: float) -> float:
    return sum((value - step * round(value / step)) ** 2 for value in codebook)


@functools.lru_cache(maxsize=64)
def table_of(codebook: tuple[float, ...]) -> Table:
    """Return the levels of 16 values: exact where these are small multiples of 1 or 0.5, else rounded."""
    low = min(codebook)
    for step in (1.0, 0.5):
        levels = [(value - low) / step for value in codebook]
        if low / step == low // step and all(level == int(level) and level <= _MOST_LEVEL for level in levels):
            return Table(tuple(int(level) for level in levels), -low / step, step, None)
    largest = max(abs(value) for value in codebook)
    step = min((largest / peak for peak in _PEAKS), key=lambda step: _squared_error(codebook, step))
    rounded = [round(value / step) for value in codebook]
    return Table(tuple(level + 128 for level in rounded), 128.0, step, tuple(level * step for level in rounded))
