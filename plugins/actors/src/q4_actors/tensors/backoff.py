"""``Backoff``: the time to sleep between two polls of another process."""

from __future__ import annotations

import time

__all__ = ["LONGEST_SLEEP_S", "Backoff"]

LONGEST_SLEEP_S = 500e-6


class Backoff:
    """Sleeps of one length, until the time runs out.

    Args:
        timeout: Seconds from now, None for no limit.
        sleep: Seconds of each; a waiting thread is mostly woken before.
    """

    def __init__(self, timeout: float | None, sleep: float = LONGEST_SLEEP_S) -> None:
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
        return min(self._sleep, left) if left > 0 else None
