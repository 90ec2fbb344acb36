"""Spikes: the product of a prepared weight with rows of 0 and 1, at the cost of the ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from q4core.backend.contract import Prepared


class RunsSpikes(Protocol):
    """The optional capability: a backend whose manifest declares the op ``"spikes"`` has these methods."""

    def spikes(self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None) -> None:
        """Write ``x @ wᵀ + bias`` to ``out``, with exact weights.

        Args:
            prepared: What ``prepare`` gave for a request of float32.
            x: bool [M, K], contiguous; M ≥ 1.
            out: float32 [M, N], contiguous; written completely, never read.
            bias: float32 [N], contiguous, or None.
        """
        ...

    def spike_limit(self, rows: int) -> float:
        """Return the share of ones, from 0 to 1, above which the dense product of that many rows is faster."""
        ...
