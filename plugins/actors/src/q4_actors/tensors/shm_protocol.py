"""The protocol between processes: what the blocks of a ``SharedMutableTensor`` do.

A thread first takes its turn among the threads of its process, then its process takes one among the processes, by
atomics in the extension module. ``docs/memory-protocols.md`` states the protocol, its memory order, and why no reader
sees half an update. A slot's address never changes, so torch's count of in-place changes is its whole mark.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, NoReturn

import torch

from q4_actors.tensors.arguments import MAX_VERSION, MutableMode
from q4_actors.tensors.at_fork import CONTENTS
from q4_actors.tensors.backoff import LONGEST_SLEEP_S, Backoff
from q4_actors.tensors.blocks import ReadView, refuse_again, refuse_outside
from q4_actors.tensors.protocol import Content, mark_of, refuse_late
from q4_actors.tensors.rwlock import ENDED, RWLock
from q4_actors.tensors.segment import CLOSED, CURRENT, FIRST_ROW, ROWS, TAINTED, WRITER_PROCESS
from q4core import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_actors._native import Core
    from q4_actors.tensors.blocks import WriteBlock
    from q4_actors.tensors.rwlock import Thread, Ticket
    from q4_actors.tensors.segment import Segment

__all__ = ["SharedContent"]

LONGEST_LOOK_S = 1.0
READERS_TURN_S = 2.4 * LONGEST_SLEEP_S
"""How long an ``IN_PLACE`` writer lets readers of other processes go first: they sleep less between two looks."""
VERSION_SLEEP_S = 0.01
"""Who waits for a version is woken; if the process that would wake it is killed just before, it looks by itself."""
LOOKS_FOR_A_SLOT = 5
"""How often a writer that won't wait looks for a free slot: a reader that comes too late holds one for an instant."""
TAKEN, IN_USE, LOOK, CUT, READERS_FIRST = range(-1, -6, -1)
"""Why an update can't begin yet: another writer has the turn; readers; a closer look; a cut file; readers that wait."""
HEALTHY, POISONED = 0, 2
"""States of an ``IN_PLACE`` content, beside its version in one word; 1 while it is written."""


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

    def hand_over(self) -> None:
        """Let in whose turn it is, but no writer while threads read."""
        if not (self._excludes_readers and self._waiting_writers and self._cells.open):
            super().hand_over()


