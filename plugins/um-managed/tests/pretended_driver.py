"""CUDA's runtime as CuPy offers it, and torch's side of it, pretended: real host memory, streams that do not run.

Work is queued by ``Runtime.queue`` and done by ``Runtime.run``: until then, events behind it are pending.
"""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from q4_actors.tensors import arguments
from q4_um_managed import ManagedProvider
from q4_um_managed.device_attributes import ATTRIBUTES, UNASKED
from q4_um_managed.driver import Driver
from q4_um_managed.driver import TorchSide as RealTorchSide
from q4_um_managed.probe_driver import Missing

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import pytest

__all__ = [
    "CONCURRENT",
    "CUDA",
    "GB10",
    "GIB",
    "LEGACY",
    "OnCuda",
    "Pretended",
    "Runtime",
    "RuntimeFaultError",
    "accept_pretended",
    "missing",
    "pretend",
    "queue_on",
]

GIB = 1 << 30
CUDA = torch.device("cuda", 0)
_NONE = dict.fromkeys(ATTRIBUTES, 0)
CONCURRENT = _NONE | {
    "managedMemory": 1,
    "concurrentManagedAccess": 1,
    "canMapHostMemory": 1,
    "unifiedAddressing": 1,
}
"""A discrete GPU on Linux."""
LEGACY = CONCURRENT | {"concurrentManagedAccess": 0}
"""The same on Windows."""
GB10 = CONCURRENT | {"pageableMemoryAccess": 1, "pageableMemoryAccessUsesHostPageTables": 1, "integrated": 1}
"""A GPU that shares the host's memory and page tables."""


