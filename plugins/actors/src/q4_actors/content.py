"""What a ``MutableTensor`` is inside: the content with its version, and what the blocks do to it.

``docs/memory-protocols.md`` states the protocol, its invariants, and why no reader sees half an update.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

import torch

from q4_actors.blocks import ReadView
from q4_actors.rwlock import HERE, Exclusion
from q4_actors.snapshot import Snapshot
from q4core.diagnostics.describe_exception import describe_briefly
from q4core.errors import InputError, LifecycleError, PoisonedError, WriteConflictError
from q4core.memory import copy_beside, detached_copy, provider_of

if TYPE_CHECKING:
    from q4_actors.blocks import WriteBlock
    from q4_actors.dual_view import Order
    from q4core.memory import MemoryProvider

__all__ = ["Content", "cause_of", "copied", "mark_of", "refuse_late"]


def refuse_late(label: str, error: BaseException | None, *, is_forked: bool = False) -> None:
    """Complain about a block that was put out before it was left, unless it is left by an error of its own."""
    if error is not None:
        return
    if is_forked:
        rule, hint = "left by the process that entered it", "There it goes on."
        raise LifecycleError(label, name="with block", rule=rule, value="left by a forked child", hint=hint)
    hint = "Leave it in the thread that entered it. Its update is dropped, or what it read may be torn: begin anew."
    raise LifecycleError(label, name="with block", rule="left before its thread ends", value="left after", hint=hint)


def cause_of(problem: BaseException | None) -> str | None:
    """Return why an update failed."""
    return None if problem is None else f"a writer failed with {describe_briefly(problem)}"


def copied(tensor: torch.Tensor, home: MemoryProvider | None, label: str) -> torch.Tensor:
    """Return a copy in memory of the provider in whose memory a content lies, or in torch's own."""
    return detached_copy(tensor) if home is None else copy_beside(home, tensor, f"copy for {label}")


def mark_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return torch's count of in-place changes, which all aliases share, and the address."""
    return tensor._version, tensor.data_ptr()  # noqa: SLF001  # torch documents it under this name


