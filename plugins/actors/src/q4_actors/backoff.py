"""``Pauses``: how long to sleep between two looks at what another process does."""

from __future__ import annotations

import time

__all__ = ["LONGEST_PAUSE_S", "Pauses"]

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 500e-6


class Pauses:
    """Sleeps, longer and longer, until the time runs out.

    Args:
        timeout: Seconds from now, None for no limit.
        shortest: Seconds of the first sleep.
        longest: Seconds of a sleep at most.
    """

    def __init__(
        self, timeout: float | None, *, shortest: float = SHORTEST_PAUSE_S, longest: float = LONGEST_PAUSE_S
    ) -> None:
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._pause, self._longest = shortest, longest
        self.count = 0

    def allows(self, seconds: float) -> bool:
        """Return whether there is so much time left."""
        return self._deadline is None or self._deadline - time.monotonic() > seconds

    def next(self) -> float | None:
        """Return how long to sleep now, None if the time ran out."""
        left = self._pause if self._deadline is None else self._deadline - time.monotonic()
        if left <= 0:
            return None
        pause = min(self._pause, left)
        self._pause = min(self._pause * 2, self._longest)
        self.count += 1
        return pause

    def sleep(self) -> bool:
        """Sleep, or return False if the time ran out."""
        pause = self.next()
        if pause is not None:
            time.sleep(pause)
        return pause is not None
