"""``StreamEvents``: each block waits for the device work that it depends on, and for no other.

A block that ends records an event on its thread's current stream. The next block on another stream makes that stream
wait for the event, and the CPU goes on at once. Only a block of the CPU tensor makes the CPU wait.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from q4core import InputError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["StreamEvents", "Streams", "TorchStreams"]


class Streams(Protocol):
    """Operations on a device's streams; each call is about the calling thread's current one."""

    def current(self) -> int:
        """Return its handle."""
        ...

    def is_capturing(self) -> bool:
        """Return whether it records a graph."""
        ...

    def record(self) -> Any:
        """Return a new event behind all that is queued on it; it goes with its last reference."""
        ...

    def follow(self, event: Any) -> None:
        """Let what is queued from now on wait for an event; the CPU does not wait."""
        ...

    def wait_for(self, event: Any) -> None:
        """Let the CPU wait for an event."""
        ...

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory, once it is released, until the stream has passed what is queued by then."""
        ...

    def synchronise(self) -> None:
        """Let the CPU wait for the whole device."""
        ...


class TorchStreams:
    """Torch's streams of one device.

    Args:
        device: A CUDA device.
        keep: Called for each stream that uses a tensor, with its handle. Defaults to torch's own allocator.
    """

    def __init__(self, device: torch.device, keep: Callable[[torch.Tensor, int], object] | None = None) -> None:
        self._device, self._keep = device, keep

    def current(self) -> int:
        """Return the current stream's handle."""
        handle: int = torch.cuda.current_stream(self._device).cuda_stream
        return handle

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def record(self) -> torch.cuda.Event:
        """Return a new event behind all that is queued on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Let the CPU wait for an event."""
        event.synchronize()

    def keep(self, tensor: torch.Tensor) -> None:
        """Record at the allocator that the current stream uses the memory."""
        if self._keep is not None:
            with contextlib.suppress(InputError):  # a first version that the provider knows and did not allocate
                self._keep(tensor, self.current())
            return
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def synchronise(self) -> None:
        """Let the CPU wait for the whole device."""
        torch.cuda.synchronize(self._device)


class StreamEvents:
    """The last events of one content's readers and writers. Writers are alone when they call; readers need not be.

    Args:
        streams: The device's.
        label: Whose content, for messages.
        is_in_place: Whether what is read is written again; else each version has memory of its own.
    """

    def __init__(self, streams: Streams, label: str, *, is_in_place: bool) -> None:
        self._streams, self._label, self._is_in_place = streams, label, is_in_place
        self._written: dict[int, Any] = {}  # by stream; replaced whole, since VERSIONED readers look at any time
        self._read: dict[int, Any] = {}

    def wait_on_stream(self, tensor: torch.Tensor, *, is_reading: bool) -> int | None:
        """Let the current stream wait for the work that a block depends on.

        Returns:
            The stream; None while it captures a graph, whose replays belong into blocks of their own.

        Raises:
            LifecycleError: A graph is captured, and the address moves.
        """
        if self._streams.is_capturing():
            if not self._is_in_place:
                text = (
                    f"{self._label} is VERSIONED, so its address moves, which the capture of a CUDA graph can't follow"
                )
                raise LifecycleError(text, hint="Use IN_PLACE, whose address stays.")
            return None
        stream = self._streams.current()
        for event in self._dependencies(is_reading=is_reading, stream=stream):
            self._streams.follow(event)
        self._streams.keep(tensor)
        return stream

    def record(self, tensor: torch.Tensor, begun_on: int | None, *, is_reading: bool) -> None:
        """Record an event after what the block has queued.

        Raises:
            LifecycleError: The block began before the capture in which it ends.
        """
        if self._streams.is_capturing():
            if begun_on is not None:
                text = (
                    f"a with block of {self._label} was entered before the capture of a CUDA graph, and left inside it"
                )
                raise LifecycleError(text, hint="Enter and leave it outside the capture, or inside.")
            return
        stream = self._streams.current()
        if stream != begun_on:
            self._streams.keep(tensor)
        if is_reading:
            if self._is_in_place:  # else it is not written again, and the allocator waits
                self._read[stream] = self._streams.record()
            return
        event = self._streams.record()
        if stream == begun_on:  # it waited for all the others, so it stands for them
            self._written, self._read = {stream: event}, {}
        else:
            self._written = {**self._written, stream: event}

    def refuse_capture(self) -> None:
        """Refuse the CPU tensor while a graph is captured, which allows the CPU no waiting.

        Raises:
            LifecycleError: One is.
        """
        if self._streams.is_capturing():
            text = f"the CPU side of {self._label} can't be used during the capture of a CUDA graph"
            raise LifecycleError(text, hint="Capture first, or use the CUDA side.")

    def wait_on_cpu(self, *, is_reading: bool) -> None:
        """Let the CPU wait for the work that its block depends on."""
        for event in self._dependencies(is_reading=is_reading, stream=None):
            self._streams.wait_for(event)
        self._written = {}
        if not is_reading:
            self._read = {}

    def settle(self) -> None:
        """Let the CPU wait for the whole device, where the stream that was used is not known."""
        self._streams.synchronise()
        self._written, self._read = {}, {}

    def _dependencies(self, *, is_reading: bool, stream: int | None) -> Iterable[Any]:
        events = tuple(self._written.items())
        if not is_reading:
            events += tuple(self._read.items())
        return (event for key, event in events if key != stream)