class SharedContent(Content):
    """State and protocol in one process; ``version``, ``poison``, ``is_closed`` and ``tensor`` are its latest look.

    Args:
        segment: The memory.
        label: For messages.
        cells: This process's part in it.
    """

    def __init__(self, segment: Segment, label: str, cells: Core) -> None:
        self.cells, self.segment, self.locks = cells, segment, segment.locks
        self.words, self.slots = segment.words, segment.slots
        super().__init__(segment.slots[0], label, is_in_place=segment.form.mode is MutableMode.IN_PLACE)
        self.is_let_go = False
        segment.close_first(cells)
        self._take_row()
        self.refresh()
        CONTENTS.add(self)

    def make_gate(self) -> RWLock:
        """Return what lets threads in."""
        return SharedRWLock(self.cells, excludes_readers=self.is_in_place)

    def renew(self) -> None:
        """Begin with nobody inside."""
        super().renew()
        self.process = os.getpid()
        self.inside: set[ReadView] = set()
        """``IN_PLACE``: blocks that waited, and that now hold the slot for this process."""
        self.kept_out: set[ReadView] = set()
        self.claimed: int | None = None
        """The slot that this process writes."""

    def _take_row(self) -> None:
        """Take a row of the header, with the lock that proves that it is this process's."""
        for row in range(ROWS):
            if self.locks.try_exclusive(FIRST_ROW + row):
                self.cells.enter(row)
                return
        hint = "Close handles, or end processes that are done with it."
        raise LifecycleError(f"{self.label} has {ROWS} handles, and no room for more", hint=hint)

    def after_fork(self) -> None:
        """Begin anew in a child: what its parent's threads hold is the parent's."""
        self.cells.after_fork()
        self.renew()
        try:
            if not self.is_disposed:
                self.segment.reopen()
                self.cells.file = self.locks.file
                if not self.is_closed and not self.is_cut:
                    self._take_row()
        except (OSError, LifecycleError):
            self.is_closed = self.is_let_go = True
            self.dispose()
        self.cells.is_shut = self.is_closed

    def _notice_fork(self) -> None:
        """Begin anew in a child that was not forked by Python, which would have told."""
        if not self.cells.is_own and not self.is_closed:
            self.check_size()
            self.after_fork()

    # -- a look at the header

    @property
    def is_disposed(self) -> bool:
        """Whether this process has given everything back."""
        return not self.segment.close.alive

    @property
    def is_cut(self) -> bool:
        """Whether somebody has cut the file short, so that a look at what is gone would end the process."""
        return not self.is_disposed and self.locks.size() < self.segment.form.total

    def check_size(self) -> None:
        """Raise if somebody has cut the file short."""
        if not self.is_closed and self.is_cut:
            size, total = self.locks.size(), self.segment.form.total
            text = f"{self.label} is lost: somebody has cut its file from {total} bytes to {size}"
            raise LifecycleError(text, hint="Make a new one.")

    def observe(self) -> None:
        """Look at what other processes have changed."""
        self.check_size()
        self.refresh()

    def refresh(self) -> None:
        """Look at version and state, which other processes change."""
        words = self.words
        if words[CLOSED]:
            self.is_closed = True
        while not self.is_closed:
            word = words[CURRENT]
            self.version, low = word >> 8, word & 255
            if not self.is_in_place:
                self.tensor = self.slots[low]
                self.poison = self.segment.cause if words[TAINTED] == self.version + 1 else None
            elif low == HEALTHY:
                self.poison = None
            else:
                self.poison = self.segment.cause if low == POISONED else self._ended_writer(word)
            # A writer that ended well between the two looks has not died.
            if words[CURRENT] == word:
                return

    def _ended_writer(self, word: int) -> str | None:
        cells = self.cells
        if self.claimed is not None or cells.current != word:  # so that the bar is seen, too
            return None
        # Nobody writes while this process reads, or has the turn.
        if not (cells.is_holding or cells.has_turn):
            held = cells.barred
            if held and self._is_alive(held):
                return None
            cells.bury(held)
        return f"process {self.words[WRITER_PROCESS]} ended inside write()" if cells.current == word else None

    def _is_alive(self, holder: int) -> bool:
        """Return whether the process lives whose turn it was; the row of a dead one is emptied."""
        token, row = divmod(holder, ROWS)
        return self.cells.token(row) == token and (row == self.cells.row or not self._clear_if_dead(row))

    def _clear_if_dead(self, row: int) -> bool:
        """Empty a row if its process has ended, which its lock tells."""
        if not self.locks.try_exclusive(FIRST_ROW + row):
            return False
        try:
            self.cells.clear(row)
        finally:
            self.locks.release(FIRST_ROW + row)
        return True

    def _clear_dead_readers(self) -> bool:
        """Empty the rows of processes that have ended, and return whether there were any."""
        cells = self.cells
        reading = [row for row in range(cells.rows_used) if row != cells.row and cells.reads_any(row)]
        return any([self._clear_if_dead(row) for row in reading])  # noqa: C419  # all of them

    def _inherit_turn(self) -> bool:
        """Take the turn to write from a process that has ended."""
        held = self.cells.turn
        return bool(held) and not self._is_alive(held) and self.cells.inherit_turn(held)

    def set_poison(self, cause: str) -> None:
        """Declare the content unknown, in all processes. ``IN_PLACE``: this one reads, or has the turn."""
        self.segment.cause = cause
        if self.is_in_place:
            self.cells.poison()
        else:
            self.words[TAINTED] = self.version + 1
        super().set_poison(cause)
        self.cells.wake()

    def refuse_touched(self, base: torch.Tensor, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()`` in this process."""
        self.refresh()
        super().refuse_touched(base, version)

    def note_failure(self, cause: str | None) -> None:
        """Count an update that does not take effect; other processes must be told also of one that closing dropped."""
        # Only who has the slot has changed anything, and may tell.
        super().note_failure(None if self.claimed is None else cause or "a handle was closed during its update")

    # -- what the extension module asks for

    def look(self) -> None:
        """Look why a reader may not be let in, and raise; or do what makes it possible."""
        self._notice_fork()
        with self.lock:
            self.check_waiting()

    def tell_of_a_change(self, slot: int, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()``."""
        with self.lock:
            self.refuse_touched(self.slots[slot], version)

    def refuse_late(self, error: BaseException | None) -> None:
        """Complain about a block that was put out before it was left."""
        refuse_late(self.label, error)

    def refuse_again(self) -> NoReturn:
        """Raise, since a block is entered once."""
        refuse_again(self.label)

    def refuse_outside(self, name: str) -> NoReturn:
        """Raise, since a view is used outside its block."""
        refuse_outside(self.label, name)

    def read_in_turn(self, timeout: float | None) -> ReadView:
        """Return a block that waits, and complains; for ``IN_PLACE``."""
        return ReadView(self, timeout)

    def hand_over(self) -> None:
        """Let in a writer of this process after the last reader."""
        with self.lock:
            self.gate.hand_over()

    def let_go(self) -> None:
        """Give everything back after the last reader of a closed handle."""
        with self.lock:
            self.dispose()

    # -- what this process holds

    def is_inside(self, thread: Thread) -> bool:
        """Return whether a thread is in a block."""
        return self.gate.is_writing(thread) or self.gate.is_reading(thread)

    def reclaim(self) -> None:
        """Take back what threads of this process that have ended hold; of processes that ended, the kernel does it."""
        if not self.is_disposed:
            self.observe()
            self.cells.reclaim()
            self.gate.hand_over()  # also after a block that was collected, which hands over nothing
            super().reclaim()
            self.reads = self.cells.reads - self.snapshots

    def release_read(self, view: ReadView) -> None:  # type: ignore[override]  # no other tickets read
        """Let a block that waited out, and this process with the last one."""
        if view in self.kept_out:
            self.kept_out.remove(view)
            self.cells.say_kept_out(bool(self.kept_out))
        if view in self.inside:
            self.inside.remove(view)
            if not self.inside:
                self.cells.let_go()
        self.dispose()

    def release_write(self) -> None:
        """Let other processes write; where the file was cut short, there is nothing to let them have."""
        self.claimed = None
        if not self.is_disposed and not self.is_cut:
            self.cells.unmark()  # unless something was written, and told
            self.cells.end_turn()
        self.dispose()

    def close(self) -> None:
        """Let go, and tell everybody who waits; the maker ends it for all processes."""
        with self.lock:
            if self.segment.is_maker:
                if not self.is_disposed and not self.is_cut:
                    self.words[CLOSED] = 1
                self.segment.remove_name()
            self.is_closed = self.is_let_go = True
            self.tensor, self.kept = torch.empty(0, device="cpu"), None
            self.gate.wake()
            if not self.is_disposed:
                self.cells.is_shut = True
                self.cells.wake()
            self.dispose()

    def dispose(self) -> None:
        """Give everything back once a closed handle has nobody inside any more."""
        if self.is_let_go and not (self.gate.writer or self.gate.readers or self.cells.open):
            self.segment.close()
            self.segment.let_go()
            self.words, self.slots = self.segment.words, []

    # -- reading

    def view(self, timeout: float | None) -> ReadView:
        """Return a block that reads, which comes back to ``read_in_turn`` if it has to wait."""
        return self.cells.read(self, timeout)

    def begin_read(self, view: ReadView) -> torch.Tensor:
        """Let the view in, when its turn comes; if that raises, ``drop_read`` must follow."""
        self._notice_fork()
        backoff = Backoff(view.timeout)
        with self.lock:
            self.check_waiting()
            self.enter_read(view)
            is_in = self._hold(view)
        while not is_in:
            pause = backoff.next()
            if pause is not None:
                _sleep(self.cells.wait_bar, pause)
            with self.lock:
                if pause is None:
                    self.refuse_timeout("read", view.timeout, "a writer is there")
                self.check_waiting()
                is_in = self._hold(view)
        return view.base.detach()

    def _hold(self, view: ReadView) -> bool:
        """Hold the one slot, or return False while another process writes or waits to."""
        cells = self.cells
        is_again = cells.is_reading(view.thread) or any(other.thread is view.thread for other in self.inside)
        if not cells.hold_in_turn(is_again):
            held = cells.turn
            if held and not self._is_alive(held):
                cells.bury(held)
            if not cells.hold_in_turn(False):  # noqa: FBT003  # called by position, as below
                self.kept_out.add(view)
                cells.say_kept_out(True)  # noqa: FBT003
                return False
        self.inside.add(view)
        word = cells.current
        if self.words[CLOSED] or word & 255 != HEALTHY:
            self.refresh()
            self.check()
        base = self.slots[0]
        view.base, view.mark, view.number = base, mark_of(base), word >> 8
        if not cells.is_untouched(0, view.number):
            self.refuse_touched(base, view.number)
        if view in self.kept_out:
            self.kept_out.remove(view)
            cells.say_kept_out(bool(self.kept_out))
        return True

    def end_read(self, view: ReadView, error: BaseException | None) -> None:
        """Let the view out, after a look at whether the content is still what it was."""
        self._notice_fork()
        super().end_read(view, error)

    def wait_for(self, version: int, timeout: float | None) -> bool:
        """Wait until the version is there; return False if the time ran out."""
        backoff = Backoff(timeout, VERSION_SLEEP_S)
        while True:
            with self.lock:
                self.check_size()
                known = self.words[CURRENT]
                self.check_waiting()
                if self.version >= version:
                    return True
                self.check_not_inside()
                pause = backoff.next()
                if pause is None:
                    return False
                self.waiting += 1
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                self.cells.wait(known, pause)
            with self.lock:
                self.waiting -= 1

    # -- writing

    def begin_write(self, block: WriteBlock) -> torch.Tensor:
        """Let the block in, when its turn comes, and return an alias of what it may change; or ``drop_write``."""
        self._notice_fork()
        timeout = block.timeout
        backoff = None if timeout is None else Backoff(timeout)
        with self.lock:
            if block.healing or self.is_closed or not self.gate.try_write(block):
                self.enter_write(block)
            yields = self.is_in_place and (timeout is None or timeout > READERS_TURN_S)
            found = self._try_begin(block, yields=yields)
        if found < 0:
            found = self._wait_to_begin(block, found, backoff or Backoff(timeout))
        block.work = work = self._filled(block, found)
        block.address = work.data_ptr()
        block.alias = alias = work.detach()
        return alias

    def _try_begin(self, block: WriteBlock, *, yields: bool) -> int:
        """Take the turn among processes and a slot; return it, or what is in the way."""
        found = self.cells.begin(block.source is None and not block.healing, block.healing, yields, self.process)
        if found >= 0:
            self.claimed = found
        elif (found == TAKEN and self._inherit_turn()) or (found == IN_USE and self._clear_dead_readers()):
            return self._try_begin(block, yields=yields)
        return found

    def _wait_to_begin(self, block: WriteBlock, found: int, backoff: Backoff) -> int:
        """Return the slot once this process alone may write, or raise."""
        yields = self.is_in_place
        while found < 0:
            if found == READERS_FIRST:
                self._let_readers_go()
                yields = False
            elif found in {TAKEN, IN_USE}:
                self._pause(block, found, backoff)
            with self.lock:
                (self.check_healing if block.healing else self.check_waiting)()
                if found == LOOK:
                    self._check_newest(block)
                found = self._try_begin(block, yields=yields and backoff.allows(READERS_TURN_S))
        return found

    def _check_newest(self, block: WriteBlock) -> None:
        """Raise if there is anything about the newest version that forbids an update."""
        if self.version >= MAX_VERSION:
            hint = "Make a new tensor from a snapshot()."
            raise LifecycleError(f"{self.label} has come to its last version, {MAX_VERSION}", hint=hint)
        slot = 0 if self.is_in_place else self.words[CURRENT] & 255
        if not block.healing and not self.cells.is_untouched(slot, self.version):
            self.refuse_touched(self.slots[slot], self.version)

    def _pause(self, block: WriteBlock, found: int, backoff: Backoff) -> None:
        """Sleep until there may be a change, or raise if the block won't wait for it, or has no time left."""
        is_impatient = not (block.wait or block.healing)
        writer = f"process {self.words[WRITER_PROCESS]}"
        held = f"readers of old versions hold {len(self.slots) - 1} of {len(self.slots)} slots"
        pause = backoff.next()
        with self.lock:
            if found == TAKEN and is_impatient:
                self.refuse(f"is being written by {writer}", "Use write(wait=True), or retry.")
            if found == IN_USE and is_impatient and not self.is_in_place and backoff.count > LOOKS_FOR_A_SLOT:
                hint = "Hold reads shorter, make the tensor with more slots, or use write(wait=True)."
                self.refuse(f"has no room for a new version: {held}", hint)
            if pause is None:
                who = f"{writer} writes" if found == TAKEN else "readers are there" if self.is_in_place else held
                self.refuse_timeout("written", block.timeout, who)
        if found == TAKEN:
            _sleep(self.cells.wait_turn, pause)
        elif self.is_in_place:
            _sleep(self.cells.wait_readers, pause)
        else:
            time.sleep(pause)

    def _let_readers_go(self) -> None:
        backoff = Backoff(READERS_TURN_S)
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            while self.cells.is_readers_turn():
                pause = backoff.next()
                if pause is None:
                    break
                self.cells.wait_kept_out(pause)
            if self.cells.keeps_out():
                with self.lock:
                    self._clear_dead_readers()

    def _filled(self, block: WriteBlock, slot: int) -> torch.Tensor:
        """Return the slot with what the update begins with; small contents are there already."""
        work = self.slots[slot]
        if self.is_in_place:
            return work
        if block.source is not None:
            return work.copy_(block.source)
        if block.healing:
            return work.zero_()
        if not self.cells.copies_here:
            word = self.words[CURRENT]
            work.copy_(self.slots[word & 255])
            if not self.cells.is_untouched(word & 255, word >> 8):
                self.tell_of_a_change(word & 255, word >> 8)
        return work

    def end_write(self, block: WriteBlock, error: BaseException | None) -> None:
        """Publish the update, or drop it, or poison the content; then let the block out."""
        self._notice_fork()
        work, alias = block.work, block.alias
        # Mostly all is well. To find out by what all contents do costs a third of a block.
        if error is None and alias.is_set_to(work) and work.data_ptr() == block.address:
            with self.lock:
                if self.gate.writer is block and self.publish(block, work):
                    if not self.is_in_place or block.source is not None:
                        self.copies += 1
                        self.bytes_copied += self.nbytes
                    self.writes += 1
                    self.kept = alias if self.is_in_place and not alias.requires_grad else None
                    self.gate.end_write(block)
                    del block.work, block.alias
                    return
        super().end_write(block, error)

    def publish(self, block: WriteBlock, work: torch.Tensor) -> bool:
        """Make ``work`` the newest version by one store, unless it was closed or poisoned meanwhile."""
        version = -1 if self.is_closed or self.claimed is None else self.cells.end(self.claimed, block.healing)
        if version < 0:
            self.refresh()
            return False
        self.tensor, self.version, self.poison, self.claimed = work, version, None, None
        return True


def _sleep(wait: Callable[[float], object], seconds: float) -> None:
    with contextlib.suppress(ValueError):  # it was closed meanwhile
        wait(seconds)


def _after_thread(thread: Thread) -> None:
    """Put out at once a thread that has ended inside a block, since other processes can't."""
    for content in tuple(CONTENTS):
        # Not in a forked child, where its parent's other threads end; nor may a thread that hangs hold up this one.
        if not isinstance(content, SharedContent) or content.process != os.getpid():
            continue
        if content.lock.acquire(timeout=LONGEST_LOOK_S):
            try:
                if content.is_inside(thread):
                    with contextlib.suppress(LifecycleError):
                        content.reclaim()
            finally:
                content.lock.release()


ENDED.append(_after_thread)
