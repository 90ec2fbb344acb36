"""An external ``libNVFP4.so``: found, checked for its version and every export, and only then called.

``Q4_NVFP4_LIBRARY`` holds candidate paths, separated as those of ``PATH`` are; the first that is complete is used. The
ABI is that of ``cuda/NVFP4.h``. A library without the right version is never called.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import attrs

from q4core import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4_nvfp4_native.calls import GemmCall, QuantizeCall

__all__ = ["ABI_VERSION", "EXPORTS", "VARIABLE", "Library", "Search", "find_library"]

VARIABLE = "Q4_NVFP4_LIBRARY"
ABI_VERSION = (1, 0)
_I32, _I64, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
EXPORTS: dict[str, list[Any]] = {
    "NVFP4_abi_version": [],
    "NVFP4_quantize": [_ADDRESS, _I32, _I64, _I64, _I64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS],
    "NVFP4_scaled_mm": [
        *[_ADDRESS] * 6, _I64, _I32, _ADDRESS, _ADDRESS, _I32, _I64, _I64, _I64, _ADDRESS,
    ],
    "NVFP4_can_use_managed": [_I32],
    "NVFP4_is_managed_tensor": [_ADDRESS],
    "NVFP4_to_managed": [_ADDRESS, _I64, _I32, ctypes.POINTER(_ADDRESS), _ADDRESS],
    "NVFP4_managed_prefetch": [_ADDRESS, _I64, _I32, _ADDRESS],
}  # fmt: skip


class Library:
    """A complete libNVFP4.so of the right version.

    Args:
        path: Where it is.

    Raises:
        BackendError: It can't be loaded, has another version, or lacks an export.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            raise BackendError(f"libNVFP4 {path!r} can't be loaded: {error}") from error
        if not hasattr(loaded, "NVFP4_abi_version"):
            raise BackendError(f"libNVFP4 {path!r} has no NVFP4_abi_version, so it is not called")
        loaded.NVFP4_abi_version.restype = _I32
        loaded.NVFP4_abi_version.argtypes = []
        version = loaded.NVFP4_abi_version()
        major, minor = version >> 16, version & 0xFFFF
        if major != ABI_VERSION[0]:
            wanted = f"{ABI_VERSION[0]}.x"
            raise BackendError(f"libNVFP4 {path!r}", name="its ABI version", rule=wanted, value=f"{major}.{minor}")
        missing = [name for name in EXPORTS if not hasattr(loaded, name)]
        if missing:
            raise BackendError(f"libNVFP4 {path!r} lacks {', '.join(missing)}", missing=tuple(missing))
        for name, types in EXPORTS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, _I32
        self.version = (major, minor)
        self._loaded = loaded

    def quantize(self, call: QuantizeCall, stream: int) -> None:
        """Round activations to NVFP4."""
        status = self._loaded.NVFP4_quantize(
            call.x,
            call.type,
            call.m,
            call.k,
            call.row_step,
            call.static_scale,
            call.codes,
            call.scales,
            call.rows,
            stream,
        )
        self._check(status, "NVFP4_quantize")

    def multiply(self, call: GemmCall, stream: int) -> None:
        """Multiply activations by a weight."""
        count = 0 if not call.b_global else call.n if call.global_step else 1
        status = self._loaded.NVFP4_scaled_mm(
            call.a_codes, call.a_scales, call.a_rows, call.b_codes, call.b_scales, call.b_global, count,
            call.global_divides, call.bias, call.out, call.out_type, call.m, call.n, call.k, stream,
        )  # fmt: skip
        self._check(status, "NVFP4_scaled_mm")

    def can_use_managed(self, device: int) -> bool:
        """Return whether a device can use managed memory while the host does."""
        return bool(self._loaded.NVFP4_can_use_managed(device) == 1)

    def is_managed(self, address: int) -> bool:
        """Return whether an address is of managed memory."""
        return bool(self._loaded.NVFP4_is_managed_tensor(address) == 1)

    def to_managed(self, source: int, count_bytes: int, device: int, stream: int) -> int:
        """Copy bytes into new managed memory and return its address, to be given back with ``cudaFree``."""
        managed = _ADDRESS()
        status = self._loaded.NVFP4_to_managed(source, count_bytes, device, ctypes.byref(managed), stream)
        self._check(status, "NVFP4_to_managed")
        if not managed.value:
            raise BackendError(f"NVFP4_to_managed of {self.path!r} gave no address")
        return managed.value

    def prefetch(self, address: int, count_bytes: int, device: int, stream: int) -> None:
        """Move managed memory to a device (to the host where it is -1), in the order of the stream."""
        self._check(self._loaded.NVFP4_managed_prefetch(address, count_bytes, device, stream), "NVFP4_managed_prefetch")

    def _check(self, status: int, name: str) -> None:
        if status:
            raise BackendError(f"{name} of {self.path!r} answers {status}", status=status)


@attrs.frozen
class Search:
    """The result of the search: the library that is used, and why each other candidate is not."""

    library: Library | None
    problems: tuple[str, ...]

    @property
    def state(self) -> str:
        """In a few words, for the record."""
        if self.library is not None:
            return f"libNVFP4 {'.'.join(map(str, self.library.version))} from {self.library.path}"
        return "; ".join(self.problems) or f"no libNVFP4 ({VARIABLE} is not set)"


def find_library(candidates: Iterable[str] | None = None) -> Search:
    """Return the first complete library among the candidates, by default those of ``Q4_NVFP4_LIBRARY``."""
    given = os.environ.get(VARIABLE, "").split(os.pathsep) if candidates is None else candidates
    problems: list[str] = []
    for path in given:
        if not path:
            continue
        try:
            return Search(Library(path), tuple(problems))
        except BackendError as error:
            problems.append(str(error))
    return Search(None, tuple(problems))
