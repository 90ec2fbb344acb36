"""Q4_0, Q4_1, Q8_0 and INT4: codes in equal steps, as float32 or as the step is stored.

Reference:
    ggml's block formats, whose codes come from the float32 step: bit-equal to ``gguf.quants.quantize`` 0.19 on x86.
    The affine scheme of GPTQ, AWQ and compressed-tensors: bit-equal to compressed-tensors 0.20 on float32 weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core.codec.rule import Coded, quotient

if TYPE_CHECKING:
    from q4core.codec.rule import Rule

_STEPS = 15
_EXTREME_CODE = -8
_LARGEST_BYTE = 127
_LOWEST, _HIGHEST = -8, 7


def _inverse(step: torch.Tensor) -> torch.Tensor:
    return torch.where(step == 0, 0.0, step.reciprocal())[..., None]


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """Return values cut towards zero, 0 … 15; steps so small that their inverse overflows give code 0."""
    return torch.where(torch.isfinite(values), values, 0.0).trunc().clamp(0, _STEPS).to(torch.uint8)


def q4_0_rule(blocks: torch.Tensor) -> Coded:
    """Return Q4_0: the value of largest magnitude (the first of equals) gets code 0, which stands for -8."""
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
    step = extreme / _EXTREME_CODE
    return Coded(_nibbles(blocks * _inverse(step) + 8.5), step.to(torch.float16))


def q4_1_rule(blocks: torch.Tensor) -> Coded:
    """Return Q4_1: 15 equal steps from the least to the greatest value.

    Where the least value is a zero, the last zero's sign is stored (it never shows in a decoded value).
    """
    backwards = blocks.flip(-1)
    least = backwards.gather(-1, backwards.argmin(-1, keepdim=True))[..., 0]
    step = quotient(blocks.amax(-1) - least, _STEPS)
    codes = _nibbles((blocks - least[..., None]) * _inverse(step) + 0.5)
    return Coded(codes, step.to(torch.float16), offset=least.to(torch.float16))


def q8_0_rule(blocks: torch.Tensor) -> Coded:
    """Return Q8_0: 127 steps each way, halves rounded away from zero."""
    step = quotient(blocks.abs().amax(-1), _LARGEST_BYTE)
    scaled = blocks * _inverse(step)
    scaled = torch.where(torch.isfinite(scaled), scaled, 0.0)
    whole = scaled.abs().floor()
    rounded = (whole + (2 * (scaled.abs() - whole)).floor()) * scaled.sign()
    return Coded(rounded.to(torch.int8).view(torch.uint8), step.to(torch.float16))


def int4_rule(dtype: torch.dtype, *, symmetric: bool) -> Rule:
    """Return the rule of INT4 whose scales are stored in ``dtype``.

    Codes are chosen with the scale as stored. Zero always has a code of its own. Where the scale would be zero, it is
    the machine epsilon of ``dtype``.
    """

    def rule(blocks: torch.Tensor) -> Coded:
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
