"""Temporary files of a writer: in a folder next to the target, which the next writer removes if this one is killed.

The folder is locked while its writer lives, and a lock ends with its process. A folder is removed by others only when
it is not locked and not empty: a writer locks its folder before it puts anything in.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import sys
from typing import TYPE_CHECKING

if sys.platform != "win32":  # there, the files of killed writers are not removed
    import fcntl

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Staging", "sync"]

_DIGEST_BYTES = 16


class Staging:
    """A folder of temporary files; making one removes those of killed writers in the same place.

    Args:
        folder: Where the files will be published.
        resume: What is written, as a text: a killed writer's files under the same text are resumed.

    Raises:
        OSError: The folder can't be written, or another process writes the same there.
    """

    def __init__(self, folder: Path, resume: str | None = None) -> None:
        own = f"{os.getpid()}-{secrets.token_hex(8)}"
        if resume is not None:
            own = hashlib.blake2b(resume.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        self.path = folder / f".q4core-{own}.tmp"
        _remove_abandoned(folder, self.path)
        self._lock: int | None = None
        if resume is not None:
            self.path.mkdir(exist_ok=True)
            self._lock = _lock(self.path, wait=False)
            if self._lock is None and sys.platform != "win32":
                raise OSError(errno.EBUSY, "another process writes the same", str(self.path))
            return
        try:
            self.path.mkdir()
            self._lock = _lock(self.path, wait=True)
        except BaseException:  # Ctrl-C, too: later writers do not remove an empty folder
            self.discard()
            raise

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file, down to the disk, and return its path."""
        path = self.path / name
        path.write_text(text, encoding="utf-8")
        sync(path)
        return path

    def discard(self) -> None:
        """Remove the folder with whatever is left in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave the folder to the next writer of the same."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(folder: Path, own: Path) -> None:
    """Remove the folders of writers that live no longer, but for one's own."""
    for path in folder.glob(".q4core-*.tmp"):
        if path == own:
            continue
        lock = _lock(path, wait=False) if path.is_dir() and not path.is_symlink() else None
        if lock is None:
            continue
        if any(path.iterdir()):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder; None where another process has it, or where the system has no such locks."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, down to the disk, where the system can."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
