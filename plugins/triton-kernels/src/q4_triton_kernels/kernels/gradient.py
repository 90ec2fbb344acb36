"""gradient: dxᵀ[K, M] = wᵀ[K, N] @ dyᵀ[N, M] on tensor cores, weights decoded in registers, sums in float32.

The sum runs over out-features, of which each has scales of its own, so no scale can wait for the end of a sum, as it
does in gemm. Where 16 bits hold scale × code, one product serves. Otherwise a float32 weight is cut into three bfloat16
whose sum it is. A bfloat16 gradient meets these in three products. A float16 one is cut into two bfloat16, and of their
six products the smallest, of the lowest parts of both, is left out: it is below 2^-25 of the whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from q4_triton_kernels.kernels.decode import bits_of, look_up, scale_of
from q4_triton_kernels.kernels.numbers import dot, multiply, narrow, widen

__all__ = ["gradient"]


@triton.jit
def _spread(numbers, HALF: tl.constexpr):
    """Return numbers of each group [G, BN], or of all groups [BN], for each byte: [BYTES, BN] or [1, BN]."""
    if len(numbers.shape) == 1:
        wide = numbers[None, :]
    else:
        GROUPS: tl.constexpr = numbers.shape[0]
        BN: tl.constexpr = numbers.shape[1]
        wide = tl.reshape(tl.broadcast_to(numbers[:, None, :], [GROUPS, HALF, BN]), [GROUPS * HALF, BN])
    return wide


@triton.jit
def _dot_short(acc, code, d, scale, SCALE: tl.constexpr):
    """Add (scale × code) @ d, where d's dtype holds scale × code exactly; × 2^-8 for e4m3, as in gemm."""
    DTYPE: tl.constexpr = d.dtype
    if SCALE == 1:
        POWER: tl.constexpr = 3.32306998946229e35 if DTYPE == tl.bfloat16 else 64.0
        weight = multiply(bits_of(code, DTYPE), narrow(scale * POWER, DTYPE))
    else:
        value = multiply(bits_of(code, DTYPE), narrow(tl.full([1, 1], 8.507059173023462e37, tl.float32), DTYPE))
        weight = multiply(value, narrow(scale, DTYPE))
    return dot(weight, d, acc)


@triton.jit
def _dot_long(acc, weight, d, d_rest):
    """Add weight @ (d + d_rest): weight in float32 as three bfloat16, d in bfloat16, d_rest as well or None."""
    high = narrow(weight, tl.bfloat16)
    rest = weight - widen(high)
    middle = narrow(rest, tl.bfloat16)
    low = narrow(rest - widen(middle), tl.bfloat16)
    acc = dot(low, d, acc)
    if d_rest is not None:
        acc = dot(middle, d_rest, acc)
        acc = dot(high, d_rest, acc)
    acc = dot(middle, d, acc)
    return dot(high, d, acc)


