"""Root-mean-square normalisation whose weight is stored as the difference from one, as Gemma's checkpoints have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from q4_programs import emit_rms_norm

if TYPE_CHECKING:
    from q4_programs import ProgramBuilder, Value

__all__ = ["OffsetRMSNorm"]


class OffsetRMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x²) + eps) * (1 + weight)``; its weight begins at zero.

    Args:
        normalized_shape: As ``nn.RMSNorm`` takes it.
        eps: Added to the mean square.

    Reference:
        Gemma Team, Gemma: Open Models Based on Gemini Research and Technology.
    """

    def reset_parameters(self) -> None:
        """Set the weight to zero, which is a factor of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, of its dtype; computed in float32 (float64 for such an x)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return nn.functional.rms_norm(wide, self.normalized_shape, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Emit the norm."""
        return emit_rms_norm(self, builder, x, shift=1.0)
