"""``Driver``: all calls of CUDA's runtime, and of torch's side of it.

``Driver`` calls ``cupy.cuda.runtime`` (or a pretended one), to a configured libNVFP4 and to ``TorchSide`` (or a
pretended one); nothing else in this package does. Calls that need a current device set it and put the thread's own
back.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import torch

from q4_um_managed.device_attributes import ATTRIBUTES
from q4_um_managed.errors import DriverFaultError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_um_managed.managed_exports import ManagedExports

__all__ = ["CPU", "Driver", "TorchSide"]

CPU = -1
"""cudaCpuDeviceId."""
_MANAGED = 3
"""cudaMemoryTypeManaged."""
_ADVICE = {
    (True, "read_mostly"): "cudaMemAdviseSetReadMostly",
    (False, "read_mostly"): "cudaMemAdviseUnsetReadMostly",
    (True, "preferred_location"): "cudaMemAdviseSetPreferredLocation",
    (False, "preferred_location"): "cudaMemAdviseUnsetPreferredLocation",
    (True, "accessed_by"): "cudaMemAdviseSetAccessedBy",
    (False, "accessed_by"): "cudaMemAdviseUnsetAccessedBy",
}


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
        # torch asks the driver where a pointer lives unless it is given the device with its number.
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
        runtime: ``cupy.cuda.runtime``, or a pretended one.
        torch_side: torch, or a pretended one.
        exports: The functions of a libNVFP4 for managed memory, which replace the runtime's where it has the device.
        state: A clause on the libraries that were looked at.
    """

    def __init__(
        self,
        runtime: Any,
        torch_side: TorchSide | None = None,
        *,
        exports: ManagedExports | None = None,
        state: str = "",
    ) -> None:
        self._runtime, self._torch, self._exports, self.state = runtime, torch_side or TorchSide(), exports, state

    # -- devices

    def device_count(self) -> int:
        """Return how many devices there are."""
        return int(self._call("getDeviceCount"))

    def current_device(self) -> int:
        """Return this thread's device."""
        return int(self._call("getDevice"))

    def attributes(self, device: int) -> dict[str, int]:
        """Return the attributes that decide, as the driver reports them."""
        return {
            name: int(self._call("deviceGetAttribute", number, device, doing=f"deviceGetAttribute({name})"))
            for name, number in ATTRIBUTES.items()
        }

    def free_and_total(self, device: int) -> tuple[int, int]:
        """Return the device's free and whole memory, in bytes."""
        free, total = self._call("memGetInfo", on=device)
        return int(free), int(total)

    # -- memory

    def allocate_managed(self, size: int, device: int) -> int:
        """Return the address of new managed memory."""
        return int(self._call("mallocManaged", size, on=device, doing=f"mallocManaged({size})"))

    def free_managed(self, address: int, device: int) -> None:
        """Give managed memory back; waits for the device."""
        self._call("free", address, on=device)

    def has_copies(self, device: int) -> bool:
        """Return whether ``copy_managed`` works on a device."""
        return self._exports is not None and self._exports.can_use(device)

    def copy_managed(self, source: int, size: int, device: int) -> int:
        """Return the address of new managed memory with a copy of bytes of host or device, which is awaited."""
        stream = self.stream(device)
        with self._on(device), self._reported("NVFP4_to_managed"):
            return self._exports.to_managed(source, size, device, stream)  # type: ignore[union-attr]  # has_copies

    def allocate_pinned(self, size: int, device: int) -> int:
        """Return the address of new pinned memory that the GPU reaches under the same address."""
        with self._on(device), self._reported(f"hostAlloc({size})"):
            flags = self._runtime.hostAllocMapped | self._runtime.hostAllocPortable
            return int(self._runtime.hostAlloc(size, flags))

    def free_pinned(self, address: int, device: int) -> None:
        """Give pinned memory back; waits for the device."""
        self._call("freeHost", address, on=device)

    def is_managed(self, address: int) -> bool:
        """Return whether the driver says that an address is of managed memory."""
        if self._exports is not None and self._exports.is_managed(address):
            return True  # a library without the device denies every address
        with self._reported("pointerGetAttributes"):
            return int(self._runtime.pointerGetAttributes(address).type) == _MANAGED

    def device_address(self, address: int) -> int:
        """Return the address under which the GPU reaches pinned memory."""
        with self._reported("pointerGetAttributes"):
            return int(self._runtime.pointerGetAttributes(address).devicePointer)

    def advise(self, address: int, size: int, advice: str, device: int, *, is_set: bool = True) -> None:
        """Advise how managed memory will be used: ``read_mostly``, ``preferred_location``, ``accessed_by``."""
        with self._reported(f"memAdvise({advice})"):
            self._runtime.memAdvise(address, size, getattr(self._runtime, _ADVICE[is_set, advice]), device)

    def fill(self, address: int, size: int, device: int) -> None:
        """Queue zeros for memory on the current stream of ``device``."""
        self._call("memsetAsync", address, 0, size, self.stream(device), on=device)

    def prefetch(self, address: int, size: int, target: int, device: int) -> None:
        """Queue a move of pages to a device, or to the ``CPU``, on the current stream of ``device``."""
        stream = self.stream(device)
        if self._exports is None or not self._exports.can_use(device):
            self._call("memPrefetchAsync", address, size, target, stream, on=device)
            return
        with self._on(device), self._reported("NVFP4_managed_prefetch"):
            self._exports.prefetch(address, size, target, stream)

    # -- order

    def stream(self, device: int) -> int:
        """Return the handle of this thread's current stream."""
        with self._reported("torch's current stream"):
            return self._torch.stream(device)

    def is_capturing(self, device: int) -> bool:
        """Return whether this thread's current stream records a graph."""
        return bool(self._call("streamIsCapturing", self.stream(device)))

    def record(self, stream: int, device: int) -> int:
        """Return a new event behind all that is queued on a stream."""
        with self._on(device), self._reported("eventRecord"):
            event = int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
            try:
                self._runtime.eventRecord(event, stream)
            except BaseException:
                self._runtime.eventDestroy(event)
                raise
            return event

    def follow(self, stream: int, event: int, device: int) -> None:
        """Let what is queued on a stream from now on wait for an event; the CPU does not wait."""
        self._call("streamWaitEvent", stream, event, on=device)

    def is_done(self, event: int) -> bool:
        """Return whether the device has passed an event."""
        return bool(self._call("eventQuery", event) == 0)

    def wait_for(self, event: int) -> None:
        """Wait until the device has passed an event."""
        self._call("eventSynchronize", event)

    def forget(self, event: int) -> None:
        """Destroy an event."""
        self._call("eventDestroy", event)

    def synchronise(self, device: int) -> None:
        """Wait for all that is queued on a device."""
        self._call("deviceSynchronize", on=device)

    # -- tensors

    def has_cuda_tensors(self) -> bool:
        """Return whether torch can make CUDA tensors here."""
        return self._torch.has_cuda()

    def cuda_bytes(self, owner: object, address: int, size: int, device: int) -> torch.Tensor:
        """Return a uint8 CUDA tensor over an address, whose storage keeps ``owner``."""
        with self._reported(f"torch's tensor over {size} bytes"):
            return self._torch.cuda_bytes(owner, address, size, device)

    @staticmethod
    def cpu_bytes(owner: object, address: int, size: int) -> torch.Tensor:
        """Return a uint8 CPU tensor over an address, whose storage keeps ``owner``."""
        area = (ctypes.c_ubyte * size).from_address(address)
        area.owner = owner  # type: ignore[attr-defined]  # torch's storage keeps the array, and this the owner
        return torch.frombuffer(area, dtype=torch.uint8)

    # -- inside

    def _call(self, name: str, *arguments: int, on: int | None = None, doing: str | None = None) -> Any:
        """Call a function of the runtime, with a device current for it; ``doing`` is what errors name."""
        with contextlib.nullcontext() if on is None else self._on(on), self._reported(doing or name):
            return getattr(self._runtime, name)(*arguments)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before = self.current_device()
        if before == device:
            yield
            return
        self._call("setDevice", device, doing=f"setDevice({device})")
        try:
            yield
        finally:
            self._call("setDevice", before, doing=f"setDevice({before})")

    @contextlib.contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        try:
            yield
        except DriverFaultError:
            raise
        except (RuntimeError, AttributeError, TypeError, OverflowError) as error:
            status = getattr(error, "status", None)
            raise DriverFaultError(f"CUDA's runtime: {doing}: {error}", call=doing, status=status) from error
