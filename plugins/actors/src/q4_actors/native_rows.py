"""What both modes have when processes agree by atomics: a row of the header, the turn to write, and being woken.

``docs/memory-protocols.md`` states the protocols.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

from q4_actors.backoff import Pauses
from q4_actors.blocks import refuse_outside
from q4_actors.content import refuse_late
from q4_actors.rwlock import HERE
from q4_actors.segment import CURRENT, ROWS
from q4_actors.shared_content import SharedContent
from q4_actors.snapshot import Snapshot
from q4core.errors import LifecycleError
from q4core.memory import detached_copy

if TYPE_CHECKING:
    from q4_actors.blocks import WriteBlock
    from q4_actors.rwlock import Thread
    from q4_actors.segment import Segment

__all__ = ["NativeRows"]

CUT = -4
"""What the plugin says of an update of a segment whose file was cut short."""
LONGEST_SLEEP_S = 0.01
"""Who waits for a version is woken; if the process that would wake it is killed just before, it looks by itself."""


class NativeRows(SharedContent):
    """What one process has of a segment that is shared by atomics."""

    def __init__(self, segment: Segment, label: str, cells: Any) -> None:
        self.cells = cells(segment.memory, segment.slots, HERE, segment.form.content_bytes, segment.locks.file)
        super().__init__(segment, label)
        segment.close_first(self.cells)
        self._take_row()

    def _take_row(self) -> None:
        """Take a row of the header, with the lock that proves that it is this process's."""
        first = self.segment.form.first_row
        for row in range(ROWS):
            if self.locks.try_exclusive(first + row):
                self.cells.enter(row)
                return
        hint = "End processes that are done with it, or make it with native=False."
        raise LifecycleError(self.label, name="handles", rule=f"at most {ROWS} at a time", value="more", hint=hint)

    def after_fork(self) -> None:
        """Begin anew in a child: what its parent's threads hold is the parent's."""
        self.cells.after_fork()
        super().after_fork()
        self.cells.file = self.locks.file
        if not self.is_disposed and not self.is_closed and not self.is_cut:
            try:
                self._take_row()
            except (OSError, LifecycleError):
                self.is_closed = True
        self.cells.is_shut = self.is_closed

    # -- what the views ask for

    def look(self) -> None:
        """Look why a reader may not be let in, and raise; or do what makes it possible."""
        self._notice_fork()
        with self.lock:
            self.check_waiting()

    def _notice_fork(self) -> None:
        """Begin anew in a child that was not forked by Python, which would have told."""
        if not self.cells.is_own and not self.is_closed:
            self.check_size()
            self.after_fork()

    def tell_of_a_change(self, slot: int, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()``."""
        with self.lock:
            self.refuse_touched(self.slots[slot], version)

    def refuse_late(self, error: BaseException | None, is_forked: bool) -> None:  # noqa: FBT001  # as the plugin calls it
        """Complain about a block that was put out before it was left."""
        refuse_late(self.label, error, is_forked=is_forked)

    def refuse_again(self) -> NoReturn:
        """Raise, since a block is entered once."""
        hint = "Call read() or write() each time."
        raise LifecycleError(self.label, name="with block", rule="entered once", hint=hint)

    def refuse_outside(self, name: str) -> NoReturn:
        """Raise, since a view is used outside its block."""
        refuse_outside(self.label, name)

    def let_go(self) -> None:
        """Give everything back after the last reader of a closed handle."""
        with self.lock:
            if self.is_let_go:
                self.dispose()

    # -- what this process holds

    @property
    def is_busy(self) -> bool:
        """Whether a thread of this process reads, or has the turn to write."""
        return self.has_turn or self.cells.open > 0 or any(self.holds)

    def is_inside(self, thread: Thread | None) -> bool:
        """Return whether a thread is in a block."""
        return super().is_inside(thread) or (not self.is_disposed and self.cells.is_reading(thread))

    def reclaim(self) -> None:
        """Take back what can't be left any more, in this process."""
        self.reads = self.cells.reads - self.snapshots
        self.cells.reclaim()
        super().reclaim()

    def set_poison(self, cause: str) -> None:
        """Declare the content unknown, in all processes."""
        super().set_poison(cause)
        self.cells.wake()

    def tell_all(self) -> None:
        """Let everybody who waits look again."""
        super().tell_all()
        if not self.is_disposed:
            self.cells.is_shut = self.is_closed
            self.cells.wake()

    def snapshot(self, timeout: float | None) -> Snapshot:
        """Copy the newest version; a copy of something that was changed meanwhile is thrown away."""
        view = self.cells.read(self, timeout)
        with view:
            copy = detached_copy(view.base)
        with self.lock:
            self.snapshots += 1
            self.copies += 1
            self.bytes_copied += self.nbytes
        return Snapshot(copy, view.version)

    def wait_for(self, version: int, timeout: float | None) -> bool:
        """Wait until the version is there; return False if the time ran out."""
        pauses = Pauses(timeout, shortest=LONGEST_SLEEP_S, longest=LONGEST_SLEEP_S)
        while True:
            with self.lock:
                self.check_size()
                known = self.words[CURRENT] if not self.is_disposed else 0
                self.check_waiting()
                if self.version >= version:
                    return True
                thread = HERE.thread
                if self.gate.is_writing(thread) or (self.is_in_place and self.gate.is_reading(thread)):
                    self.refuse("wait()", "outside this thread's own block", "inside", "It would never end.")
                pause = pauses.next()
                if pause is None:
                    return False
                self.waiting += 1
            try:
                with contextlib.suppress(ValueError):  # it was closed meanwhile
                    self.cells.wait(known, pause)
            finally:
                with self.lock:
                    self.waiting -= 1

    # -- the turn to write

    def _step_back(self, block: WriteBlock, found: int) -> None:
        """Take back an attempt to write at once, and raise if the file was cut short."""
        if found == CUT:
            self.gate.drop(block)
            self.check_size()
        else:
            self._drop_write(block)

    def _take_turn(self) -> bool:
        cells = self.cells
        if cells.try_turn():
            return True
        held = cells.turn
        return not (held and self._is_alive(held)) and cells.inherit_turn(held)

    def _is_alive(self, holder: int) -> bool:
        """Return whether the process lives whose turn it was; the row of a dead one is emptied."""
        token, row = divmod(holder, ROWS)
        return self.cells.token(row) == token and (row == self.cells.row or not self._clear_if_dead(row))

    def _clear_if_dead(self, row: int) -> bool:
        """Empty a row if its process has ended, which its lock tells."""
        place = self.segment.form.first_row + row
        if not self.locks.try_exclusive(place):
            return False
        try:
            self.cells.clear(row)
        finally:
            self.locks.release(place)
        return True

    def release_claim(self, *, is_cut: bool = False) -> None:
        """Let other processes write; where the file was cut short, there is nothing to let them have."""
        self.claimed = None
        if self.has_turn:
            if not is_cut:
                self.cells.end_turn()
            self.has_turn = False
        if self.is_let_go:
            self.dispose()
