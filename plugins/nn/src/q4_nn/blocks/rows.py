"""``RowPlaces``: whole sequences one after another in a program, without padding."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4_programs import ProgramBuilder, Value

__all__ = ["RowPlaces"]


class RowPlaces:
    """The position of each row in its sequence, and the rows that it sees.

    Args:
        builder: Collects; its steps are of ``most`` tokens.
        most: Rows of a run at most.
        capacity: Positions of a sequence at most.
    """

    def __init__(self, builder: ProgramBuilder, most: int, capacity: int) -> None:
        self._cells: list[array[int]] = []  # Python's arrays, which are written without a tensor's operations
        self.capacity = capacity
        self._builder, self._most = builder, most
        self._positions = self._numbers(most)
        self.position = builder.bound(self._positions, "positions")
        self._spans: dict[tuple[bool, int | None], torch.Tensor] = {}

    def _numbers(self, count: int) -> torch.Tensor:
        """Return memory for numbers of a run."""
        self._cells.append(array("q", bytes(8 * count)))
        return torch.frombuffer(self._cells[-1], dtype=torch.int64)

    def spans(self, *, causal: bool, window: int | None) -> Value:
        """Return the first row that each row sees, and the one behind the last: int64 [2 · most]."""
        window = None if window is None or window >= self.capacity else window
        if (causal, window) not in self._spans:
            self._spans[causal, window] = self._numbers(2 * self._most).view(-1, 2)
        return self._builder.bound(self._spans[causal, window], "spans")

    def seen(self, layer: int, key: Value, value: Value) -> tuple[Value, Value]:  # noqa: ARG002  # of a cache
        """Return the keys and values that spans are of: those of the rows themselves."""
        return key, value

    def fill(self, lengths: Iterable[int]) -> list[tuple[int, int]]:
        """Write positions and spans of sequences, and return the first row of each, and the one behind its last.

        Args:
            lengths: Rows of each, 1 or more, together at most ``most``.
        """
        positions, *cells = self._cells
        ends, at = [], 0
        for length in lengths:
            to = at + length
            positions[at:to] = array("q", range(length))
            for (causal, window), spans in zip(self._spans, cells, strict=True):
                near = length if window is None else min(window, length)  # rows that see the first one, or the last
                low = array("q", [at]) * near + array("q", range(at + 1, to - near + 1))
                high = array("q", range(at + near, to)) + array("q", [to]) * near
                spans[2 * at : 2 * to : 2] = low
                spans[2 * at + 1 : 2 * to : 2] = array("q", range(at + 1, to + 1)) if causal else high
            ends.append((at, to))
            at = to
        return ends