class RuntimeFaultError(RuntimeError):
    """What CuPy raises."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status


class Runtime:
    """``cupy.cuda.runtime``; names and meanings are its own.

    Args:
        attributes: Of the only device, or of each.
        free: What ``memGetInfo`` says is free.
        total: What it says there is.
    """

    cudaMemAdviseSetReadMostly = 1  # noqa: N815  # CuPy's names, from here on
    cudaMemAdviseUnsetReadMostly = 2  # noqa: N815
    cudaMemAdviseSetPreferredLocation = 3  # noqa: N815
    cudaMemAdviseUnsetPreferredLocation = 4  # noqa: N815
    cudaMemAdviseSetAccessedBy = 5  # noqa: N815
    cudaMemAdviseUnsetAccessedBy = 6  # noqa: N815
    hostAllocPortable = 1  # noqa: N815
    hostAllocMapped = 2  # noqa: N815
    eventDisableTiming = 2  # noqa: N815

    def __init__(self, *attributes: dict[str, int], free: int = 4 * GIB, total: int = 8 * GIB) -> None:
        self.devices = list(attributes)
        self.free_bytes, self.total_bytes = free, total
        self.device = 0
        self.calls: list[str] = []
        self.details: list[tuple[Any, ...]] = []
        self.fails: dict[str, RuntimeFaultError] = {}
        self.areas: dict[int, tuple[Any, int]] = {}  # address → what holds it, and what kind it is
        self.synchronised = 0
        self.capturing = False
        self.follows: list[tuple[int, int, int]] = []  # a stream, whom it waits for, and how much of that
        self.events: dict[int, tuple[int, int]] = {}  # event → its stream, and how much had been queued there
        self.queued: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self._numbers = itertools.count(100)

    # -- for tests

    def queue(self, stream: int) -> None:
        """Queue work."""
        self.queued[stream] = self.queued.get(stream, 0) + 1

    def run(self, stream: int | None = None) -> None:
        """Do all that is queued on a stream, or on all."""
        for key in list(self.queued) if stream is None else [stream]:
            self.done[key] = self.queued.get(key, 0)

    def count(self, name: str) -> int:
        """Return how often a function was called."""
        return self.calls.count(name)

    def _called(self, name: str, *details: Any) -> None:
        self.calls.append(name)
        self.details.append((name, *details))
        if name in self.fails:
            raise self.fails[name]

    # -- devices

    def getDeviceCount(self) -> int:  # noqa: N802  # CuPy's
        """As CuPy's, like all that follow."""
        self._called("getDeviceCount")
        return len(self.devices)

    def getDevice(self) -> int:  # noqa: N802, D102
        self._called("getDevice")
        return self.device

    def setDevice(self, device: int) -> None:  # noqa: N802, D102
        self._called("setDevice", device)
        self.device = device

    def deviceGetAttribute(self, attrib: Any, device: int) -> int:  # noqa: N802, D102
        self._called("deviceGetAttribute", attrib)
        names = {number: name for name, number in ATTRIBUTES.items()}
        return self.devices[device][names[attrib]]

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802, D102
        self._called("memGetInfo")
        return self.free_bytes, self.total_bytes

    def deviceSynchronize(self) -> None:  # noqa: N802, D102
        self._called("deviceSynchronize")
        self.synchronised += 1
        self.run()

    # -- memory

    def _allocate(self, size: int, kind: int) -> int:
        area = ctypes.create_string_buffer(size + 4096)
        address = -(-ctypes.addressof(area) // 4096) * 4096
        self.areas[address] = (area, kind)
        self.free_bytes -= size
        return address

    def _release(self, address: int, kind: int) -> None:
        area, own = self.areas.pop(address)
        if own != kind:
            raise RuntimeFaultError(1, "cudaErrorInvalidValue")
        self.free_bytes += len(area) - 4096
        self.synchronised += 1
        self.run()

    def mallocManaged(self, size: int) -> int:  # noqa: N802, D102
        self._called("mallocManaged", size)
        return self._allocate(size, 3)

    def free(self, ptr: int) -> None:  # noqa: D102
        self._called("free", ptr)
        self._release(ptr, 3)

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: N802, D102
        self._called("hostAlloc", size, flags)
        return self._allocate(size, 1)

    def freeHost(self, ptr: int) -> None:  # noqa: N802, D102
        self._called("freeHost", ptr)
        self._release(ptr, 1)

    def pointerGetAttributes(self, ptr: int) -> Any:  # noqa: N802, D102
        self._called("pointerGetAttributes", ptr)
        for address, (area, kind) in self.areas.items():
            if address <= ptr < address + len(area) - 4096:
                return SimpleNamespace(type=kind, device=0, devicePointer=ptr, hostPointer=ptr)
        return SimpleNamespace(type=0, device=-2, devicePointer=0, hostPointer=ptr)

    def memAdvise(self, devPtr: int, count: int, advice: int, device: int) -> None:  # noqa: N802, N803, D102
        self._called("memAdvise", devPtr, count, advice, device)

    def memPrefetchAsync(self, devPtr: int, count: int, dstDevice: int, stream: int) -> None:  # noqa: N802, N803, D102
        self._called("memPrefetchAsync", devPtr, count, dstDevice, stream)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802, D102
        self._called("memsetAsync", ptr, value, size, stream)

    # -- order

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802, D102
        self._called("eventCreateWithFlags", flags)
        event = next(self._numbers)
        self.events[event] = (0, 0)
        return event

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802, D102
        self._called("eventRecord", event, stream)
        self.events[event] = (stream, self.queued.get(stream, 0))

    def streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802, D102
        self._called("streamWaitEvent", stream, event)
        self.follows.append((stream, *self.events[event]))

    def eventQuery(self, event: int) -> int:  # noqa: N802, D102
        self._called("eventQuery", event)
        stream, place = self.events[event]
        return 0 if self.done.get(stream, 0) >= place else 600

    def eventSynchronize(self, event: int) -> None:  # noqa: N802, D102
        self._called("eventSynchronize", event)
        stream, place = self.events[event]
        self.done[stream] = max(self.done.get(stream, 0), place)

    def eventDestroy(self, event: int) -> None:  # noqa: N802, D102
        self._called("eventDestroy", event)
        del self.events[event]

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802, D102
        self._called("streamIsCapturing", stream)
        return self.capturing


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    device = CUDA


def accept_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mutable tensors be made of pretended CUDA tensors, whose type is all that they would be refused for."""
    check = arguments.check_content

    def check_what_it_is(label: str, tensor: torch.Tensor, *, copy: bool) -> None:
        check(label, tensor.as_subclass(torch.Tensor), copy=copy)

    monkeypatch.setattr("q4_actors.tensors.tensor.check_content", check_what_it_is)


class TorchSide(RealTorchSide):
    """torch, whose CUDA tensors lie in host memory."""

    def __init__(self) -> None:
        self.current = 7
        self.is_built_with_cuda = True

    def has_cuda(self) -> bool:
        """Say so."""
        return self.is_built_with_cuda

    def stream(self, device: int) -> int:
        """Return what was set."""
        return self.current

    def cuda_bytes(self, owner: object, address: int, size: int, device: int) -> torch.Tensor:
        """Return a CPU tensor that says it is on the device."""
        return Driver.cpu_bytes(owner, address, size).as_subclass(OnCuda)


class Pretended:
    """A provider over a pretended driver, with everything in reach."""

    def __init__(self, runtime: Runtime, host: Callable[[], tuple[int, int, str]], **options: Any) -> None:
        self.runtime, self.torch = runtime, TorchSide()
        self.driver = Driver(runtime, self.torch)
        self.provider = ManagedProvider(lambda: self.driver, host=host, **options)


def pretend(
    *attributes: dict[str, int], host: tuple[int, int] = (64 * GIB, 128 * GIB), free: int = 4 * GIB, **options: Any
) -> Pretended:
    """Return a provider on a pretended machine, by default a discrete GPU on Linux."""
    return Pretended(Runtime(*(attributes or (CONCURRENT,)), free=free), lambda: (*host, "MemAvailable"), **options)


def missing(reason: str = "there is no CUDA driver (libcuda.so.1) on this machine") -> ManagedProvider:
    """Return a provider on a machine without a driver."""
    return ManagedProvider(lambda: Missing(reason, {"cupy": True, "cuda_driver": False, **UNASKED}))


def queue_on(case: Pretended, stream: int, block: AbstractContextManager[object]) -> None:
    """Queue work on a stream inside a block."""
    case.torch.current = stream
    with block:
        case.runtime.queue(stream)
