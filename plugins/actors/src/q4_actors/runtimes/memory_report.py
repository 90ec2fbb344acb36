"""``ActorMemory``: the private and the shared memory of an actor's process."""

from __future__ import annotations

import os
import pathlib

import attrs

__all__ = ["ActorMemory", "memory_of"]


@attrs.frozen
class ActorMemory:
    """Resident memory of the process in which an actor runs, as Linux counts it.

    Args:
        pid: The process; actors that are threads have one together.
        private_bytes: Of pages that no other process has mapped.
        shared_bytes: Of pages that another process has mapped as well.
    """

    pid: int
    private_bytes: int
    shared_bytes: int


def memory_of(pid: int | None = None) -> ActorMemory:
    """Return the memory of a process; defaults to this one. An ``OSError`` if it is gone, or this is not Linux."""
    pid = os.getpid() if pid is None else pid
    found = dict.fromkeys(("Private", "Shared"), 0)
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, rest = line.split(":")
        kind = name.split("_", maxsplit=1)[0]
        if kind in found:
            found[kind] += int(rest.split()[0]) * 1024
    return ActorMemory(pid, found["Private"], found["Shared"])
