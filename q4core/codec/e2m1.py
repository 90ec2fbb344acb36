"""NVFP4 and MXFP4: E2M1 codes, rounded to nearest with ties to even, under E4M3 or E8M0 block scales.

Reference:
    OCP Microscaling Formats (MX) v1.0; cuBLAS documentation, 1D block quantisation (the round-up E8M0 scale).
    Bit-equal on CPU to torchao 0.18 (E4M3, E4M3_MUL above 2.1e-33, E8M0) and, for float32 weights, to
    compressed-tensors 0.20 (E4M3_DIV).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core.codec.rule import Coded, quotient
from q4core.formats import ScaleKind, as_e4m3, as_e8m0

if TYPE_CHECKING:
    from q4core.codec.rule import Rule

_LARGEST = 6.0
_LARGEST_E4M3 = 448.0
_SMALLEST_NORMAL_E4M3 = 2.0**-6
_SMALLEST_NORMAL = 2.0**-126
_SMALLEST_GLOBAL = 2.0**-120
"""Its reciprocal, and that of its product with the smallest e4m3 scale that is stored, are finite."""
_ZERO_BLOCK_SCALE = 0.125
"""What compressed-tensors stores where a scale rounds to zero."""
_E8M0_BIAS = 127
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SIGN = 8


def _codes(values: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return E2M1 codes (uint8) of the nearest magnitudes, at most 6, with the sign given.

    At a midpoint the even code wins: bucketize gives the lower one, so midpoints above an odd code are lowered a hair.
    """
    midpoints = torch.tensor(_MIDPOINTS, dtype=torch.float32, device=values.device)
    midpoints[1::2] = torch.nextafter(midpoints[1::2], midpoints.new_zeros(()))
    codes = torch.bucketize(values.abs(), midpoints, out_int32=True).to(torch.uint8)
    return codes | (negative.to(torch.uint8) * _SIGN)


def nvfp4_global_scale(largest: torch.Tensor, kind: ScaleKind) -> torch.Tensor:
    """Return the per-tensor float32 scale for the largest magnitude in the tensor.

    E4M3_MUL: largest / (448 * 6), at least 2^-120: where largest is below 2.1e-33, reciprocals come near overflow, and
    torchao's numbers soon saturate or are NaN. E4M3_DIV: 448 * 6 / largest, or 1 where that is not finite.
    """
    if kind is ScaleKind.E4M3_MUL:
        scale = quotient(largest, _LARGEST_E4M3 * _LARGEST)
        # Below it the reciprocal of global × 2^-6 overflows, and zeros become NaN and then codes.
        return torch.where(scale >= _SMALLEST_GLOBAL, scale, _SMALLEST_GLOBAL)
    divisor = _LARGEST_E4M3 * _LARGEST / largest.clamp(min=_SMALLEST_NORMAL)
    return torch.where(torch.isfinite(divisor), divisor, 1.0)


def nvfp4_rule(kind: ScaleKind, global_scale: torch.Tensor | None) -> Rule:
    """Return the rule of NVFP4 for a scale kind.

    E4M3 and E4M3_MUL: scale = amax / 6 (/ global), kept in [2^-6, 448]; the data is multiplied by the reciprocal of the
    scales; a value's sign is kept even when it is a zero. E4M3_DIV: scale = global * (amax / 6), at most 448, 0.125
    where that rounds to zero; the data is divided; a zero has code 0. PLAIN: scale = amax / 6 in float32, and the data
    is divided.
    """

    def rule(blocks: torch.Tensor) -> Coded:
        scale = quotient(blocks.abs().amax(-1), _LARGEST)
        if kind is ScaleKind.PLAIN:
            scaled = torch.where(scale[..., None] > 0, blocks / scale[..., None], blocks)
            return Coded(_codes(scaled, torch.signbit(scaled)), scale)
        if kind is ScaleKind.E4M3_DIV and global_scale is not None:
            stored = (global_scale * scale).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
            stored = torch.where(as_e4m3(stored) == 0, _ZERO_BLOCK_SCALE, as_e4m3(stored)).to(torch.float8_e4m3fn)
            scaled = blocks / (as_e4m3(stored) / global_scale)[..., None]
            return Coded(_codes(scaled, scaled < 0), stored)
        if global_scale is not None:
            scale = scale / global_scale
        stored = scale.clamp(_SMALLEST_NORMAL_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
        reciprocal = 1.0 if global_scale is None else global_scale.reciprocal()
        scaled = blocks * (reciprocal / as_e4m3(stored))[..., None]
        return Coded(_codes(scaled, torch.signbit(scaled)), stored)

    return rule


def mxfp4_rule(blocks: torch.Tensor) -> Coded:
    """Return MXFP4 codes under the round-up scale, 2^ceil(log2(amax / 6)), so that no value saturates.

    The logarithm is rounded to float32 before the ceiling, as torchao does on CPU: amax / 6 a few ulps above a power of
    two keeps that power. Hardware conversion rounds up there; no other input tells the two apart. The smallest scale,
    2^-127, multiplies the data by 1, which leaves only zeros.
    """
    logarithm = torch.log2(quotient(blocks.abs().amax(-1), _LARGEST).to(torch.float64)).to(torch.float32)
    exponent = (logarithm.ceil().clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS).to(torch.uint8)
    reciprocal = torch.where(exponent == 0, 1.0, as_e8m0(2 * _E8M0_BIAS - exponent))
    scaled = blocks * reciprocal[..., None]
    return Coded(_codes(scaled, torch.signbit(scaled)), exponent.view(torch.float8_e8m0fnu))
