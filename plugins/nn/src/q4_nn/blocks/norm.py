"""Root-mean-square normalisation, whose weight Gemma's checkpoints store as the difference from one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from q4_programs import emit_rms_norm

if TYPE_CHECKING:
    from q4_programs import ProgramBuilder, Value

__all__ = ["OffsetRMSNorm", "RMSNorm"]


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x²) + eps) * weight``, by the norm of each row.

    The mean is that of the row's norm, which is one pass; torch's own squares, sums and divides tensors of x's size.

    Args:
        normalized_shape: As ``nn.RMSNorm`` takes it.
        eps: Added to the mean square.

    Reference:
        Zhang and Sennrich, Root Mean Square Layer Normalization.
    """

    shift = 0.0
    """Added to the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, of its dtype; computed in float32 (float64 for such an x)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size = torch.linalg.vector_norm(wide, dim=tuple(range(-len(self.normalized_shape), 0)), keepdim=True)
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        y: torch.Tensor = wide * (size.square() / math.prod(self.normalized_shape) + eps).rsqrt()
        if self.weight is not None:
            weight = self.weight.to(wide.dtype)
            y = y * (weight + self.shift if self.shift else weight)
        return y.to(x.dtype)

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Emit the norm."""
        return emit_rms_norm(self, builder, x, shift=self.shift)


class OffsetRMSNorm(RMSNorm):
    """``x / sqrt(mean(x²) + eps) * (1 + weight)``; its weight begins at zero.

    Args:
        normalized_shape: As ``nn.RMSNorm`` takes it.
        eps: Added to the mean square.

    Reference:
        Gemma Team, Gemma: Open Models Based on Gemini Research and Technology.
    """

    shift = 1.0

    def reset_parameters(self) -> None:
        """Set the weight to zero, which is a factor of one."""
        nn.init.zeros_(self.weight)
