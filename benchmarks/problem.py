"""``Problem``: one shape of weight, its data, and how many copies exceed the last-level cache."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import attrs
import torch

__all__ = ["Problem", "last_level_cache_bytes", "rotation_bytes"]

_LEAST_ROTATION, _MOST_ROTATION = 96 << 20, 144 << 20
"""Some 45 weights rotate at once: 6.5 GB at the lower end, and less than 10 GB at the upper one."""
_PATTERN_ROWS = 128
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@functools.cache
def last_level_cache_bytes() -> int | None:
    """Return the size of the largest cache of the first CPU, None where the system doesn't say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size), default=None)


def rotation_bytes() -> int:
    """Return how much memory the copies of a weight take at least: three caches, within the bounds above."""
    return min(max(_LEAST_ROTATION, 3 * (last_level_cache_bytes() or 0)), _MOST_ROTATION)


@attrs.frozen(slots=False)  # cached properties
class Problem:
    """A weight [N, K] whose rows repeat a pattern, which is quantised and checked once instead of N / P times."""

    out_features: int
    in_features: int

    @functools.cached_property
    def pattern(self) -> torch.Tensor:
        """float32 [P, K]."""
        rows = math.gcd(self.out_features, _PATTERN_ROWS)
        return torch.randn(rows, self.in_features, generator=torch.Generator().manual_seed(1)) / 50

    @property
    def repeats(self) -> int:
        """How often the pattern repeats in the weight."""
        return self.out_features // self.pattern.shape[0]

    def tiled(self, pattern: torch.Tensor) -> torch.Tensor:
        """Return what a pattern [P, …] becomes in the whole weight [N, …]."""
        return pattern.repeat(self.repeats, *(1 for _ in pattern.shape[1:]))

    def x(self, rows: int) -> torch.Tensor:
        """Return activations, float32 [rows, K], that no row of the weight resembles."""
        return torch.randn(rows, self.in_features, generator=torch.Generator().manual_seed(1000 + rows))

    @staticmethod
    def copies(weight_bytes: int, rotation: int | None = None) -> int:
        """Return how many copies of a weight take at least ``rotation`` bytes: more than the cache of this CPU."""
        return max(1, -(-(rotation_bytes() if rotation is None else rotation) // weight_bytes))
