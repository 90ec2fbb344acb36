"""Synchronisation of a mutable tensor's blocks with the work of a CUDA device, which runs asynchronously."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from q4_actors.tensors.stream_order import StreamEvents, TorchStreams
from q4core import WriteConflictError
from q4core.memory import keeper_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from q4_actors.tensors.state import State
    from q4_actors.tensors.stream_order import Streams
    from q4_actors.tensors.tickets import BlockTicket

__all__ = ["DeviceSync", "DualView"]


class DualView(Protocol):
    """A CPU tensor and a CUDA tensor over the same bytes, such as a memory provider's ``dual_view`` gives."""

    @property
    def streams(self) -> Streams:
        """The streams of the CUDA side's device."""
        ...

    def turn(self, device: str, *, timeout: float | None) -> AbstractContextManager[torch.Tensor]:
        """Give the tensor of ``"cpu"`` or ``"cuda"``; without concurrent access, only while the other is not in use.

        Args:
            device: Which of the two.
            timeout: Seconds to wait for the other one's blocks, None for no limit.

        Raises:
            WriteConflictError: The time ran out, or this thread itself holds the other one.
        """
        ...


class DeviceSync:
    """Lets each block begin after the device work that it depends on, and in its turn between CPU and CUDA.

    Args:
        content: Whose blocks.
        view: The CPU and the CUDA tensor of its memory, or None for a plain CUDA tensor.
    """

    def __init__(self, content: State, view: DualView | None = None) -> None:
        self._content, self._view = content, view
        self.has_dual_view = view is not None
        self._home = content.device.type
        streams = TorchStreams(content.device, keeper_of(content.tensor)) if view is None else view.streams
        self._events = StreamEvents(streams, content.label, is_in_place=content.is_in_place)
        if not streams.is_capturing():
            self._events.record(content.tensor, None, is_reading=False)  # its creator may still be filling it

    def arrive(self, block: BlockTicket) -> None:
        """Record when a block requested admission: its time limit covers every wait."""
        block.deadline = None if block.timeout is None else time.monotonic() + block.timeout

    def begin(self, block: BlockTicket, base: torch.Tensor, *, is_reading: bool) -> torch.Tensor | None:
        """Let a block that has its turn among the threads go on.

        Returns:
            The tensor of its device, if it named one.
        """
        side, tensor = block.side or self._home, None
        block.begun_on = None
        if side == "cpu":
            self._events.refuse_capture()
        if self.has_dual_view:
            tensor = self._take_turn(block, side)
        try:
            if side == "cpu":
                self._events.wait_on_cpu(is_reading=is_reading)
            else:
                block.begun_on = self._events.wait_on_stream(base, is_reading=is_reading)
        except BaseException:
            self.leave(block)
            raise
        return None if block.side is None else tensor

    def _take_turn(self, block: BlockTicket, side: str) -> torch.Tensor:
        content, view = self._content, self._view
        if view is None:  # closed in this instant
            content.raise_closed()
        left = None if block.deadline is None else max(0.0, block.deadline - time.monotonic())
        turn = view.turn(side, timeout=left)
        try:
            tensor = turn.__enter__()
        except WriteConflictError as error:
            with content.lock:
                other = "cuda" if side == "cpu" else "cpu"
                content.raise_conflict(f"is in use on its {other} side: {error.summary}", error.hint or "Wait longer.")
        block.turn = turn
        return tensor

    def end(self, block: BlockTicket, base: torch.Tensor, *, is_reading: bool) -> None:
        """Record an event after what the block has queued, and end its turn."""
        try:
            if (block.side or self._home) == "cuda":
                self._events.record(base, block.begun_on, is_reading=is_reading)
        except BaseException:
            self._content.is_unsettled = self._content.is_in_place
            raise
        finally:
            self.leave(block)

    def end_write(self, block: BlockTicket, work: torch.Tensor, problem: BaseException | None) -> BaseException | None:
        """End an update; return what has failed by now, in it or here."""
        try:
            if self._content.gate.writer is block:
                self.end(block, work, is_reading=False)
            else:  # its thread had ended, and others have gone on
                self.leave(block)
        except BaseException as raised:  # noqa: BLE001  # whatever it is, the tensor must be left in a known state
            return problem or raised
        return problem

    def leave(self, block: BlockTicket) -> None:
        """End a block's turn, if it has one."""
        turn, block.turn = block.turn, None
        if turn is not None:
            turn.__exit__(None, None, None)

    def close(self) -> None:
        """Release the dual view; open blocks end as they would have."""
        self._view = None

    def settle(self) -> None:
        """Wait for the device: a block that failed, or whose thread ended, may have queued work on any stream."""
        self._events.settle()
