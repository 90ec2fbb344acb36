"""Zero points as codes: what integer dialects store for each group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from q4core import Dialect, PackedWeight

__all__ = ["zero_codes"]


def zero_codes(dialect: Dialect, module: str, weight: PackedWeight) -> torch.Tensor:
    """Return the zero points of a weight as codes, uint8 [N, G]; the middle one where it has none.

    Raises:
        DialectError: Zero points are no codes.
    """
    if weight.zero is None:
        return torch.full(weight.scale.shape, weight.format.middle, dtype=torch.uint8)
    codes, last = weight.zero.to(torch.int64), (1 << weight.format.bits) - 1
    if not torch.equal(codes.to(weight.zero.dtype), weight.zero) or bool(((codes < 0) | (codes > last)).any()):
        raise dialect.refusal(module, "zero", f"whole numbers 0 … {last}", "others")
    return codes.to(torch.uint8)
