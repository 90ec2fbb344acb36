"""Microseconds of work on a device: graphs replayed between two events, candidates interleaved in rounds.

A graph of a candidate's turns holds each kernel's own time and its launch by the device, not Python's; what Python adds
is measured apart. Without a GPU the same turns are timed with the host's clock, which proves the plumbing alone.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.candidate import Calls, Candidate
    from benchmarks.gpu.place import Place

__all__ = ["Budget", "Recorded", "Timed", "elapsed_us", "recorded", "sample_us", "synchronize"]

_LEAST_TURNS = 16
"""Turns in one graph: launching the graph itself costs some microseconds, which this many share."""


@attrs.frozen
class Budget:
    """How long sampling may take.

    Args:
        samples: Of each candidate.
        sample_us: How long one sample is at least.
    """

    samples: int = 31
    sample_us: float = 2000.0


def synchronize(place: Place) -> None:
    """Wait for the device."""
    if place.is_cuda:
        torch.cuda.synchronize(place.device)


@attrs.frozen
class Recorded:
    """Turns as one call.

    Args:
        run: Runs them all.
        turns: How many they are.
        why_eager: Why they are no graph, where there is a GPU; else None.
    """

    run: Callable[[], object]
    turns: int
    why_eager: str | None = None


def recorded(turns: Sequence[Callable[[], object]], place: Place) -> Recorded:
    """Return a call that runs all turns, as one CUDA graph where there is a GPU and they can be captured.

    Few turns are repeated, so that the graph's own launch weighs little.
    """
    steps = [*turns]
    eager = Recorded(lambda: [step() for step in steps], len(steps))
    if not place.is_cuda:
        return eager
    try:
        return _captured(steps * max(1, math.ceil(_LEAST_TURNS / len(steps))), place)
    except RuntimeError as error:
        torch.cuda.synchronize(place.device)
        return attrs.evolve(eager, why_eager=f"can't be captured: {error}")


def _captured(steps: Sequence[Callable[[], object]], place: Place) -> Recorded:
    stream = torch.cuda.Stream(place.device)
    stream.wait_stream(torch.cuda.current_stream(place.device))
    with torch.cuda.stream(stream):
        for step in dict.fromkeys(steps):  # what is made on the first call is made before the capture
            step()
    torch.cuda.current_stream(place.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for step in steps:
            step()
    return Recorded(graph.replay, len(steps))


def elapsed_us(call: Callable[[], object], count: int, place: Place) -> float:
    """Return how many microseconds ``count`` calls took on the device."""
    if not place.is_cuda:
        started = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - started) * 1e6
    first: Any = torch.cuda.Event(enable_timing=True)
    last: Any = torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3


@attrs.define(eq=False)
class Timed:
    """A candidate's calls, recorded, and what was measured of them.

    Args:
        candidate: What is timed.
        calls: Its turns.
        place: Where.
    """

    candidate: Candidate
    calls: Calls
    place: Place
    us: list[float] = attrs.field(init=False, factory=list)
    recorded: Recorded = attrs.field(init=False)
    _repeats: int = attrs.field(init=False, default=1)

    def __attrs_post_init__(self) -> None:
        """Record the turns."""
        self.recorded = recorded(self.calls.turns, self.place)

    @property
    def calls_per_sample(self) -> int:
        """How many products one sample holds."""
        return self.recorded.turns * self._repeats * self.calls.products

    def calibrate(self, budget: Budget) -> None:
        """Find how many replays make a sample."""
        if not self.place.is_cuda:
            return
        elapsed_us(self.recorded.run, 1, self.place)
        took = min(elapsed_us(self.recorded.run, 1, self.place) for _ in range(2))
        self._repeats = max(1, math.ceil(budget.sample_us / max(took, 1e-3)))

    def sample(self) -> None:
        """Take one sample, after a replay that is not counted."""
        if self.place.is_cuda:
            self.recorded.run()
        self.us.append(elapsed_us(self.recorded.run, self._repeats, self.place) / self.calls_per_sample)


def sample_us(timed: Sequence[Timed], budget: Budget, *, seed: int = 0) -> None:
    """Sample every candidate in rounds, in another order each time.

    Args:
        timed: What is sampled; each gets its microseconds per product.
        budget: How many samples, and how long each.
        seed: Of the order.
    """
    order = random.Random(seed)  # noqa: S311  # an order, no secret
    with torch.no_grad():
        for one in timed:
            one.calibrate(budget)
        for _ in range(budget.samples):
            for one in order.sample([*timed], len(timed)):
                one.sample()
