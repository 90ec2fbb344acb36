"""INT4: the range of each group in 15 steps, with a zero point, or symmetric about code 8.

Reference:
    The affine scheme of GPTQ, AWQ and compressed-tensors. Bit-equal to compressed-tensors 0.20 on float32 weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core.codec.quotient import quotient
from q4core.codec.rule import Coded

if TYPE_CHECKING:
    from q4core.codec.rule import Rule

__all__ = ["int4_rule"]

_STEPS = 15
_LOWEST, _HIGHEST = -8, 7


def int4_rule(dtype: torch.dtype, *, symmetric: bool) -> Rule:
    """Return the rule of INT4 whose scales are stored in ``dtype``.

    Codes are chosen with the scale as stored. Zero always has a code of its own. Where the scale would be zero, it is
    the machine epsilon of ``dtype``.
    """

    def rule(blocks: torch.Tensor, *, short: bool) -> Coded:  # noqa: ARG001  # a short group follows the same rule
        least = blocks.amin(-1).clamp(max=0)
        greatest = blocks.amax(-1).clamp(min=0)
        reach = torch.maximum(-least, greatest) * 2 if symmetric else greatest - least
        step = quotient(reach, _STEPS).to(dtype)
        stored = torch.where(step == 0, torch.finfo(dtype).eps, step)
        scaled = blocks / stored.to(torch.float32)[..., None]
        zero = None
        if not symmetric:
            # A group of zeros divides 0 by 0; its zero point is the middle, as in a symmetric group.
            shift = (_LOWEST - least / step.to(torch.float32)).nan_to_num(nan=0.0).clamp(_LOWEST, _HIGHEST).round()
            scaled = scaled + shift[..., None]
            zero = (shift - _LOWEST).to(torch.uint8)
        codes = scaled.clamp(_LOWEST, _HIGHEST).round() - _LOWEST
        return Coded(codes.to(torch.uint8), stored, zero=zero)

    return rule
