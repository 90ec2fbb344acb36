"""The protocol between processes by atomics: as ``shared_content`` has it, without a system call where nobody waits.

``docs/memory.md`` states it. What readers do is the plugin's; what a writer does is here, and in the plugin.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

from q4core.errors import LifecycleError
from q4core.memory import detached_copy
from q4core.mutable.content import refuse_late
from q4core.mutable.exclusion import HERE
from q4core.mutable.pauses import Pauses
from q4core.mutable.records import Snapshot
from q4core.mutable.segment import CURRENT, ROWS
from q4core.mutable.shared_content import SharedContent

if TYPE_CHECKING:
    import torch

    from q4core.mutable.blocks import WriteBlock
    from q4core.mutable.native import SharedCells
    from q4core.mutable.segment import Segment

__all__ = ["NativeContent"]

LONGEST_SLEEP_S = 0.01
"""Who waits for a version is woken; if the process that would wake it is killed just before, it looks by itself."""


class NativeContent(SharedContent):
    """The protocol, in the mode ``VERSIONED``."""

    def __init__(self, segment: Segment, label: str, cells: SharedCells) -> None:
        self.cells = cells.make(segment.memory, segment.slots, HERE, segment.form.content_bytes)
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
        if not self.is_disposed and not self.is_closed:
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
            self.after_fork()

    def tell_of_a_change(self, slot: int, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()``."""
        with self.lock:
            self.refuse_touched(self.slots[slot], version)

    def refuse_late(self, error: BaseException | None) -> None:
        """Complain about a block that was put out before it was left."""
        refuse_late(self.label, error)

    def refuse_again(self) -> NoReturn:
        """Raise, since a block is entered once."""
        hint = "Call read() or write() each time."
        raise LifecycleError(self.label, name="with block", rule="entered once", hint=hint)

    def refuse_outside(self) -> NoReturn:
        """Raise, since a view is used outside its block."""
        rule, hint = "used inside its with block", "Take a snapshot() for what must last longer."
        raise LifecycleError(f"read view of {self.label}", name="view.tensor", rule=rule, hint=hint)

    def let_go(self) -> None:
        """Give everything back after the last reader of a closed handle."""
        with self.lock:
            if self.is_let_go:
                self.dispose()

    # -- what this process holds

    @property
    def is_busy(self) -> bool:
        """Whether a thread of this process reads, or has the turn to write."""
        return self.has_turn or self.cells.open > 0

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

    def snapshot(self, timeout: float | None) -> Snapshot:  # noqa: ARG002  # nobody waits
        """Copy the newest version; a copy of something that was changed meanwhile is thrown away."""
        view = self.cells.read(self)
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
                known = self.words[CURRENT] if not self.is_disposed else 0
                self.check_waiting()
                if self.version >= version:
                    return True
                if self.gate.is_writing(HERE.thread):
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

    # -- writing

    def begin_write(self, block: WriteBlock) -> torch.Tensor:
        """Let the block in, when its turn comes, and return an alias of what it may change."""
        self._notice_fork()
        try:
            with self.lock:
                block.place = (self.epoch, -1)
                slot = self._begin_at_once(block)
            if slot >= 0:
                block.work = work = self._filled(slot, block.source)
                block.alias = alias = work.detach()
                return alias
        except BaseException:
            with self.lock:
                self._drop_write(block)
            raise
        return super().begin_write(block)

    def _begin_at_once(self, block: WriteBlock) -> int:
        """Return the slot to write to, or a negative number if there is anything to wait for or to complain about."""
        cells = self.cells
        if cells.open and cells.is_reading(block.thread):
            (self.check_healing if block.healing else self.check_waiting)()
            if cells.is_reading(block.thread):
                self.refuse("write()", "outside this thread's own read()", "inside", "Leave the outer block first.")
        if block.healing or self.is_closed or not self.gate.try_write(block):
            return -1
        slot = cells.begin_write(block.source is None, self.process)
        if slot < 0:
            self._drop_write(block)
        else:
            self.claimed, self.has_turn = slot, True
        return slot

    def _filled(self, slot: int, source: torch.Tensor | None) -> torch.Tensor:
        """Return the slot with what the update begins with; small contents are there already."""
        work = self.slots[slot]
        if source is not None:
            return work.copy_(source)
        if not self.cells.copies_here:
            word = self.words[CURRENT]
            base, version = word & 255, word >> 8
            work.copy_(self.slots[base])
            if not self.cells.is_untouched(base, version):
                self.tell_of_a_change(base, version)
        return work

    def end_write(self, block: WriteBlock, error: BaseException | None) -> None:
        """Publish the update, or drop it; then let the block out."""
        self._notice_fork()
        if error is None and self.claimed is not None and block.alias.is_set_to(block.work):
            with self.lock:
                is_well = block.place[0] == self.epoch and self.gate.writer is block.thread and not block.healing
                if is_well and not self.is_closed and (version := self.cells.end_write(self.claimed)) >= 0:
                    try:
                        self.tensor, self.version, self.poison = block.work, version, None
                        del block.work, block.alias
                        self.copies += 1
                        self.bytes_copied += self.nbytes
                        self.writes += 1
                    finally:
                        self.claimed, self.has_turn = None, False
                        self.gate.end_write(block)
                    return
        super().end_write(block, error)

    def _take_turn(self) -> bool:
        cells = self.cells
        if cells.try_turn():
            return True
        held = cells.turn
        token, row = divmod(held, ROWS)
        if held and cells.token(row) == token and not self._clear_if_dead(row):
            return False
        return cells.inherit_turn(held)

    def _sleep(self, obstacle: str, pauses: Pauses) -> bool:
        if obstacle != "another writer":
            return pauses.sleep()
        pause = pauses.next()
        if pause is not None:
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                self.cells.wait_turn(pause)
        return pause is not None

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

    def _claim_free_slot(self) -> str | None:
        cells = self.cells
        slot = cells.free_slot()
        if slot < 0:
            for row in range(cells.rows_used):
                if row != cells.row and cells.reads_any(row):
                    self._clear_if_dead(row)
            slot = cells.free_slot()
        if slot < 0:
            return "readers"
        self.claimed = slot
        return None

    def _begin_update(self, block: WriteBlock) -> None:
        slot = self.words[CURRENT] & 255
        if not self.cells.is_untouched(slot, self.version) and not block.healing:
            self.refuse_touched(self.slots[slot], self.version)

    def publish(self, work: torch.Tensor) -> None:
        """Make ``work`` the newest version, by one store."""
        if self.claimed is None:
            return
        slot, self.claimed = self.claimed, None
        self.version = self.cells.publish(slot)
        self.tensor, self.poison = work, None
        self.writes += 1

    # -- giving back

    def release_unheld(self) -> None:
        """Do nothing: no attempt is interrupted in the midst."""

    def release_claim(self) -> None:
        """Let other processes write."""
        self.claimed = None
        if self.has_turn:
            self.cells.end_turn()
            self.has_turn = False
        if self.is_let_go:
            self.dispose()
