"""What the memory of this machine gives in the same moment: copying, and reading, of more than any cache keeps.

Between two uses of a weight the yardsticks go over several times the last-level cache, so that they also leave
nothing of the weight in it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_CACHES = 4
"""A buffer is so many last-level caches large: what is left of it in one when its turn comes again is a small part."""
_UNKNOWN_CACHE = 64 << 20
_LEAST, _MOST = 128 << 20, 1 << 30
_TRIES = 3
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache; a large one where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    texts = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(text[:-1]) * _UNITS[text[-1]] for text in texts if text), default=_UNKNOWN_CACHE)


def synchronise(device: torch.device) -> None:
    """Wait for all that was asked of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Memory:
    """Two buffers larger than several caches, of ``size`` bytes if told, and how fast torch copies and reads them."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter, size: int | None = None
    ) -> None:
        self.device = device
        self.clock = clock
        self.size = size or min(max(_LEAST, _CACHES * cache_bytes(device)), _MOST)
        self._source = torch.ones(self.size // 4, device=device)  # written, so that it is not one page of zeros
        self._target = self._source.clone()

    def speeds(self) -> tuple[float, float]:
        """Return bytes per second of copying, read and written, and of reading alone: the best of a few turns each."""
        half = self._source.numel() // 2
        left, right = self._source[:half], self._source[half : 2 * half]
        copying = [self._seconds(lambda: self._target.copy_(self._source)) for _ in range(_TRIES)]
        reading = [self._seconds(lambda: torch.dot(left, right)) for _ in range(_TRIES)]
        return 2 * self.size / min(copying), self.size / min(reading)

    def _seconds(self, call: Callable[[], object]) -> float:
        synchronise(self.device)
        started = self.clock()
        call()
        synchronise(self.device)
        return self.clock() - started
