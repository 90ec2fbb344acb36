"""Every call of CUDA's runtime, and of torch's side of it, in one place.

``Driver`` speaks to ``cupy.cuda.runtime`` (or a pretended one) and to ``TorchSide`` (or a pretended one); nothing else
in this package does. Calls that need a current device set it and put the thread's own back.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs
import torch

from q4_um_managed import library
from q4_um_managed.faults import DriverFaultError
from q4_um_managed.prospect import Prospect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ATTRIBUTES", "CPU", "UNASKED", "Driver", "MemoryKind", "Missing", "TorchSide", "find_driver"]

CPU = -1
"""cudaCpuDeviceId."""

ATTRIBUTES = {
    "managedMemory": "cudaDevAttrManagedMemory",
    "concurrentManagedAccess": "cudaDevAttrConcurrentManagedAccess",
    "pageableMemoryAccess": "cudaDevAttrPageableMemoryAccess",
    "pageableMemoryAccessUsesHostPageTables": "cudaDevAttrPageableMemoryAccessUsesHostPageTables",
    "directManagedMemAccessFromHost": "cudaDevAttrDirectManagedMemAccessFromHost",
    "canMapHostMemory": "cudaDevAttrCanMapHostMemory",
    "unifiedAddressing": "cudaDevAttrUnifiedAddressing",
    "integrated": "cudaDevAttrIntegrated",
}
"""The device attributes that decide, by the driver's names and by CuPy's."""

UNASKED: dict[str, None] = dict.fromkeys(ATTRIBUTES)
"""What is told of the attributes where there is nobody to ask."""

MemoryKind = Literal["managed", "host", "device", "unregistered"]
_KINDS: dict[int, MemoryKind] = {0: "unregistered", 1: "host", 2: "device", 3: "managed"}
_ADVICE = {
    (True, "read_mostly"): "cudaMemAdviseSetReadMostly",
    (False, "read_mostly"): "cudaMemAdviseUnsetReadMostly",
    (True, "preferred_location"): "cudaMemAdviseSetPreferredLocation",
    (False, "preferred_location"): "cudaMemAdviseUnsetPreferredLocation",
    (True, "accessed_by"): "cudaMemAdviseSetAccessedBy",
    (False, "accessed_by"): "cudaMemAdviseUnsetAccessedBy",
}


class Torch(Protocol):
    """What torch is asked for."""

    def has_cuda(self) -> bool:
        """Return whether torch can make CUDA tensors here."""
        ...

    def stream(self, device: int) -> int:
        """Return the handle of this thread's current stream."""
        ...

    def cuda_bytes(self, owner: object, address: int, size: int, device: int) -> torch.Tensor:
        """Return a uint8 CUDA tensor over an address, whose storage keeps ``owner``."""
        ...


class TorchSide:
    """torch itself."""

    def has_cuda(self) -> bool:
        """Return whether torch can make CUDA tensors here."""
        return torch.cuda.is_available()

    def stream(self, device: int) -> int:
        """Return the handle of this thread's current stream; the default one of a torch without CUDA."""
        handle: int = torch.cuda.current_stream(device).cuda_stream if torch.cuda.is_available() else 0
        return handle

    def cuda_bytes(self, owner: object, address: int, size: int, device: int) -> torch.Tensor:
        """Return a uint8 CUDA tensor over an address, whose storage keeps ``owner``.

        Raises:
            DriverFaultError: torch made a copy.
        """
        # torch asks the driver where a pointer lives unless it is told the device with its number.
        tensor = torch.as_tensor(_Exported(owner, address, size), device=torch.device("cuda", device))
        if tensor.data_ptr() != address:
            raise DriverFaultError(f"torch.as_tensor copied {size} bytes instead of looking at them")
        return tensor


