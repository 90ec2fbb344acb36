"""``Exclusion``: who of a process's threads may read and who may write, in turn, so that nobody starves.

One lock guards this bookkeeping and its owner's. It is held for a few instructions, never while a caller's block or a
copy runs, and it is re-entrant, so that a finaliser that runs inside it can't deadlock its own thread. Nothing here
relies on the interpreter's global lock.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Exclusion", "Ticket"]


class Ticket:
    """One request to read or to write, and the thread that made it."""

    __slots__ = ("is_admitted", "thread")

    def __init__(self) -> None:
        self.thread = 0
        self.is_admitted = False


class Exclusion:
    """One writer at a time; readers at any time, or (``excludes_readers``) only while nobody writes.

    Turns: a reader that comes while a writer writes or waits, waits; whoever leaves hands over, under the lock: after a
    write all readers that wait by then go first, then the writer that has waited longest. So a stream of readers
    can't starve a writer, nor a stream of writers a reader. A thread that reads already may always read once more.

    Args:
        excludes_readers: Whether readers and the writer keep each other out.
    """

    def __init__(self, *, excludes_readers: bool) -> None:
        self.lock = threading.RLock()
        self._turn = threading.Condition(self.lock)
        self._excludes_readers = excludes_readers
        self._writer: Ticket | None = None
        self._reads_by_thread: dict[int, int] = {}
        self._waiting_writers: collections.deque[Ticket] = collections.deque()
        self._waiting_readers: collections.deque[Ticket] = collections.deque()

    # Every method below is called with the lock held.

    @property
    def has_writer(self) -> bool:
        """Whether somebody writes, or waits to."""
        return self._writer is not None or bool(self._waiting_writers)

    def is_writing(self, thread: int) -> bool:
        """Return whether the thread writes."""
        return self._writer is not None and self._writer.thread == thread

    def is_reading(self, thread: int) -> bool:
        """Return whether the thread reads."""
        return thread in self._reads_by_thread

    def enter_read(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket read, now or in its turn.

        Args:
            ticket: A new ticket.
            timeout: Seconds to wait, None for no limit.
            check: Called before each sleep; raises if waiting has become pointless.

        Returns:
            False if the time ran out.
        """
        reads = self._reads_by_thread
        thread = ticket.thread
        if self._excludes_readers and (self._writer or self._waiting_writers) and thread not in reads:
            return self._wait(ticket, self._waiting_readers, timeout, check)
        ticket.is_admitted = True
        reads[thread] = reads.get(thread, 0) + 1
        return True

    def enter_write(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket write, now or in its turn; arguments and result as for ``enter_read``.

        The ticket's thread must hold no other ticket.
        """
        return self.try_write(ticket) or self._wait(ticket, self._waiting_writers, timeout, check)

    def try_write(self, ticket: Ticket) -> bool:
        """Let the ticket write now and return True, or return False; also where its own thread is in the way."""
        reads = self._reads_by_thread
        if self._writer or self._waiting_writers or (reads and (self._excludes_readers or ticket.thread in reads)):
            return False
        ticket.is_admitted = True
        self._writer = ticket
        return True

    def leave_read(self, ticket: Ticket) -> None:
        """End a read, if it was let in."""
        if ticket.is_admitted:
            ticket.is_admitted = False
            reads = self._reads_by_thread.pop(ticket.thread)
            if reads > 1:
                self._reads_by_thread[ticket.thread] = reads - 1
            elif self._waiting_writers:
                self._hand_over()

    def leave_write(self, ticket: Ticket) -> None:
        """End a write, if it was let in."""
        if ticket.is_admitted:
            ticket.is_admitted = False
            self._writer = None
            if self._waiting_readers:
                self._admit_waiting_readers()
            elif self._waiting_writers:
                self._hand_over()

    def wake(self) -> None:
        """Let everybody who waits look at ``check`` again."""
        self._turn.notify_all()

    def _admit_waiting_readers(self) -> None:
        while self._waiting_readers:
            ticket = self._waiting_readers.popleft()
            ticket.is_admitted = True
            self._reads_by_thread[ticket.thread] = self._reads_by_thread.get(ticket.thread, 0) + 1
        self._turn.notify_all()

    def _hand_over(self) -> None:
        """Let the longest waiting writer in if the way is free, or the readers if no writer is left to wait for."""
        if self._writer is not None:
            return
        if not self._waiting_writers:
            self._admit_waiting_readers()
        elif not (self._excludes_readers and self._reads_by_thread):
            self._writer = self._waiting_writers.popleft()
            self._writer.is_admitted = True
            self._turn.notify_all()

    def _wait(
        self,
        ticket: Ticket,
        queue: collections.deque[Ticket],
        timeout: float | None,
        check: Callable[[], object],
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        queue.append(ticket)
        try:
            while not ticket.is_admitted:
                check()
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    break
                self._turn.wait(remaining)
        finally:
            if not ticket.is_admitted:
                queue.remove(ticket)
                self._hand_over()
        return ticket.is_admitted
