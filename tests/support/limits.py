"""Time limits of tests, scaled by how slow the machine is at the moment."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["EXPIRED", "TooSlowError", "explain", "scaled", "slowness", "until", "within"]

EXPIRED = (TimeoutError, futures.TimeoutError, subprocess.TimeoutExpired, queue.Empty, threading.BrokenBarrierError)
"""What is raised where a limit has expired."""
_WORK = 1_500_000
_WORK_S = 0.04
"""What counting to ``_WORK`` takes on the idle machine with which the limits were chosen."""
_VALID_S = 5.0

_measured = (-_VALID_S, 1.0)  # when, and what


class TooSlowError(TimeoutError):
    """Something took longer than its scaled limit."""


def slowness() -> float:
    """Return how many times slower this machine is now than an idle one of the kind that limits are chosen for.

    The larger of two: what a little work takes here, and the processes that wait for each core. At least 1.
    """
    global _measured  # noqa: PLW0603  # one measurement serves the limits of the next seconds
    now = time.monotonic()
    if now - _measured[0] >= _VALID_S:
        start = time.perf_counter()
        for _ in range(_WORK):
            pass
        work = (time.perf_counter() - start) / _WORK_S
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
        _measured = (now, max(1.0, work, waiting))
    return _measured[1]


def scaled(seconds: float) -> float:
    """Return the limit for this machine as it is now, given that of an idle one: it ends what hangs, no more."""
    return seconds * slowness()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooSlowError if the block takes longer than a limit, scaled by the slower of its start and its end."""
    factor, start = slowness(), time.monotonic()
    yield
    took = time.monotonic() - start
    if took > seconds * max(factor, slowness()):
        raise TooSlowError(f"took {took:.3g} s, at most {seconds:g} s on an idle machine; {explain()}")


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something holds that another thread or process does.

    Raises:
        TooSlowError: It does not hold within the scaled limit.
    """
    end = time.monotonic() + scaled(seconds)
    while not condition():
        if time.monotonic() > end:
            raise TooSlowError(f"nothing has happened for {seconds:g} s of an idle machine; {explain()}")
        time.sleep(0.001)


def explain() -> str:
    """Return what an expired limit means."""
    return f"it hangs, or the machine is too slow here: now {slowness():.1f} times slower than an idle one"
