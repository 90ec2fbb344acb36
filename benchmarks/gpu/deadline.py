"""``Deadline``: the time that a run has left."""

from __future__ import annotations

import time

import attrs

__all__ = ["Deadline"]


@attrs.frozen
class Deadline:
    """A moment after which nothing new is begun.

    Args:
        seconds: From now on.
    """

    seconds: float
    _started: float = attrs.field(init=False, factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left, 0 when it is over."""
        return max(0.0, self.seconds - (time.monotonic() - self._started))

    def is_over(self) -> bool:
        """Whether nothing new may be begun."""
        return self.left <= 0
