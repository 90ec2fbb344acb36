"""Reads a file that a stranger names: a regular one, up to a bound, and without waiting for anybody."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class NotRegularError(Exception):
    """It is no regular file, and may never end; the text says what it is."""


class TooLargeError(Exception):
    """It is larger than the bound; the text says how large it is known to be."""


def read_bounded(path: str | Path, most_bytes: int) -> bytes:
    """Return all bytes of a regular file.

    Args:
        path: Which.
        most_bytes: How many bytes it may have.

    Raises:
        NotRegularError: It is a folder, a pipe, a device or a socket.
        TooLargeError: It has more bytes.
        OSError, ValueError: The system can't open it, or such a name can't be.
    """
    _require_regular(Path(path).stat())  # before it is opened, which a device or a pipe may take for a request
    # A pipe that took its place in between would otherwise wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        _require_regular(facts)
        if facts.st_size > most_bytes:
            raise TooLargeError(str(facts.st_size))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:  # it grew, or its size was not told, as of files that the kernel makes up
        raise TooLargeError(f"more than {most_bytes}")
    return data


def _require_regular(facts: os.stat_result) -> None:
    kind = stat.S_IFMT(facts.st_mode)
    if kind != stat.S_IFREG:
        raise NotRegularError(_KINDS.get(kind, "something else"))
