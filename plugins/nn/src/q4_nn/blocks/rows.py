"""``RowPlaces``: whole sequences one after another in a program, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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
        self.capacity = capacity
        self._builder, self._most = builder, most
        self._positions = self._numbers(most)
        self.position = builder.bound(self._positions, "positions")
        self._spans: dict[tuple[bool, int | None], torch.Tensor] = {}

    def _numbers(self, count: int) -> torch.Tensor:
        """Return memory for numbers of a run."""
        return torch.zeros(count, dtype=torch.int64)

    def spans(self, *, causal: bool, window: int | None) -> Value:
        """Return the first row that each row sees, and the one behind the last: int64 [2 · most]."""
        window = None if window is None or window >= self.capacity else window
        if (causal, window) not in self._spans:
            self._spans[causal, window] = self._numbers(2 * self._most).view(-1, 2)
        return self._builder.bound(self._spans[causal, window], "spans")

    def seen(self, layer: int, key: Value, value: Value) -> tuple[Value, Value]:  # noqa: ARG002  # of a cache
        """Return the keys and values that spans are of: those of the rows themselves."""
        return key, value

    def fill(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write positions and spans of sequences, and return the first row of each, and the one behind its last.

        Args:
            lengths: int64 [sequences], each 1 or more, together at most ``most``.
        """
        lasts = lengths.cumsum(0)
        firsts = lasts - lengths
        first, last = (part.repeat_interleave(lengths) for part in (firsts, lasts))
        rows = torch.arange(len(first))
        torch.sub(rows, first, out=self._positions[: len(rows)])
        for (causal, window), spans in self._spans.items():
            low, high = first, rows + 1 if causal else last
            if window is not None:
                low, high = torch.maximum(low, rows - window + 1), torch.minimum(high, rows + window)
            spans[: len(rows), 0].copy_(low)
            spans[: len(rows), 1].copy_(high)
        return firsts, lasts
