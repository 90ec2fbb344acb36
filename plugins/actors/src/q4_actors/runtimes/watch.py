"""``Watch``: waits for a pipe, and spins at first where that is cheaper than sleep."""

from __future__ import annotations

import os
import select
import time

__all__ = ["Watch"]

SPIN_S = 100e-6
"""An idle core takes some 25 µs to wake, more than a small message and its answer take."""
SHORT_S = 2 * SPIN_S
STALL_S = 500e-6
REST = 50
"""No spinning for this multiple of the time that a stalled poll took: spins cost other threads 2 % at most."""


class Watch:
    """Waits until a pipe has something to read: awake at first, where the last wait was short, and asleep then.

    Between two polls it yields the core. Where another thread then holds the core for long, spinning pauses.
    """

    def __init__(self, file: int) -> None:
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)
        self._spins, self._rests_until = False, 0.0
        self._may_spin = len(os.sched_getaffinity(0)) > 1

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether there is something, once there is or the time runs out; None for no limit."""
        started = now = time.monotonic()
        found = self._poll.poll(0)
        if self._spins and now >= self._rests_until:
            limit = now + (SPIN_S if seconds is None else min(SPIN_S, seconds))
            while not found and now < limit:
                os.sched_yield()
                found, before, now = self._poll.poll(0), now, time.monotonic()
                if now - before > STALL_S:
                    self._rests_until = now + REST * (now - before)
        if not found:
            found = self._poll.poll(None if seconds is None else max(0.0, started + seconds - now) * 1000)
            now = time.monotonic()
        self._spins = self._may_spin and now - started < SHORT_S
        return bool(found)
