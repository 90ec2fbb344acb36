"""``RWLock``: who of a process's threads may read and who may write, in turn, so that nobody starves.

One re-entrant lock guards this bookkeeping and its owner's. It is held for a few instructions, never while a caller's
block or a copy runs. Nothing here relies on the interpreter's global lock.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENDED", "HERE", "LOOK_INTERVAL_S", "RWLock", "Thread", "Ticket"]

LOOK_INTERVAL_S = 0.1
"""How long a waiting thread sleeps before it looks again whether the one it waits for can still leave."""


class _Life:
    """Something that a thread's own storage holds, so that it goes when the thread ends."""

    __slots__ = ("__weakref__",)


Thread: TypeAlias = "weakref.ref[_Life]"
"""A thread, by its life: refers to None once it has ended, and equals no later one, unlike the system's numbers."""

ENDED: list[Callable[[Thread], None]] = []
"""Called by a thread that ends while somebody still keeps its ``Thread``: inside a block, most likely."""


def _report_end(thread: Thread, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
    if not is_exiting():
        for look in ENDED:
            look(thread)


class _Here(threading.local):
    """The calling thread, as ``HERE.thread``."""

    def __init__(self) -> None:
        self._life = _Life()
        self.thread: Thread = weakref.ref(self._life, _report_end)


HERE = _Here()


class Ticket:
    """One request to read or to write, and the thread that made it."""

    __slots__ = ("bell", "is_admitted", "thread")

    bell: threading.Condition
    """Rung for this ticket alone, while it waits: each thread that wakes for nothing costs all others a turn."""
    thread: Thread

    def __init__(self) -> None:
        self.is_admitted = False


class RWLock:
    """One writer at a time; readers at any time, or (``excludes_readers``) only while nobody writes.

    Turns: a reader that comes while a writer writes or waits, waits; whoever leaves hands over, under the lock: after a
    write all readers that wait by then go first, then the writer that has waited longest. So a stream of readers
    can't starve a writer, nor a stream of writers a reader. A thread that reads already may always read once more.

    Every method is called with ``lock`` held.

    Args:
        excludes_readers: Whether readers and the writer keep each other out.
    """

    def __init__(self, *, excludes_readers: bool) -> None:
        self.lock = threading.RLock()
        self._excludes_readers = excludes_readers
        self.writer: Ticket | None = None
        self.readers: set[Ticket] = set()
        self._waiting_writers: collections.deque[Ticket] = collections.deque()
        self._waiting_readers: collections.deque[Ticket] = collections.deque()

    @property
    def has_writer(self) -> bool:
        """Whether somebody writes, or waits to."""
        return self.writer is not None or bool(self._waiting_writers)

    def is_writing(self, thread: Thread) -> bool:
        """Return whether the thread writes."""
        return self.writer is not None and self.writer.thread is thread

    def is_reading(self, thread: Thread) -> bool:
        """Return whether the thread reads."""
        return any(ticket.thread is thread for ticket in self.readers)

    def enter_read(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket read, now or in its turn.

        Args:
            ticket: A new ticket.
            timeout: Seconds to wait, None for no limit.
            check: Called before each sleep; puts out who can't leave, and raises if waiting has become pointless.

        Returns:
            False if the time ran out.
        """
        if self._excludes_readers and (self.writer or self._waiting_writers) and not self.is_reading(ticket.thread):
            return self._wait(ticket, self._waiting_readers, timeout, check)
        self.readers.add(ticket)
        ticket.is_admitted = True
        return True

    def enter_write(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket write, now or in its turn; arguments and result as for ``enter_read``.

        The ticket's thread must hold no other ticket.
        """
        return self.try_write(ticket) or self._wait(ticket, self._waiting_writers, timeout, check)

    def try_write(self, ticket: Ticket) -> bool:
        """Let the ticket write now and return True, or return False; also where its own thread is in the way."""
        if self.writer or self._waiting_writers:
            return False
        if self.readers and (self._excludes_readers or self.is_reading(ticket.thread)):
            return False
        self.writer, ticket.is_admitted = ticket, True
        return True

    def end_read(self, ticket: Ticket) -> bool:
        """End a read; return False if it had ended, since it was put out."""
        was_in = ticket in self.readers
        self.readers.discard(ticket)
        ticket.is_admitted = False
        if self._waiting_writers:
            self.hand_over()
        return was_in

    def end_write(self, ticket: Ticket) -> bool:
        """End a write; return False if it had ended, since it was put out."""
        ticket.is_admitted = False
        if self.writer is not ticket:
            return False
        self.writer = None
        if self._waiting_readers:
            self._admit_waiting_readers()
        if self._waiting_writers:
            self.hand_over()
        return True

    def put_out_readers(self) -> list[Ticket]:
        """Put out readers whose thread has ended, and return them."""
        ended = [ticket for ticket in self.readers if ticket.thread() is None]
        self.readers.difference_update(ended)
        if ended:
            self.hand_over()
        return ended

    def wake(self) -> None:
        """Let everybody who waits look at ``check`` again."""
        for ticket in (*self._waiting_readers, *self._waiting_writers):
            ticket.bell.notify()

    def hand_over(self) -> None:
        """Let the longest waiting writer in if the way is free, or the readers if no writer is left to wait for."""
        if self.writer is not None:
            return
        if not self._waiting_writers:
            self._admit_waiting_readers()
        elif not (self._excludes_readers and self.readers):
            ticket = self._waiting_writers.popleft()
            self.writer, ticket.is_admitted = ticket, True
            ticket.bell.notify()

    def _admit_waiting_readers(self) -> None:
        while self._waiting_readers:
            ticket = self._waiting_readers.popleft()
            self.readers.add(ticket)
            ticket.is_admitted = True
            ticket.bell.notify()

    def _wait(
        self,
        ticket: Ticket,
        queue: collections.deque[Ticket],
        timeout: float | None,
        check: Callable[[], object],
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        ticket.bell = threading.Condition(self.lock)
        queue.append(ticket)
        try:
            while not ticket.is_admitted:
                check()  # which may let it in
                remaining = LOOK_INTERVAL_S if deadline is None else min(deadline - time.monotonic(), LOOK_INTERVAL_S)
                if ticket.is_admitted or remaining <= 0:
                    break
                ticket.bell.wait(remaining)
        finally:
            if ticket in queue:
                queue.remove(ticket)
                self.hand_over()  # to those who waited behind it
        return ticket.is_admitted
