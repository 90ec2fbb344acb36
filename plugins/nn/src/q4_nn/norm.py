"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + epsilon) * weight`` over the last axis; the mean is taken in float32.

    Args:
        weight: [K] float.
        epsilon: Added to the mean square.

    Reference:
        Zhang and Sennrich, Root Mean Square Layer Normalization.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.weight: torch.Tensor
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x: [..., K], of x's dtype."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