@triton.jit
def _add(
    acc, code, d, d_rest, s_ptr, z_ptr, table_ptr, factor, row, base, K, blocks,
    BYTES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, BASE: tl.constexpr,
    WEIGHTS: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr, GLOBAL: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Add one nibble of BYTES bytes: base is the first one's in-feature; factor the global scale by row."""
    if HALF >= BYTES or BLOCK % 128 == 0:  # one number per out-feature
        place = row * blocks + base // BLOCK
        here = base < K
    else:
        first = base + tl.arange(0, BYTES // HALF) * (2 * HALF)
        place = row[None, :] * blocks + (first // BLOCK)[:, None]
        here = (first < K)[:, None]
    scale = _spread(scale_of(tl.load(s_ptr + place, mask=here, other=0.0), SCALE), HALF)
    if WEIGHTS:
        acc = _dot_short(acc, code, d, scale, SCALE)
    else:
        if CODES == 2:
            weight = (code.to(tl.int32) - BASE).to(tl.float32)
        else:
            weight = look_up(code, table_ptr, TABLE).to(tl.float32, bitcast=True)
        if SECOND != 0:
            second = _spread(widen(tl.load(z_ptr + place, mask=here, other=0.0)), HALF)
        if SECOND == 2:
            weight -= second
        weight = weight * scale
        if SECOND == 1:
            weight += second
        if GLOBAL == 1:
            weight = weight * factor[None, :]
        elif GLOBAL == 2:
            weight = weight / factor[None, :]
        if d.dtype == tl.float32:
            acc = dot(weight, d, acc)
        else:
            acc = _dot_long(acc, weight, d, d_rest)
    return acc


@triton.jit
def _write(acc, m, k, M, K, out_ptr, part_ptr, splits, factor):
    """Write a plane [BYTES, BM]: the result where the sum is whole, else float32 sums [splits, M, K]."""
    valid = (k < K)[:, None] & (m < M)[None, :]
    if splits == 1:
        place = m.to(tl.int64)[None, :] * K + k[:, None]
        tl.store(out_ptr + place, narrow(acc * factor, out_ptr.dtype.element_ty), mask=valid)
    else:
        place = (tl.program_id(1) * M + m).to(tl.int64)[None, :] * K + k[:, None]
        tl.store(part_ptr + place, acc, mask=valid)


@triton.jit
def gradient(
    d_ptr, q_ptr, s_ptr, z_ptr, g_ptr, table_ptr, out_ptr, part_ptr,
    M, N, K, row_bytes, blocks, splits, span,
    BYTES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    CODES: tl.constexpr, BASE: tl.constexpr, WEIGHTS: tl.constexpr, POST: tl.constexpr, SCALE: tl.constexpr,
    SECOND: tl.constexpr, GLOBAL: tl.constexpr, BY_ROW: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the in-features in BYTES bytes × BM rows over a span of steps of BN out-features.

    BYTES is 64, or 32 for float32: a float32 product of 64 rows is made one of tf32 on sm_100, whatever is asked for.
    GLOBAL with BY_ROW is taken into each weight; a single one is applied to the whole sum, by ``finish`` where the sum
    is cut.
    """
    tiles_m = tl.cdiv(M, BM)
    tile_k = tl.program_id(0) // tiles_m
    m = (tl.program_id(0) % tiles_m) * BM + tl.arange(0, BM)
    p = tile_k * BYTES + tl.arange(0, BYTES)
    k = (p // HALF) * (2 * HALF) + p % HALF
    d_rows = d_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * N
    q_bytes = q_ptr + p[:, None]
    base = (tile_k * BYTES // HALF) * (2 * HALF) + tile_k * BYTES % HALF
    low = tl.zeros([BYTES, BM], tl.float32)
    high = tl.zeros([BYTES, BM], tl.float32)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, tl.cdiv(N, BN))
    INNER: tl.constexpr = GLOBAL if BY_ROW else 0
    for step in range(first, last):
        n = step * BN + tl.arange(0, BN)
        row = tl.minimum(n, N - 1).to(tl.int64)
        q = tl.load(q_bytes + row[None, :] * row_bytes)
        d = tl.load(d_rows + n[:, None], mask=(n < N)[:, None], other=0.0)
        d_rest = None
        if (not WEIGHTS) and d.dtype == tl.float16:
            wide = widen(d)
            d = narrow(wide, tl.bfloat16)
            d_rest = narrow(wide - widen(d), tl.bfloat16)
        factor = row
        if INNER != 0:
            factor = tl.load(g_ptr + row)
        low = _add(low, q & 15, d, d_rest, s_ptr, z_ptr, table_ptr, factor, row, base, K, blocks,
                   BYTES, HALF, BLOCK, CODES, BASE, WEIGHTS, SCALE, SECOND, INNER, TABLE)  # fmt: skip
        high = _add(high, q >> 4, d, d_rest, s_ptr, z_ptr, table_ptr, factor, row, base + HALF, K, blocks,
                    BYTES, HALF, BLOCK, CODES, BASE, WEIGHTS, SCALE, SECOND, INNER, TABLE)  # fmt: skip
    whole = tl.full([1, 1], 1.0, tl.float32)
    if GLOBAL != 0 and not BY_ROW:
        given = tl.load(g_ptr)
        whole = whole * given if GLOBAL == 1 else whole / given
    _write(low * POST, m, k, M, K, out_ptr, part_ptr, splits, whole)
    _write(high * POST, m, k + HALF, M, K, out_ptr, part_ptr, splits, whole)
