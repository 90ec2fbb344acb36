"""Q4_0, Q4_1 and Q8_0: codes from the float32 step, which is then stored as float16.

Reference:
    ggml's block formats. Bit-equal to ``gguf.quants.quantize`` 0.19 on x86.
"""

from __future__ import annotations

import torch

from q4core.codec.quotient import quotient
from q4core.codec.rule import Coded

__all__ = ["q4_0_rule", "q4_1_rule", "q8_0_rule"]

_LARGEST_NIBBLE = 15
_EXTREME_CODE = -8
_LARGEST_BYTE = 127


def _inverse(step: torch.Tensor) -> torch.Tensor:
    return torch.where(step == 0, 0.0, step.reciprocal())[..., None]


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """Return values cut towards zero, 0 … 15; steps so small that their inverse overflows give code 0."""
    return torch.where(torch.isfinite(values), values, 0.0).trunc().clamp(0, _LARGEST_NIBBLE).to(torch.uint8)


def q4_0_rule(blocks: torch.Tensor, *, short: bool) -> Coded:  # noqa: ARG001  # K is a multiple of 32
    """Return Q4_0: the value of largest magnitude (the first of equals) gets code 0, which stands for -8."""
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
    step = extreme / _EXTREME_CODE
    return Coded(_nibbles(blocks * _inverse(step) + 8.5), step.to(torch.float16))


def q4_1_rule(blocks: torch.Tensor, *, short: bool) -> Coded:  # noqa: ARG001  # K is a multiple of 32
    """Return Q4_1: 15 equal steps from the least to the greatest value.

    Where the least value is a zero, the last zero's sign is stored (it never shows in a decoded value).
    """
    backwards = blocks.flip(-1)
    least = backwards.gather(-1, backwards.argmin(-1, keepdim=True))[..., 0]
    step = quotient(blocks.amax(-1) - least, _LARGEST_NIBBLE)
    codes = _nibbles((blocks - least[..., None]) * _inverse(step) + 0.5)
    return Coded(codes, step.to(torch.float16), offset=least.to(torch.float16))


def q8_0_rule(blocks: torch.Tensor, *, short: bool) -> Coded:  # noqa: ARG001  # K is a multiple of 32
    """Return Q8_0: 127 steps each way, halves rounded away from zero."""
    step = quotient(blocks.abs().amax(-1), _LARGEST_BYTE)
    scaled = blocks * _inverse(step)
    scaled = torch.where(torch.isfinite(scaled), scaled, 0.0)
    whole = scaled.abs().floor()
    rounded = (whole + (2 * (scaled.abs() - whole)).floor()) * scaled.sign()
    return Coded(rounded.to(torch.int8).view(torch.uint8), step.to(torch.float16))
