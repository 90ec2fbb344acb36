"""Linear layers that share their x."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["JoinedLinear"]


class JoinedLinear(nn.Module):
    """Several linear layers over one x (q, k and v; gate and up), in as few calls as their formats allow.

    A call costs a small model about as much as a third of the rows that it computes, and with several threads each one
    ends with all of them waiting for the last.

    Args:
        layers: Linear layers of the same in-features.
        parts: For each layer, the out-features of the parts whose rows it holds.
    """

    def __init__(self, layers: Sequence[nn.Module], parts: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.parts = tuple(parts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [..., N] of each part, from x [..., K]; parts of one layer are views of its result."""
        results = zip(self.layers, self.parts, strict=True)
        return tuple(part for layer, sizes in results for part in layer(x).split(sizes, -1))