class Content:
    """State and protocol. ``lock`` guards every field; the content is guarded by ``gate``, or never changes."""

    __slots__ = (
        "__weakref__",
        "bytes_copied",
        "conflicts",
        "copies",
        "device",
        "dtype",
        "failures",
        "gate",
        "grown",
        "home",
        "is_closed",
        "is_forked",
        "is_in_place",
        "is_unsettled",
        "kept",
        "label",
        "lock",
        "mark",
        "nbytes",
        "order",
        "poison",
        "reads",
        "shape",
        "snapshots",
        "tensor",
        "version",
        "waiting",
        "writes",
    )

    def __init__(self, tensor: torch.Tensor, label: str, *, is_in_place: bool) -> None:
        self.label = label
        self.home = provider_of(tensor)
        self.is_in_place = is_in_place
        self.gate = Exclusion(excludes_readers=self.is_in_place)
        self.lock = self.gate.lock
        self.grown = threading.Condition(self.lock)
        self.waiting = 0
        self.tensor = tensor
        # The last writer's tensor, until the next turn. To free a tensor torch gives up the interpreter's lock: if that
        # happened after the block, readers would run on for whole switch intervals before the writer could come back.
        self.kept: torch.Tensor | None = None
        self.mark = mark_of(tensor)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.nbytes = tensor.nbytes
        self.order: Order | None = None  # where a device works behind the CPU's back
        self.version = 0
        self.poison: str | None = None
        self.is_closed = self.is_forked = False
        self.is_unsettled = False
        self.reads = self.writes = self.snapshots = self.failures = self.conflicts = self.copies = 0
        self.bytes_copied = 0

    def after_fork(self) -> None:
        """Refuse all use in a child, whose memory is another: what is written there, the parent never sees."""
        self.gate = Exclusion(excludes_readers=self.is_in_place)  # of the old one a lock may be held for ever
        self.lock = self.gate.lock
        self.grown = threading.Condition(self.lock)
        self.order = None  # its device, and the turns of its sides, are the parent's
        self.is_closed = self.is_forked = True

    # -- places that nobody leaves

    def lose_read(self, view: ReadView) -> None:
        """Take word from a finaliser that nobody will leave this block."""
        self.gate.lost_reads.append(view.token)

    def lose_write(self, block: WriteBlock) -> None:
        """Take word from a finaliser that nobody will leave this block."""
        self.gate.lost_writes.append(block.token)

    def reclaim(self) -> None:
        """Take back what can't be left any more: a reader's place, and an update, which has failed."""
        gate = self.gate
        cause = gate.lost_writer()
        if cause is not None:  # known as failed before anybody else is let in
            self.note_failure(cause)
            self.release_claim()
            gate.end_write()
        if gate.put_out_readers():
            self.is_unsettled = self.is_in_place

    def release_claim(self) -> None:
        """Let other processes write, if there are any."""

    def drop_read(self, view: ReadView) -> None:
        """Take back whatever a read that ends before its time has taken, wherever it was interrupted."""
        if self.order is not None:
            self.order.leave(view)
        with self.lock:
            self.gate.drop(view)

    def drop_write(self, block: WriteBlock) -> None:
        """Take back whatever an update that was not let in has taken, wherever it was interrupted."""
        if self.order is not None:
            self.order.leave(block)
        with self.lock:
            self.gate.drop(block)

    def fail_write(self, block: WriteBlock, fault: BaseException) -> None:
        """End an update whose end was interrupted; it has failed, unless it was published before."""
        if self.order is not None:
            self.order.leave(block)
        with self.lock:
            if self.gate.writing is block.token:
                self.note_fault(block, fault)
                self.gate.end_write(block)
            block.is_admitted = False

    def note_fault(self, block: WriteBlock, fault: BaseException) -> None:
        """Count an update that was interrupted, unless it was published before."""
        if block.before is None or block.before == self.version:
            self.note_failure(cause_of(fault))

    def note_failure(self, cause: str | None) -> None:
        """Count an update that does not take effect; with a cause, ``IN_PLACE`` content is unknown from now on."""
        self.is_unsettled = self.is_in_place
        if self.is_in_place and cause is not None and self.poison is None:
            self.set_poison(cause)
        self.failures += 1

    # -- complaints

    def check(self) -> None:
        """Raise if it is closed or poisoned."""
        if self.is_closed:
            self.raise_closed()
        if self.poison is not None:
            raise PoisonedError(
                self.label,
                name="content",
                rule="known",
                value=self.poison,
                hint="Give it new content with reset(tensor).",
                version=self.version,
            )

    def raise_closed(self) -> NoReturn:
        """Tell that it is closed, or another process's."""
        if self.is_forked:
            rule, hint = "used by the process that made it", "Between processes take a SharedMutableTensor."
            raise LifecycleError(self.label, name="it", rule=rule, value="used by a forked child", hint=hint)
        raise LifecycleError(self.label, name="it", rule="open", value="closed", hint="Make a new one.")

    def check_waiting(self) -> None:
        """Look whether who is waited for can still leave, and raise if it is closed or poisoned."""
        self.reclaim()
        if self.is_closed or self.poison is not None:
            self.check()

    def check_healing(self) -> None:
        """Raise if there is nothing that ``reset()`` could heal."""
        self.reclaim()
        if self.is_forked:
            self.raise_closed()
        if self.is_closed or self.poison is None:
            rule, got = ("open", "closed") if self.is_closed else ("poisoned", "healthy")
            hint = "Update a healthy tensor with write() or replace(tensor)."
            raise LifecycleError(f"reset() of {self.label}", name="it", rule=rule, value=got, hint=hint)

    def refuse(self, name: str, rule: str, value: str, hint: str) -> NoReturn:
        """Count a conflict and raise it."""
        self.conflicts += 1
        raise WriteConflictError(self.label, name=name, rule=rule, value=value, hint=hint, version=self.version)

    def set_poison(self, cause: str) -> None:
        """Declare the content unknown, and tell everybody who waits."""
        self.poison = cause
        self.gate.wake()
        self.grown.notify_all()

    def refuse_touched(self, base: torch.Tensor, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()``: by a reader, or a writer that kept its tensor."""
        cause = f"version {version} was changed in place outside write()"
        if base is self.tensor and self.poison is None:
            self.set_poison(cause)
        raise PoisonedError(
            self.label,
            name="content",
            rule="changed inside write() only",
            value=cause,
            hint="Change a snapshot(), or write inside write(); then call reset(tensor).",
            version=version,
        )

    # -- reading

    def begin_read(self, view: ReadView) -> torch.Tensor:
        """Let the view in, when its turn comes, to the newest version; if that raises, ``drop_read`` must follow."""
        order = self.order
        if order is not None:
            order.arrive(view)
        with self.lock:
            gate = self.gate
            if self.is_in_place and gate.writer is view.thread:
                self.check_waiting()
                if gate.writer is view.thread:
                    hint = "Read what write() gave you."
                    self.refuse("read()", "outside this thread's own write()", "inside", hint)
            if not gate.enter_read(view, view.timeout, self.check_waiting):
                self.refuse("read()", f"let in within {view.timeout} s", "a writer", "Wait longer, or write less.")
            if self.is_closed or self.poison is not None:
                self.check()
            base, mark = self.tensor, self.mark
            if mark_of(base) != mark:
                self.refuse_touched(base, self.version)
            view.base, view.mark, view.number = base, mark, self.version
        side = None if order is None else order.begin(view, base, is_reading=True)
        return base.detach() if side is None else side

    def end_read(self, view: ReadView, error: BaseException | None, *, is_copied: bool = False) -> None:
        """Let the view out, after a look at whether its version is still what it was."""
        base, version = view.base, view.number
        is_late = False
        del view.base  # an old version goes with its last reader
        try:
            if self.order is not None:  # before the memory is written again, or goes
                self.order.end(view, base, is_reading=True)
        finally:
            with self.lock:
                is_late = not self.gate.end_read(view) and (self.is_in_place or self.is_forked)
                is_touched = mark_of(base) != view.mark and not is_late
                if is_copied:
                    self.snapshots += 1
                    self.copies += 1
                    self.bytes_copied += self.nbytes
                else:
                    self.reads += 1
                try:
                    if is_touched:
                        self.refuse_touched(base, version)
                except PoisonedError:
                    if error is None:
                        raise
        if is_late:
            refuse_late(self.label, error, is_forked=self.is_forked)

    def snapshot(self, timeout: float | None) -> Snapshot:
        """Copy the newest version; a copy of something that was changed meanwhile is thrown away."""
        view = ReadView(self, timeout)
        view.thread = HERE.thread
        error: BaseException | None = None
        try:
            self.begin_read(view)
            try:
                copy = detached_copy(view.base)
            except BaseException as raised:
                error = raised
                raise
            finally:
                self.end_read(view, error, is_copied=error is None)
            return Snapshot(copy, view.number)
        except BaseException:
            self.drop_read(view)
            raise

    # -- writing

    def begin_write(self, block: WriteBlock) -> torch.Tensor:
        """Let the block in, when its turn comes, and return an alias of what it may change; or ``drop_write``."""
        order, side = self.order, None
        if order is not None:
            order.arrive(block)
        with self.lock:
            if block.healing:
                self.check_healing()
            elif self.is_closed or self.poison is not None:
                self.check()
            if not self.gate.try_write(block):
                self.enter_write(block)
            base, mark = self.tensor, self.mark
            if mark_of(base) != mark and not block.healing:
                self.refuse_touched(base, self.version)
        if order is not None:
            side = order.begin(block, base, is_reading=False)
        block.work = work = self.working_copy(block, base, mark)
        block.address, block.extent = work.data_ptr(), work.untyped_storage().nbytes()
        block.alias = alias = work.detach()
        return alias if side is None else side

    def enter_write(self, block: WriteBlock) -> None:
        """Let the block in when its turn comes, or refuse it."""
        gate = self.gate
        check = self.check_healing if block.healing else self.check_waiting
        check()
        if gate.try_write(block):
            return
        if gate.is_writing(block.thread) or gate.is_reading(block.thread):
            inside = "write()" if gate.is_writing(block.thread) else "read()"
            self.refuse("write()", f"outside this thread's own {inside}", "inside", "Leave the outer block first.")
        if not block.wait and gate.has_writer:
            self.refuse("writer", "the only one", "another one is there", "Try later, or wait with write(wait=True).")
        if not gate.enter_write(block, block.timeout, check):
            who = "readers" if self.is_in_place and gate.writer is None else "another writer"
            self.refuse("write()", f"let in within {block.timeout} s", who, "Wait longer, or hold blocks shorter.")
        check()

    def working_copy(self, block: WriteBlock, base: torch.Tensor, mark: tuple[int, int]) -> torch.Tensor:
        """Return what the writer changes: the content itself, or a copy of it (or of what replaces it)."""
        if self.is_unsettled and self.order is not None:
            self.order.settle()
            self.is_unsettled = False
        if block.healing:
            if self.is_in_place and base.data_ptr() == mark[1]:
                return base
            if block.source is None:
                return copied(torch.zeros(self.shape, dtype=self.dtype, device=self.device), self.home, self.label)
        elif self.is_in_place:
            return base
        source = base if block.source is None else block.source
        copy = detached_copy(source) if self.home is None else copied(source, self.home, self.label)
        if mark_of(base) != mark and not block.healing:
            with self.lock:
                self.refuse_touched(base, self.version)
        return copy

    def end_write(self, block: WriteBlock, error: BaseException | None) -> None:
        """Publish the update, or drop it, or poison the content; then let the block out, or ``fail_write``."""
        work, alias = block.work, block.alias
        del block.work, block.alias
        problem = error
        try:
            if problem is None:
                self.check_form(block, work, alias)
        except BaseException as raised:  # noqa: BLE001  # whatever it is, the tensor must be left in a known state
            problem = raised
        if self.order is not None:
            problem = self.order.end_write(block, work, problem)
        is_kept = self.is_in_place and not alias.requires_grad
        self.kept = None
        with self.lock:
            if self.gate.writing is not block.token:  # it was put out, and counted as a failure
                block.is_admitted = False
                refuse_late(self.label, error, is_forked=self.is_forked)
                return
            block.before = self.version
            if not self.is_in_place or block.source is not None:
                self.copies += 1
                self.bytes_copied += self.nbytes
            may_publish = not self.is_closed and (block.healing or self.poison is None)
            if problem is None and may_publish:
                self.publish(work)
                self.kept = alias if is_kept else None
            else:
                self.note_failure(cause_of(problem))
            self.gate.end_write(block)
        if problem is None and not may_publish:
            self.check()
        if problem is not None and problem is not error:
            raise problem

    def check_form(self, block: WriteBlock, work: torch.Tensor, alias: torch.Tensor) -> None:
        """Refuse an update that changed more than values."""
        extent = None if block.extent is None else work.untyped_storage().nbytes()
        if alias.is_set_to(work) and (work.data_ptr(), extent) == (block.address, block.extent):
            return
        wanted = (self.shape, self.dtype, work.stride(), block.address, block.extent)
        found = (alias.shape, alias.dtype, alias.stride(), alias.data_ptr(), extent)
        for name, rule, got in zip(("shape", "dtype", "stride", "address", "bytes"), wanted, found, strict=True):
            if rule != got:
                raise InputError(
                    f"update of {self.label}",
                    name=name,
                    rule=f"left as it is ({rule})",
                    value=got,
                    hint="Change values only, or use replace(tensor).",
                )

    def publish(self, work: torch.Tensor) -> None:
        """Make ``work`` the newest version."""
        mark = mark_of(work)
        # By one statement, so that no signal handler finds half of it.
        self.tensor, self.mark, self.version, self.poison = work, mark, self.version + 1, None
        self.writes += 1
        if self.gate.lost_reads:  # else nobody might ever look
            self.reclaim()
        if self.waiting:
            self.grown.notify_all()
