"""Limits of the device, measured in the same run: memory copies, empty kernels, and a dense product."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import record
from benchmarks.candidate import YARDSTICK, Calls, Candidate
from benchmarks.gpu.timing import Budget, Timed, sample_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.place import Place

__all__ = ["measure"]

_COPY_BYTES = (256 << 20, 1 << 30)
_TINY_BYTES = (1 << 16,)
_SIDE, _TINY_SIDE = 8192, 64
_EMPTY = 64
"""Empty kernels in one turn."""


def _copies(size: int, place: Place) -> Calls:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return Calls([functools.partial(target.copy_, source)])


def _empty(place: Place) -> Calls | None:
    """Return launches of a kernel that does nothing; None without Triton."""
    try:
        from benchmarks.gpu.empty_kernel import launch  # noqa: PLC0415  # needs Triton
    except ImportError:
        return None
    given = torch.zeros(1, dtype=torch.int32, device=place.device)
    return Calls([functools.partial(launch, given)] * _EMPTY)


def _product(side: int, place: Place) -> Calls:
    left, right = (torch.randn(side, side, device=place.device).bfloat16() for _ in range(2))
    return Calls([functools.partial(torch.mm, left, right, out=torch.empty_like(left))])


def _candidate(name: str, *, moved: int = 0, operations: int = 0) -> Candidate:
    def nothing(*_: object) -> Calls:
        return Calls([])

    return Candidate(name, "torch", YARDSTICK, "none", "none", moved, nothing, operations=operations)


def measure(place: Place, budget: Budget) -> dict[str, Any]:
    """Return the samples of each yardstick, and the three numbers that ratios are made with.

    Returns:
        ``copy_gb_per_s`` counts bytes read and written; ``empty_us`` is one empty kernel of a graph (None without
        Triton); ``bf16_tflop_per_s`` is the dense product of 8192³.
    """
    side = _SIDE if place.is_cuda else _TINY_SIDE
    made: list[tuple[Candidate, Callable[[], Calls | None]]] = [
        (_candidate(f"copy {size >> 10} KiB", moved=2 * size), functools.partial(_copies, size, place))
        for size in (_COPY_BYTES if place.is_cuda else _TINY_BYTES)
    ]
    made.append((_candidate("empty kernel"), functools.partial(_empty, place)))
    made.append((_candidate(f"bf16 {side}³", operations=2 * side**3), functools.partial(_product, side, place)))
    ready = [(candidate, make()) for candidate, make in made]
    timed = [Timed(candidate, turns, place) for candidate, turns in ready if turns is not None]
    sample_us(timed, budget)
    calls = {one.candidate.name: _result(one) for one in timed}
    empty = calls.get("empty kernel")
    return {
        "calls": calls,
        "copy_gb_per_s": max(call["gb_per_s"] for name, call in calls.items() if name.startswith("copy")),
        "empty_us": None if empty is None else empty["median"],
        "bf16_tflop_per_s": max(call["tflop_per_s"] for call in calls.values()),
    }


def _result(timed: Timed) -> dict[str, Any]:
    values = record.summary(timed.us)
    candidate = timed.candidate
    return {
        "gb_per_s": candidate.weight_bytes / values["median"] / 1e3,
        "tflop_per_s": (candidate.operations or 0) / values["median"] / 1e6,
        **values,
    }
