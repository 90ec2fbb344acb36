"""Memory limits of control groups: a container is stopped at its own limit, not at the machine's."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["group_memory"]

_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Limit, use and the part of the use that the kernel takes back when it must, by the version of control groups."""


def group_memory(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int, str] | None:
    """Return what this process's control groups leave free, the limit that says so, and its name.

    Args:
        groups: File that lists the process's groups.
        mount: Where the groups are.

    Returns:
        Bytes, bytes, and the limit's file; None where nothing limits.
    """
    rooms = []
    for version, folder in _folders(groups, mount):
        limit_file, use_file, cache_key = _FILES[version]
        limit, used = _number(folder / limit_file), _number(folder / use_file)
        if limit is None or used is None:
            continue
        free = limit - used + _cache(folder / "memory.stat", cache_key)
        rooms.append((max(0, min(free, limit)), limit, f"cgroup {limit_file}"))
    return min(rooms, default=None)


def _folders(groups: Path, mount: Path) -> Iterator[tuple[int, Path]]:
    """Yield the folders of the process's groups and of all above them, which limit it too."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        version, base = (1, mount / "memory") if controllers else (2, mount)
        # Inside a container the path may be the host's, which is not there; the mount itself is the group's then.
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield version, base / part


def _number(file: Path) -> int | None:
    """Return a file's number; None for "max", and where there is none."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cache(file: Path, key: str) -> int:
    try:
        for line in file.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
