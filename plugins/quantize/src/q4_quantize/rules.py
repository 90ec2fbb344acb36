"""Quantisation rules: the codes and numbers of some blocks, by the rule of the library that each format comes from.

Reference:
    NF4, FP4: Dettmers et al., QLoRA, 2023 (NF4, double quantisation), and 8-bit Approximations, 2015 (dynamic map).
        Bit-equal to bitsandbytes 0.50 on x86 CPUs.
    NVFP4, MXFP4: OCP Microscaling Formats (MX) v1.0; cuBLAS documentation, 1D block quantisation (the round-up E8M0
        scale). Bit-equal on CPU to torchao 0.18 (E4M3, E4M3_MUL above 2.1e-33, E8M0) and, for float32 weights, to
        compressed-tensors 0.20 (E4M3_DIV).
    Q4_0, Q4_1, Q8_0: ggml's block formats, whose codes come from the float32 step. Bit-equal to
        ``gguf.quants.quantize`` 0.19 on x86.
    Q4_K, Q6_K, IQ4_NL: see ``super_blocks``.
    INT4: GPTQ's, AWQ's and compressed-tensors' affine scheme. Bit-equal to compressed-tensors 0.20 on float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import attrs
import torch

from q4_quantize.coded import Coded
from q4_quantize.super_blocks import iq4_nl_rule, q4_k_rule, q6_k_rule
from q4core import ScaleKind, resolve_levels

if TYPE_CHECKING:
    from q4core import Format

_SMALLEST_ABSMAX = 1e-38
_LARGEST_E2M1 = 6.0
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
_STEPS = 15
_EXTREME_CODE = -8
_LARGEST_BYTE = 127
_LOWEST, _HIGHEST = -8, 7


Rule: TypeAlias = Callable[[torch.Tensor], Coded]
"""Turns float32 blocks [..., block] into codes and numbers."""


def quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return ``values / divisor``, each rounded once.

    On CUDA torch multiplies by the reciprocal of a Python number, which rounds twice; a tensor it divides by.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def _of_e4m3(scale: torch.Tensor) -> torch.Tensor:
    return resolve_levels(ScaleKind.E4M3, scale)


def _nearest(values: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the code nearest to each value; halfway between two, the code of the lower value."""
    levels, order = form.codebook_tensor(values.device).sort(stable=True)
    midpoints = (levels[:-1] + levels[1:]) / 2
    index = torch.bucketize(values, midpoints, out_int32=True)
    return order.to(torch.uint8).index_select(0, index.reshape(-1)).view(values.shape)


def code_of_zero(form: Format) -> int:
    """Return the code that pads the last byte of an odd number of codes."""
    return int(_nearest(torch.zeros(1, dtype=torch.float32), form))


def absmax_rule(form: Format, *, short: bool = False) -> Rule:
    """Return the rule of NF4 or FP4, for whole blocks or for the ``short`` one that ends a weight.

    Whole blocks are multiplied by the reciprocal of absmax, the short last block is divided by it, and its absmax is
    at least 1e-38; an all-zero whole block stores 0.
    """

    def rule(blocks: torch.Tensor) -> Coded:
        absmax = blocks.abs().amax(-1)
        floored = absmax.clamp(min=_SMALLEST_ABSMAX)
        if short:
            return Coded(_nearest((blocks / floored[..., None]).clamp(-1, 1), form), floored)
        scaled = blocks * floored.reciprocal()[..., None]
        return Coded(_nearest(scaled.clamp(-1, 1), form), absmax)

    return rule


