"""The protocol between processes: what the blocks of a ``SharedMutableTensor`` do.

A thread first takes its turn among the threads of its process, then its process takes a lock among the processes.
``docs/memory-protocols.md`` states the protocol, its memory order, and why no reader sees half an update.
"""

from __future__ import annotations

import time
from os import SEEK_END, lseek
from typing import TYPE_CHECKING

from q4_actors.backoff import LONGEST_PAUSE_S, Pauses
from q4_actors.content import cause_of, refuse_late
from q4_actors.rwlock import HERE, wait_on
from q4_actors.segment import (
    CLOSED,
    CURRENT,
    FIRST_SLOT,
    READER_WAITS,
    TAINTED,
    WRITER,
    WRITER_PROCESS,
    WRITER_WAITS,
)
from q4_actors.shared_state import HEALTHY, WRITING, SharedState
from q4core.errors import LifecycleError, PoisonedError

if TYPE_CHECKING:
    import torch

    from q4_actors.blocks import ReadView, WriteBlock

__all__ = ["MAX_VERSION", "SharedContent"]

MAX_VERSION = 2**55 - 1
"""The word that publishes has 8 bits for the slot, and a sign."""
READERS_TURN_S = 2.4 * LONGEST_PAUSE_S
"""How long an ``IN_PLACE`` writer lets readers of other processes go first: they sleep less between two looks."""
LOOKS_FOR_A_SLOT = 5
"""How often a writer that won't wait looks for a free slot: a reader that comes too late holds one for an instant."""


