"""``ManagedExports``: the functions of an external libNVFP4 for managed memory.

``Q4_NVFP4_LIBRARY`` holds candidate paths, separated as those of ``PATH`` are; the first that is complete is used. The
ABI is that of ``NVFP4.h`` in q4-nvfp4-native. A library without the right version is never called.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

from q4_um_managed.errors import DriverFaultError
from q4core import UnifiedMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["VARIABLE", "ManagedExports", "find_exports"]

VARIABLE = "Q4_NVFP4_LIBRARY"
_MAJOR = 1
_I32, _I64, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_EXPORTS: dict[str, list[Any]] = {
    "NVFP4_abi_version": [],
    "NVFP4_can_use_managed": [_I32],
    "NVFP4_is_managed_tensor": [_ADDRESS],
    "NVFP4_to_managed": [_ADDRESS, _I64, _I32, ctypes.POINTER(_ADDRESS), _ADDRESS],
    "NVFP4_managed_prefetch": [_ADDRESS, _I64, _I32, _ADDRESS],
}


class ManagedExports:
    """The functions of a libNVFP4 of the right version.

    Args:
        path: The library's path.

    Raises:
        UnifiedMemoryError: It can't be loaded, has another version, or lacks an export.
    """

    def __init__(self, path: str) -> None:
        what = f"libNVFP4 {path!r}"
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise UnifiedMemoryError(f"{what} can't be loaded: {error}") from error
        missing = [name for name in _EXPORTS if not hasattr(self._library, name)]
        if missing:
            raise UnifiedMemoryError(f"{what} lacks {', '.join(missing)}, so it is not called")
        for name, types in _EXPORTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, _I32
        version = self._library.NVFP4_abi_version()
        major, minor = version >> 16, version & 0xFFFF
        if major != _MAJOR:
            raise UnifiedMemoryError(what, name="its ABI version", rule=f"{_MAJOR}.x", value=f"{major}.{minor}")
        self.name = f"libNVFP4 {major}.{minor} from {path}"

    def can_use(self, device: int) -> bool:
        """Return whether the library has managed memory on a device."""
        return bool(self._library.NVFP4_can_use_managed(device) == 1)

    def is_managed(self, address: int) -> bool:
        """Return whether an address is of managed memory."""
        return bool(self._library.NVFP4_is_managed_tensor(address) == 1)

    def to_managed(self, source: int, size: int, device: int, stream: int) -> int:
        """Return the address of new managed memory with a copy of bytes, which ``cudaFree`` gives back.

        Raises:
            DriverFaultError: The library fails.
        """
        managed = _ADDRESS()
        self._check("NVFP4_to_managed", source, size, device, ctypes.byref(managed), stream)
        if not managed.value:
            raise DriverFaultError(f"NVFP4_to_managed of {self.name} gave no address", call="NVFP4_to_managed")
        return managed.value

    def prefetch(self, address: int, size: int, device: int, stream: int) -> None:
        """Move managed memory to a device, or to the host where it is -1, in the order of the stream.

        Raises:
            DriverFaultError: The library fails.
        """
        self._check("NVFP4_managed_prefetch", address, size, device, stream)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverFaultError(f"{name} of {self.name}: error {status}", call=name, status=status)


def find_exports(candidates: Iterable[str] | None = None) -> tuple[ManagedExports | None, str]:
    """Return the first complete library, and a clause on what was found; an empty one where none is configured.

    Args:
        candidates: Paths of libraries. Defaults to those of ``Q4_NVFP4_LIBRARY``.
    """
    problems = []
    for path in os.environ.get(VARIABLE, "").split(os.pathsep) if candidates is None else candidates:
        if path:
            try:
                found = ManagedExports(path)
            except UnifiedMemoryError as error:
                problems.append(error.summary)
            else:
                return found, f"through {found.name}"
    return None, "; ".join(problems)
