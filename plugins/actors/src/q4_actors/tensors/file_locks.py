"""``FileLocks``: locks between processes that the kernel releases when their holder dies, however it dies.

They prove who lives; no read or update takes one. They are Linux's open-file-description locks on single bytes of a
file. Such a lock belongs to what ``open`` made, which a forked child shares: so a child must ``reopen``, and memory
must be mapped through another ``open``. Holders of one description never conflict with each other.
"""

from __future__ import annotations

import os
import struct
import sys

from q4core import LifecycleError

if sys.platform == "linux":
    import fcntl

__all__ = ["FileLocks"]


class FileLocks:
    """Locks on places of one file; every method returns at once.

    Args:
        path: The file.
        label: For messages.

    Attributes:
        file: The file that is locked; −1 once it is closed.
    """

    def __init__(self, path: str, label: str) -> None:
        self._label = label
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def try_shared(self, place: int) -> bool:
        """Take a place together with others, or return False if another process has it exclusively."""
        return self._request(fcntl.F_RDLCK, place)

    def try_exclusive(self, place: int) -> bool:
        """Take a place alone, or return False if another process has it; this object's shared hold turns exclusive."""
        return self._request(fcntl.F_WRLCK, place)

    def release(self, place: int) -> None:
        """Release a place; also one that is not held."""
        self._request(fcntl.F_UNLCK, place)

    def reopen(self, place: int) -> None:
        """Reset in a forked child, whose parent's holds are not its own; take ``place`` together with others."""
        inherited, self.file = self.file, -1
        try:
            self.file = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(inherited)  # also if there is nothing in its place: what is locked through it is the parent's
        self.try_shared(place)

    def size(self) -> int:
        """Return the size of the file."""
        return os.lseek(self.file, 0, os.SEEK_END)

    def close(self) -> None:
        """Release everything."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _request(self, kind: int, place: int) -> bool:
        # Every second byte, since the kernel would join holds of neighbours, and need memory to part them again.
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, 2 * place, 1, 0)
        try:
            fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):  # another process has the place
            return False
        except OSError as error:
            hint = "Raise the system's limit on file locks, or share fewer tensors."
            raise LifecycleError(f"the system grants {self._label} no file lock: {error}", hint=hint) from error
        return True
