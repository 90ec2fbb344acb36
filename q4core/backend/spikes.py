"""Spikes: the product of a prepared weight with rows of 0 and 1, given as the columns that hold a 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from q4core.backend.contract import Prepared


class RunsSpikes(Protocol):
    """The optional capability: a backend whose manifest declares the op ``"spikes"`` has these methods."""

    def spikes(
        self,
        prepared: Prepared,
        columns: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
    ) -> None:
        """Write to each row of ``out`` the sum of the weight's columns that spike in it, plus the bias.

        Args:
            prepared: What ``prepare`` gave for a request of float32.
            columns: int64 [S], contiguous: row m's are ``columns[starts[m]:starts[m + 1]]``, in 0 … K - 1.
            starts: int64 [M + 1], contiguous, from 0 to S, never falling; M ≥ 1.
            out: float32 [M, N], contiguous; written completely, never read.
            bias: float32 [N], contiguous, or None.

        Raises:
            InputError: A column is out of range, or does not rise within its row. Nothing has been written.
        """
        ...

    def spike_limit(self, rows: int) -> float:
        """Return the share of ones, from 0 to 1, above which the dense product of that many rows is faster."""
        ...
