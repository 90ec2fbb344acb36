"""What a use case must show: each statement of docs/use-cases.md, whether it holds here, and what was seen."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

__all__ = ["ROOM", "Acceptance", "held_bytes"]

_STATUS = Path("/proc/self/status")
ROOM = 2**20
"""Bytes that an allocator may hold for later use. What a leak would hold is many times as much."""


def held_bytes() -> int | None:
    """Return the bytes that this process holds and that no file backs, freed ones given back; None but on Linux."""
    if not _STATUS.is_file():
        return None
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Acceptance:
    """Statements as they are judged, on the screen.

    Args:
        title: Id and name of the use case.
    """

    def __init__(self, title: str) -> None:
        self._signs: list[str] = []
        print(title)

    def judge(self, statement: str, *seen: object, holds: bool) -> None:
        """Print a statement, whether it holds, and what was seen."""
        self._show("✓" if holds else "✗", statement, *seen)

    def leave(self, statement: str, why: object) -> None:
        """Print a statement that can't be judged on this machine, and why."""
        self._show("○", statement, f"not testable here: {why}")

    def _show(self, sign: str, statement: str, *seen: object) -> None:
        self._signs.append(sign)
        print(f"\n{sign} {statement}")
        for item in seen:
            print("    " + str(item).replace("\n", "\n    "))

    def end(self) -> int:
        """Print how many statements held, and return the exit status: 0 where none failed."""
        held, failed, left = (self._signs.count(sign) for sign in "✓✗○")
        print(f"\n{held} hold, {failed} fail, {left} not testable here")
        return int(failed > 0)
