"""Turns among processes: who of this one reads and writes, and who waits; ``SharedRWLock`` for its threads."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from q4_actors.tensors.backoff import LONGEST_SLEEP_S, Backoff
from q4_actors.tensors.rwlock import RWLock

if TYPE_CHECKING:
    from q4_actors._native import Core
    from q4_actors.tensors.liveness import Liveness
    from q4_actors.tensors.tickets import ReadTicket, Thread, Ticket, WriteTicket

__all__ = ["IN_USE", "LOOK", "READERS_FIRST", "READERS_TURN_S", "TAKEN", "SharedRWLock", "Turns"]

READERS_TURN_S = 2.4 * LONGEST_SLEEP_S
"""How long an ``IN_PLACE`` writer lets readers of other processes go first: they sleep less between two looks."""
TAKEN, IN_USE, LOOK, CUT, READERS_FIRST = range(-1, -6, -1)
"""Why an update can't begin yet: another writer has the turn; readers; a closer look; a cut file; readers that wait."""


class SharedRWLock(RWLock):
    """Turns among the threads of this process, of which most read by the extension module, without asking here."""

    def __init__(self, cells: Core, *, excludes_readers: bool) -> None:
        super().__init__(excludes_readers=excludes_readers)
        self._cells = cells

    def is_reading(self, thread: Thread) -> bool:
        """Return whether the thread reads."""
        return super().is_reading(thread) or self._cells.is_reading(thread)

    def try_write(self, ticket: Ticket) -> bool:
        """Let the ticket write now and return True, or return False."""
        cells = self._cells
        if cells.open and (self._excludes_readers or cells.is_reading(ticket.thread)):
            return False
        return super().try_write(ticket)

    def pass_turn(self) -> None:
        """Let in whose turn it is, but no writer while threads read."""
        if not (self._excludes_readers and self._waiting_writers and self._cells.open):
            super().pass_turn()


class Turns:
    """The turns that this process has or waits for. Anew after a fork, since a child has none.

    Args:
        cells: This process's part in the segment.
        liveness: Which processes live.
        is_in_place: Whether readers and the writer keep each other out.
    """

    def __init__(self, cells: Core, liveness: Liveness, *, is_in_place: bool) -> None:
        self._cells, self._liveness, self._is_in_place = cells, liveness, is_in_place
        self.process = os.getpid()
        self.inside: set[ReadTicket] = set()
        """``IN_PLACE``: blocks that waited, and that now hold the slot for this process."""
        self.kept_out: set[ReadTicket] = set()
        self.claimed: int | None = None
        """The slot that this process writes."""

    # -- reading, ``IN_PLACE``

    def try_read(self, view: ReadTicket) -> bool:
        """Hold the one slot, or return False while another process writes or waits to."""
        cells = self._cells
        is_again = cells.is_reading(view.thread) or any(other.thread is view.thread for other in self.inside)
        if not cells.hold_in_turn(is_again):
            held = cells.turn
            if held and not self._liveness.is_alive(held):
                cells.bury(held)
            if not cells.hold_in_turn(False):  # noqa: FBT003  # called by position, as below
                self.kept_out.add(view)
                cells.say_kept_out(True)  # noqa: FBT003
                return False
        self.inside.add(view)
        return True

    def end_wait(self, view: ReadTicket) -> None:
        """Take note that a block waits no more, since it is in or has given up."""
        if view in self.kept_out:
            self.kept_out.remove(view)
            self._cells.say_kept_out(bool(self.kept_out))

    def end_read(self, view: ReadTicket) -> None:
        """Let a block that waited out, and this process with the last one."""
        self.end_wait(view)
        if view in self.inside:
            self.inside.remove(view)
            if not self.inside:
                self._cells.release()

    # -- writing

    def try_write(self, block: WriteTicket, *, yields: bool) -> int:
        """Take the turn and a slot; return it, or what is in the way."""
        cells, liveness = self._cells, self._liveness
        found = cells.begin(block.source is None and not block.healing, block.healing, yields, self.process)
        if found >= 0:
            self.claimed = found
        elif (found == TAKEN and liveness.inherit_turn()) or (found == IN_USE and liveness.clear_dead_readers()):
            return self.try_write(block, yields=yields)
        return found

    def end_write(self) -> None:
        """Give the turn back."""
        self._cells.unmark()  # unless something was written, and published or poisoned
        self._cells.end_turn()

    def sleep(self, obstacle: int, seconds: float) -> None:
        """Sleep until what is in the way of an update may have changed, or for so long."""
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            if obstacle == TAKEN:
                self._cells.wait_turn(seconds)
            elif self._is_in_place:
                self._cells.wait_readers(seconds)
            else:
                time.sleep(seconds)

    def await_readers(self) -> bool:
        """Let readers that wait go first, for a time; return whether some still wait then."""
        backoff = Backoff(READERS_TURN_S)
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            while self._cells.is_readers_turn():
                pause = backoff.next()
                if pause is None:
                    break
                self._cells.wait_kept_out(pause)
            return self._cells.keeps_out()
        return False
