"""Memory budget: an error with the numbers instead of a host that hangs.

An integrated GPU shares the host's memory, and CUDA's own count of free memory leaves out the page cache there: the
kernel's ``MemAvailable`` counts, or the limit of a control group. Elsewhere the device's free memory does. Some is
always left: a machine without any stops answering.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from q4_um_managed.cgroups import group_memory
from q4core import UnifiedMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from q4_um_managed.driver import Driver

__all__ = ["HOST_HEADROOM_BYTES", "Budget", "Room", "host_memory"]

HOST_HEADROOM_BYTES = 8 << 30
"""Left free on an integrated GPU, or an eighth of a smaller machine."""
_DEVICE_HEADROOM_BYTES = 256 << 20
_SHARE = 8
_DEVICE_SHARE = 32


@attrs.frozen
class Room:
    """Bytes of one memory that may still be allocated.

    Args:
        source: The source of the counts: ``"MemAvailable"``, ``"cudaMemGetInfo"`` or a control group's limit.
        free_bytes: Free bytes by that source.
        total_bytes: All bytes.
        headroom_bytes: Bytes that stay free.
        unbacked_bytes: What was handed out and counts as free still, since it is untouched.
    """

    source: str
    free_bytes: int
    total_bytes: int
    headroom_bytes: int
    unbacked_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that may be taken."""
        return max(0, self.free_bytes - self.headroom_bytes - self.unbacked_bytes)


def host_memory(limits: Callable[[], tuple[int, int, str] | None] = group_memory) -> tuple[int, int, str]:
    """Return the host's available and whole memory, in bytes, and the source: the kernel, or a control group's limit.

    Args:
        limits: Gives what control groups leave, or None.

    Raises:
        UnifiedMemoryError: It reports neither.
    """
    found: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in {"MemAvailable", "MemTotal"}:
                found[name] = int(rest.split()[0]) * 1024
        kernels = (found["MemAvailable"], found["MemTotal"], "MemAvailable")
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise UnifiedMemoryError("the host's memory: /proc/meminfo can't be read", error=str(error)) from error
    groups = limits()
    return kernels if groups is None or groups[0] >= kernels[0] else groups


class Budget:
    """Accepts or rejects an allocation.

    Args:
        driver: CUDA's runtime.
        host: Gives the host's available and whole memory, and the source of the counts.
    """

    def __init__(self, driver: Driver, host: Callable[[], tuple[int, int, str]] = host_memory) -> None:
        self._driver, self._host = driver, host

    def room(self, device: int, *, on_host: bool, unbacked: int = 0) -> Room:
        """Return what may still be taken.

        Args:
            device: Whose memory.
            on_host: Whether the memory comes out of the host's: pinned memory, or an integrated GPU's.
            unbacked: Bytes of that memory that were handed out and are not backed yet.
        """
        if on_host:
            free, total, source = self._host()
            return Room(source, free, total, min(HOST_HEADROOM_BYTES, total // _SHARE), unbacked)
        free, total = self._driver.free_and_total(device)
        headroom = min(max(_DEVICE_HEADROOM_BYTES, total // _DEVICE_SHARE), total // 2)
        return Room("cudaMemGetInfo", free, total, headroom, unbacked)

    def require(
        self, size: int, device: int, attributes: Mapping[str, int], *, on_host: bool, unbacked: int = 0
    ) -> Room:
        """Return the room, or raise where an allocation does not fit; arguments as for ``room``.

        Raises:
            UnifiedMemoryError: It does not; the numbers are in its attributes.
        """
        room = self.room(device, on_host=on_host, unbacked=unbacked)
        if size <= room.bytes:
            return room
        numbers = {
            "requested_bytes": size,
            "free_bytes": room.free_bytes,
            "headroom_bytes": room.headroom_bytes,
            "unbacked_bytes": room.unbacked_bytes,
            "total_bytes": room.total_bytes,
            "counted_by": room.source,
        }
        less = f"{room.headroom_bytes} reserved"
        if room.unbacked_bytes:
            less += f" and {room.unbacked_bytes} handed out and not touched yet"
        raise UnifiedMemoryError(
            f"unified memory for cuda:{device}",
            name="size",
            rule=f"at most {room.bytes} bytes ({room.source} {room.free_bytes} less {less})",
            value=size,
            hint="Close what holds memory, or place less of it.",
            attributes={**attributes, **numbers},
        )
