"""Interleaved samples: one library at a time within a round, its workers parked before the next begins."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from typing import TYPE_CHECKING

import attrs
import torch

from benchmarks.cpu.rounds import is_due

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.candidate import Calls, Candidate

__all__ = ["Budget", "Timed", "sample_us"]

_SAMPLE_SECONDS = 3e-3
_SLOW_SECONDS = 4e-3
_VERY_SLOW_SECONDS = 0.2
_TRIALS = 3
_PARK_SECONDS = 8e-3
"""Idle workers of OpenMP and ONNX Runtime spin for some milliseconds."""
_OWN_POOLS = {"onnxruntime"}
"""Libraries each of whose candidates has threads of its own, which spin while the next one runs."""


@attrs.frozen
class Budget:
    """How long sampling may take: samples of each candidate, fewer of those that would take more than the seconds."""

    samples: int = 30
    seconds: float = 1.5
    least: int = 5


@attrs.define
class Timed:
    """A candidate's calls, and how they are sampled."""

    candidate: Candidate
    calls: Calls
    turns: Iterator[Callable[[], object]] = attrs.field(init=False)
    repeats: int = attrs.field(init=False)
    samples: int = attrs.field(init=False, default=0)
    is_slow: bool = attrs.field(init=False)
    us: list[float] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        """Go round the copies of the weight."""
        self.turns = itertools.cycle(self.calls.turns)

    def run(self, turns: int) -> float:
        """Run some turns and return how many seconds they took."""
        steps = list(itertools.islice(self.turns, turns))
        started = time.perf_counter()
        for step in steps:
            step()
        return time.perf_counter() - started

    def calibrate(self, budget: Budget) -> None:
        """Find how many turns make a sample, and how many samples there is time for."""
        seconds = self.run(1)
        for _ in range(_TRIALS):
            if seconds < _VERY_SLOW_SECONDS:
                seconds = min(seconds, self.run(1))
        self.is_slow = seconds / self.calls.products > _SLOW_SECONDS
        self.repeats = max(1, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-6)))
        affordable = int(budget.seconds / (seconds * self.repeats))
        self.samples = min(budget.samples, max(budget.least, affordable))

    def sample(self) -> None:
        """Take one sample, after as long a warm-up where that matters: what ran before slows the first calls."""
        if not self.is_slow:
            self.run(self.repeats)
        self.us.append(self.run(self.repeats) / self.repeats / self.calls.products * 1e6)


def sample_us(timed: Sequence[Timed], threads: int, budget: Budget, *, seed: int = 0) -> None:
    """Sample every candidate in rounds, libraries and candidates in another order each time.

    Args:
        timed: What is sampled; each gets its microseconds per product.
        threads: Of torch, and of the libraries that share its OpenMP.
        budget: How many samples are taken.
        seed: Of the order.
    """
    order = random.Random(seed)  # noqa: S311  # an order, no secret
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for one in timed:
                one.calibrate(budget)
            for index in range(budget.samples):
                _round(timed, index, budget.samples, order)
    finally:
        gc.enable()
        torch.set_num_threads(before)


def _round(timed: Sequence[Timed], index: int, rounds: int, order: random.Random) -> None:
    libraries = sorted({one.candidate.library for one in timed})
    order.shuffle(libraries)
    for library in libraries:
        due = [one for one in timed if one.candidate.library == library and is_due(index, one.samples, rounds)]
        order.shuffle(due)
        for place, one in enumerate(due):
            if place == 0 or library in _OWN_POOLS:
                time.sleep(_PARK_SECONDS)
            one.sample()
