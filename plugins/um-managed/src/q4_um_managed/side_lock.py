"""``SideLock``: the CPU's blocks or the GPU's, never both at once, in the order in which they were asked for."""

from __future__ import annotations

import collections
import threading
import time
import weakref
from typing import NoReturn, TypeAlias

from q4core import WriteConflictError

__all__ = ["SideLock"]

_LOOK_INTERVAL_S = 0.1
"""Seconds of sleep before a waiting thread checks again whether the thread that it waits for has ended."""
_HINT = "concurrentManagedAccess=0: the sides take turns."


class _Life:
    """Something that a thread's own storage holds, so that it goes when the thread ends."""

    __slots__ = ("__weakref__",)


_Thread: TypeAlias = "weakref.ref[_Life]"


class _Here(threading.local):
    """The calling thread, as ``thread``: a thread's number is reused once it has ended."""

    def __init__(self) -> None:
        self._life = _Life()
        self.thread: _Thread = weakref.ref(self._life)
        hash(self.thread)  # so that it can be looked up after its end too


_HERE = _Here()


class _Ticket:
    """A block that waits for its turn."""

    __slots__ = ("side",)

    def __init__(self, side: str) -> None:
        self.side = side


class SideLock:
    """Any number of threads on one side while none is on the other; a thread that has ended is on neither."""

    def __init__(self) -> None:
        # Re-entrant, since a finaliser that ends a turn may run in a thread that holds it.
        self._changed = threading.Condition(threading.RLock())
        self._inside: dict[str, dict[_Thread, int]] = {"cpu": {}, "cuda": {}}
        self._waiting: collections.deque[_Ticket] = collections.deque()

    def is_open(self, side: str) -> bool:
        """Return whether a living thread has an open block on a side."""
        return any(thread() is not None for thread in tuple(self._inside[side]))

    def enter(self, side: str, timeout: float | None) -> _Thread:
        """Begin a turn, once the other side's are over; a thread that is on a side already goes on at once.

        Args:
            side: ``"cpu"`` or ``"cuda"``.
            timeout: Seconds to wait, None for no limit.

        Returns:
            The argument of ``leave``.

        Raises:
            WriteConflictError: The time ran out, or this thread itself is on the other side.
        """
        thread, inside = _HERE.thread, self._inside[side]
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if thread in self._inside[_other(side)]:
                _refuse(side, "left first", "open, in this thread itself")
            if thread not in inside:
                self._wait(_Ticket(side), timeout, deadline)
            inside[thread] = inside.get(thread, 0) + 1
        return thread

    def leave(self, side: str, thread: _Thread) -> None:
        """End a turn."""
        with self._changed:
            inside = self._inside[side]
            count = inside.pop(thread, 0)
            if count > 1:
                inside[thread] = count - 1
            self._changed.notify_all()

    def _wait(self, ticket: _Ticket, timeout: float | None, deadline: float | None) -> None:
        self._waiting.append(ticket)
        try:
            while self._is_barred(ticket):
                left = _LOOK_INTERVAL_S if deadline is None else min(deadline - time.monotonic(), _LOOK_INTERVAL_S)
                if left <= 0:
                    _refuse(ticket.side, f"left within {timeout:.3g} s" if timeout else "left first", "open")
                self._sleep(left)
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        """Wait for a change, with the lock held afterwards also where a signal handler raises meanwhile."""
        try:
            self._changed.wait(seconds)
        except BaseException:
            if not self._changed._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # it had just been given back
                self._changed.acquire()
            raise

    def _is_barred(self, ticket: _Ticket) -> bool:
        if self.is_open(_other(ticket.side)):
            return True
        for earlier in tuple(self._waiting):
            if earlier is ticket:
                return False
            if earlier.side != ticket.side:
                return True
        return False


def _other(side: str) -> str:
    return "cuda" if side == "cpu" else "cpu"


def _refuse(side: str, rule: str, value: str) -> NoReturn:
    name = f"block of the {'CUDA' if side == 'cpu' else 'CPU'} side"
    raise WriteConflictError("dual view", name=name, rule=rule, value=value, hint=_HINT)
