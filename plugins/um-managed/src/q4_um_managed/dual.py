"""``DualView``: a CPU tensor and a CUDA tensor over the same bytes."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NoReturn

import torch

from q4core import UnifiedMemoryError, WriteConflictError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4_um_managed.driver import Driver

__all__ = ["DualView"]


class DualView:
    """Both sides of one piece of unified memory; made by ``ManagedProvider.dual_view``.

    On a device with ``concurrentManagedAccess=1`` (and in pinned memory) both tensors may be held and used at any time;
    ``on_cpu`` and ``on_cuda`` add the order between them. On any other device, a CPU that touches managed memory
    while a kernel runs ends the process, so the contract refuses it first: ``cpu`` raises, ``on_cpu`` waits for the
    device, and while its block lasts the CUDA side is not handed out.

    Args:
        cuda: The CUDA tensor.
        make_cpu: Makes a CPU tensor over the same bytes.
        driver: CUDA's runtime.
        device: The device's number.
        attributes: Its attributes.
        is_concurrent: Whether both sides may be used at once.
    """

    def __init__(  # noqa: PLR0913  # one argument per fact
        self,
        cuda: torch.Tensor,
        make_cpu: Callable[[], torch.Tensor],
        driver: Driver,
        device: int,
        attributes: Mapping[str, int],
        *,
        is_concurrent: bool,
    ) -> None:
        self._cuda, self._make_cpu, self._driver, self._device = cuda, make_cpu, driver, device
        self._attributes = dict(attributes)
        self.is_concurrent = is_concurrent
        """Whether both sides may be used at once."""
        self._lock = threading.Lock()
        self._cpu_turns = 0
        self._cuda_turns = 0
        self._fences: dict[int, int] = {}  # stream → event behind the last on_cuda() block there

    @property
    def cuda(self) -> torch.Tensor:
        """The CUDA tensor.

        Raises:
            WriteConflictError: The device is not concurrent, and the CPU has its turn.
        """
        with self._lock:
            self._refuse_cpu_turn()
            return self._cuda

    @property
    def cpu(self) -> torch.Tensor:
        """The CPU tensor; what the device has still to write is not awaited.

        Raises:
            UnifiedMemoryError: The device is not concurrent: ``on_cpu`` is the way.
        """
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
    def on_cpu(self, *, wait: bool = True) -> Iterator[torch.Tensor]:
        """Give the CPU tensor once the device has passed what this thread and ``on_cuda`` blocks have queued.

        On a device that is not concurrent the whole device is awaited, and the tensor is emptied when the block ends,
        so that it can't be touched later (views that were made of it can: let them go).

        Args:
            wait: False refuses instead of waiting.

        Raises:
            WriteConflictError: Not waiting, and the device is busy; or an ``on_cuda`` block is open, on a device that
                is not concurrent.
        """
        with self._lock:
            if not self.is_concurrent and self._cuda_turns:
                self._refuse("outside the block of on_cuda()", "inside")
            self._cpu_turns += 1
        try:
            self._settle(wait=wait)
            tensor = self._make_cpu()
            try:
                yield tensor
            finally:
                if not self.is_concurrent:
                    tensor.set_(torch.UntypedStorage(0), 0, (0,), (1,))
        finally:
            with self._lock:
                self._cpu_turns -= 1

    @contextlib.contextmanager
    def on_cuda(self) -> Iterator[torch.Tensor]:
        """Give the CUDA tensor; what the block queues on the current stream is awaited by the next ``on_cpu``.

        Raises:
            WriteConflictError: The device is not concurrent, and the CPU has its turn.
        """
        with self._lock:
            self._refuse_cpu_turn()
            self._cuda_turns += 1
        try:
            yield self._cuda
        finally:
            try:
                self._fence()
            finally:
                with self._lock:
                    self._cuda_turns -= 1

    def settle(self) -> None:
        """Wait for what this thread and ``on_cuda`` blocks have queued."""
        self._settle(wait=True)

    def _fence(self) -> None:
        stream = self._driver.stream(self._device)
        if self._driver.is_capturing(self._device):
            return  # the work runs when the graph is replayed
        event = self._driver.record(stream, self._device)
        with self._lock:
            old = self._fences.pop(stream, None)
            self._fences[stream] = event
        if old is not None:
            self._driver.forget(old)

    def _settle(self, *, wait: bool) -> None:
        self._fence()
        if wait and not self.is_concurrent:
            self._driver.synchronise(self._device)
        with self._lock:
            for stream, event in list(self._fences.items()):
                if not self._driver.is_done(event):
                    if not wait:
                        self._refuse("awaited before the CPU touches it", "the device is still at work")
                    self._driver.wait_for(event)
                del self._fences[stream]
                self._driver.forget(event)

    def _refuse_cpu_turn(self) -> None:
        if not self.is_concurrent and self._cpu_turns:
            self._refuse("outside the block of on_cpu()", "inside")

    def _refuse(self, rule: str, value: str) -> NoReturn:
        raise WriteConflictError(
            "dual view", name="memory", rule=rule, value=value, hint="concurrentManagedAccess=0: the sides take turns."
        )

    def __del__(self) -> None:
        """Forget the events."""
        with contextlib.suppress(Exception):
            for event in self._fences.values():
                self._driver.forget(event)