def _e2m1_codes(values: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
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
        scale = quotient(largest, _LARGEST_E4M3 * _LARGEST_E2M1)
        # Below it the reciprocal of global × 2^-6 overflows, and zeros become NaN and then codes.
        return torch.where(scale >= _SMALLEST_GLOBAL, scale, _SMALLEST_GLOBAL)
    divisor = _LARGEST_E4M3 * _LARGEST_E2M1 / largest.clamp(min=_SMALLEST_NORMAL)
    return torch.where(torch.isfinite(divisor), divisor, 1.0)


def nvfp4_rule(kind: ScaleKind, global_scale: torch.Tensor | None) -> Rule:
    """Return the rule of NVFP4 for a scale kind.

    E4M3 and E4M3_MUL: scale = amax / 6 (/ global), clamped to [2^-6, 448]; the data is multiplied by the reciprocal of
    the scales; a zero keeps its sign. E4M3_DIV: scale = global * (amax / 6), at most 448, 0.125 where that rounds to
    zero; the data is divided; a zero has code 0. PLAIN: scale = amax / 6 in float32, and the data is divided.
    """

    def rule(blocks: torch.Tensor) -> Coded:
        scale = quotient(blocks.abs().amax(-1), _LARGEST_E2M1)
        if kind is ScaleKind.PLAIN:
            scaled = torch.where(scale[..., None] > 0, blocks / scale[..., None], blocks)
            return Coded(_e2m1_codes(scaled, torch.signbit(scaled)), scale)
        if kind is ScaleKind.E4M3_DIV and global_scale is not None:
            stored = (global_scale * scale).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
            stored = torch.where(_of_e4m3(stored) == 0, _ZERO_BLOCK_SCALE, _of_e4m3(stored)).to(torch.float8_e4m3fn)
            scaled = blocks / (_of_e4m3(stored) / global_scale)[..., None]
            return Coded(_e2m1_codes(scaled, scaled < 0), stored)
        if global_scale is not None:
            scale = scale / global_scale
        stored = scale.clamp(_SMALLEST_NORMAL_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
        reciprocal = 1.0 if global_scale is None else global_scale.reciprocal()
        scaled = blocks * (reciprocal / _of_e4m3(stored))[..., None]
        return Coded(_e2m1_codes(scaled, torch.signbit(scaled)), stored)

    return rule


def mxfp4_rule(blocks: torch.Tensor) -> Coded:
    """Return MXFP4 codes under the round-up scale, 2^ceil(log2(amax / 6)), so that no value saturates.

    The logarithm is rounded to float32 before the ceiling, as torchao does on CPU: amax / 6 a few ulps above a power of
    two keeps that power. Hardware conversion rounds up there; the two differ for no other input. The smallest scale,
    2^-127, multiplies the data by 1, which leaves only zeros.
    """
    logarithm = torch.log2(quotient(blocks.abs().amax(-1), _LARGEST_E2M1).to(torch.float64)).to(torch.float32)
    exponent = (logarithm.ceil().clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS).to(torch.uint8)
    reciprocal = torch.where(exponent == 0, 1.0, resolve_levels(ScaleKind.E8M0, 2 * _E8M0_BIAS - exponent))
    scaled = blocks * reciprocal[..., None]
    return Coded(_e2m1_codes(scaled, torch.signbit(scaled)), exponent.view(torch.float8_e8m0fnu))


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


@attrs.frozen
class Choices:
    """What a rule depends on besides the values: format, scale kind, dtype of ``dense``, global scale, symmetry."""

    format: Format
    kind: ScaleKind
    dtype: torch.dtype
    global_scale: torch.Tensor | None = None
    symmetric: bool = False


RULES: dict[str, Callable[[Choices], Rule]] = {
    "absmax": lambda choices: absmax_rule(choices.format),
    "e2m1": lambda choices: (
        mxfp4_rule if choices.kind is ScaleKind.E8M0 else nvfp4_rule(choices.kind, choices.global_scale)
    ),
    "q4_0": lambda _: q4_0_rule,
    "q4_1": lambda choices: q4_k_rule if choices.kind is ScaleKind.SUPER_BLOCK else q4_1_rule,
    "q8_0": lambda choices: q6_k_rule if choices.kind is ScaleKind.SUPER_BLOCK else q8_0_rule,
    "iq4_nl": lambda choices: iq4_nl_rule(choices.format),
    "affine": lambda choices: int4_rule(choices.dtype, symmetric=choices.symmetric),
}
"""Name, as ``Format.rule`` has it → the rule for some choices."""
MEANINGS = {"e2m1": "nvfp4", "q4_0": "q4_0", "q4_1": "q4_1", "q8_0": "q8_0", "iq4_nl": "iq4_nl", "affine": "int4"}
"""Rule → a built-in format whose codes it writes; ``absmax`` takes the nearest of any codebook's values."""
