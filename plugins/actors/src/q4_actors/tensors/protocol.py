"""``ThreadProtocol``: the steps of a mutable tensor's blocks, among the threads of one process.

``docs/memory-protocols.md`` states the protocol, its invariants, and why no reader sees half an update.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

import torch

from q4_actors.tensors.backoff import Backoff
from q4_actors.tensors.rwlock import LOOK_INTERVAL_S
from q4_actors.tensors.state import State, mark_of
from q4_actors.tensors.tickets import HERE
from q4core import LifecycleError, PoisonedError, default_registry
from q4core.memory import detached_copy
from q4core.plugin_api import describe_exception

if TYPE_CHECKING:
    from q4_actors.tensors.dual_view import DeviceSync
    from q4_actors.tensors.tickets import ReadTicket, WriteTicket
    from q4core.memory import MemoryProvider

__all__ = ["PROTOCOLS", "ThreadProtocol", "copied"]

PROTOCOLS: weakref.WeakSet[ThreadProtocol] = weakref.WeakSet()
"""``after_fork`` of each is called in every child of this process: what its parent's threads hold is the parent's."""


def _after_fork() -> None:
    for protocol in tuple(PROTOCOLS):
        protocol.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def copied(tensor: torch.Tensor, home: MemoryProvider | None, label: str) -> torch.Tensor:
    """Return a copy in memory of the provider in whose memory a content lies, or in torch's own."""
    if home is None:
        return detached_copy(tensor)
    return default_registry().placer_type().copy_into(home, tensor, f"copy for {label}")


