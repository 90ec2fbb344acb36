"""gemm: yᵀ[N, M] = w[N, K] @ xᵀ[K, M] on tensor cores, weights decoded in registers, sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from q4_triton_kernels.kernels.decode import bits_of, integer_of, look_up, scale_of, second_of
from q4_triton_kernels.kernels.numbers import dot, multiply, narrow, subtract, widen

__all__ = ["gemm"]


@triton.jit
def _dot_codes(
    part, code, x, table_ptr, zero, CODES: tl.constexpr, BASE: tl.constexpr, SECOND: tl.constexpr, TABLE: tl.constexpr
):
    """Add codes @ x, where 16 bits hold the codes: one product, or two where a table's values need twice 16 bits."""
    DTYPE: tl.constexpr = x.dtype
    if (CODES == 0) | (CODES == 3):
        pair = look_up(code, table_ptr, TABLE)
        if CODES == 0:
            part = dot(pair.to(tl.int16).to(DTYPE, bitcast=True), x, part)
        part = dot((pair >> 16).to(tl.int16).to(DTYPE, bitcast=True), x, part)
    elif CODES == 1:
        POWER: tl.constexpr = 8.507059173023462e37 if DTYPE == tl.bfloat16 else 16384.0
        part = dot(multiply(bits_of(code, DTYPE), narrow(tl.full([1, 1], POWER, tl.float32), DTYPE)), x, part)
    else:
        value = integer_of(code, BASE, DTYPE)
        if SECOND == 3:
            value = subtract(value, narrow(zero.to(tl.float32), DTYPE)[:, None])
        part = dot(value, x, part)
    return part


@triton.jit
def _dot_weights(acc, code, x, scale, table_ptr, SCALE: tl.constexpr, TABLE: tl.constexpr):
    """Add (scale × code) @ x, where x's dtype holds scale × code exactly, or is float32."""
    DTYPE: tl.constexpr = x.dtype
    if DTYPE == tl.float32:
        value = look_up(code, table_ptr, TABLE).to(tl.float32, bitcast=True)
        acc = dot(value * scale[:, None], x, acc)
    elif SCALE == 1:
        # w × 2^-8 has no factor that overflows: bits × 2^-126 (2^-14) × scale × 2^118 (2^6).
        POWER: tl.constexpr = 3.32306998946229e35 if DTYPE == tl.bfloat16 else 64.0
        acc = dot(multiply(bits_of(code, DTYPE), narrow(scale * POWER, DTYPE)[:, None]), x, acc)
    else:
        value = multiply(bits_of(code, DTYPE), narrow(tl.full([1, 1], 8.507059173023462e37, tl.float32), DTYPE))
        acc = dot(multiply(value, narrow(scale, DTYPE)[:, None]), x, acc)
    return acc


@triton.jit
def gemm(
    x_ptr, x_stride, q_ptr, s_ptr, z_ptr, g_ptr, table_ptr, bias_ptr, out_ptr,
    M, N, K, row_bytes, blocks, span, g_stride, has_bias,
    BN: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    CODES: tl.constexpr, BASE: tl.constexpr, WEIGHTS: tl.constexpr, POST: tl.constexpr, SCALE: tl.constexpr,
    SECOND: tl.constexpr, GLOBAL: tl.constexpr, EVEN: tl.constexpr, TABLE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BN, BM] over a span of steps of 128 in-features.

    WEIGHTS says that x's dtype holds scale × code: then one sum runs over all of K. Otherwise each block's sum over
    codes is scaled in float32. The result is y itself with FINAL, else float32 sums [splits, M, N].
    """
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    group = tile // (GROUP * tiles_m)
    size = tl.minimum(tiles_n - group * GROUP, GROUP)
    inner = tile % (GROUP * tiles_m)
    n = (group * GROUP + inner % size) * BN + tl.arange(0, BN)
    m = (inner // size) * BM + tl.arange(0, BM)
    row = tl.minimum(n, N - 1).to(tl.int64)
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * x_stride
    h = tl.arange(0, HALF)
    q_rows = q_ptr + row[:, None] * row_bytes + h[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, row_bytes // 64)
    for step in range(first, last):
        part = tl.zeros([BN, BM], tl.float32)
        for unit in tl.static_range(128 // (2 * HALF)):
            q = tl.load(q_rows + (step * 64 + unit * HALF))
            for plane in tl.static_range(2):
                base = step * 128 + (2 * unit + plane) * HALF
                k = base + h
                x_mask = (k < K)[:, None] if not EVEN else base < K
                x = tl.load(x_rows + k[:, None], mask=x_mask, other=0.0)
                code = q & 15 if plane == 0 else q >> 4
                if (
                    BLOCK % 128 != 0 or unit + plane == 0
                ):  # else one block holds the step, of which the end may be padding
                    place = row * blocks + base // BLOCK
                    here = base < K
                    scale = scale_of(tl.load(s_ptr + place, mask=here, other=0.0), SCALE)
                    stored = scale
                    if SECOND != 0:
                        stored = tl.load(z_ptr + place, mask=here, other=0.0)
                if WEIGHTS:
                    acc = _dot_weights(acc, code, x, scale, table_ptr, SCALE, TABLE)
                else:
                    part = _dot_codes(part, code, x, table_ptr, stored, CODES, BASE, SECOND, TABLE)
                    if BLOCK % 128 != 0 or (2 * unit + plane + 1) * HALF == 128:
                        acc += scale[:, None] * part
                        part = tl.zeros([BN, BM], tl.float32)
                if (SECOND == 1) | (SECOND == 2):
                    sums = tl.sum(widen(x), axis=0)
                    acc += second_of(stored, scale, SECOND)[:, None] * sums[None, :]
    valid = (n < N)[:, None] & (m < M)[None, :]
    acc = acc * POST
    if FINAL:
        if GLOBAL != 0:
            factor = tl.load(g_ptr + row * g_stride)[:, None]
            acc = acc * factor if GLOBAL == 1 else acc / factor
        bias = widen(tl.load(bias_ptr + n, mask=(n < N) & (has_bias != 0), other=0.0))
        acc += bias[:, None]
        place = m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptr + place, narrow(acc, out_ptr.dtype.element_ty), mask=valid)
    else:
        place = (tl.program_id(1) * M + m).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptr + place, acc, mask=valid)
