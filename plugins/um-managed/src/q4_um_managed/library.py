"""The driver's own library, for the few facts that decide whether CuPy is worth its half second of import."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

from q4_um_managed.device_attributes import ATTRIBUTES

__all__ = [
    "LibraryRefusesError",
    "cupy_cuda",
    "devices_of",
    "has_cupy",
    "load_library",
    "version_of",
    "wheel_cuda",
]

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")


class LibraryRefusesError(Exception):
    """The driver gave an error: ``call`` and ``status``."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"the CUDA driver refuses: {call} gave error {status}")
        self.call, self.status = call, status


def load_library() -> Any:
    """Return the driver's library, or None where there is none."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def devices_of(library: Any) -> tuple[dict[str, int | None], ...]:
    """Return each device's attributes, None for what the library does not know.

    Args:
        library: The driver's library.

    Raises:
        LibraryRefusesError: The driver gives an error.
    """
    count, value = ctypes.c_int(0), ctypes.c_int(0)
    for name, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        status = int(getattr(library, name)(*arguments))
        if status:
            raise LibraryRefusesError(name, status)
    devices = []
    for device in range(count.value):
        found: dict[str, int | None] = {}
        for name, number in ATTRIBUTES.items():
            status = int(library.cuDeviceGetAttribute(ctypes.byref(value), number, device))
            found[name] = None if status else value.value
        devices.append(found)
    return tuple(devices)


def version_of(library: Any) -> int | None:
    """Return the CUDA version that the driver is for, as 1000 × major + 10 × minor; None where it reports none."""
    version = ctypes.c_int(0)
    try:
        status = int(library.cuDriverGetVersion(ctypes.byref(version)))
    except AttributeError:  # ctypes finds no such function
        return None
    return None if status else version.value


def has_cupy() -> bool:
    """Return whether CuPy is installed; it is not imported."""
    return importlib.util.find_spec("cupy") is not None


def cupy_cuda() -> int | None:
    """Return the major version of the CUDA that CuPy was built for; None where that shows only on import."""
    spec = importlib.util.find_spec("cupy")
    return None if spec is None or spec.origin is None else wheel_cuda(Path(spec.origin))


def wheel_cuda(origin: Path) -> int | None:
    """Return the CUDA version in the name of CuPy's wheel, next to the package; the lowest, if there are several.

    Args:
        origin: CuPy's ``__init__.py``.
    """
    names = (
        re.fullmatch(r"cupy_cuda(\d+)x-.*", path.stem) for path in origin.parent.parent.glob("cupy_cuda*.dist-info")
    )
    return min((int(name[1]) for name in names if name), default=None)
