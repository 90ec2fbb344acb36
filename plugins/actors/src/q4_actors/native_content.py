"""The protocol between processes by atomics, ``VERSIONED``: without a lock of the system's where nobody waits.

``docs/memory-protocols.md`` states it. What readers do is the plugin's; what a writer does is here, and in the plugin.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from q4_actors.native_rows import NativeRows
from q4_actors.segment import CURRENT

if TYPE_CHECKING:
    import torch

    from q4_actors.backoff import Pauses
    from q4_actors.blocks import WriteBlock

__all__ = ["NativeContent"]


class NativeContent(NativeRows):
    """The protocol, in the mode ``VERSIONED``."""

    def begin_write(self, block: WriteBlock) -> torch.Tensor:
        """Let the block in, when its turn comes, and return an alias of what it may change."""
        self._notice_fork()
        try:
            with self.lock:
                block.place = (self.epoch, -1)
                slot = self._begin_at_once(block)
            if slot >= 0:
                block.work = work = self._filled(slot, block.source)
                block.address = work.data_ptr()
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
            self._step_back(block, slot)
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

    def _sleep(self, obstacle: str, pauses: Pauses) -> bool:
        if obstacle != "another writer":
            return pauses.sleep()
        pause = pauses.next()
        if pause is not None:
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                self.cells.wait_turn(pause)
        return pause is not None

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
