"""Quantisation of x[N, K] to NVFP4 or MXFP4, to the very bytes of q4core's reference codec on the CPU.

Blocks of 16 (32) in-features are numbered row by row; a program takes TILE of them. Every operation is the reference's
own, rounded to float32 once, in its order: division is ``div_rn``, and nothing is fused. The largest magnitude of the
whole tensor is found by a first kernel, as bits, which order like magnitudes and put NaN above infinity.

Bound: the bytes of x, read twice for NVFP4 with a global scale, and once otherwise; not measured yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from q4_triton_kernels.kernels.numbers import widen

__all__ = ["largest_bits", "quantize_mxfp4", "quantize_nvfp4"]

# Values of the constexpr KIND: how scales are stored.
SINGLE = 0
MULTIPLY = 1
DIVIDE = 2

_VARYING = ("seed", "row_step", "blocks", "total", "programs")
"""Arguments that change from call to call: no variant is compiled for 1, or for multiples of 16."""


@triton.jit
def _block(x_ptr, row_step, blocks, total, block, BLOCK: tl.constexpr):
    """Load blocks [TILE, BLOCK] by their numbers, zeros past the last one, as float32."""
    row = (block // blocks).to(tl.int64)
    place = row * row_step + (block % blocks).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    return widen(tl.load(x_ptr + place[:, None] + lanes[None, :], mask=(block < total)[:, None], other=0.0))


@triton.jit(do_not_specialize=_VARYING)
def largest_bits(
    x_ptr, parts_ptr, row_step, blocks, total, programs,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the largest magnitude, as bits, that each program meets."""
    program = tl.program_id(0)
    largest = tl.zeros([TILE], tl.int32)
    for start in range(program * TILE, total, programs * TILE):
        x = _block(x_ptr, row_step, blocks, total, start + tl.arange(0, TILE), BLOCK)
        largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    tl.store(parts_ptr + program, tl.max(largest, axis=0))


