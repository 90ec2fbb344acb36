"""Timing of one layer, after a check of its result, with a weight that comes from memory and not from a cache."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["COLD_BYTES", "copies_for", "copy_bandwidth", "quantile", "require_right", "time_calls"]

COLD_BYTES = 256 << 20
"""Weights rotate through this much, and a copy moves as much: more than all but the largest machines' caches hold."""
_MOST_COPIES = 64
_CHECKED_ROWS = 256
_MOST_SAMPLES = 5000
_LEAST_SAMPLES = 5
_WARM_UP = 2
_PATIENCE_SECONDS = 2.0


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which ``share`` of them lie (nearest rank)."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def copies_for(nbytes: int, *, is_cold: bool) -> int:
    """Return how many copies of a weight to rotate through, within a quarter of the memory that is free."""
    available = q4.machine_facts().memory_available_bytes or (4 << 30)
    room = max(1, available // (8 * nbytes))  # a copy and what is prepared from it
    return min(_MOST_COPIES, room, -(-COLD_BYTES // nbytes)) if is_cold else 1


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Return the bytes per second that a copy of a large tensor moves on a device, read and written bytes together."""
    available = q4.machine_facts().memory_available_bytes or (4 << 30)
    size = min(COLD_BYTES, max(1 << 20, available // 8))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = time_calls([lambda: target.copy_(source)], device, seconds)
    return 2 * size / (statistics.median(samples) * 1e-6)


def require_right(layer: q4.Q4Linear, weight: q4.PackedWeight, path: q4.KernelPath, rows: int) -> float:
    """Compare a layer's answer for ``rows`` rows with float64 from the reference codec; return the worst error / bound.

    The activations lie on the grid of the path's precision, so that quantising them loses nothing. An element outside
    the bound of float32 arithmetic is a ``BackendError``.
    """
    scale = None if weight.activation_scale is None else float(weight.activation_scale)
    columns = weight.in_features
    x = q4.grid_activations(rows, columns, path.precision, dtype=layer.dtype, seed=rows, activation_scale=scale)
    with torch.no_grad():
        y = layer(x.to(layer.device)).to("cpu", torch.float64)
    count = min(weight.out_features, _CHECKED_ROWS)
    chosen = torch.linspace(0, weight.out_features - 1, count, dtype=torch.float64).round().to(torch.int64).unique()
    source = weight
    if path.codebook is not None:
        source = attrs.evolve(weight, codebook=torch.tensor(path.codebook, dtype=torch.float32, device=weight.device))
    dense = q4.dequantize(source, torch.float64, rows=chosen).cpu()
    exact = x.to(torch.float64)
    reference = exact @ dense.T
    bound = q4.error_bound(reference, exact.abs() @ dense.abs().T, columns, layer.dtype)
    error = (y[:, chosen] - reference).abs()
    ratio = float((error / bound).nan_to_num(nan=float("inf")).where(error != 0, 0.0).max())
    if not ratio <= 1:
        raise q4.BackendError(
            f"bench of {path.name}",
            name="error",
            rule="at most 1 × the bound of float32 arithmetic",
            value=ratio,
            hint="Name another backend: this path computes wrong numbers. `q4 explain --prove` shows more.",
        )
    return ratio


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float) -> tuple[float, ...]:
    """Call each in turn, round and round, and return how long each call took, in microseconds.

    After the warm-up at least five calls are measured, unless they take too long; CUDA's by events on its stream.
    """
    with torch.no_grad():
        for index in range(max(_WARM_UP, min(len(calls), 8))):
            calls[index % len(calls)]()
        if device.type == "cuda":
            return _time_on_cuda(calls, device, seconds)
        samples: list[float] = []
        started = time.perf_counter()
        while len(samples) < _MOST_SAMPLES:
            before = time.perf_counter()
            calls[len(samples) % len(calls)]()
            after = time.perf_counter()
            samples.append((after - before) * 1e6)
            if _enough(len(samples), after - started, seconds):
                break
    return tuple(round(sample, 3) for sample in samples)


def _enough(count: int, elapsed: float, seconds: float) -> bool:
    return elapsed >= seconds and (count >= _LEAST_SAMPLES or elapsed >= max(_PATIENCE_SECONDS, 10 * seconds))


def _time_on_cuda(calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float) -> tuple[float, ...]:
    samples: list[float] = []
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    while len(samples) < _MOST_SAMPLES:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize(device)
        samples += [1e3 * first.elapsed_time(last) for first, last in itertools.pairwise(marks)]
        if _enough(len(samples), time.perf_counter() - started, seconds):
            break
    return tuple(round(sample, 3) for sample in samples)
