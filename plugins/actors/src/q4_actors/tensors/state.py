"""``State``: the state of a mutable tensor's content, and the errors that report it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

from q4_actors.tensors.rwlock import RWLock
from q4core import InputError, LifecycleError, PoisonedError, WriteConflictError
from q4core.memory import provider_of

if TYPE_CHECKING:
    import torch

    from q4_actors.tensors.tickets import WriteTicket

__all__ = ["State", "mark_of"]


def mark_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return torch's count of in-place changes, which all aliases share, and the address."""
    return tensor._version, tensor.data_ptr()  # noqa: SLF001  # torch documents it under this name


class State:
    """Facts of a content and of its use. ``lock`` guards every field.

    Args:
        tensor: The content, which ``gate`` guards, or which never changes.
        label: For messages.
        is_in_place: Whether updates change this very tensor.
        version: Its number.
    """

    def __init__(self, tensor: torch.Tensor, label: str, *, is_in_place: bool, version: int = 0) -> None:
        self.label = label
        self.home = provider_of(tensor)
        self.is_in_place = is_in_place
        self.renew()
        self.tensor = tensor
        # The last writer's tensor, until the next turn. To free a tensor torch gives up the interpreter's lock: if that
        # happened after the block, readers would run on for whole switch intervals before the writer could come back.
        self.last_work: torch.Tensor | None = None
        self.mark = mark_of(tensor)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.nbytes = tensor.nbytes
        self.version = version
        self.poison: str | None = None
        self.is_closed = self.is_forked = False
        self.is_unsettled = False

    def make_gate(self) -> RWLock:
        """Return what lets threads in."""
        return RWLock(excludes_readers=self.is_in_place)

    def renew(self) -> None:
        """Reset to no block inside and nothing counted."""
        self.gate = self.make_gate()
        self.lock = self.gate.lock
        self.grown = threading.Condition(self.lock)
        self.waiting = 0
        self.reads = self.writes = self.snapshots = self.failures = self.conflicts = self.copies = 0
        self.bytes_copied = 0

    def count_copy(self) -> None:
        """Count a copy of the whole content."""
        self.copies += 1
        self.bytes_copied += self.nbytes

    def set_poison(self, cause: str) -> None:
        """Declare the content unknown, and wake all waiting threads."""
        self.poison = cause
        self.gate.wake()
        self.grown.notify_all()

    # -- errors

    def check(self) -> None:
        """Raise if it is closed or poisoned."""
        if self.is_closed:
            self.raise_closed()
        if self.poison is not None:
            self.raise_poisoned(self.poison, self.version, "Give it new content with reset(tensor).")

    def check_form(self, block: WriteTicket, work: torch.Tensor, alias: torch.Tensor) -> None:
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

    def raise_closed(self) -> NoReturn:
        """Raise, since it is closed, or another process's."""
        if self.is_forked:
            hint = "Between processes take a SharedMutableTensor."
            raise LifecycleError(f"{self.label} belongs to the process that made it, not to its fork", hint=hint)
        raise LifecycleError(f"{self.label} is closed")

    def raise_poisoned(self, cause: str, version: int, hint: str) -> NoReturn:
        """Raise, since the content is unknown."""
        raise PoisonedError(f"{self.label} is poisoned: {cause}", hint=hint, value=cause, version=version)

    def raise_external_write(self, base: torch.Tensor, version: int) -> NoReturn:
        """Raise, since a version was changed outside ``write()``: by a reader, or by a writer after its block."""
        cause = f"version {version} was changed in place outside write()"
        if base is self.tensor and self.poison is None:
            self.set_poison(cause)
        self.raise_poisoned(cause, version, "Change a snapshot(), or write inside write(); then call reset(tensor).")

    def raise_conflict(self, complaint: str, hint: str) -> NoReturn:
        """Count a conflict and raise it."""
        self.conflicts += 1
        raise WriteConflictError(f"{self.label} {complaint}", hint=hint, version=self.version)

    def raise_nested_use(self, wanted: str, held: str) -> NoReturn:
        """Raise, since a thread waits for what it holds itself."""
        hint = "Read what write() gave you." if wanted == "read" else "Leave the outer block first."
        self.raise_conflict(f"can't {wanted} inside this thread's own {held}()", hint)

    def raise_timeout(self, what: str, timeout: float | None, who: str) -> NoReturn:
        """Raise, since a block's time ran out."""
        self.raise_conflict(f"could not be {what} within {timeout} s: {who}", "Wait longer, or hold blocks shorter.")

    def raise_late(self, error: BaseException | None) -> None:
        """Raise, since a block was evicted before it was left, unless it is left by an error of its own."""
        if error is None:
            text = f"a with block of {self.label} was left after its thread had ended, or in a forked child"
            hint = (
                "Its update is dropped, and what it read may be torn. Leave each block in the thread that entered it."
            )
            raise LifecycleError(text, hint=hint)

    def raise_again(self) -> NoReturn:
        """Raise, since a block is entered once."""
        hint = "Call read() or write() each time."
        raise LifecycleError(f"this with block of {self.label} was entered before", hint=hint)

    def raise_outside(self, name: str) -> NoReturn:
        """Raise, since a view is used outside its block."""
        hint = "Take a snapshot() for what must last longer."
        raise LifecycleError(f"view.{name} of {self.label} is used outside its with block", hint=hint)
