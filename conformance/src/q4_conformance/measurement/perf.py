"""How fast a backend is here. Another mode: it changes no verdict, and no case knows of it.

Each point is warmed up and measured for at least a second; median and spread are told, with the shares of the speed at
which this machine copies and reads memory in the same run.
"""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.contract.cases import weight_recipes
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4core import ActivationPrecision, Q4Error, find_format

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4core import PackedWeight

POINTS = (("decode", 1), ("prefill", 128))
"""Name and rows of x of each point."""
_SIZE = 4096
_WEIGHTS = 8
"""So many weights take turns. Between two turns of one, memory's yardsticks clear the caches of it."""
_LEAST_ROUNDS = 3


@attrs.frozen
class _Round:
    """Each weight once, at memory's speed of the same moment."""

    samples: tuple[float, ...]
    copying: float
    reading: float


def rounds(
    calls: Sequence[Callable[[], object]], memory: Memory, seconds: float, *, least: int = _LEAST_ROUNDS
) -> list[_Round]:
    """Return what calls, two at least, take in seconds, each on a weight of its own, in ``least`` rounds or more.

    Before each round memory is measured, over more than the caches hold. The first call of a round wakes threads, and
    is not counted.
    """
    found: list[_Round] = []
    end = memory.clock() + seconds
    while len(found) < least or memory.clock() < end:
        copying, reading = memory.speeds()
        samples = []
        for call in calls:
            started = memory.clock()
            call()
            synchronise(memory.device)
            samples.append(memory.clock() - started)
        found.append(_Round(tuple(samples[1:]), copying, reading))
    return found


def _bytes_of(weight: PackedWeight) -> int:
    tensors = (weight.qdata, weight.scale, weight.offset, weight.zero)
    return sum(item.numel() * item.element_size() for item in tensors if item is not None)


def measure(subject: Any, format_name: str, seconds: float) -> list[dict[str, Any]]:
    """Return the points of one format, each measured for ``seconds``; what the backend does not serve is left out."""
    device: torch.device = subject.device
    recipe = weight_recipes(find_format(format_name))[0]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    memory = Memory(device)
    weights = [attrs.evolve(recipe, n=_SIZE, k=_SIZE, seed=seed).build() for seed in range(_WEIGHTS)]
    points: list[dict[str, Any]] = []
    for wish in (ActivationPrecision.EXACT, ActivationPrecision.INT8):
        try:
            layers = [subject.layer(weight, dtype=dtype, precision=wish) for weight in weights]
        except (NotDeclaredError, NotTestableError, FailureError, Q4Error):
            continue
        for name, rows in POINTS:
            x = torch.randn(rows, _SIZE, dtype=dtype, device=device)
            calls = [functools.partial(layer.module, x) for layer in layers]
            with torch.inference_mode():
                rounds(calls, memory, 0.0, least=1)
                found = rounds(calls, memory, seconds)
            points.append(
                {"format": format_name, "point": name, "path": layers[0].paths(rows).name, "precision": wish.value}
                | {"rows": rows, "n": _SIZE, "k": _SIZE, "dtype": str(dtype).removeprefix("torch.")}
                | {"weights": len(weights)}
                | figures(found, _bytes_of(weights[0]), 2 * rows * _SIZE * _SIZE)
            )
    return points


def figures(found: Sequence[_Round], weight_bytes: int, operations: int) -> dict[str, Any]:
    """Return what is told of a point. Shares are of the best that memory showed beside it.

    Who else uses the machine makes them smaller, never larger. Decode only reads, and a machine may read faster than it
    copies.
    """
    samples = [item for turn in found for item in turn.samples]
    median = statistics.median(samples)
    tenths = statistics.quantiles(samples, n=10)
    speed = weight_bytes / median
    copying, reading = (max(values) for values in zip(*((turn.copying, turn.reading) for turn in found), strict=True))
    return {
        "calls": len(samples),
        "median_us": round(median * 1e6, 2),
        "p10_us": round(tenths[0] * 1e6, 2),
        "p90_us": round(tenths[-1] * 1e6, 2),
        "gb_per_s": round(speed / 1e9, 2),
        "gflop_per_s": round(operations / median / 1e9, 2),
        "copy_gb_per_s": round(copying / 1e9, 2),
        "read_gb_per_s": round(reading / 1e9, 2),
        "share_of_copy": round(speed / copying, 3),
        "share_of_read": round(speed / reading, 3),
    }


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
