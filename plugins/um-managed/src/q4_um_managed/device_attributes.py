"""Device attributes that decide a placement, and the memory that they allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core import UnifiedMemoryError
from q4core.memory import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ATTRIBUTES", "UNASKED", "choose", "reads_system_memory"]

ATTRIBUTES = {
    "managedMemory": 83,
    "concurrentManagedAccess": 89,
    "pageableMemoryAccess": 88,
    "pageableMemoryAccessUsesHostPageTables": 100,
    "directManagedMemAccessFromHost": 101,
    "canMapHostMemory": 19,
    "unifiedAddressing": 41,
    "integrated": 18,
}
"""The device attributes that decide, by the driver's names, with the numbers that it and CUDA's runtime give them."""

UNASKED: dict[str, None] = dict.fromkeys(ATTRIBUTES)
"""The values of the attributes where there is no driver to ask."""


def reads_system_memory(attributes: Mapping[str, int]) -> str | None:
    """Return the attribute by which a GPU reads ordinary system memory well, where it lies; None where it doesn't.

    ``pageableMemoryAccess`` alone is not enough: without the host's own page tables, or its own memory, each page
    crosses the bus when it is touched, and a file's pages again and again.
    """
    if not attributes.get("pageableMemoryAccess"):
        return None
    for name in ("pageableMemoryAccessUsesHostPageTables", "integrated"):
        if attributes.get(name):
            return name
    return None


def choose(attributes: Mapping[str, int], *, wanted: str = "auto", is_readable_in_place: bool = False) -> Placement:
    """Return where a tensor goes.

    Args:
        attributes: The device's.
        wanted: ``"auto"``, or ``"managed"``, ``"pageable"``, ``"pinned"``: followed or rejected.
        is_readable_in_place: Whether the tensor lies in system memory in a way that a GPU could read.

    Raises:
        UnifiedMemoryError: The device's attributes allow none, or not the requested one.
    """
    reader = reads_system_memory(attributes)
    if wanted in {"auto", "pageable"} and is_readable_in_place and (reader or _is_wanted(wanted, attributes)):
        return Placement("pageable", f"{reader or 'pageableMemoryAccess'}=1")
    if wanted in {"auto", "managed"} and attributes.get("managedMemory"):
        name = "concurrentManagedAccess"
        return Placement("managed", f"{name}=1" if attributes.get(name) else f"managedMemory=1, {name}=0")
    if wanted in {"auto", "pinned"} and attributes.get("canMapHostMemory") and attributes.get("unifiedAddressing"):
        return Placement("pinned", "canMapHostMemory=1")
    rules = {
        "managed": "of a device with managedMemory=1",
        "pageable": "aligned system memory, of a device with pageableMemoryAccess=1",
        "pinned": "of a device with canMapHostMemory=1 and unifiedAddressing=1",
    }
    raise UnifiedMemoryError(
        "unified memory",
        name="placement",
        rule=rules.get(wanted, "possible: managed, pageable or pinned memory"),
        value=wanted,
        hint="Leave the placement to 'auto', or ask for PREFER_UNIFIED.",
        attributes=attributes,
    )


def _is_wanted(wanted: str, attributes: Mapping[str, int]) -> bool:
    return wanted == "pageable" and bool(attributes.get("pageableMemoryAccess"))
