"""``Exclusion``: who of a process's threads may read and who may write, in turn, so that nobody starves.

One lock guards this bookkeeping and its owner's. It is held for a few instructions, never while a caller's block or a
copy runs, and it is re-entrant, so that a finaliser that runs inside it can't deadlock its own thread. Nothing here
relies on the interpreter's global lock.
"""

from __future__ import annotations

import collections
import threading
import time
import weakref
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HERE", "LOOK_INTERVAL_S", "Exclusion", "Thread", "Ticket"]

LOOK_INTERVAL_S = 0.1
"""How long who waits sleeps before it looks again whether the one it waits for can still leave."""


class _Life:
    """Something that a thread's own storage holds, so that it goes when the thread ends."""

    __slots__ = ("__weakref__",)


Thread: TypeAlias = "weakref.ref[_Life]"
"""A thread, by its life: refers to None once it has ended, and equals no later one, unlike the system's numbers."""


class _Here(threading.local):
    """The calling thread, as ``HERE.thread``."""

    def __init__(self) -> None:
        self._life = _Life()
        self.thread: Thread = weakref.ref(self._life)
        hash(self.thread)  # so that it can be looked up after its end too


HERE = _Here()


class Ticket:
    """One request to read or to write, the thread that made it, and (between processes) where it was let in."""

    __slots__ = ("is_admitted", "place", "thread")

    thread: Thread | None
    place: tuple[int, int]

    def __init__(self) -> None:
        self.is_admitted = False
        self.thread = None


class Exclusion:
    """One writer at a time; readers at any time, or (``excludes_readers``) only while nobody writes.

    Turns: a reader that comes while a writer writes or waits, waits; whoever leaves hands over, under the lock: after a
    write all readers that wait by then go first, then the writer that has waited longest. So a stream of readers
    can't starve a writer, nor a stream of writers a reader. A thread that reads already may always read once more.

    Who can't leave any more, because its thread has ended or its block was collected, is put out by whoever looks:
    ``reclaim``. So it is not the block that is kept here while somebody writes, but the thread.

    Args:
        excludes_readers: Whether readers and the writer keep each other out.
    """

    def __init__(self, *, excludes_readers: bool) -> None:
        self.lock = threading.RLock()
        self._turn = threading.Condition(self.lock)
        self._excludes_readers = excludes_readers
        self.writer: Thread | None = None
        self._reads_by_thread: dict[Thread | None, int] = {}
        # A finaliser may run in the midst of the bookkeeping, so it only leaves word here, without the lock.
        self.lost_reads: collections.deque[Thread | None] = collections.deque()
        self.lost_writes: collections.deque[Thread | None] = collections.deque()
        self._waiting_writers: collections.deque[Ticket] = collections.deque()
        self._waiting_readers: collections.deque[Ticket] = collections.deque()

    # Every method below is called with the lock held.

    @property
    def has_writer(self) -> bool:
        """Whether somebody writes, or waits to."""
        return self.writer is not None or bool(self._waiting_writers)

    def is_writing(self, thread: Thread | None) -> bool:
        """Return whether the thread writes."""
        return self.writer is thread

    def is_reading(self, thread: Thread | None) -> bool:
        """Return whether the thread reads."""
        return thread in self._reads_by_thread

    def enter_read(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket read, now or in its turn.

        Args:
            ticket: A new ticket.
            timeout: Seconds to wait, None for no limit.
            check: Called before each sleep; calls ``reclaim``, and raises if waiting has become pointless.

        Returns:
            False if the time ran out.
        """
        reads = self._reads_by_thread
        thread = ticket.thread
        if self._excludes_readers and (self.writer or self._waiting_writers) and thread not in reads:
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
        if self.writer or self._waiting_writers or (reads and (self._excludes_readers or ticket.thread in reads)):
            return False
        ticket.is_admitted = True
        self.writer = ticket.thread
        return True

    def end_read(self, thread: Thread | None) -> bool:
        """End one read of the thread; return False if it has none, since it was put out."""
        reads = self._reads_by_thread.pop(thread, 0)
        if reads > 1:
            self._reads_by_thread[thread] = reads - 1
        elif self._waiting_writers:
            self._hand_over()
        return reads > 0

    def end_write(self) -> None:
        """End the write that is under way."""
        self.writer = None
        if self._waiting_readers:
            self._admit_waiting_readers()
        elif self._waiting_writers:
            self._hand_over()

    def reclaim(self) -> tuple[bool, str | None]:
        """Put out whoever can't leave any more.

        Returns:
            Whether there was anybody; and why the writer had to go, or None if it didn't.
        """
        cause = None
        writer = self.writer
        if writer is None and not self._reads_by_thread and not self.lost_reads and not self.lost_writes:
            return False, None
        if writer is not None and writer() is None:
            cause = "a writer's thread ended without leaving its block"
        while self.lost_writes:
            if self.lost_writes.popleft() is writer and writer is not None:
                cause = cause or "a writer's block was collected without leaving it"
        is_any_out = cause is not None or bool(self.lost_reads)
        while self.lost_reads:
            self.end_read(self.lost_reads.popleft())
        # Copied first, and compared at the end, because a finaliser may leave a block in the midst of this.
        ended = [thread for thread in tuple(self._reads_by_thread) if thread is None or thread() is None]
        for thread in ended:
            self._reads_by_thread.pop(thread, None)
        if self.writer is not writer:
            cause = None
        if cause is not None:
            self.end_write()
        elif ended:
            self._hand_over()
        return is_any_out or bool(ended), cause

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
        if self.writer is not None:
            return
        if not self._waiting_writers:
            self._admit_waiting_readers()
        elif not (self._excludes_readers and self._reads_by_thread):
            ticket = self._waiting_writers.popleft()
            ticket.is_admitted = True
            self.writer = ticket.thread
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
                check()  # which may let it in
                remaining = LOOK_INTERVAL_S if deadline is None else min(deadline - time.monotonic(), LOOK_INTERVAL_S)
                if ticket.is_admitted or remaining <= 0:
                    break
                self._turn.wait(remaining)
        finally:
            if not ticket.is_admitted:
                queue.remove(ticket)
                self._hand_over()
        return ticket.is_admitted
