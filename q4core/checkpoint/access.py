"""Opening files that are files: a pipe, a socket or a device would make a reader wait, or read, for ever."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from q4core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["is_there", "open_regular", "require_regular", "unreadable"]

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)


def require_regular(path: Path, *, or_folder: bool = False) -> None:
    """Check that a path leads to a regular file, without opening it.

    Args:
        path: The path; links are followed.
        or_folder: Allow a folder too.

    Raises:
        CheckpointError: It leads to something else, or nowhere.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode) and not (or_folder and stat.S_ISDIR(mode)):
        raise CheckpointError(
            "checkpoint",
            name="path",
            rule="a regular file or a folder" if or_folder else "a regular file",
            value=_KINDS.get(stat.S_IFMT(mode), "something else"),
            where=str(path),
            hint="A checkpoint is mapped into memory, which works with files alone; save it to one first.",
        )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises:
        CheckpointError: It is not one, or the system won't give it.
    """
    require_regular(path)
    try:
        # Should it have become a pipe since: opened without waiting for a writer, it is found to be empty.
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE))
    except OSError as error:
        raise unreadable(path, error) from error


def is_there(path: Path) -> bool:
    """Return whether a path leads to anything.

    Raises:
        CheckpointError: The system won't tell.
    """
    try:
        return path.exists()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that the system won't give."""
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError("checkpoint", name="file", rule="readable", value=reason, where=str(path))
