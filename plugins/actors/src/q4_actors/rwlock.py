"""``Exclusion``: who of a process's threads may read and who may write, in turn, so that nobody starves.

One lock guards this bookkeeping and its owner's. It is held for a few instructions, never while a caller's block or a
copy runs, and it is re-entrant, so that a finaliser that runs inside it can't deadlock its own thread. Nothing here
relies on the interpreter's global lock.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENDED", "HERE", "LOOK_INTERVAL_S", "Exclusion", "Thread", "Ticket", "wait_on"]

LOOK_INTERVAL_S = 0.1
"""How long who waits sleeps before it looks again whether the one it waits for can still leave."""


class _Life:
    """Something that a thread's own storage holds, so that it goes when the thread ends."""

    __slots__ = ("__weakref__",)


Thread: TypeAlias = "weakref.ref[_Life]"
"""A thread, by its life: refers to None once it has ended, and equals no later one, unlike the system's numbers."""


ENDED: list[Callable[[Thread], None]] = []
"""Called by a thread that ends while somebody still keeps its ``Thread``: inside a block, most likely."""


def _tell_of_end(thread: Thread, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
    if not is_exiting():
        for look in ENDED:
            look(thread)


class _Here(threading.local):
    """The calling thread, as ``HERE.thread``."""

    def __init__(self) -> None:
        self._life = _Life()
        self.thread: Thread = weakref.ref(self._life, _tell_of_end)
        hash(self.thread)  # so that it can be looked up after its end too


HERE = _Here()


def wait_on(bell: threading.Condition, seconds: float) -> None:
    """Wait for the bell, whose lock is held before and after, also where a signal handler raises meanwhile."""
    try:
        bell.wait(seconds)
    except BaseException:
        if not bell._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # raised just after it gave the lock back
            bell.acquire()
        raise


class Ticket:
    """One request to read or to write, the thread that made it, and (between processes) where it was let in.

    ``token`` stands for it wherever it must not be kept, so that its end shows.
    """

    __slots__ = ("bell", "is_admitted", "place", "thread", "token")

    bell: threading.Condition
    """Rung for this ticket alone, while it waits: each thread that wakes for nothing costs all others a turn."""
    thread: Thread | None
    place: tuple[int, int]
    token: object

    def __init__(self) -> None:
        self.is_admitted = False
        self.thread = None
        self.token = object()


class Exclusion:
    """One writer at a time; readers at any time, or (``excludes_readers``) only while nobody writes.

    Turns: a reader that comes while a writer writes or waits, waits; whoever leaves hands over, under the lock: after a
    write all readers that wait by then go first, then the writer that has waited longest. So a stream of readers
    can't starve a writer, nor a stream of writers a reader. A thread that reads already may always read once more.

    Who can't leave any more, because its thread has ended or its block was collected, is put out by whoever looks:
    ``Content.reclaim``. So it is not the block that is kept here while somebody reads or writes, but its token.

    A signal handler may raise between any two lines. So a ticket is let in by one statement, and every method that
    takes something back may be called again, until it comes to its end.

    Args:
        excludes_readers: Whether readers and the writer keep each other out.
    """

    __slots__ = (
        "_excludes_readers",
        "_waiting_readers",
        "_waiting_writers",
        "lock",
        "lost_reads",
        "lost_writes",
        "readers",
        "writer",
        "writing",
    )

    def __init__(self, *, excludes_readers: bool) -> None:
        self.lock = threading.RLock()
        self._excludes_readers = excludes_readers
        self.writer: Thread | None = None
        self.writing: object = None
        self.readers: dict[object, Thread | None] = {}
        # Tokens. A finaliser may run in the midst of the bookkeeping, so it only leaves word here, without the lock.
        self.lost_reads: collections.deque[object] = collections.deque()
        self.lost_writes: collections.deque[object] = collections.deque()
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
        return thread in self.readers.values()

    def enter_read(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket read, now or in its turn.

        Args:
            ticket: A new ticket.
            timeout: Seconds to wait, None for no limit.
            check: Called before each sleep; puts out who can't leave, and raises if waiting has become pointless.

        Returns:
            False if the time ran out.
        """
        readers, thread = self.readers, ticket.thread
        if self._excludes_readers and (self.writer or self._waiting_writers) and thread not in readers.values():
            return self._wait(ticket, self._waiting_readers, timeout, check)
        readers[ticket.token], ticket.is_admitted = thread, True
        return True

    def enter_write(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket write, now or in its turn; arguments and result as for ``enter_read``.

        The ticket's thread must hold no other ticket.
        """
        return self.try_write(ticket) or self._wait(ticket, self._waiting_writers, timeout, check)

    def try_write(self, ticket: Ticket) -> bool:
        """Let the ticket write now and return True, or return False; also where its own thread is in the way."""
        readers = self.readers
        if self.writer or self._waiting_writers:
            return False
        if readers and (self._excludes_readers or ticket.thread in readers.values()):
            return False
        self.writer, self.writing, ticket.is_admitted = ticket.thread, ticket.token, True
        return True

    def end_read(self, ticket: Ticket) -> bool:
        """End a read; return False if it had ended, since it was put out."""
        was_in = ticket.token in self.readers
        self.readers.pop(ticket.token, None)
        ticket.is_admitted = False
        if self._waiting_writers:
            self._hand_over()
        return was_in

    def end_write(self, ticket: Ticket | None = None) -> None:
        """End the write that is under way; with a ticket, only if it is that one's."""
        if ticket is None:
            self.writer = self.writing = None
        elif self.writing is ticket.token:
            self.writer, self.writing, ticket.is_admitted = None, None, False
        if self.writer is None:
            if self._waiting_readers:
                self._admit_waiting_readers()
            elif self._waiting_writers:
                self._hand_over()

    def drop(self, ticket: Ticket) -> None:
        """Take back whatever a ticket has, wherever it was interrupted."""
        for queue in (self._waiting_readers, self._waiting_writers):
            if ticket in queue:
                queue.remove(ticket)
        self.end_write(ticket)
        self.end_read(ticket)
        self._hand_over()

    def lost_writer(self) -> str | None:
        """Return why the writer can't leave any more, or None if it can, or there is none."""
        writer, token = self.writer, self.writing
        if writer is None:
            self.lost_writes.clear()
            return None
        cause = None
        if writer() is None:
            cause = "a writer's thread ended without leaving its block"
        elif token in self.lost_writes:
            cause = "a writer's block was collected without leaving it"
        return cause if self.writing is token else None  # else a finaliser has left it meanwhile

    def put_out_readers(self) -> bool:
        """Put out readers that can't leave any more; return whether there were any."""
        readers, lost = self.readers, self.lost_reads
        is_any_out = bool(lost)
        # Copied first, because a finaliser may leave a block in the midst of this.
        for token in tuple(lost):
            readers.pop(token, None)
            with contextlib.suppress(ValueError):
                lost.remove(token)
        for token in tuple(readers):
            thread = readers.get(token)
            if thread is None or thread() is None:
                readers.pop(token, None)
                is_any_out = True
        if is_any_out:
            self._hand_over()
        return is_any_out

    def wake(self) -> None:
        """Let everybody who waits look at ``check`` again."""
        for ticket in (*self._waiting_readers, *self._waiting_writers):
            ticket.bell.notify()

    def _admit_waiting_readers(self) -> None:
        while self._waiting_readers:
            ticket = self._waiting_readers[0]
            self.readers[ticket.token], ticket.is_admitted = ticket.thread, True
            self._waiting_readers.popleft()
            ticket.bell.notify()

    def _hand_over(self) -> None:
        """Let the longest waiting writer in if the way is free, or the readers if no writer is left to wait for."""
        if self.writer is not None:
            return
        if not self._waiting_writers:
            self._admit_waiting_readers()
        elif not (self._excludes_readers and self.readers):
            ticket = self._waiting_writers[0]
            self.writer, self.writing, ticket.is_admitted = ticket.thread, ticket.token, True
            self._waiting_writers.popleft()
            ticket.bell.notify()

    def _wait(
        self,
        ticket: Ticket,
        queue: collections.deque[Ticket],
        timeout: float | None,
        check: Callable[[], object],
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        ticket.bell = bell = threading.Condition(self.lock)
        try:
            queue.append(ticket)
            while not ticket.is_admitted:
                check()  # which may let it in
                self._hand_over()  # if whoever should have was interrupted
                remaining = LOOK_INTERVAL_S if deadline is None else min(deadline - time.monotonic(), LOOK_INTERVAL_S)
                if ticket.is_admitted or remaining <= 0:
                    break
                wait_on(bell, remaining)
        finally:
            if ticket in queue:
                queue.remove(ticket)
            if not ticket.is_admitted:
                self._hand_over()
        return ticket.is_admitted
