"""Division by a number that rounds alike on every device."""

from __future__ import annotations

import torch

__all__ = ["quotient"]


def quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return ``values / divisor``, each rounded once.

    On CUDA torch multiplies by the reciprocal of a Python number, which rounds twice; a tensor it divides by.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
