"""``ShmProtocol``: the steps of a ``SharedMutableTensor``'s blocks, among processes.

A thread first takes its turn among the threads of its process, then its process takes one among the processes, by
atomics in the extension module. ``docs/memory-protocols.md`` states the protocol, its memory order, and why no reader
sees half an update. A slot's address never changes, so torch's count of in-place changes is its whole mark.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NoReturn

import torch

from q4_actors.tensors.arguments import MAX_VERSION, MutableMode
from q4_actors.tensors.backoff import Backoff
from q4_actors.tensors.blocks import ReadView
from q4_actors.tensors.form import CLOSED, CURRENT
from q4_actors.tensors.liveness import Liveness
from q4_actors.tensors.protocol import PROTOCOLS, ThreadProtocol
from q4_actors.tensors.slots import HEALTHY, Slots
from q4_actors.tensors.state import mark_of
from q4_actors.tensors.tickets import ENDED
from q4_actors.tensors.turns import IN_USE, LOOK, READERS_FIRST, READERS_TURN_S, TAKEN, SharedRWLock, Turns
from q4core import LifecycleError

if TYPE_CHECKING:
    from q4_actors._native import Core
    from q4_actors.tensors.rwlock import RWLock
    from q4_actors.tensors.segment import Segment
    from q4_actors.tensors.tickets import ReadTicket, Thread, WriteTicket

__all__ = ["ShmProtocol"]

LONGEST_LOOK_S = 1.0
VERSION_SLEEP_S = 0.01
"""A thread that waits for a version is woken; if the process that would wake it is killed before, it polls."""


class ShmProtocol(ThreadProtocol):
    """State and steps in one process; ``version``, ``poison``, ``is_closed`` and ``tensor`` are its latest look.

    Args:
        segment: The memory.
        label: For messages.
        cells: This process's part in it.
    """

    def __init__(self, segment: Segment, label: str, cells: Core) -> None:
        self.cells, self.segment = cells, segment
        self.liveness = Liveness(cells, segment.locks)
        self.slots = Slots(segment, cells, self.liveness)
        super().__init__(segment.slots[0], label, is_in_place=segment.form.mode is MutableMode.IN_PLACE)
        self.is_released = False
        segment.close_first(cells)
        self.liveness.take_row(label)
        self.refresh()
        PROTOCOLS.add(self)

    def make_gate(self) -> RWLock:
        """Return what lets threads in."""
        return SharedRWLock(self.cells, excludes_readers=self.is_in_place)

    def renew(self) -> None:
        """Reset to no block inside."""
        super().renew()
        self.turns = Turns(self.segment, self.cells, self.liveness)

    def after_fork(self) -> None:
        """Reset in a child: what its parent's threads hold is the parent's."""
        self.cells.after_fork()
        self.renew()
        try:
            if not self.segment.is_disposed:
                self.segment.reopen()
                self.cells.file = self.segment.locks.file
                if not self.is_closed and not self.segment.is_cut:
                    self.liveness.take_row(self.label)
        except (OSError, LifecycleError):
            self.is_closed = self.is_released = True
            self.dispose()
        self.cells.is_shut = self.is_closed

    def _notice_fork(self) -> None:
        """Reset in a child that was not forked by Python, which would have called ``after_fork``."""
        if not self.cells.is_own and not self.is_closed:
            self.check_size()
            self.after_fork()

    # -- reading the header

    def check_size(self) -> None:
        """Raise if the file was truncated."""
        if not self.is_closed and self.segment.is_cut:
            size, total = self.segment.locks.size(), self.segment.form.total
            text = f"{self.label} is lost: its file was truncated from {total} bytes to {size}"
            raise LifecycleError(text, hint="Make a new one.")

    def observe(self) -> None:
        """Refresh what other processes have changed."""
        self.check_size()
        self.refresh()

    def refresh(self) -> None:
        """Refresh version and state, which other processes change."""
        if self.segment.words[CLOSED]:
            self.is_closed = True
        if not self.is_closed:
            self.version, slot, self.poison = self.slots.newest(is_writing=self.turns.claimed is not None)
            self.tensor = self.segment.slots[slot]

    def set_poison(self, cause: str) -> None:
        """Declare the content unknown, in all processes. ``IN_PLACE``: this one reads, or has the turn."""
        self.slots.poison(self.version, cause)
        super().set_poison(cause)
        self.cells.wake()

    def raise_external_write(self, base: torch.Tensor, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()`` in this process."""
        with self.lock:
            self.refresh()
            super().raise_external_write(base, version)

    def note_failure(self, cause: str | None) -> None:
        """Count an update that does not take effect; other processes must see also one that closing dropped."""
        # Only who has the slot has changed anything, and may poison it.
        is_writing = self.turns.claimed is not None
        super().note_failure((cause or "a handle was closed during its update") if is_writing else None)

    # -- what the extension module calls

    def poll(self) -> None:
        """Raise the reason why a reader can't be admitted, or remove it."""
        self._notice_fork()
        with self.lock:
            self.check_waiting()

    def read_in_turn(self, timeout: float | None) -> ReadView:
        """Return a block that waits, or raises the obstacle; for ``IN_PLACE``."""
        return ReadView(self, timeout)

    def pass_turn(self) -> None:
        """Admit a writer of this process after the last reader."""
        with self.lock:
            self.gate.pass_turn()

    def release(self) -> None:
        """Release everything after the last reader of a closed handle."""
        with self.lock:
            self.dispose()

    # -- what this process holds

    def reclaim(self) -> None:
        """Release what ended threads of this process hold; for ended processes, the kernel does it."""
        if not self.segment.is_disposed:
            self.observe()
            self.cells.reclaim()
            self.gate.pass_turn()  # also after a block that was collected, which passes no turn on
            super().reclaim()
            self.reads = self.cells.reads - self.snapshots

    def release_read(self, view: ReadTicket) -> None:  # type: ignore[override]  # no other tickets read
        """Release a block that waited, and with the last one the slot for this process."""
        self.turns.end_read(view)
        self.dispose()

    def release_write(self) -> None:
        """Let other processes write; not where the file was truncated."""
        self.turns.claimed = None
        if not self.segment.is_disposed and not self.segment.is_cut:
            self.turns.end_write()
        self.dispose()

    def close(self) -> None:
        """Release this handle, and wake all waiting threads; its creator closes it for all processes."""
        with self.lock:
            segment = self.segment
            if segment.is_maker:
                if not segment.is_disposed and not segment.is_cut:
                    segment.words[CLOSED] = 1
                segment.remove_name()
            self.is_closed = self.is_released = True
            self.tensor, self.last_work = torch.empty(0, device="cpu"), None
            self.gate.wake()
            if not segment.is_disposed:
                self.cells.is_shut = True
                self.cells.wake()
            self.dispose()

    def dispose(self) -> None:
        """Release everything once a closed handle has no block inside."""
        if self.is_released and not (self.gate.writer or self.gate.readers or self.cells.open):
            self.segment.close()
            self.segment.release()

    # -- reading

    def begin_read(self, view: ReadTicket) -> torch.Tensor:
        """Admit the view when its turn comes; if that raises, ``drop_read`` must follow."""
        self._notice_fork()
        backoff = Backoff(view.timeout)
        with self.lock:
            self.check_waiting()
            self.enter_read(view)
            is_in = self._hold(view)
        while not is_in:
            pause = backoff.next()
            if pause is not None:
                with contextlib.suppress(ValueError):  # it was closed meanwhile
                    self.cells.wait_bar(pause)
            with self.lock:
                if pause is None:
                    self.raise_timeout("read", view.timeout, "a writer is there")
                self.check_waiting()
                is_in = self._hold(view)
        return view.base.detach()

    def _hold(self, view: ReadTicket) -> bool:
        """Hold the one slot, or return False while another process writes or waits to."""
        if not self.turns.try_read(view):
            return False
        word = self.cells.current
        if self.segment.words[CLOSED] or word & 255 != HEALTHY:
            self.refresh()
            self.check()
        base = self.segment.slots[0]
        view.base, view.mark, view.number = base, mark_of(base), word >> 8
        if not self.cells.is_untouched(0, view.number):
            self.raise_external_write(base, view.number)
        self.turns.end_wait(view)
        return True

    def end_read(self, view: ReadTicket, error: BaseException | None) -> None:
        """Release the view, after a check that the content was not changed."""
        self._notice_fork()
        super().end_read(view, error)

    def wait_for(self, version: int, timeout: float | None) -> bool:
        """Wait until the version is there; return False if the time ran out."""
        backoff = Backoff(timeout, VERSION_SLEEP_S)
        while True:
            with self.lock:
                self.check_size()
                known = self.segment.words[CURRENT]
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

    def begin_write(self, block: WriteTicket) -> torch.Tensor:
        """Admit the block in its turn, and return an alias of what it may change; on an error, call ``drop_write``."""
        self._notice_fork()
        timeout = block.timeout
        backoff = None if timeout is None else Backoff(timeout)
        with self.lock:
            if block.healing or self.is_closed or not self.gate.try_write(block):
                self.enter_write(block)
            yields = self.is_in_place and (timeout is None or timeout > READERS_TURN_S)
            found = self.turns.try_write(block, yields=yields)
        if found < 0:
            found = self._wait_to_begin(block, found, backoff or Backoff(timeout))
        block.work = work = self.slots.fill(found, block, self.raise_external_write)
        block.address = work.data_ptr()
        block.alias = alias = work.detach()
        return alias

    def _wait_to_begin(self, block: WriteTicket, found: int, backoff: Backoff) -> int:
        """Return the slot once this process alone may write, or raise."""
        yields = self.is_in_place
        while found < 0:
            if found == READERS_FIRST:
                with contextlib.suppress(ValueError):  # it was closed meanwhile
                    if self.turns.await_readers():
                        with self.lock:
                            self.liveness.clear_dead_readers()
                yields = False
            elif found in {TAKEN, IN_USE}:
                self.turns.pause(self, block, found, backoff)
            with self.lock:
                (self.check_healing if block.healing else self.check_waiting)()
                if found == LOOK:
                    self._check_newest(block)
                found = self.turns.try_write(block, yields=yields and backoff.allows(READERS_TURN_S))
        return found

    def _check_newest(self, block: WriteTicket) -> None:
        """Raise if there is anything about the newest version that forbids an update."""
        if self.version >= MAX_VERSION:
            hint = "Make a new tensor from a snapshot()."
            raise LifecycleError(f"{self.label} has come to its last version, {MAX_VERSION}", hint=hint)
        slot = 0 if self.is_in_place else self.segment.words[CURRENT] & 255
        if not block.healing and not self.cells.is_untouched(slot, self.version):
            self.raise_external_write(self.segment.slots[slot], self.version)

    def end_write(self, block: WriteTicket, error: BaseException | None) -> None:
        """Publish the update, or drop it, or poison the content; then release the block."""
        self._notice_fork()
        work, alias = block.work, block.alias
        # Usually all is well. The check that all contents have would cost a third of a block.
        if error is None and alias.is_set_to(work) and work.data_ptr() == block.address:
            with self.lock:
                if self.gate.writer is block and self.publish(block, work):
                    if not self.is_in_place or block.source is not None:
                        self.count_copy()
                    self.writes += 1
                    self.last_work = alias if self.is_in_place and not alias.requires_grad else None
                    self.gate.end_write(block)
                    del block.work, block.alias
                    return
        super().end_write(block, error)

    def publish(self, block: WriteTicket, work: torch.Tensor) -> bool:
        """Make ``work`` the newest version by one store, unless it was closed or poisoned meanwhile."""
        slot = self.turns.claimed
        version = -1 if self.is_closed or slot is None else self.cells.end(slot, block.healing)
        if version < 0:
            self.refresh()
            return False
        self.tensor, self.version, self.poison, self.turns.claimed = work, version, None, None
        return True


def _after_thread(thread: Thread) -> None:
    """Release at once what a thread that has ended inside a block holds, since other processes can't."""
    for protocol in tuple(PROTOCOLS):
        # Not in a forked child, where its parent's other threads end; nor may a thread that hangs hold up this one.
        if not isinstance(protocol, ShmProtocol) or protocol.turns.process != os.getpid():
            continue
        if protocol.lock.acquire(timeout=LONGEST_LOOK_S):
            try:
                if protocol.gate.is_writing(thread) or protocol.gate.is_reading(thread):
                    with contextlib.suppress(LifecycleError):
                        protocol.reclaim()
            finally:
                protocol.lock.release()


ENDED.append(_after_thread)
