"""Turns among processes: this process's readers, writers and waiting blocks; ``SharedRWLock`` for its threads."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from q4_actors.tensors.backoff import FIRST_SLEEP_S, Backoff
from q4_actors.tensors.form import WRITER
from q4_actors.tensors.rwlock import RWLock

if TYPE_CHECKING:
    from q4_actors._native import Core
    from q4_actors.tensors.liveness import Liveness
    from q4_actors.tensors.segment import Segment
    from q4_actors.tensors.state import State
    from q4_actors.tensors.tickets import ReadTicket, Thread, Ticket, WriteTicket

__all__ = ["IN_USE", "LOOK", "READERS_FIRST", "READERS_TURN_S", "TAKEN", "SharedRWLock", "Turns"]

READERS_TURN_S = 2.4 * FIRST_SLEEP_S
"""How long an ``IN_PLACE`` writer lets readers of other processes go first: they sleep less between two polls."""
TAKEN, IN_USE, LOOK, CUT, READERS_FIRST = range(-1, -6, -1)
"""Why an update can't begin yet: another writer; readers; a state to check; a truncated file; waiting readers."""
LOOKS_FOR_A_SLOT = 5
"""How often a writer that won't wait polls for a free slot: a reader that comes too late holds one for an instant."""


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
        """Admit the next ticket in turn, but no writer while threads read."""
        if not (self._excludes_readers and self._waiting_writers and self._cells.open):
            super().pass_turn()


class Turns:
    """The turns that this process has or waits for; created again after a fork, since a child has none.

    Args:
        segment: The memory.
        cells: This process's part in the segment.
        liveness: Which processes live.
    """

    def __init__(self, segment: Segment, cells: Core, liveness: Liveness) -> None:
        self._segment, self._cells, self._liveness = segment, cells, liveness
        self.process = os.getpid()
        self.inside: set[ReadTicket] = set()
        """``IN_PLACE``: blocks that waited, and that now hold the slot for this process."""
        self.blocked: set[ReadTicket] = set()
        """``IN_PLACE``: blocks that wait for a writer of another process."""
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
                self.blocked.add(view)
                cells.say_kept_out(True)  # noqa: FBT003
                return False
        self.inside.add(view)
        return True

    def end_wait(self, view: ReadTicket) -> None:
        """Record that a block no longer waits, since it is in or has given up."""
        if view in self.blocked:
            self.blocked.remove(view)
            self._cells.say_kept_out(bool(self.blocked))

    def end_read(self, view: ReadTicket) -> None:
        """Release a block that waited, and with the last one the slot for this process."""
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

    def pause(self, state: State, block: WriteTicket, obstacle: int, backoff: Backoff) -> None:
        """Sleep until there may be a change, or raise if the block won't wait for it, or has no time left."""
        is_impatient, is_in_place = not (block.wait or block.healing), state.is_in_place
        writer, count = f"process {self._segment.words[WRITER]}", len(self._segment.slots)
        held = f"readers of old versions hold {count - 1} of {count} slots"
        pause = backoff.next()
        with state.lock:
            if obstacle == TAKEN and is_impatient:
                state.raise_conflict(f"is being written by {writer}", "Use write(wait=True), or retry.")
            if obstacle == IN_USE and is_impatient and not is_in_place and backoff.count > LOOKS_FOR_A_SLOT:
                hint = "Hold reads shorter, make the tensor with more slots, or use write(wait=True)."
                state.raise_conflict(f"has no room for a new version: {held}", hint)
            if pause is None:
                who = f"{writer} writes" if obstacle == TAKEN else "readers are there" if is_in_place else held
                state.raise_timeout("written", block.timeout, who)
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            if obstacle == TAKEN:
                self._cells.wait_turn(pause)
            elif is_in_place:
                self._cells.wait_readers(pause)
            else:
                time.sleep(min(pause, FIRST_SLEEP_S))  # nobody wakes it

    def await_readers(self) -> bool:
        """Let waiting readers go first, for a limited time; return whether some still wait then."""
        backoff = Backoff(READERS_TURN_S)
        while self._cells.is_readers_turn():
            pause = backoff.next()
            if pause is None:
                break
            self._cells.wait_kept_out(pause)
        return self._cells.keeps_out()
