"""How fast a backend is here. Another mode: it changes no verdict, and no case knows of it.

Each point is warmed up and measured for at least a second; median and spread are told, with the share of the copy
bandwidth that this machine shows at the same moment.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.cases import weight_recipes
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4core import ActivationPrecision, Q4Error, find_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.weights import WeightRecipe
    from q4core import PackedWeight

__all__ = ["POINTS", "copy_bandwidth", "measure"]

POINTS = (("decode", 1), ("prefill", 128))
"""Name and rows of x of each point."""
_SIZE = 4096
_COLD_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Weights of so many bytes take turns, so that none is still in a cache when it is needed again."""
_COPY_BYTES = 256 << 20
_LEAST_CALLS = 5
_WARM_UP = 3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Return how long single calls take, in seconds."""
    for _ in range(_WARM_UP):
        call()
    _synchronise(device)
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < _LEAST_CALLS or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        _synchronise(device)
        samples.append(time.perf_counter() - started)
    return samples


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Return the bytes per second, read and written, at which a device copies what fits into no cache."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / statistics.median(_time(lambda: target.copy_(source), device, seconds))


def _bytes_of(weight: PackedWeight) -> int:
    tensors = (weight.qdata, weight.scale, weight.offset, weight.zero)
    return sum(item.numel() * item.element_size() for item in tensors if item is not None)


def measure(subject: Any, format_name: str, seconds: float) -> list[dict[str, Any]]:
    """Return the points of one format; those that the subject does not serve say so.

    Args:
        subject: A ``BackendSubject``.
        format_name: Name of the format.
        seconds: How long to measure each point.
    """
    device: torch.device = subject.device
    recipe = weight_recipes(find_format(format_name))[0]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    bandwidth = copy_bandwidth(device, seconds)
    weights = list(_cold_weights(recipe, _COLD_BYTES["cpu" if device.type == "cpu" else "cuda"]))
    points: list[dict[str, Any]] = []
    for wish in (ActivationPrecision.EXACT, ActivationPrecision.INT8):
        try:
            layers = [subject.layer(weight, dtype=dtype, precision=wish) for weight in weights]
        except (NotDeclaredError, NotTestableError, FailureError, Q4Error):
            continue
        for name, rows in POINTS:
            x = torch.randn(rows, _SIZE, dtype=dtype, device=device)
            turns = itertools.cycle([layer.module for layer in layers])
            with torch.inference_mode():
                samples = _time(lambda turns=turns, x=x: next(turns)(x), device, seconds)  # type: ignore[misc]  # bound now
            points.append(
                {"format": format_name, "point": name, "path": layers[0].paths(rows).name, "precision": wish.value}
                | {"rows": rows, "n": _SIZE, "k": _SIZE, "dtype": str(dtype).removeprefix("torch.")}
                | {"weights": len(weights)}
                | _figures(samples, _bytes_of(weights[0]), 2 * rows * _SIZE * _SIZE, bandwidth)
            )
    return points


def _cold_weights(recipe: WeightRecipe, most_bytes: int) -> Iterator[PackedWeight]:
    total, seed = 0, 0
    while total < most_bytes:
        weight = attrs.evolve(recipe, n=_SIZE, k=_SIZE, seed=seed).build()
        total, seed = total + _bytes_of(weight), seed + 1
        yield weight


def _figures(samples: list[float], weight_bytes: int, operations: int, bandwidth: float) -> dict[str, Any]:
    median = statistics.median(samples)
    tenths = statistics.quantiles(samples, n=10)
    speed = weight_bytes / median
    return {
        "calls": len(samples),
        "median_us": round(median * 1e6, 2),
        "p10_us": round(tenths[0] * 1e6, 2),
        "p90_us": round(tenths[-1] * 1e6, 2),
        "gb_per_s": round(speed / 1e9, 2),
        "gflop_per_s": round(operations / median / 1e9, 2),
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "share_of_copy": round(speed / bandwidth, 3),
    }
