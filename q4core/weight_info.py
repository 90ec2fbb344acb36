"""``WeightInfo``: what ``Q4Linear.weight`` answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch

__all__ = ["WeightInfo"]


@attrs.frozen
class WeightInfo:
    """What ``Q4Linear.weight`` answers: the facts of a dense weight, without one.

    Args:
        shape: (N, K).
        dtype: dtype of the activations that the layer takes.
        device: Where it runs.
        format: Name of the format.
        nbytes: Bytes that the packed weight takes.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    format: str
    nbytes: int
    requires_grad: bool = False

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one extent of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 2."""
        return len(self.shape)

    def numel(self) -> int:
        """Return N × K."""
        return self.shape.numel()
