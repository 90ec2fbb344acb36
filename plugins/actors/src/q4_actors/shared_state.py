"""What one process knows of a shared tensor: its latest look at the header, and what its own threads hold."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, NoReturn

import torch

from q4_actors.arguments import MutableMode
from q4_actors.at_fork import let_forks_know
from q4_actors.content import Content
from q4_actors.rwlock import ENDED, Exclusion
from q4_actors.segment import CLOSED, CURRENT, FIRST_SLOT, TAINTED, WRITER, WRITER_PROCESS, WRITER_WAITS, Segment
from q4core.errors import LifecycleError

if TYPE_CHECKING:
    from q4_actors.blocks import ReadView, WriteBlock
    from q4_actors.rwlock import Thread

__all__ = ["HEALTHY", "POISONED", "WRITING", "SharedState"]

LONGEST_LOOK_S = 1.0
HEALTHY, WRITING, POISONED = range(3)
"""States of an ``IN_PLACE`` content, beside its version in one word."""


class SharedState(Content):
    """The state. ``version``, ``poison``, ``is_closed`` and ``tensor`` are this process's latest look."""

    __slots__ = (
        "claimed",
        "current",
        "epoch",
        "has_turn",
        "holds",
        "is_let_go",
        "locks",
        "lost",
        "process",
        "seen",
        "segment",
        "slots",
        "total",
        "words",
    )

    def __init__(self, segment: Segment, label: str) -> None:
        super().__init__(segment.slots[0], label, is_in_place=segment.form.mode is MutableMode.IN_PLACE)
        self.segment = segment
        self.words, self.locks, self.slots = segment.words, segment.locks, segment.slots
        self.total = segment.form.total
        self.is_let_go = False
        self.epoch = 0
        self.forget()
        self.refresh()
        _STATES.add(self)
        let_forks_know(self)

    def forget(self) -> None:
        """Begin with nobody inside."""
        self.process = os.getpid()
        self.holds: list[dict[object, Thread | None]] = [{} for _ in self.slots]
        """Who reads each slot: the thread, by its ticket's token."""
        self.lost: collections.deque[tuple[object, int]] = collections.deque()
        # Torch's count of changes when a version was first seen here; it tells of this process's changes alone.
        self.seen: list[tuple[int, int]] = [(-1, 0)] * len(self.slots)
        self.has_turn = False
        self.current = 0
        """The slot of ``version``."""
        self.claimed: int | None = None

    def after_fork(self) -> None:
        """Begin anew in a child: what its parent's threads hold is the parent's."""
        self.epoch += 1
        self.gate = Exclusion(excludes_readers=self.is_in_place)
        self.lock = self.gate.lock
        self.grown = threading.Condition(self.lock)
        self.waiting = 0
        self.reads = self.writes = self.snapshots = self.failures = self.conflicts = self.copies = 0
        self.bytes_copied = 0
        self.forget()
        if not self.is_disposed:
            try:
                self.segment.reopen()
            except (OSError, LifecycleError):
                self.is_closed = self.is_let_go = True
                self.dispose()

    @property
    def is_busy(self) -> bool:
        """Whether a thread of this process holds a slot, or the turn to write."""
        return self.has_turn or any(self.holds)

    def is_inside(self, thread: Thread | None) -> bool:
        """Return whether a thread is in a block."""
        return self.gate.writer is thread or self.gate.is_reading(thread)

    @property
    def is_disposed(self) -> bool:
        """Whether this process has given everything back."""
        return not self.segment.close.alive

    # -- a look at the header

    @property
    def is_cut(self) -> bool:
        """Whether somebody has cut the file short, so that a look at what is gone would end the process."""
        return not self.is_disposed and self.locks.size() < self.total

    def check_size(self) -> None:
        """Raise if somebody has cut the file short."""
        if not self.is_closed and (size := self.locks.size()) < self.total:
            hint = "Somebody has truncated it. Make a new one."
            rule = f"{self.total} bytes"
            raise LifecycleError(f"segment of {self.label}", name="size", rule=rule, value=size, hint=hint)

    def refresh(self) -> None:
        """Look at version and state, which other processes change."""
        words = self.words
        if words[CLOSED]:
            self.is_closed = True
        if self.is_closed:
            return
        while True:
            word = words[CURRENT]
            self.version, low = word >> 8, word & 255
            if not self.is_in_place:
                self.current, self.tensor = low, self.slots[low]
                self.poison = self.segment.cause if words[TAINTED] == self.version + 1 else None
                return
            self.poison = (
                None if low == HEALTHY else self.segment.cause if low == POISONED else self._ended_writer(word)
            )
            # A writer that ended well between the two looks has not died.
            if words[CURRENT] == word:
                return

    def _ended_writer(self, word: int) -> str | None:
        locks = self.locks
        if self.claimed is not None or locks.is_taken(FIRST_SLOT) or self.words[CURRENT] != word:
            return None
        if not self.holds[0]:  # to look at a lock orders no memory, to take it does
            if not locks.try_shared(FIRST_SLOT):
                return None
            locks.release(FIRST_SLOT)
        return f"process {self.words[WRITER_PROCESS]} ended inside write()"

    def set_poison(self, cause: str) -> None:
        """Declare the content unknown, in all processes. ``IN_PLACE``: the caller's process holds the slot."""
        self.segment.cause = cause
        if self.is_in_place:
            self.words[CURRENT] = self.version << 8 | POISONED
        else:
            self.words[TAINTED] = self.version + 1
        super().set_poison(cause)

    def refuse_touched(self, base: torch.Tensor, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()`` in this process."""
        self.refresh()
        super().refuse_touched(base, version)

    def note_failure(self, cause: str | None) -> None:
        """Count an update that does not take effect; other processes must be told also of one that closing dropped."""
        # Only who has the slot has changed anything, and may tell.
        super().note_failure(None if self.claimed is None else cause or "a handle was closed during its update")

    # -- places that nobody leaves

    def reclaim(self) -> None:
        """Take back what can't be left any more, in this process; of processes that ended, the kernel does it."""
        if self.is_disposed:
            return
        self.check_size()
        self.refresh()
        super().reclaim()
        for place in tuple(self.lost):
            self.release_hold(*place)
            with contextlib.suppress(ValueError):  # a finaliser may have done it meanwhile
                self.lost.remove(place)
        for slot, holders in enumerate(self.holds):
            for token in tuple(holders):
                thread = holders.get(token)
                if thread is None or thread() is None:
                    self.release_hold(token, slot)

    def lose_read(self, view: ReadView) -> None:
        """Take word from a finaliser that nobody will leave this block; not if it is the parent's."""
        if view.place[0] == self.epoch:
            super().lose_read(view)
            self.lost.append((view.token, view.place[1]))

    def lose_write(self, block: WriteBlock) -> None:
        """Take word from a finaliser that nobody will leave this block; not if it is the parent's."""
        if block.place[0] == self.epoch:
            super().lose_write(block)

    # -- giving back

    def release_hold(self, token: object, slot: int) -> None:
        """Let one reader out of a slot, if it is in, and the process with the last one."""
        if slot < 0 or (self.holds[slot].pop(token, None) is None and self.is_disposed):
            return
        if not self.holds[slot] and slot != self.claimed:
            self.locks.release(FIRST_SLOT + slot)
            if self.is_let_go:
                self.dispose()

    def release_unheld(self) -> None:
        """Release what an interrupted attempt to hold may have left."""
        if not self.is_disposed:
            for slot, holders in enumerate(self.holds):
                if not holders and slot != self.claimed:
                    self.locks.release(FIRST_SLOT + slot)

    def release_claim(self, *, is_cut: bool = False) -> None:
        """Let other processes write; where the file was cut short, without a look at it."""
        if self.claimed is not None:
            self.locks.release(FIRST_SLOT + self.claimed)
            self.claimed = None
        if self.has_turn:
            if not is_cut and self.words[WRITER_WAITS]:
                self.words[WRITER_WAITS] = 0
            self.locks.release(WRITER)
            self.has_turn = False
        if self.is_let_go:
            self.dispose()

    def tell_all(self) -> None:
        """Let everybody who waits look again."""
        self.gate.wake()
        self.grown.notify_all()

    def close(self) -> None:
        """Let go, and tell everybody who waits; the maker ends it for all processes."""
        with self.lock:
            if self.segment.is_maker:
                if not self.is_disposed and self.locks.size() >= self.total:
                    self.words[CLOSED] = 1
                self.segment.remove_name()
            self.is_closed = self.is_let_go = True
            self.tensor, self.kept = torch.empty(0, device="cpu"), None
            self.tell_all()
            self.dispose()

    def dispose(self) -> None:
        """Give everything back once nobody is inside any more."""
        if not self.is_busy:
            self.segment.close()
            self.segment.let_go()
            self.words, self.slots = self.segment.words, []


_STATES: weakref.WeakSet[SharedState] = weakref.WeakSet()


def _after_thread(thread: Thread) -> None:
    """Put out at once a thread that has ended inside a block, since other processes can't."""
    for state in tuple(_STATES):
        # Not in a forked child, where its parent's other threads end; nor may a thread that hangs hold up this one.
        if state.process == os.getpid() and state.lock.acquire(timeout=LONGEST_LOOK_S):
            try:
                if state.is_inside(thread):
                    with contextlib.suppress(LifecycleError):
                        state.reclaim()
            finally:
                state.lock.release()


ENDED.append(_after_thread)
