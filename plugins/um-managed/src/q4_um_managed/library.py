"""The driver's own library, asked for the few facts that tell whether CuPy is worth its half second of import."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NUMBERS", "load_library", "refusal_of"]

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")

NUMBERS = {
    "managedMemory": 83,
    "concurrentManagedAccess": 89,
    "pageableMemoryAccess": 88,
    "pageableMemoryAccessUsesHostPageTables": 100,
    "directManagedMemAccessFromHost": 101,
    "canMapHostMemory": 19,
    "unifiedAddressing": 41,
    "integrated": 18,
}
"""The driver's numbers of the attributes that decide."""


def load_library() -> Any:
    """Return the driver's library, or None where there is none."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def refusal_of(library: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return why no device of this machine can have managed memory, and by which facts; None where one may.

    Args:
        library: The driver's library.
    """
    count, value = ctypes.c_int(0), ctypes.c_int(0)
    for name, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        status = int(getattr(library, name)(*arguments))
        if status:
            return f"the CUDA driver refuses: {name} gave error {status}", {name: status}
    if not count.value:
        return "there is no CUDA device (cuDeviceGetCount gave 0)", {"cuda_device_count": 0}
    first: dict[str, Any] = {}
    for device in range(count.value):
        found: dict[str, Any] = {}
        for name, number in NUMBERS.items():
            status = int(library.cuDeviceGetAttribute(ctypes.byref(value), number, device))
            found[name] = None if status else value.value
        if found["managedMemory"] != 0:
            return None
        first = first or found
    return "no device has managed memory (managedMemory=0)", {"cuda_device_count": count.value, **first}
