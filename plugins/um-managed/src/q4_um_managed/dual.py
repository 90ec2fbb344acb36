"""``DualView``: a CPU tensor and a CUDA tensor over the same bytes."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

from q4_um_managed.arguments import to_seconds
from q4_um_managed.fences import DriverStreams, Fence
from q4_um_managed.side_lock import SideLock
from q4core import ConfigError, UnifiedMemoryError, WriteConflictError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4_um_managed.driver import Driver
    from q4_um_managed.lease import Lease

__all__ = ["DualView"]

_SIDES = ("cpu", "cuda")


class DualView:
    """Both sides of one piece of unified memory; made by ``ManagedProvider.dual_view``.

    On a device with ``concurrentManagedAccess=1`` (and in pinned memory) both tensors may be held and used at any time;
    ``on_cpu`` and ``on_cuda`` add the order between them. On any other device, a CPU that touches managed memory
    while a kernel runs ends the process, so the contract refuses it first: ``cpu`` raises, ``on_cpu`` waits for the
    device, and while its block lasts the CUDA side is not handed out.

    Once the memory was given back by ``free``, no side is handed out any more: its bytes may be another tensor's.

    A mutable tensor made with ``sides=`` this keeps its blocks in order by itself, through ``turn`` and ``streams``.

    Args:
        cuda: The CUDA tensor.
        make_cpu: Makes a CPU tensor over the same bytes.
        driver: CUDA's runtime.
        device: The device's number.
        attributes: Its attributes.
        lease: The memory of both, which records each stream that uses it.
        is_concurrent: Whether both sides may be used at once.
    """

    def __init__(  # noqa: PLR0913  # one argument per fact
        self,
        cuda: torch.Tensor,
        make_cpu: Callable[[], torch.Tensor],
        driver: Driver,
        device: int,
        attributes: Mapping[str, int],
        lease: Lease,
        *,
        is_concurrent: bool,
    ) -> None:
        self._cuda, self._make_cpu, self._driver, self._device = cuda, make_cpu, driver, device
        self._attributes, self._lease = dict(attributes), lease
        self.is_concurrent = is_concurrent
        """Whether both sides may be used at once."""
        self.streams = DriverStreams(driver, device, lease.streams.add)
        """The streams of the CUDA side's device, as a mutable tensor asks for them."""
        self._lock = threading.Lock()
        self._side_lock = SideLock()
        self._fences: dict[int, Fence] = {}  # stream → event behind the last on_cuda() block there

    @property
    def cuda(self) -> torch.Tensor:
        """The CUDA tensor.

        Raises:
            LifecycleError: The memory was given back.
            WriteConflictError: The device is not concurrent, and the CPU has its turn.
        """
        self._require_memory()
        if not self.is_concurrent and self._side_lock.is_open("cpu"):
            self._side_lock.leave("cuda", self._side_lock.enter("cuda", 0.0))
        return self._cuda

    @property
    def cpu(self) -> torch.Tensor:
        """The CPU tensor; what the device has still to write is not awaited.

        Raises:
            LifecycleError: The memory was given back.
            UnifiedMemoryError: The device is not concurrent: ``on_cpu`` is the way.
        """
        self._require_memory()
        if not self.is_concurrent:
            raise UnifiedMemoryError(
                "CPU side of a dual view",
                name="concurrentManagedAccess",
                rule="1 for a CPU tensor that may be used at any time",
                value=self._attributes.get("concurrentManagedAccess"),
                hint="Use `with view.on_cpu() as tensor:`, or pinned memory.",
                attributes=self._attributes,
            )
        return self._make_cpu()

    @contextlib.contextmanager
    def on_cpu(self, *, wait: bool = True, timeout: float | None = 0.0) -> Iterator[torch.Tensor]:
        """Give the CPU tensor once the device has passed what this thread and ``on_cuda`` blocks have queued.

        On a device that is not concurrent the whole device is awaited, and the tensor is emptied when the block ends,
        so that it can't be touched later (views of it can: drop them).

        Args:
            wait: False refuses instead of waiting for the device.
            timeout: Seconds to wait, where the device is not concurrent, for other threads' ``on_cuda`` blocks to end;
                None for no limit.

        Raises:
            WriteConflictError: Not waiting, and the device is busy; or the device is not concurrent, and an ``on_cuda``
                block is still open, or is this thread's own.
            LifecycleError: The memory was given back.
            ConfigError: ``timeout`` is no time.
        """
        with self._turn("cpu", timeout):
            self._settle(wait=wait)
            with self._cpu_tensor() as tensor:
                yield tensor

    @contextlib.contextmanager
    def on_cuda(self, *, timeout: float | None = 0.0) -> Iterator[torch.Tensor]:
        """Give the CUDA tensor; what the block queues on the current stream is awaited by the next ``on_cpu``.

        Args:
            timeout: Seconds to wait, where the device is not concurrent, for other threads' ``on_cpu`` blocks to end;
                None for no limit.

        Raises:
            WriteConflictError: The device is not concurrent, and the CPU still has its turn.
            LifecycleError: The memory was given back.
            ConfigError: ``timeout`` is no time.
        """
        with self._turn("cuda", timeout):
            try:
                yield self._cuda
            finally:
                self._fence()

    @contextlib.contextmanager
    def turn(self, device: str, *, timeout: float | None) -> Iterator[torch.Tensor]:
        """Give one side's tensor, one at a time where the device requires it, for a caller that orders work by itself.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            timeout: Seconds to wait for the other side's blocks, None for no limit.

        Raises:
            WriteConflictError: The time ran out, or this thread itself holds the other side.
            LifecycleError: The memory was given back.
            ConfigError: ``device`` is no side, or ``timeout`` no time.
        """
        if device not in _SIDES:
            raise ConfigError("dual view", name="device", rule="'cpu' or 'cuda'", value=device)
        with self._turn(device, timeout):
            if device == "cuda":
                yield self._cuda.detach()
                return
            if not self.is_concurrent:
                self._driver.synchronise(self._device)
            with self._cpu_tensor() as tensor:
                yield tensor

    @contextlib.contextmanager
    def _turn(self, side: str, timeout: float | None) -> Iterator[None]:
        limit = None if timeout is None else to_seconds("dual view", timeout)
        if self.is_concurrent:
            self._require_memory()
            yield
            return
        thread = self._side_lock.enter(side, limit)
        try:
            self._require_memory()
            yield
        finally:
            self._side_lock.leave(side, thread)

    def _require_memory(self) -> None:
        self._lease.require_block("dual view")

    @contextlib.contextmanager
    def _cpu_tensor(self) -> Iterator[torch.Tensor]:
        tensor = self._make_cpu()
        try:
            yield tensor
        finally:
            if not self.is_concurrent:
                tensor.set_(torch.UntypedStorage(0), 0, (0,), (1,))

    def _fence(self) -> None:
        if self.streams.is_capturing():
            return  # the work runs when the graph is replayed
        fence = self.streams.record()
        with self._lock:
            self._fences[self.streams.current()] = fence

    def _settle(self, *, wait: bool) -> None:
        self._fence()
        if wait and not self.is_concurrent:
            self._driver.synchronise(self._device)
        with self._lock:
            fences = dict(self._fences)
        for stream, fence in fences.items():
            if not wait and not fence.is_done():
                raise WriteConflictError(
                    "dual view",
                    name="memory",
                    rule="awaited before the CPU touches it",
                    value="the device is still busy",
                    hint="Wait, or come later.",
                )
            fence.wait()
            with self._lock:
                if self._fences.get(stream) is fence:
                    del self._fences[stream]
