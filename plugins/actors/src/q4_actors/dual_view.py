"""What keeps the blocks of a content in order where a device works behind the CPU's back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from q4_actors.stream_order import Fences, TorchStreams
from q4core import ConfigError, WriteConflictError
from q4core.memory import keeper_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from q4_actors.blocks import ReadView, WriteBlock
    from q4_actors.content import Content
    from q4_actors.stream_order import Streams

__all__ = ["Order", "Sides", "to_side"]


class Sides(Protocol):
    """A CPU tensor and a CUDA tensor over the same bytes, such as a memory provider's ``dual_view`` gives."""

    @property
    def streams(self) -> Streams:
        """The streams of the CUDA side's device."""
        ...

    def turn(self, device: str, *, timeout: float | None) -> AbstractContextManager[torch.Tensor]:
        """Give one side's tensor, ``"cpu"`` or ``"cuda"``; where the device wants it, only while the other rests.

        Args:
            device: The side.
            timeout: Seconds to wait for the other side's blocks, None for no limit.

        Raises:
            WriteConflictError: The time ran out, or this thread itself holds the other side.
        """
        ...


def to_side(content: Content, device: str) -> str:
    """Return the side that is meant.

    Raises:
        ConfigError: There is only one, or no such.
        LifecycleError: This is a forked child.
    """
    if content.is_forked:
        content.raise_closed()
    if content.order is None or not content.order.has_sides:
        rule, hint = "None for memory of one side", "Only MutableTensor(…, sides=…) over unified memory has two."
        raise ConfigError(content.label, name="device", rule=rule, value=device, hint=hint)
    if device not in {"cpu", "cuda"}:
        raise ConfigError(content.label, name="device", rule="'cpu', 'cuda' or None", value=device)
    return device


class Order:
    """Lets each block begin after the device work that must come before, and on its side's turn.

    Args:
        content: Whose blocks.
        sides: Both sides of its memory, or None for a plain CUDA tensor.
    """

    def __init__(self, content: Content, sides: Sides | None = None) -> None:
        self._content, self._sides = content, sides
        self.has_sides = sides is not None
        """Whether the memory has two sides."""
        self._home = content.device.type
        streams = TorchStreams(content.device, keeper_of(content.tensor)) if sides is None else sides.streams
        self._fences = Fences(streams, content.label, is_in_place=content.is_in_place)
        if not streams.is_capturing():
            self._fences.after(content.tensor, None, is_reading=False)  # whoever made it may still be filling it

    def arrive(self, block: ReadView | WriteBlock) -> None:
        """Note when a block asked to be let in: its time limit counts all that it waits for."""
        block.deadline = None if block.timeout is None else time.monotonic() + block.timeout

    def begin(self, block: ReadView | WriteBlock, base: torch.Tensor, *, is_reading: bool) -> torch.Tensor | None:
        """Let a block that has its turn among the threads go on.

        Returns:
            The tensor of its side, if it named one.
        """
        side, tensor = block.side or self._home, None
        block.begun_on = None
        if side == "cpu":
            self._fences.check_cpu()
        if self.has_sides:
            tensor = self._take_turn(block, side)
        try:
            if side == "cpu":
                self._fences.wait(is_reading=is_reading)
            else:
                block.begun_on = self._fences.before(base, is_reading=is_reading)
        except BaseException:
            self.leave(block)
            raise
        return None if block.side is None else tensor

    def _take_turn(self, block: ReadView | WriteBlock, side: str) -> torch.Tensor:
        content, sides = self._content, self._sides
        if sides is None:  # closed in this instant
            content.raise_closed()
        left = None if block.deadline is None else max(0.0, block.deadline - time.monotonic())
        turn = sides.turn(side, timeout=left)
        try:
            tensor = turn.__enter__()
        except WriteConflictError as error:
            with content.lock:
                content.refuse(f"waits for its other side: {error.summary}", error.hint or "Wait longer.")
        block.turn = turn
        return tensor

    def end(self, block: ReadView | WriteBlock, base: torch.Tensor, *, is_reading: bool) -> None:
        """Leave an event behind what the block has queued, and end its side's turn."""
        try:
            if (block.side or self._home) == "cuda":
                self._fences.after(base, block.begun_on, is_reading=is_reading)
        except BaseException:
            self._content.is_unsettled = self._content.is_in_place
            raise
        finally:
            self.leave(block)

    def end_write(self, block: WriteBlock, work: torch.Tensor, problem: BaseException | None) -> BaseException | None:
        """End an update; return what has failed by now, in it or here."""
        try:
            if self._content.gate.writer is block:
                self.end(block, work, is_reading=False)
            else:  # it was put out, and others have gone on
                self.leave(block)
        except BaseException as raised:  # noqa: BLE001  # whatever it is, the tensor must be left in a known state
            return problem or raised
        return problem

    def leave(self, block: ReadView | WriteBlock) -> None:
        """End the turn of a block's side, if it has one."""
        turn, block.turn = block.turn, None
        if turn is not None:
            turn.__exit__(None, None, None)

    def close(self) -> None:
        """Let the sides go; open blocks end as they would have."""
        self._sides = None

    def settle(self) -> None:
        """Wait for whatever a block that failed or was put out has queued, nobody knows on which stream."""
        self._fences.settle()