@triton.jit
def _magnitude(x, chance, STOCHASTIC: tl.constexpr):
    """Return the E2M1 code of |x|: the nearest, ties to even; or the one below or above, by chance in [0, 1)."""
    size = tl.abs(x)
    if STOCHASTIC:
        size = tl.minimum(size, 6.0)
        low = (
            (size >= 0.5).to(tl.int32) + (size >= 1.0).to(tl.int32) + (size >= 1.5).to(tl.int32)
            + (size >= 2.0).to(tl.int32) + (size >= 3.0).to(tl.int32) + (size >= 4.0).to(tl.int32)
            + (size >= 6.0).to(tl.int32)
        )  # fmt: skip
        step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
        inverse = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
        below = tl.where(size < 2.0, low * 0.5, tl.where(size < 4.0, (low - 2) * step, (low - 4) * step))
        code = low + (chance < (size - below) * inverse).to(tl.int32)
    else:
        code = (
            (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
            + (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
            + (size > 5.0).to(tl.int32)
        )  # fmt: skip
    return code


@triton.jit
def _chances(seed, block, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return one number in [0, 1) for each element of each block, of 24 random bits."""
    QUARTER: tl.constexpr = BLOCK // 4
    offsets = block[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    a, b, c, d = tl.randint4x(seed, offsets)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [TILE, BLOCK])
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-8


@triton.jit
def _store_codes(codes_ptr, code, block, total, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Store codes [TILE, BLOCK], two a byte, the even one in the lower nibble."""
    HALF: tl.constexpr = BLOCK // 2
    low, high = tl.split(tl.reshape(code, [TILE, HALF, 2]))
    place = block.to(tl.int64)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(codes_ptr + place, (low | (high << 4)).to(tl.uint8), mask=(block < total)[:, None])


@triton.jit
def _scale_place(block, blocks, SWIZZLED: tl.constexpr):
    """Return where the scale of a block lies: row by row, or in tiles of 128 rows by 4 scales."""
    if SWIZZLED:
        row = (block // blocks).to(tl.int64)
        column = block % blocks
        tile = (row // 128) * ((blocks + 3) // 4) + column // 4
        place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    else:
        place = block.to(tl.int64)
    return place


@triton.jit
def _e4m3_byte(value, UP: tl.constexpr):
    """Return the E4M3 byte of 0 … 448: the nearest one, ties to even; with UP the next one above."""
    bits = value.to(tl.int32, bitcast=True)
    if UP:
        normal = ((bits + 0xFFFFF) >> 20) - 960
        whole = (value * 512.0).to(tl.int32)
        small = whole + (whole.to(tl.float32) < value * 512.0).to(tl.int32)
    else:
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        small = (value * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(value < 0.015625, small, normal)


@triton.jit
def _e4m3_value(byte):
    """Return the value of an E4M3 byte without sign."""
    normal = (((byte >> 3) + 120) << 23) | ((byte & 7) << 20)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=_VARYING)
def quantize_nvfp4(
    x_ptr, parts_ptr, codes_ptr, scales_ptr, global_ptr, bad_ptr, row_step, blocks, total, seed,
    PARTS: tl.constexpr, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, SWIZZLED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write codes, scales and the global scale; to bad_ptr the largest magnitude of the program's blocks, as bits."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = _block(x_ptr, row_step, blocks, total, block, 16)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.store(bad_ptr + tl.program_id(0), tl.max(bits, axis=0))
    one = tl.full([1], 1.0, tl.float32)
    wanted = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full([TILE], 6.0, tl.float32))
    if KIND == 0:
        byte = _e4m3_byte(tl.minimum(tl.maximum(wanted, 0.015625), 448.0), STOCHASTIC)
        factor = tl.div_rn(one, _e4m3_value(byte))
    else:
        largest = tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), axis=0)
        whole = (tl.zeros([1], tl.int32) + largest).to(tl.float32, bitcast=True)
        if KIND == 1:
            share = tl.div_rn(whole, tl.full([1], 2688.0, tl.float32))
            share = tl.where(share >= 7.52316384526264e-37, share, 7.52316384526264e-37)
            wanted = tl.div_rn(wanted, share + tl.zeros([TILE], tl.float32))
            byte = _e4m3_byte(tl.minimum(tl.maximum(wanted, 0.015625), 448.0), STOCHASTIC)
            factor = tl.div_rn(tl.div_rn(one, share) + tl.zeros([TILE], tl.float32), _e4m3_value(byte))
        else:
            share = tl.div_rn(one, tl.maximum(whole, 1.1754943508222875e-38)) * 2688.0
            share = tl.where(share < float("inf"), share, 1.0)
            byte = _e4m3_byte(tl.minimum(share * wanted, 448.0), STOCHASTIC)
            byte = tl.where(byte == 0, 32, byte)  # 0.125
            factor = tl.div_rn(_e4m3_value(byte), share + tl.zeros([TILE], tl.float32))
        tl.store(global_ptr + tl.arange(0, 1), share, mask=tl.program_id(0) + tl.arange(0, 1) == 0)
    if KIND == 2:
        scaled = tl.div_rn(x, factor[:, None] + tl.zeros([TILE, 16], tl.float32))
        sign = (scaled < 0.0).to(tl.int32)
    else:
        scaled = x * factor[:, None]
        sign = (scaled.to(tl.int32, bitcast=True) >> 31) & 1
    if STOCHASTIC:
        code = _magnitude(scaled, _chances(seed, block, TILE, 16), STOCHASTIC)
    else:
        code = _magnitude(scaled, scaled, STOCHASTIC)
    _store_codes(codes_ptr, code | (sign << 3), block, total, TILE, 16)
    tl.store(scales_ptr + _scale_place(block, blocks, SWIZZLED), byte.to(tl.uint8), mask=block < total)


@triton.jit
def _slack(exponent):
    """Return by how many float32 steps above 2^exponent the reference still takes 2^exponent for the ceiling.

    It rounds log2 to float32 before the ceiling. Just above 2^k that logarithm is k + m 2^-23 / ln 2 for m steps, and a
    float32 near k rounds it to k while that is below half its own spacing.
    """
    # Below zero the logarithm has a smaller magnitude than k, so that at a power of two the finer spacing holds.
    size = tl.where(exponent > 0, exponent, -exponent - 1)
    return tl.where(size >= 64, 22, tl.where(size >= 32, 11, tl.where(size >= 16, 5, tl.where(
        size >= 8, 2, tl.where(size >= 4, 1, 0)))))  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def quantize_mxfp4(
    x_ptr, codes_ptr, scales_ptr, bad_ptr, row_step, blocks, total, seed,
    STOCHASTIC: tl.constexpr, SWIZZLED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write codes and scales 2^ceil(log2(amax / 6)); to bad_ptr the largest magnitude of the blocks, as bits."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = _block(x_ptr, row_step, blocks, total, block, 32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.store(bad_ptr + tl.program_id(0), tl.max(bits, axis=0))
    wanted = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full([TILE], 6.0, tl.float32))
    wanted_bits = wanted.to(tl.int32, bitcast=True)
    power = wanted_bits >> 23
    fraction = wanted_bits & 0x7FFFFF
    byte = tl.where(
        power == 0,
        (fraction > 0x400000 + 11).to(tl.int32),  # 2^-127 is a subnormal number, with steps of 2^-22 of itself
        power + (fraction > _slack(power - 127)).to(tl.int32),
    )
    byte = tl.minimum(byte, 254)
    factor = tl.where(byte == 0, 1.0, ((254 - byte) << 23).to(tl.float32, bitcast=True))
    scaled = x * factor[:, None]
    sign = (scaled.to(tl.int32, bitcast=True) >> 31) & 1
    if STOCHASTIC:
        code = _magnitude(scaled, _chances(seed, block, TILE, 32), STOCHASTIC)
    else:
        code = _magnitude(scaled, scaled, STOCHASTIC)
    _store_codes(codes_ptr, code | (sign << 3), block, total, TILE, 32)
    tl.store(scales_ptr + _scale_place(block, blocks, SWIZZLED), byte.to(tl.uint8), mask=block < total)
