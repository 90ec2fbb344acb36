"""Probe of the driver: what its own library reports, before CUDA's runtime is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4_um_managed import library
from q4_um_managed.device_attributes import UNASKED
from q4_um_managed.driver import Driver, TorchSide
from q4_um_managed.managed_exports import find_exports

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Missing", "Prospect", "find_driver"]


@attrs.frozen
class Missing:
    """Why there is no driver to ask.

    Args:
        reason: In one sentence.
        facts: What was looked at.
    """

    reason: str
    facts: dict[str, Any]


@attrs.frozen
class Prospect:
    """A machine where managed memory may be had, as far as the driver's library knows.

    Args:
        devices: Each device's attributes; None for what the library does not know.
        facts: What else was looked at.
        load: Loads CUDA's runtime, which takes most of a second, or says what is missing.
        has_cuda: Whether torch can make CUDA tensors here.
    """

    devices: tuple[dict[str, int | None], ...]
    facts: dict[str, Any]
    load: Callable[[], Driver | Missing]
    has_cuda: Callable[[], bool]

    def of(self, index: int | None) -> tuple[dict[str, int | None], ...]:
        """Return the attributes of a device; of all, where the current one is not known yet."""
        return self.devices if index is None else self.devices[index : index + 1]


def find_driver(load: Callable[[], Any] = library.load_library) -> Prospect | Missing:
    """Return what the driver's library reports of this machine, or the fact that refuses it. CuPy is not imported yet.

    Args:
        load: Gives the driver's library, or None.
    """
    found, has_cupy = load(), library.has_cupy()
    facts: dict[str, Any] = {"cupy": has_cupy, "cuda_driver": found is not None}
    if found is None:
        return Missing("there is no CUDA driver (libcuda.so.1) on this machine", {**facts, **UNASKED})
    try:
        devices = library.devices_of(found)
    except library.LibraryRefusesError as error:
        return Missing(str(error), {**facts, error.call: error.status, **UNASKED})
    facts["cuda_device_count"] = len(devices)
    if not devices:
        return Missing("there is no CUDA device (cuDeviceGetCount gave 0)", {**facts, **UNASKED})
    version, wanted = library.version_of(found), library.cupy_cuda() if has_cupy else None
    facts |= {"cuda_driver_version": version, "cupy_cuda": wanted}
    reason = None
    if all(device["managedMemory"] == 0 for device in devices):
        reason = "no device has managed memory (managedMemory=0)"
    elif not has_cupy:
        reason = "CuPy is not installed (pip install 'q4-um-managed[cuda13]')"
    elif wanted is not None and (version or 0) // 1000 < wanted:
        reason = f"CuPy was built for CUDA {wanted}, and the driver is for {_version_text(version)}"
    if reason is not None:
        return Missing(reason, {**facts, **devices[0]})
    return Prospect(devices, facts, _load_runtime, TorchSide().has_cuda)


def _version_text(version: int | None) -> str:
    return "none that it reports" if version is None else f"CUDA {version // 1000}.{version % 1000 // 10}"


def _load_runtime() -> Driver | Missing:
    try:
        from cupy.cuda import runtime  # noqa: PLC0415  # takes most of a second, and may be missing
    except Exception as error:  # noqa: BLE001  # a broken CuPy must not take the plugin with it; it is reported
        return Missing(f"CuPy can't be imported: {type(error).__name__}: {error}", {"cupy": True, "cuda_driver": True})
    exports, state = find_exports()
    return Driver(runtime, exports=exports, state=state)