class SharedContent(SharedState):
    """The protocol.

    A slot's address never changes, so torch's count of in-place changes, ``_version``, is its whole mark. What every
    block does is written out, for calls are what a block costs beside its locks.
    """

    __slots__ = ()

    # -- reading

    def begin_read(self, view: ReadView) -> torch.Tensor:
        """Let the view in, when its turn comes, to the newest version; if that raises, ``drop_read`` must follow."""
        with self.lock:
            view.place = (self.epoch, -1)
            if self.lost or self.is_closed or lseek(self.locks.file, 0, SEEK_END) < self.total:
                self.check_waiting()
            if not self.is_in_place:
                self.gate.enter_read(view, None, self.check_waiting)
                self._hold_newest(view)
                return view.base.detach()
            pauses = None if view.timeout is None else self.pauses(view.timeout)
            gate = self.gate
            if gate.writer is view.thread:
                self._refuse_own_write(view)
            if not gate.enter_read(view, view.timeout, self.check_waiting):
                self._refuse_late_read(view)
            is_in = self._hold_in_place(view)
        while not is_in:
            pauses = pauses or self.pauses(view.timeout)
            is_in = self._hold_later(view, pauses)
        return view.base.detach()

    def _refuse_own_write(self, view: ReadView) -> None:
        self.check_waiting()  # it may have been put out
        if self.gate.writer is view.thread:
            self.refuse("read()", "outside this thread's own write()", "inside", "Read what write() gave you.")

    def _refuse_late_read(self, view: ReadView) -> None:
        self.refuse("read()", f"let in within {view.timeout} s", "a writer", "Wait longer, or write less.")

    def _hold_newest(self, view: ReadView) -> None:
        """Hold the slot of the newest version. Begins anew only after another version was published."""
        words, holds, locks = self.words, self.holds, self.locks
        while True:
            word = words[CURRENT]
            slot = word & 255
            if holds[slot]:  # so nobody has written there since, and it has what the word says
                break
            if locks.try_shared(FIRST_SLOT + slot):
                word = words[CURRENT]  # anew, since a later version may have been begun there before the hold
                if word & 255 == slot:
                    break
                locks.release(FIRST_SLOT + slot)
        if words[CLOSED] or words[TAINTED]:
            self.refresh()
            self.check()
        self._enter(view, slot, word >> 8)

    def _hold_in_place(self, view: ReadView) -> bool:
        """Hold the one slot, or return False while another process writes or waits to."""
        words, locks, holds = self.words, self.locks, self.holds[0]
        if words[WRITER_WAITS] and view.thread not in holds.values():
            if locks.is_taken(WRITER):
                return False
            words[WRITER_WAITS] = 0  # left behind by a process that died
        if not holds and not locks.try_shared(FIRST_SLOT):
            words[READER_WAITS] = 1
            return False
        word = words[CURRENT]
        if words[CLOSED] or word & 255 != HEALTHY:
            self.refresh()
            self.check()
        self._enter(view, 0, word >> 8)
        return True

    def _hold_later(self, view: ReadView, pauses: Pauses) -> bool:
        is_in_time = pauses.sleep()
        with self.lock:
            if not is_in_time:
                self._refuse_late_read(view)
            self.check_waiting()
            return self._hold_in_place(view)

    def _enter(self, view: ReadView, slot: int, version: int) -> None:
        self.holds[slot][view.token], view.place = view.thread, (self.epoch, slot)
        base = self.slots[slot]
        count = base._version  # noqa: SLF001  # torch documents it under this name
        view.base, view.count, view.number = base, count, version
        seen = self.seen[slot]
        if seen[0] != version:
            self.seen[slot] = (version, count)
        elif seen[1] != count:
            self.refuse_touched(base, version)

    def drop_read(self, view: ReadView) -> None:
        """Take back whatever a read that ends before its time has taken, wherever it was interrupted."""
        with self.lock:
            if getattr(view, "place", (-1, -1))[0] == self.epoch:  # else it got no place, or it is the parent's
                self.release_hold(view.token, view.place[1])
                self.release_unheld()
                self.gate.drop(view)

    def end_read(self, view: ReadView, error: BaseException | None, *, is_copied: bool = False) -> None:
        """Let the view out, after a look at whether its version is still what it was."""
        base, version = view.base, view.number
        del view.base
        with self.lock:
            epoch, slot = view.place
            is_late = epoch != self.epoch or view.token not in self.gate.readers
            if is_copied:
                self.snapshots += 1
                self.copies += 1
                self.bytes_copied += self.nbytes
            else:
                self.reads += 1
            try:
                if base._version != view.count and not is_late:  # noqa: SLF001  # as in _enter
                    self.refuse_touched(base, version)
            except PoisonedError:
                if error is None:
                    raise
            finally:
                if is_late:
                    view.is_admitted = False
                else:
                    holders = self.holds[slot]
                    holders.pop(view.token, None)
                    if not holders and slot != self.claimed:
                        self.locks.release(FIRST_SLOT + slot)
                        if self.is_let_go:
                            self.dispose()
                    self.gate.end_read(view)
        if is_late:
            refuse_late(self.label, error, is_forked=epoch != self.epoch)

    def pauses(self, timeout: float | None) -> Pauses:
        """Return how long to sleep between two looks at what other processes do."""
        return Pauses(timeout)

    # -- waiting for a version

    def wait_for(self, version: int, timeout: float | None) -> bool:
        """Wait until the version is there; return False if the time ran out."""
        pauses = Pauses(timeout)
        thread = HERE.thread
        while True:
            with self.lock:
                self.check_waiting()
                if self.version >= version:
                    return True
                if self.gate.is_writing(thread) or (self.is_in_place and self.gate.is_reading(thread)):
                    self.refuse("wait()", "outside this thread's own block", "inside", "It would never end.")
                pause = pauses.next()
                if pause is None:
                    return False
                self.waiting += 1
                try:
                    wait_on(self.grown, pause)  # which ends early when this process itself writes
                finally:
                    self.waiting -= 1

    # -- writing

    def begin_write(self, block: WriteBlock) -> torch.Tensor:
        """Let the block in, when its turn comes, and return an alias of what it may change; or ``drop_write``."""
        with self.lock:
            block.place = (self.epoch, -1)
            pauses = None if block.timeout is None else self.pauses(block.timeout)
            if block.healing:
                self.check_healing()
            elif self.lost or self.is_closed or lseek(self.locks.file, 0, SEEK_END) < self.total:
                self.check_waiting()
            if not self.gate.try_write(block):
                self.enter_write(block)
            lets_readers_go = self.is_in_place and (block.timeout is None or block.timeout > READERS_TURN_S)
            obstacle = self._obstacle(block, lets_readers_go=lets_readers_go)
            if obstacle is None:
                self._begin_update(block)
        if obstacle is not None:
            self._wait_for_claim(block, obstacle, pauses or self.pauses(block.timeout))
        block.work = work = self._working_copy(block)
        block.address = work.data_ptr()
        block.alias = alias = work.detach()
        return alias

    def _wait_for_claim(self, block: WriteBlock, obstacle: str | None, pauses: Pauses) -> None:
        """Return once this process alone may write, or raise."""
        lets_readers_go = obstacle == "another writer" and self.is_in_place and pauses.allows(READERS_TURN_S)
        while obstacle is not None:
            with self.lock:
                self._give_up(block, obstacle, pauses)
            if obstacle == "readers that wait":
                lets_readers_go = False
                self._let_readers_go()
            elif not self._sleep(obstacle, pauses):
                with self.lock:
                    got = obstacle if self.is_in_place or obstacle != "readers" else self._slots_held()
                    hint = "Wait longer, or hold blocks shorter."
                    self.refuse("write()", f"let in within {block.timeout} s", got, hint)
            with self.lock:
                self.reclaim()
                if self.is_closed:  # there may be no locks any more
                    self.check()
                obstacle = self._obstacle(block, lets_readers_go=lets_readers_go)
                if obstacle is None:
                    self._begin_update(block)

    def _sleep(self, obstacle: str, pauses: Pauses) -> bool:  # noqa: ARG002  # others are woken
        return pauses.sleep()

    def _let_readers_go(self) -> None:
        time.sleep(READERS_TURN_S)

    def _are_readers_kept_out(self) -> bool:
        is_told = bool(self.words[READER_WAITS])
        if is_told:
            self.words[READER_WAITS] = 0
        return is_told

    def _give_up(self, block: WriteBlock, obstacle: str, pauses: Pauses) -> None:
        """Raise if the block won't wait for what is in the way."""
        if block.wait or block.healing:
            return
        if obstacle == "another writer":
            got = f"another one is there (process {self.words[WRITER_PROCESS]})"
            self.refuse("writer", "the only one", got, "Try later, or wait with write(wait=True).")
        if not self.is_in_place and pauses.count >= LOOKS_FOR_A_SLOT:
            hint = "Hold reads shorter, make the tensor with more slots, or wait with write(wait=True)."
            self.refuse("slot", "free for the next version", self._slots_held(), hint)

    def _slots_held(self) -> str:
        """Return in words what is in the way where no slot is free."""
        return f"{len(self.slots) - 1} of {len(self.slots)} slots held by readers of old versions"

    def _obstacle(self, block: WriteBlock, *, lets_readers_go: bool) -> str | None:
        """Take what an update still lacks, and return what is in the way, or None."""
        if not self.has_turn:
            self.has_turn = self._take_turn()
        if block.healing:  # after it, since no other process can change the version now
            self.check_healing()
        else:
            words = self.words
            if words[CLOSED] or words[TAINTED] or words[CURRENT] != self.version << 8 | self.current:
                self.refresh()
            if self.is_closed or self.poison is not None:
                self.check()
            if self.has_turn:  # while it is healed, the process that died stays named
                words[WRITER_PROCESS] = self.process
        if not self.has_turn:
            return "another writer"
        if self.version >= MAX_VERSION:
            hint = "Make a new tensor from a snapshot()."
            rule = f"less than {MAX_VERSION}"
            raise LifecycleError(f"update of {self.label}", name="version", rule=rule, value=self.version, hint=hint)
        if lets_readers_go and self._are_readers_kept_out():
            return "readers that wait"
        return self._claim_in_place(block) if self.is_in_place else self._claim_free_slot()

    def _take_turn(self) -> bool:
        return self.locks.try_exclusive(WRITER)

    def _claim_in_place(self, block: WriteBlock) -> str | None:
        words, locks = self.words, self.locks
        if self.holds[0] or not locks.try_exclusive(FIRST_SLOT):
            words[WRITER_WAITS] = 1
            return "readers"
        words[WRITER_WAITS] = 0
        if words[CURRENT] & 255 != HEALTHY and not block.healing:  # a reader has changed it meanwhile
            locks.release(FIRST_SLOT)
            self.check_waiting()
        self.claimed = 0
        return None

    def _claim_free_slot(self) -> str | None:
        current, try_exclusive = self.current, self.locks.try_exclusive
        for slot, holders in enumerate(self.holds):
            if slot != current and not holders and try_exclusive(FIRST_SLOT + slot):
                self.claimed = slot
                return None
        return "readers"

    def _begin_update(self, block: WriteBlock) -> None:
        base, version, slot = self.tensor, self.version, self.current
        count = base._version  # noqa: SLF001  # as in _enter
        seen = self.seen[slot]
        if seen[0] != version:
            self.seen[slot] = (version, count)
        elif seen[1] != count and not block.healing:
            self.refuse_touched(base, version)
        if self.is_in_place and not block.healing:
            self.words[CURRENT] = version << 8 | WRITING

    def _working_copy(self, block: WriteBlock) -> torch.Tensor:
        """Return what the writer changes: the content itself, or the free slot with a copy of what it begins with."""
        base = self.tensor
        if self.is_in_place or self.claimed is None:
            return base
        work = self.slots[self.claimed]
        if block.source is not None:
            return work.copy_(block.source)
        if block.healing:
            return work.zero_()
        count = base._version  # noqa: SLF001  # as in _enter
        work.copy_(base)
        if base._version != count:  # noqa: SLF001  # as in _enter
            with self.lock:
                self.refuse_touched(base, self.version)
        return work

    def drop_write(self, block: WriteBlock) -> None:
        """Take back whatever an update that was not let in has taken, wherever it was interrupted."""
        with self.lock:
            self._drop_write(block)

    def _drop_write(self, block: WriteBlock) -> None:
        if getattr(block, "place", (-1, -1))[0] != self.epoch:  # it got no place, or it is the parent's
            return
        if self.gate.writing is block.token:
            self._unmark(block)
            self._release_all()
        self.gate.drop(block)

    def _unmark(self, block: WriteBlock) -> None:
        """Take back that the content is being written, since nothing was."""
        if self.is_in_place and self.claimed is not None and not block.healing:
            low = HEALTHY if self.poison is None else self.words[CURRENT] & 255
            self.words[CURRENT] = self.version << 8 | low

    def _release_all(self) -> None:
        """Let go whatever only a writer has, also what it was just taking."""
        self.has_turn = not self.is_disposed
        self.release_claim(is_cut=self.is_cut)
        self.release_unheld()

    def fail_write(self, block: WriteBlock, fault: BaseException) -> None:
        """End an update whose end was interrupted; it has failed, unless it was published before."""
        with self.lock:
            if block.place[0] == self.epoch and self.gate.writing is block.token:
                self.note_fault(block, fault)
                self._release_all()
                self.gate.end_write(block)
            block.is_admitted = False

    def end_write(self, block: WriteBlock, error: BaseException | None) -> None:
        """Publish the update, or drop it, or poison the content; then let the block out, or ``fail_write``."""
        work, alias = block.work, block.alias
        del block.work, block.alias
        problem = error
        if problem is None and (self.is_in_place or not alias.is_set_to(work)):
            try:
                self.check_form(block, work, alias)
            except BaseException as raised:  # noqa: BLE001  # whatever it is, the tensor must be left in a known state
                problem = raised
        is_kept = self.is_in_place and not alias.requires_grad
        self.kept = None
        with self.lock:
            if block.place[0] != self.epoch or self.gate.writing is not block.token:
                block.is_admitted = False
                refuse_late(self.label, error, is_forked=block.place[0] != self.epoch)
                return
            if not self.is_in_place or block.source is not None:
                self.copies += 1
                self.bytes_copied += self.nbytes
            words = self.words
            if words[CLOSED] or words[TAINTED] or words[CURRENT] >> 8 != self.version:
                self.refresh()  # what else there is can't have changed in this process's turn
            block.before = self.version
            may_publish = not self.is_closed and (block.healing or self.poison is None)
            if problem is None and may_publish:
                self.publish(work)
                self.kept = alias if is_kept else None
            else:
                self.note_failure(cause_of(problem))
            self.release_claim()
            self.gate.end_write(block)
        if problem is None and not may_publish:
            self.check()
        if problem is not None and problem is not error:
            raise problem

    def publish(self, work: torch.Tensor) -> None:
        """Make ``work`` the newest version, by one store."""
        version = self.version + 1
        slot = 0
        if not self.is_in_place and self.claimed is not None:
            # Given back first, so that readers of the new version never wait for this process. Nobody can take it:
            # other writers lack the turn, and a reader looks at the word again once it holds the slot.
            slot = self.claimed
            self.locks.release(FIRST_SLOT + slot)
            self.claimed = None
        word = version << 8 | slot  # HEALTHY is 0
        seen = (version, work._version)  # noqa: SLF001  # as in _enter
        # By one statement, so that no signal handler finds half of it.
        news = (seen, word, slot, work, version, None)
        self.seen[slot], self.words[CURRENT], self.current, self.tensor, self.version, self.poison = news
        self.writes += 1
        if self.lost:
            self.reclaim()
        if self.waiting:
            self.grown.notify_all()
