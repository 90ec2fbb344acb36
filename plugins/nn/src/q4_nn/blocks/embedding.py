"""``PackedEmbedding``: rows of a packed weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_programs import Op

if TYPE_CHECKING:
    from q4_programs import ProgramBuilder, Value

__all__ = ["PackedEmbedding"]


class PackedEmbedding(nn.Module):
    """An embedding whose rows are those of a packed weight, which may be the head's as well.

    Args:
        layer: A ``Q4Linear`` over the rows.
        dtype: dtype of what it gives.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer: Any = layer
        self.dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows [..., hidden] of token numbers [...].

        Raises:
            InputError: A token number is out of range, or no int64 or int32.
        """
        rows: torch.Tensor = self.layer.rows(tokens, self.dtype)
        return rows

    def emit_program(self, builder: ProgramBuilder, tokens: Value) -> Value:
        """Emit the look-up."""
        return builder.step(Op.EMBEDDING, tokens, shape=(*tokens.shape, self.layer.in_features), layer=self.layer)
