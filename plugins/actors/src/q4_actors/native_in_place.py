"""The protocol between processes by atomics, ``IN_PLACE``: without a lock of the system's where nobody waits.

``docs/memory-protocols.md`` states it. A read that need not wait is the plugin's, and an update mostly; whoever must
wait does so here: in turn among the threads of this process, as by locks, and then among the processes.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from q4_actors.backoff import LONGEST_PAUSE_S, Pauses
from q4_actors.blocks import ReadView
from q4_actors.content import Content, cause_of, refuse_late
from q4_actors.native_rows import NativeRows
from q4_actors.rwlock import Exclusion
from q4_actors.segment import CLOSED, WRITER_PROCESS
from q4_actors.shared_content import READERS_TURN_S
from q4_actors.shared_state import HEALTHY
from q4core.errors import PoisonedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4_actors.blocks import WriteBlock
    from q4_actors.native import Cells
    from q4_actors.rwlock import Thread, Ticket
    from q4_actors.segment import Segment

__all__ = ["NativeInPlace"]

READERS_INSIDE, LOOK = -2, -3
"""What the plugin says of an update that can't begin at once."""


def _mark_of(slot: torch.Tensor) -> tuple[int, int]:
    """Return torch's count of in-place changes; a slot's address never changes."""
    return slot._version, 0  # noqa: SLF001  # torch documents it under this name


class NativeExclusion(Exclusion):
    """Turns among the threads of this process, of which some read without having asked here."""

    def __init__(self, cells: Cells) -> None:
        super().__init__(excludes_readers=True)
        self._cells = cells

    def is_reading(self, thread: Thread | None) -> bool:
        """Return whether the thread reads."""
        return super().is_reading(thread) or self._cells.is_reading(thread)

    def enter_read(self, ticket: Ticket, timeout: float | None, check: Callable[[], object]) -> bool:
        """Let the ticket read, now or in its turn; at once if its thread reads already."""
        if self._cells.is_reading(ticket.thread):
            self.readers[ticket.token], ticket.is_admitted = ticket.thread, True
            return True
        return super().enter_read(ticket, timeout, check)

    def try_write(self, ticket: Ticket) -> bool:
        """Let the ticket write now and return True, or return False."""
        return not self._cells.open and super().try_write(ticket)

    def hand_over(self) -> None:
        """Let in whose turn it is, after the last of those readers has left."""
        self._hand_over()

    def _hand_over(self) -> None:
        if not (self._waiting_writers and self._cells.open):
            super()._hand_over()


