"""A codebook's values in 8 bits for the w4a8 kernels (level, centre, step), and in 16 for the w4i16 ones."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Table", "Words", "table_of", "words_of"]

_MOST_LEVEL = 24
"""Unsigned levels up to this leave the 16-bit sums of AVX2 in range, so that the fast instruction is usable."""
_WIDE_CENTER = 128
"""The level of zero where levels are wider."""
_PEAKS = range(96, 125)
"""Largest levels to choose from, by the squared error.

A value is off by half a step at most, 1 / (2 peak) of the largest. FP4's are, but for one, multiples of 1 / 120.
"""
_EXACT_PEAK = 192
"""FP4's values are multiples of 1 / 192, stored as float32."""
_WORD_PEAKS = range(7168, 8192)
"""Largest words to choose from: sums of 16 of 8191 times 16383 fit 31 bits."""
_ROUNDING = 2.0**-24


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


@attrs.frozen
class Words:
    """value[q] = step * word[q], exactly or nearly.

    Args:
        word: 16 whole numbers within ±8191.
        step: Value of one.
        values: The values that these stand for, where they differ from the codebook's by more than float32 rounds; else
            None.
    """

    word: tuple[int, ...]
    step: float
    values: tuple[float, ...] | None


def _squared_error(codebook: Sequence[float], step: float) -> float:
    return sum((value - step * round(value / step)) ** 2 for value in codebook)


@functools.lru_cache(maxsize=64)
def table_of(codebook: tuple[float, ...]) -> Table:
    """Return the levels of 16 values: exact where these are bytes or small multiples of 0.5, else rounded."""
    low = min(codebook)
    for step in (1.0, 0.5):
        levels = [(value - low) / step for value in codebook]
        if low / step == low // step and all(level == int(level) and level <= _MOST_LEVEL for level in levels):
            return Table(tuple(int(level) for level in levels), -low / step, step, None)
    if all(value == int(value) and abs(value) < _WIDE_CENTER for value in codebook):
        return Table(tuple(int(value) + _WIDE_CENTER for value in codebook), float(_WIDE_CENTER), 1.0, None)
    largest = max(abs(value) for value in codebook)
    step = min((largest / peak for peak in _PEAKS), key=lambda step: _squared_error(codebook, step))
    rounded = [round(value / step) for value in codebook]
    wide = tuple(level + _WIDE_CENTER for level in rounded)
    return Table(wide, float(_WIDE_CENTER), step, tuple(level * step for level in rounded))


@functools.lru_cache(maxsize=64)
def words_of(codebook: tuple[float, ...]) -> Words | None:
    """Return the words of 16 values; None where ``table_of`` has narrow levels, which the kernels take.

    NF4's lie within ±7854, with a squared error of 1.3e-9 of the values' own.
    """
    table = table_of(codebook)
    if max(table.level) <= _MOST_LEVEL:
        return None
    if table.values is None:
        return Words(tuple(level - _WIDE_CENTER for level in table.level), table.step, None)
    largest = max(abs(value) for value in codebook)
    step = largest / _EXACT_PEAK
    word = tuple(round(value / step) for value in codebook)
    if all(abs(value - step * level) <= _ROUNDING * abs(value) for value, level in zip(codebook, word, strict=True)):
        return Words(word, step, None)
    step = min((largest / peak for peak in _WORD_PEAKS), key=lambda step: _squared_error(codebook, step))
    word = tuple(round(value / step) for value in codebook)
    return Words(word, step, tuple(level * step for level in word))
