"""``DriverStreams``: events between streams, for mutable tensors whose two sides are unified memory."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4_um_managed.driver import Driver

__all__ = ["DriverStreams", "Fence"]


class Fence:
    """An event behind what was queued on a stream; destroyed with its last reference, since others may look at it."""

    __slots__ = ("_driver", "_process", "event")

    def __init__(self, driver: Driver, stream: int, device: int) -> None:
        self._driver, self._process = driver, os.getpid()
        self.event: int | None = None
        self.event = driver.record(stream, device)

    def is_done(self) -> bool:
        """Return whether the device has passed it."""
        return self.event is None or self._driver.is_done(self.event)

    def wait(self) -> None:
        """Let the CPU wait for it."""
        if self.event is not None and not self._driver.is_done(self.event):
            self._driver.wait_for(self.event)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Destroy the event."""
        if not is_exiting() and self.event is not None and os.getpid() == self._process:
            with contextlib.suppress(Exception):
                self._driver.forget(self.event)


class DriverStreams:
    """The streams of one device; each call is about the calling thread's current one.

    Args:
        driver: CUDA's runtime.
        device: The device's number.
        keep: Called with each stream that uses the memory, which is not reused until that stream has passed.
    """

    def __init__(self, driver: Driver, device: int, keep: Callable[[int], object]) -> None:
        self._driver, self._device, self._keep = driver, device, keep

    def current(self) -> int:
        """Return the current stream's handle."""
        return self._driver.stream(self._device)

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph."""
        return self._driver.is_capturing(self._device)

    def record(self) -> Fence:
        """Return a new event behind all that is queued on the current stream."""
        return Fence(self._driver, self.current(), self._device)

    def follow(self, event: Fence) -> None:
        """Let the current stream wait for an event; the CPU does not wait."""
        if event.event is not None:
            self._driver.follow(self.current(), event.event, self._device)

    def wait_for(self, event: Fence) -> None:
        """Let the CPU wait for an event."""
        event.wait()

    def keep(self, tensor: torch.Tensor) -> None:  # noqa: ARG002  # the protocol's
        """Keep the memory, once it is released, until the current stream has passed."""
        self._keep(self.current())

    def synchronise(self) -> None:
        """Let the CPU wait for the whole device."""
        self._driver.synchronise(self._device)
