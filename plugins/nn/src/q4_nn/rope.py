"""Rotary position embedding over neighbouring pairs.

Llama-family GGUF files hold q and k rows that are permuted so that the two members of each rotated pair are neighbours.
Rotating neighbours on the permuted rows gives the same attention scores as rotating halves on the original ones, so the
packed rows are used as they stand.

Reference:
    Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """Turns pair i of a head at position p by the angle ``p · base^(-2i/d) / factor_i / scale``.

    Args:
        dimensions: d: how many of a head's features are turned, counted from the first; even.
        base: The base of the frequencies.
        scale: Divides positions (linear scaling).
        factors: [d/2] float that divides the frequencies, or None.
    """

    def __init__(
        self,
        dimensions: int,
        base: float,
        *,
        scale: float = 1.0,
        factors: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.dimensions = dimensions
        exponent = torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions
        frequency = 1.0 / (base**exponent)
        if factors is not None:
            frequency = frequency / factors.to(torch.float32)
        self.scale = scale
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("turn", torch.empty(0, dimensions // 2, dtype=torch.complex64), persistent=False)
        self.frequency: torch.Tensor
        self.turn: torch.Tensor

    def prepare(self, positions: int) -> None:
        """Make sure that the first ``positions`` positions can be turned."""
        if positions > self.turn.shape[0]:
            place = torch.arange(positions, dtype=torch.float32, device=self.frequency.device) / self.scale
            angle = torch.outer(place, self.frequency)
            # A pair is one complex number, and turning it is one multiplication: one operation instead of six.
            self.turn = torch.polar(torch.ones_like(angle), angle)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Return x turned, of x's dtype; computed in float32.

        Args:
            x: [B, T, heads, head_dim].
            start: Position of the first of the T tokens.
        """
        turned, kept = x[..., : self.dimensions], x[..., self.dimensions :]
        pairs = torch.view_as_complex(turned.to(torch.float32).unflatten(-1, (-1, 2)))
        angles = self.turn[start : start + x.shape[1], None, :]
        turned = torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)
        return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned
