"""``ProcessLocks``: locks between processes that the kernel takes back when their holder dies, however it dies.

They are Linux's open-file-description locks on single bytes of a file. Such a lock belongs to what ``open`` made, which
a forked child shares: so a child must ``reopen``, and memory must be mapped through another ``open``. Holders of one
description never conflict with each other: threads must keep one another out by other means.
"""

from __future__ import annotations

import os
import struct
import sys

from q4core.errors import ConfigError, LifecycleError

if sys.platform == "linux":
    import fcntl

    SET_LOCK = fcntl.F_OFD_SETLK

__all__ = ["ProcessLocks", "check_platform"]

HAS_LOCKS = sys.platform == "linux"


def check_platform(label: str) -> None:
    """Raise if this machine has no such locks."""
    if not HAS_LOCKS:
        hint = "Use a MutableTensor, which threads share."
        raise ConfigError(label, name="platform", rule="Linux, for its file locks", value=sys.platform, hint=hint)


def _request(kind: int, place: int) -> bytes:
    # Every second byte, since the kernel would join holds of neighbours, and need memory to part them again.
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 2 * place, 1, 0)


class ProcessLocks:
    """Locks on the places 0 … count − 1 of one file; every method returns at once.

    Args:
        path: The file.
        count: How many places.
        label: For messages.

    Attributes:
        file: The file that is locked; −1 once it is closed.
    """

    def __init__(self, path: str, count: int, label: str) -> None:
        self._label = label
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._shared = [_request(fcntl.F_RDLCK, place) for place in range(count)]
        self._exclusive = [_request(fcntl.F_WRLCK, place) for place in range(count)]
        self._free = [_request(fcntl.F_UNLCK, place) for place in range(count)]

    def try_shared(self, place: int) -> bool:
        """Take a place together with others, or return False if somebody else has it exclusively."""
        try:
            fcntl.fcntl(self.file, SET_LOCK, self._shared[place])
        except OSError as error:
            return self._refuse(error)
        return True

    def try_exclusive(self, place: int) -> bool:
        """Take a place alone, or return False if somebody else has it; a shared hold of this object turns exclusive."""
        try:
            fcntl.fcntl(self.file, SET_LOCK, self._exclusive[place])
        except OSError as error:
            return self._refuse(error)
        return True

    def release(self, place: int) -> None:
        """Give a place back; also one that is not held."""
        fcntl.fcntl(self.file, SET_LOCK, self._free[place])

    def is_taken(self, place: int) -> bool:
        """Return whether somebody else has the place exclusively."""
        answer = fcntl.fcntl(self.file, fcntl.F_OFD_GETLK, self._shared[place])
        (kind,) = struct.unpack_from("h", answer)
        return bool(kind != fcntl.F_UNLCK)

    def reopen(self, keep: int) -> None:
        """Begin anew in a forked child, without its parent's locks but with an own shared hold of one place."""
        inherited, self.file = self.file, -1
        try:
            self.file = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(inherited)  # also if there is nothing in its place: what is locked through it is the parent's
        self.try_shared(keep)

    def size(self) -> int:
        """Return the size of the file."""
        return os.lseek(self.file, 0, os.SEEK_END)

    def close(self) -> None:
        """Give everything back."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _refuse(self, error: OSError) -> bool:
        """Return False if somebody else has the place; raise what else there may be."""
        if isinstance(error, (BlockingIOError, PermissionError)):
            return False
        hint = "Raise the system's limit on file locks, or share fewer tensors."
        raise LifecycleError(self._label, name="lock", rule="granted", value=str(error), hint=hint) from error
