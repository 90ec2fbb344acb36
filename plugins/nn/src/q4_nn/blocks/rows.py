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

    def fill(self, lengths: torch.Tensor) -> torch.Tensor:
        """Write positions and spans of sequences; return the first row of each and the one behind its last, [n, 2].

        Args:
            lengths: int64 [sequences], each 1 or more, together at most ``most``.
        """
        lasts = lengths.cumsum(0)
        ends = torch.stack([lasts - lengths, lasts], dim=1)
        whole = ends.expand(int(lengths), 2) if len(lengths) == 1 else ends.repeat_interleave(lengths, dim=0)
        rows = torch.arange(len(whole))
        torch.sub(rows, whole[:, 0], out=self._positions[: len(rows)])
        for (causal, window), spans in self._spans.items():
            spans[: len(rows)].copy_(whole)
            low, high = spans[: len(rows)].unbind(1)
            if causal:
                torch.add(rows, 1, out=high)
            if window is not None:
                low.clamp_(min=rows - window + 1)
                high.clamp_(max=rows + window)
        return ends