class NativeInPlace(NativeRows):
    """The protocol, in the mode ``IN_PLACE``."""

    gate: NativeExclusion

    def __init__(self, segment: Segment, label: str, cells: Any) -> None:
        super().__init__(segment, label, cells)
        self._take_turns_among_threads()

    def forget(self) -> None:
        """Begin with nobody inside."""
        super().forget()
        self.kept_out: set[object] = set()

    def after_fork(self) -> None:
        """Begin anew in a child."""
        super().after_fork()
        self._take_turns_among_threads()

    def _take_turns_among_threads(self) -> None:
        self.gate = NativeExclusion(self.cells)
        self.lock = self.gate.lock
        self.grown = threading.Condition(self.lock)

    # -- what the views ask for

    def read_in_turn(self, timeout: float | None) -> ReadView:
        """Return a block that waits, and complains, as by locks."""
        return ReadView(self, timeout)

    def hand_over(self) -> None:
        """Let in a writer of this process after the last reader."""
        with self.lock:
            self.gate.hand_over()

    # -- reading in turn

    def begin_read(self, view: ReadView) -> torch.Tensor:
        """Let the view in, when its turn comes."""
        self._notice_fork()
        return super().begin_read(view)

    def end_read(self, view: ReadView, error: BaseException | None, *, is_copied: bool = False) -> None:  # noqa: ARG002  # see snapshot
        """Let the view out, after a look at whether the content is still what it was; the plugin counts it."""
        self._notice_fork()
        base, version = view.base, view.number
        del view.base
        with self.lock:
            epoch, slot = view.place
            is_late = epoch != self.epoch or view.token not in self.gate.readers
            try:
                if not is_late and _mark_of(base) != view.mark:
                    self.refuse_touched(base, version)
            except PoisonedError:
                if error is None:
                    raise
            finally:
                if is_late:
                    view.is_admitted = False
                else:
                    self.release_hold(view.token, slot)
                    self.gate.end_read(view)
        if is_late:
            refuse_late(self.label, error, is_forked=epoch != self.epoch)

    def _hold_in_place(self, view: ReadView) -> bool:
        cells = self.cells
        is_again = view.thread in self.holds[0].values() or cells.is_reading(view.thread)
        if not cells.hold_in_turn(is_again):
            self._bury_the_dead()
            if not cells.hold_in_turn(False):  # noqa: FBT003  # as the plugin says
                self.kept_out.add(view.token)
                cells.say_kept_out(True)  # noqa: FBT003  # as the plugin says
                return False
        word = cells.current
        if self.words[CLOSED] or word & 255 != HEALTHY:
            self.refresh()
            self.check()
        self._enter(view, 0, word >> 8)
        self._let_in(view.token)
        return True

    def _bury_the_dead(self) -> None:
        """End the turn of a writer that has ended."""
        held = self.cells.turn
        if held and not self._is_alive(held):
            self.cells.bury(held)

    def pauses(self, timeout: float | None) -> Pauses:
        """Return pauses that are long, since whoever waits is woken."""
        return Pauses(timeout, shortest=LONGEST_PAUSE_S)

    def _let_in(self, token: object) -> None:
        if token in self.kept_out:
            self.kept_out.discard(token)
            if not self.kept_out:
                self.cells.say_kept_out(False)  # noqa: FBT003  # as the plugin says

    def _hold_later(self, view: ReadView, pauses: Pauses) -> bool:
        pause = pauses.next()
        if pause is not None:
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                self.cells.wait_bar(pause)
        with self.lock:
            if pause is None:
                self._refuse_late_read(view)
            self.check_waiting()
            return self._hold_in_place(view)

    def _enter(self, view: ReadView, slot: int, version: int) -> None:
        self.holds[slot][view.token], view.place = view.thread, (self.epoch, slot)
        base = self.slots[slot]
        view.base, view.mark, view.number = base, _mark_of(base), version
        if not self.cells.is_untouched(slot, version):
            self.refuse_touched(base, version)

    def release_hold(self, token: object, slot: int) -> None:
        """Let one reader out, if it is in or waits, and the process with the last one."""
        self._let_in(token)
        if slot < 0 or (self.holds[slot].pop(token, None) is None and self.is_disposed):
            return
        if not self.holds[slot]:
            self.cells.let_go()
            if self.is_let_go:
                self.dispose()

    def release_unheld(self) -> None:
        """Release what an interrupted attempt to hold may have left."""
        if not self.is_disposed and not self.holds[0]:
            self.cells.let_go()

    # -- the state of the content

    def _ended_writer(self, word: int) -> str | None:
        cells = self.cells
        if self.claimed is not None or cells.is_marked or cells.current != word:  # so that the bar is seen, too
            return None
        # Nobody writes while this process reads, or has the turn.
        if not (cells.is_holding or cells.has_turn):
            held = cells.barred
            if held and self._is_alive(held):
                return None
            cells.bury(held)
        return f"process {self.words[WRITER_PROCESS]} ended inside write()" if cells.current == word else None

    def set_poison(self, cause: str) -> None:
        """Declare the content unknown, in all processes; this one reads, or has the turn."""
        self.segment.cause = cause
        self.cells.poison()
        Content.set_poison(self, cause)
        self.cells.wake()

    # -- writing

    def begin_write(self, block: WriteBlock) -> torch.Tensor:
        """Let the block in, when its turn comes, and return an alias of what it may change."""
        self._notice_fork()
        try:
            with self.lock:
                block.place = (self.epoch, -1)
                found = self._begin_at_once(block)
            if found == READERS_INSIDE:
                self._wait_for_claim(block, "readers", self.pauses(block.timeout))
            if found != LOOK:
                block.work = work = self.tensor
                block.address = self.mark[1]
                block.alias = alias = work.detach()
                return alias
        except BaseException:
            with self.lock:
                self._drop_write(block)
            raise
        return super().begin_write(block)

    def _begin_at_once(self, block: WriteBlock) -> int:
        """Take all that an update needs, or all but the slot; or nothing, if there is anything else in the way."""
        if block.healing or self.is_closed or not self.gate.try_write(block):
            return LOOK
        found = self.cells.begin_in_place(self.process)
        if found == READERS_INSIDE:
            self.has_turn = True  # and new readers are kept out
        elif found < 0:
            self._step_back(block, found)
            return LOOK
        else:
            self.claimed, self.has_turn = 0, True
        return found

    def _let_readers_go(self) -> None:
        pauses = Pauses(READERS_TURN_S)
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            while self.cells.is_readers_turn():
                pause = pauses.next()
                if pause is None:
                    break
                self.cells.wait_kept_out(pause)
            if self.cells.keeps_out():
                with self.lock:
                    self._clear_dead_readers()

    def _are_readers_kept_out(self) -> bool:
        return self.cells.is_readers_turn()

    def _sleep(self, obstacle: str, pauses: Pauses) -> bool:
        pause = pauses.next()
        if pause is not None:
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                (self.cells.wait_turn if obstacle == "another writer" else self.cells.wait_readers)(pause)
        return pause is not None

    def _claim_in_place(self, block: WriteBlock) -> str | None:
        cells = self.cells
        if not cells.claim():
            self._clear_dead_readers()
            if not cells.claim():
                return "readers"
        if cells.current & 255 != HEALTHY and not block.healing:  # a reader has changed it meanwhile
            self.check_waiting()
        self.claimed = 0
        return None

    def _clear_dead_readers(self) -> None:
        """Empty the rows of processes that have ended."""
        cells = self.cells
        for row in range(cells.rows_used):
            if row != cells.row and cells.reads_any(row):
                self._clear_if_dead(row)

    def _begin_update(self, block: WriteBlock) -> None:
        if not block.healing:
            if not self.cells.is_untouched(0, self.version):
                self.refuse_touched(self.tensor, self.version)
            self.cells.mark()

    def _unmark(self, block: WriteBlock) -> None:  # noqa: ARG002  # the plugin knows whose
        if not self.is_disposed:
            self.cells.unmark()

    def end_write(self, block: WriteBlock, error: BaseException | None) -> None:
        """Publish the update, or poison the content; then let the block out."""
        self._notice_fork()
        if (
            error is None
            and self.claimed is not None
            and block.alias.is_set_to(block.work)
            and block.work.data_ptr() == self.mark[1]
        ):
            with self.lock:
                is_well = block.place[0] == self.epoch and self.gate.writer is block.thread and not block.healing
                if is_well and not self.is_closed and (version := self.cells.end_in_place()) >= 0:
                    try:
                        self.version, self.poison = version, None
                        if block.source is not None:
                            self.copies += 1
                            self.bytes_copied += self.nbytes
                        self.writes += 1
                        del block.work, block.alias
                    finally:
                        self.claimed, self.has_turn = None, False
                        self.gate.end_write(block)
                    return
        super().end_write(block, error)

    def note_fault(self, block: WriteBlock, fault: BaseException) -> None:  # noqa: ARG002  # the plugin knows more
        """Count an update that was interrupted, unless it was published before."""
        if not self.cells.has_published:
            self.note_failure(cause_of(fault))

    def publish(self, work: torch.Tensor) -> None:
        """Make what is there the next version, by one store."""
        self.version = self.cells.publish(0)
        self.tensor, self.poison = work, None
        self.writes += 1
        if self.lost:
            self.reclaim()
