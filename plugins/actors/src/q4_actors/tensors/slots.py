"""``Slots``: the contents of a segment, and the header's entry for the newest one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from q4_actors.tensors.arguments import MutableMode
from q4_actors.tensors.form import CURRENT, TAINTED, WRITER

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4_actors._native import Core
    from q4_actors.tensors.liveness import Liveness
    from q4_actors.tensors.segment import Segment
    from q4_actors.tensors.tickets import WriteTicket

__all__ = ["HEALTHY", "Slots"]

HEALTHY, POISONED = 0, 2
"""States of an ``IN_PLACE`` content, in one word with its version; 1 while it is written."""


class Slots:
    """One tensor for each version that there is room for; ``IN_PLACE`` there is one slot.

    Args:
        segment: The memory.
        cells: This process's part in it.
        liveness: Which processes live.
    """

    def __init__(self, segment: Segment, cells: Core, liveness: Liveness) -> None:
        self._segment, self._cells, self._liveness = segment, cells, liveness
        self._is_in_place = segment.form.mode is MutableMode.IN_PLACE

    def newest(self, *, is_writing: bool) -> tuple[int, int, str | None]:
        """Return version, slot and the cause of its poison, as they were at one instant; other processes change them.

        Args:
            is_writing: Whether this process has a slot to write.
        """
        words = self._segment.words
        while True:
            word = words[CURRENT]
            version, low = word >> 8, word & 255
            if not self._is_in_place:
                cause = self._segment.cause if words[TAINTED] == version + 1 else None
            elif low == HEALTHY:
                cause = None
            elif low == POISONED:
                cause = self._segment.cause
            else:
                cause = None if is_writing else self._ended_writer(word)
            # A writer that ended well between the two reads has not died.
            if words[CURRENT] == word:
                return version, 0 if self._is_in_place else low, cause

    def _ended_writer(self, word: int) -> str | None:
        """Return which process ended while it wrote, if one did."""
        cells = self._cells
        if cells.current != word:  # so that the bar is seen as well
            return None
        # No process writes while this process reads, or has the turn.
        if not (cells.is_holding or cells.has_turn):
            held = cells.barred
            if held and self._liveness.is_alive(held):
                return None
            cells.bury(held)
        return f"process {self._segment.words[WRITER]} ended inside write()" if cells.current == word else None

    def poison(self, version: int, cause: str) -> None:
        """Declare the newest version unknown. ``IN_PLACE``: this process reads, or has the turn."""
        self._segment.cause = cause
        if self._is_in_place:
            self._cells.poison()
        else:
            self._segment.words[TAINTED] = version + 1

    def fill(
        self, slot: int, block: WriteTicket, on_external_write: Callable[[torch.Tensor, int], NoReturn]
    ) -> torch.Tensor:
        """Return a slot with what an update begins with; small contents are there already.

        Args:
            slot: Which this process writes.
            block: Which update.
            on_external_write: Raises where a version was changed outside ``write()``.
        """
        slots = self._segment.slots
        work = slots[slot]
        if self._is_in_place:
            return work
        if block.source is not None:
            return work.copy_(block.source)
        if block.healing:
            return work.zero_()
        if not self._cells.copies_here:
            word = self._segment.words[CURRENT]
            newest = slots[word & 255]
            work.copy_(newest)
            if not self._cells.is_untouched(word & 255, word >> 8):
                on_external_write(newest, word >> 8)
        return work
