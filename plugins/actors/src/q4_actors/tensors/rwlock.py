"""``RWLock``: a fair lock among the threads of a process, so that neither readers nor writers starve.

One re-entrant lock guards this bookkeeping and its owner's. It is held for a few instructions, never while a caller's
block or a copy runs. Nothing here relies on the interpreter's global lock.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_actors.tensors.tickets import Thread, Ticket

__all__ = ["LOOK_INTERVAL_S", "RWLock"]

LOOK_INTERVAL_S = 0.1
"""How long a waiting thread sleeps before it checks again that the thread it waits for still lives."""


class RWLock:
    """One writer at a time; readers at any time, or (``excludes_readers``) only while no thread writes.

    The lock is fair rather than fast: a reader that comes while a writer writes or waits, waits. A block that ends
    passes the turn on, under the lock: after a write to all readers that wait by then, then to the writer that has
    waited longest. So readers can't starve a writer, and writers can't starve a reader. A thread that reads already may
    always read once more.

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
        """Whether a thread writes, or waits to."""
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
            check: Called before each sleep; evicts who can't leave, and raises if waiting has become pointless.

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
        """End a read; return False if it had ended, since it was evicted."""
        was_in = ticket in self.readers
        self.readers.discard(ticket)
        ticket.is_admitted = False
        if self._waiting_writers:
            self.pass_turn()
        return was_in

    def end_write(self, ticket: Ticket) -> bool:
        """End a write; return False if it had ended, since it was evicted."""
        ticket.is_admitted = False
        if self.writer is not ticket:
            return False
        self.writer = None
        if self._waiting_readers:
            self._admit_waiting_readers()
        if self._waiting_writers:
            self.pass_turn()
        return True

    def evict_readers(self) -> list[Ticket]:
        """Evict readers whose thread has ended, and return them."""
        ended = [ticket for ticket in self.readers if ticket.thread() is None]
        self.readers.difference_update(ended)
        if ended:
            self.pass_turn()
        return ended

    def wake(self) -> None:
        """Let all waiting threads call ``check`` again."""
        for ticket in (*self._waiting_readers, *self._waiting_writers):
            ticket.bell.notify()

    def pass_turn(self) -> None:
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
        self, ticket: Ticket, queue: collections.deque[Ticket], timeout: float | None, check: Callable[[], object]
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        ticket.bell = threading.Condition(self.lock)
        queue.append(ticket)
        try:
            while not ticket.is_admitted:
                check()  # which may admit it
                remaining = LOOK_INTERVAL_S if deadline is None else min(deadline - time.monotonic(), LOOK_INTERVAL_S)
                if ticket.is_admitted or remaining <= 0:
                    break
                ticket.bell.wait(remaining)
        finally:
            if ticket in queue:
                queue.remove(ticket)
                self.pass_turn()  # to those who waited behind it
        return ticket.is_admitted