class _Exported:
    """Memory by the CUDA array interface; torch's storage keeps this object, and this object the owner."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Driver:
    """CUDA's runtime.

    Args:
        runtime: ``cupy.cuda.runtime``, or what stands for it.
        torch_side: torch, or what stands for it.
    """

    def __init__(self, runtime: Any, torch_side: Torch | None = None) -> None:
        self._runtime = runtime
        self._torch = torch_side or TorchSide()

    # -- devices

    def device_count(self) -> int:
        """Return how many devices there are."""
        with self._told("getDeviceCount"):
            return int(self._runtime.getDeviceCount())

    def current_device(self) -> int:
        """Return this thread's device."""
        with self._told("getDevice"):
            return int(self._runtime.getDevice())

    def attributes(self, device: int) -> dict[str, int]:
        """Return the attributes that decide, as the driver tells them."""
        found = {}
        for name, constant in ATTRIBUTES.items():
            with self._told(f"deviceGetAttribute({name})"):
                found[name] = int(self._runtime.deviceGetAttribute(getattr(self._runtime, constant), device))
        return found

    def free_and_total(self, device: int) -> tuple[int, int]:
        """Return the device's free and whole memory, in bytes."""
        with self._on(device), self._told("memGetInfo"):
            free, total = self._runtime.memGetInfo()
            return int(free), int(total)

    # -- memory

    def allocate_managed(self, size: int, device: int) -> int:
        """Return the address of new managed memory."""
        with self._on(device), self._told(f"mallocManaged({size})"):
            return int(self._runtime.mallocManaged(size))

    def free_managed(self, address: int, device: int) -> None:
        """Give managed memory back; waits for the device."""
        with self._on(device), self._told("free"):
            self._runtime.free(address)

    def allocate_pinned(self, size: int, device: int) -> int:
        """Return the address of new pinned memory that the GPU reaches under the same address."""
        with self._on(device), self._told(f"hostAlloc({size})"):
            flags = self._runtime.hostAllocMapped | self._runtime.hostAllocPortable
            return int(self._runtime.hostAlloc(size, flags))

    def free_pinned(self, address: int, device: int) -> None:
        """Give pinned memory back; waits for the device."""
        with self._on(device), self._told("freeHost"):
            self._runtime.freeHost(address)

    def kind_of(self, address: int) -> MemoryKind:
        """Return what the driver says of an address."""
        with self._told("pointerGetAttributes"):
            return _KINDS.get(int(self._runtime.pointerGetAttributes(address).type), "unregistered")

    def device_address(self, address: int) -> int:
        """Return the address under which the GPU reaches pinned memory."""
        with self._told("pointerGetAttributes"):
            return int(self._runtime.pointerGetAttributes(address).devicePointer)

    def advise(self, address: int, size: int, advice: str, device: int, *, is_set: bool = True) -> None:
        """Tell the driver how managed memory will be used: ``read_mostly``, ``preferred_location``, ``accessed_by``."""
        with self._told(f"memAdvise({advice})"):
            self._runtime.memAdvise(address, size, getattr(self._runtime, _ADVICE[is_set, advice]), device)

    def fill(self, address: int, size: int, device: int) -> None:
        """Queue zeros for memory on the current stream of ``device``."""
        stream = self.stream(device)
        with self._on(device), self._told("memsetAsync"):
            self._runtime.memsetAsync(address, 0, size, stream)

    def prefetch(self, address: int, size: int, target: int, device: int) -> None:
        """Queue a move of pages to a device, or to the ``CPU``, on the current stream of ``device``."""
        stream = self.stream(device)
        with self._on(device), self._told("memPrefetchAsync"):
            self._runtime.memPrefetchAsync(address, size, target, stream)

    # -- order

    def stream(self, device: int) -> int:
        """Return the handle of this thread's current stream."""
        with self._told("torch's current stream"):
            return self._torch.stream(device)

    def is_capturing(self, device: int) -> bool:
        """Return whether this thread's current stream records a graph."""
        stream = self.stream(device)
        with self._told("streamIsCapturing"):
            return bool(self._runtime.streamIsCapturing(stream))

    def record(self, stream: int, device: int) -> int:
        """Return a new event behind all that is queued on a stream."""
        with self._on(device), self._told("eventRecord"):
            event = int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
            try:
                self._runtime.eventRecord(event, stream)
            except BaseException:
                self._runtime.eventDestroy(event)
                raise
            return event

    def follow(self, stream: int, event: int, device: int) -> None:
        """Let what is queued on a stream from now on wait for an event; the CPU does not wait."""
        with self._on(device), self._told("streamWaitEvent"):
            self._runtime.streamWaitEvent(stream, event)

    def is_done(self, event: int) -> bool:
        """Return whether the device has passed an event."""
        with self._told("eventQuery"):
            return bool(self._runtime.eventQuery(event) == 0)

    def wait_for(self, event: int) -> None:
        """Wait until the device has passed an event."""
        with self._told("eventSynchronize"):
            self._runtime.eventSynchronize(event)

    def forget(self, event: int) -> None:
        """Destroy an event."""
        with self._told("eventDestroy"):
            self._runtime.eventDestroy(event)

    def synchronise(self, device: int) -> None:
        """Wait for all that is queued on a device."""
        with self._on(device), self._told("deviceSynchronize"):
            self._runtime.deviceSynchronize()

    # -- tensors

    def has_cuda_tensors(self) -> bool:
        """Return whether torch can make CUDA tensors here."""
        return self._torch.has_cuda()

    def cuda_bytes(self, owner: object, address: int, size: int, device: int) -> torch.Tensor:
        """Return a uint8 CUDA tensor over an address, whose storage keeps ``owner``."""
        with self._told(f"torch's tensor over {size} bytes"):
            return self._torch.cuda_bytes(owner, address, size, device)

    @staticmethod
    def cpu_bytes(owner: object, address: int, size: int) -> torch.Tensor:
        """Return a uint8 CPU tensor over an address, whose storage keeps ``owner``."""
        area = (ctypes.c_ubyte * size).from_address(address)
        area.owner = owner  # type: ignore[attr-defined]  # torch's storage keeps the array, and this the owner
        return torch.frombuffer(area, dtype=torch.uint8)

    # -- inside

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before = self.current_device()
        if before == device:
            yield
            return
        with self._told(f"setDevice({device})"):
            self._runtime.setDevice(device)
        try:
            yield
        finally:
            with self._told(f"setDevice({before})"):
                self._runtime.setDevice(before)

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except DriverFaultError:
            raise
        except (RuntimeError, AttributeError, TypeError, OverflowError) as error:
            status = getattr(error, "status", None)
            raise DriverFaultError(f"CUDA's runtime: {doing}: {error}", call=doing, status=status) from error


@attrs.frozen
class Missing:
    """Why there is no driver to ask.

    Args:
        reason: In one sentence.
        facts: What was looked at.
    """

    reason: str
    facts: dict[str, Any]


def find_driver(load: Callable[[], Any] = library.load_library) -> Prospect | Missing:
    """Return what the driver's library tells of this machine, or the fact that refuses it. CuPy is not imported yet.

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
    return "none that it tells" if version is None else f"CUDA {version // 1000}.{version % 1000 // 10}"


def _load_runtime() -> Driver | Missing:
    try:
        from cupy.cuda import runtime  # noqa: PLC0415  # takes most of a second, and may be missing
    except Exception as error:  # noqa: BLE001  # a broken CuPy must not take the plugin with it; it is told
        return Missing(f"CuPy can't be imported: {type(error).__name__}: {error}", {"cupy": True, "cuda_driver": True})
    return Driver(runtime)
