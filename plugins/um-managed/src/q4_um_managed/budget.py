"""How much memory may still be taken: refuse with the numbers instead of hanging the host.

An integrated GPU shares the host's memory, and CUDA's own count of free memory leaves out the page cache there: the
kernel's ``MemAvailable`` counts. Elsewhere the device's free memory does. Some is always left: a machine without any
stops answering.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

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
    """What may still be taken of one memory.

    Args:
        source: Who counted: ``"MemAvailable"`` or ``"cudaMemGetInfo"``.
        free_bytes: What it says is free.
        total_bytes: What there is.
        headroom_bytes: What stays free.
    """

    source: str
    free_bytes: int
    total_bytes: int
    headroom_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes that may be taken."""
        return max(0, self.free_bytes - self.headroom_bytes)


def host_memory() -> tuple[int, int]:
    """Return the host's available and whole memory, in bytes, as the kernel tells them.

    Raises:
        UnifiedMemoryError: It tells neither.
    """
    found: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in {"MemAvailable", "MemTotal"}:
                found[name] = int(rest.split()[0]) * 1024
        return found["MemAvailable"], found["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise UnifiedMemoryError("the host's memory: /proc/meminfo can't be read", error=str(error)) from error


class Budget:
    """Says yes or no to one more allocation.

    Args:
        driver: CUDA's runtime.
        host: Gives the host's available and whole memory.
    """

    def __init__(self, driver: Driver, host: Callable[[], tuple[int, int]] = host_memory) -> None:
        self._driver, self._host = driver, host

    def room(self, device: int, *, on_host: bool) -> Room:
        """Return what may still be taken.

        Args:
            device: Whose memory.
            on_host: Whether the memory comes out of the host's: pinned memory, or an integrated GPU's.
        """
        if on_host:
            free, total = self._host()
            return Room("MemAvailable", free, total, min(HOST_HEADROOM_BYTES, total // _SHARE))
        free, total = self._driver.free_and_total(device)
        return Room("cudaMemGetInfo", free, total, min(max(_DEVICE_HEADROOM_BYTES, total // _DEVICE_SHARE), total // 2))

    def require(self, size: int, device: int, attributes: Mapping[str, int], *, on_host: bool) -> None:
        """Raise where an allocation does not fit.

        Raises:
            UnifiedMemoryError: It does not; the numbers are in its attributes.
        """
        room = self.room(device, on_host=on_host)
        if size <= room.bytes:
            return
        numbers = {
            "requested_bytes": size,
            "free_bytes": room.free_bytes,
            "headroom_bytes": room.headroom_bytes,
            "total_bytes": room.total_bytes,
            "counted_by": room.source,
        }
        raise UnifiedMemoryError(
            f"unified memory for cuda:{device}",
            name="size",
            rule=f"at most {room.bytes} bytes ({room.source} {room.free_bytes} less {room.headroom_bytes} kept free)",
            value=size,
            hint="Close what holds memory, or place less of it.",
            attributes={**attributes, **numbers},
        )
