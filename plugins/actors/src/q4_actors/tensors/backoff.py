"""``Backoff``: the time to sleep between two polls of another process."""

from __future__ import annotations

import time

__all__ = ["FIRST_SLEEP_S", "Backoff"]

FIRST_SLEEP_S, LONGEST_SLEEP_S = 500e-6, 10e-3
_SLEEPS = 8
"""How many are as long, before they double: a poll takes 40 µs, which is 9 % of a core with the first sleep."""


class Backoff:
    """Sleeps that grow to a greatest length, until the time runs out; a waiting thread is mostly woken before.

    Args:
        timeout: Seconds from now, None for no limit.
        sleep: Seconds of the first ones.
    """

    def __init__(self, timeout: float | None, sleep: float = FIRST_SLEEP_S) -> None:
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._sleep = sleep
        self.count = 0

    def allows(self, seconds: float) -> bool:
        """Return whether there is so much time left."""
        return self._deadline is None or self._deadline - time.monotonic() > seconds

    def next(self) -> float | None:
        """Return how long to sleep now, None if the time ran out."""
        left = self._sleep if self._deadline is None else self._deadline - time.monotonic()
        self.count += 1
        if self.count % _SLEEPS == 0:
            self._sleep = max(self._sleep, min(2 * self._sleep, LONGEST_SLEEP_S))
        return min(self._sleep, left) if left > 0 else None