class ThreadProtocol(State):
    """The steps of blocks, over the state that they change under its lock."""

    sync: DeviceSync | None = None
    """For memory that a device works on."""

    def after_fork(self) -> None:
        """Reject all use in a child, whose memory is a copy: the parent never sees what is written there."""
        self.renew()  # a lock of the old one may never be released
        self.sync = None  # its device, and the turns of its sides, are the parent's
        self.is_closed = self.is_forked = True

    def observe(self) -> None:
        """Refresh what other processes have changed: nothing, here."""

    def close(self) -> None:
        """Drop the content, and wake all waiting threads."""
        with self.lock:
            self.is_closed = True
            self.tensor, self.last_work = torch.empty(0, device="cpu"), None
            if self.sync is not None:
                self.sync.close()
            self.gate.wake()
            self.grown.notify_all()

    def wait_for(self, version: int, timeout: float | None) -> bool:
        """Wait until the version is there; return False if the time ran out."""
        backoff = Backoff(timeout, LOOK_INTERVAL_S)
        with self.lock:
            while True:
                self.check_waiting()
                if self.version >= version:
                    return True
                self.check_not_inside()
                remaining = backoff.next()
                if remaining is None:
                    return False
                self.waiting += 1
                try:
                    self.grown.wait(remaining)
                finally:
                    self.waiting -= 1

    # -- blocks whose thread has ended

    def reclaim(self) -> None:
        """Release what ended threads hold: a reader's place, and an update, which has failed."""
        writer = self.gate.writer
        if writer is not None and writer.thread() is None:  # marked as failed before another block is admitted
            self.note_failure("a writer's thread ended without leaving its block")
            self.gate.end_write(writer)
            writer.is_admitted = True  # so that leaving its block raises
            self.release_write()
        for ticket in self.gate.evict_readers():
            self.is_unsettled = self.is_in_place
            self.release_read(ticket)

    def release_read(self, view: object) -> None:
        """Release what a read holds in addition to its place among the threads."""

    def release_write(self) -> None:
        """Release what the writer holds in addition to its place among the threads."""

    def drop_read(self, view: ReadTicket) -> None:
        """Release what a read that did not begin holds."""
        if self.sync is not None:
            self.sync.leave(view)
        with self.lock:
            self.gate.end_read(view)
            self.release_read(view)

    def drop_write(self, block: WriteTicket) -> None:
        """Release what an update that did not begin holds."""
        if self.sync is not None:
            self.sync.leave(block)
        with self.lock:
            if self.gate.end_write(block):
                self.release_write()

    def note_failure(self, cause: str | None) -> None:
        """Count an update that does not take effect; with a cause, ``IN_PLACE`` content is unknown from now on."""
        self.is_unsettled = self.is_in_place
        if self.is_in_place and cause is not None and self.poison is None:
            self.set_poison(cause)
        self.failures += 1

    # -- checks before and while a block waits

    def check_waiting(self) -> None:
        """Evict holders whose threads have ended, and raise if the tensor is closed or poisoned."""
        self.reclaim()
        if self.is_closed or self.poison is not None:
            self.check()

    def check_healing(self) -> None:
        """Raise if there is nothing that ``reset()`` could repair."""
        self.reclaim()
        if self.is_closed:
            self.raise_closed()
        if self.poison is None:
            hint = "Update it with write() or replace(tensor)."
            raise LifecycleError(f"{self.label} is not poisoned, so reset() has nothing to repair", hint=hint)

    def check_not_inside(self) -> None:
        """Raise where a thread waits for a version that its own block prevents."""
        thread, gate = HERE.thread, self.gate
        if gate.is_writing(thread) or (self.is_in_place and gate.is_reading(thread)):
            self.raise_conflict("can't wait() inside this thread's own block", "It would never end.")

    # -- reading

    def begin_read(self, view: ReadTicket) -> torch.Tensor:
        """Admit the view to the newest version when its turn comes; if that raises, ``drop_read`` must follow."""
        sync = self.sync
        if sync is not None:
            sync.arrive(view)
        with self.lock:
            self.enter_read(view)
            if self.is_closed or self.poison is not None:
                self.check()
            base, mark = self.tensor, self.mark
            if mark_of(base) != mark:
                self.raise_external_write(base, self.version)
            view.base, view.mark, view.number = base, mark, self.version
        side = None if sync is None else sync.begin(view, base, is_reading=True)
        return base.detach() if side is None else side

    def enter_read(self, view: ReadTicket) -> None:
        """Admit the view among the threads of this process, in its turn."""
        gate = self.gate
        if self.is_in_place and gate.is_writing(view.thread):
            self.raise_nested_use("read", "write")
        if not gate.enter_read(view, view.timeout, self.check_waiting):
            self.raise_timeout("read", view.timeout, "a writer is there")

    def end_read(self, view: ReadTicket, error: BaseException | None) -> None:
        """Release the view, after a check that its version was not changed."""
        base, version = view.base, view.number
        is_late = False
        del view.base  # an old version goes with its last reader
        try:
            if self.sync is not None:  # before the memory is written again, or goes
                self.sync.end(view, base, is_reading=True)
        finally:
            with self.lock:
                is_late = not self.gate.end_read(view) and (self.is_in_place or self.is_forked)
                self.reads += 1
                try:
                    if not is_late and mark_of(base) != view.mark:
                        self.raise_external_write(base, version)
                except PoisonedError:
                    if error is None:
                        raise
                finally:
                    self.release_read(view)
        if is_late:
            self.raise_late(error)

    # -- writing

    def begin_write(self, block: WriteTicket) -> torch.Tensor:
        """Admit the block in its turn, and return an alias of what it may change; on an error, call ``drop_write``."""
        sync, side = self.sync, None
        if sync is not None:
            sync.arrive(block)
        with self.lock:
            if block.healing:
                self.check_healing()
            elif self.is_closed or self.poison is not None:
                self.check()
            if not self.gate.try_write(block):
                self.enter_write(block)
            base, mark = self.tensor, self.mark
            if mark_of(base) != mark and not block.healing:
                self.raise_external_write(base, self.version)
        if sync is not None:
            side = sync.begin(block, base, is_reading=False)
        block.work = work = self.working_copy(block, base, mark)
        block.address, block.extent = work.data_ptr(), work.untyped_storage().nbytes()
        block.alias = alias = work.detach()
        return alias if side is None else side

    def enter_write(self, block: WriteTicket) -> None:
        """Admit the block among the threads of this process when its turn comes, or raise."""
        gate = self.gate
        check = self.check_healing if block.healing else self.check_waiting
        check()
        if gate.try_write(block):
            return
        if gate.is_writing(block.thread) or gate.is_reading(block.thread):
            self.raise_nested_use("write", "write" if gate.is_writing(block.thread) else "read")
        if not block.wait and gate.has_writer:
            self.raise_conflict("is being written by another thread", "Use write(wait=True), or retry.")
        if not gate.enter_write(block, block.timeout, check):
            has_readers = self.is_in_place and gate.writer is None
            who = "readers are there" if has_readers else "another writer is there"
            self.raise_timeout("written", block.timeout, who)
        check()

    def working_copy(self, block: WriteTicket, base: torch.Tensor, mark: tuple[int, int]) -> torch.Tensor:
        """Return what the writer changes: the content itself, or a copy of it (or of what replaces it)."""
        if self.is_unsettled and self.sync is not None:
            self.sync.settle()
            self.is_unsettled = False
        if self.is_in_place and (not block.healing or base.data_ptr() == mark[1]):
            return base
        if block.healing and block.source is None:
            return copied(torch.zeros(self.shape, dtype=self.dtype, device=self.device), self.home, self.label)
        copy = copied(base if block.source is None else block.source, self.home, self.label)
        if mark_of(base) != mark and not block.healing:
            with self.lock:
                self.raise_external_write(base, self.version)
        return copy

    def end_write(self, block: WriteTicket, error: BaseException | None) -> None:
        """Publish the update, or drop it, or poison the content; then release the block."""
        work, alias = block.work, block.alias
        del block.work, block.alias
        problem = error
        try:
            if problem is None:
                self.check_form(block, work, alias)
        except BaseException as raised:  # noqa: BLE001  # after any error the tensor must be left in a known state
            problem = raised
        if self.sync is not None:
            problem = self.sync.end_write(block, work, problem)
        keeps_work = self.is_in_place and not alias.requires_grad
        self.last_work = None
        with self.lock:
            if self.gate.writer is not block:  # it was evicted, and counted as a failure
                block.is_admitted = False
                self.raise_late(error)
                return
            is_published = False
            try:
                if not self.is_in_place or block.source is not None:
                    self.count_copy()
                is_published = problem is None and self.publish(block, work)
                if is_published:
                    self.writes += 1
                    self.last_work = alias if keeps_work else None
                else:
                    self.note_failure(
                        None if problem is None else f"a writer failed with {describe_exception(problem)}"
                    )
            finally:
                self.gate.end_write(block)
                if not is_published:
                    self.release_write()
        if problem is None and not is_published:
            self.check()
        if problem is not None and problem is not error:
            raise problem

    def publish(self, block: WriteTicket, work: torch.Tensor) -> bool:
        """Make ``work`` the newest version, and release all; not if it was closed or poisoned meanwhile."""
        if self.is_closed or (self.poison is not None and not block.healing):
            return False
        self.tensor, self.mark, self.version, self.poison = work, mark_of(work), self.version + 1, None
        if self.waiting:
            self.grown.notify_all()
        return True
