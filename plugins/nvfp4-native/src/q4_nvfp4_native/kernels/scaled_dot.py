"""y[M, N] = rows[m] · global[n] · Σ_k a[m, k] b[n, k] + bias[n] by ``tl.dot_scaled``; E2M1 operands, float32 sums.

Operands lie as ``cuda/gemm.cuh`` says. The interpreter has no ``dot_scaled`` (or, in Triton 3.9, one that reads e4m3 as
e8m0): with NATIVE false the same tiles are decoded and multiplied by ``tl.dot``, which checks every index.
Not measured yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["multiply"]


@triton.jit
def _decoded(codes, scales, ROWS: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr):
    """Return float32 [ROWS, BK] from codes [ROWS, BK / 2] and scale bytes [ROWS, BK / BLOCK]."""
    BLOCKS: tl.constexpr = BK // BLOCK
    code = tl.reshape(tl.join(codes & 15, codes >> 4), [ROWS, BK]).to(tl.int32)
    power, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(power == 0, half, (1.0 + half) * (1 << tl.maximum(power - 1, 0)).to(tl.float32))
    value = tl.where(code >= 8, -size, size)
    byte = scales.to(tl.int32)
    if BLOCK == 16:
        normal = ((((byte >> 3) + 120) << 23) | ((byte & 7) << 20)).to(tl.float32, bitcast=True)
        scale = tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)
    else:
        scale = (byte << 23).to(tl.float32, bitcast=True)
    return tl.reshape(tl.reshape(value, [ROWS, BLOCKS, BLOCK]) * scale[:, :, None], [ROWS, BK])


@triton.jit
def _product(
    a, a_scale, b, b_scale, sums,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return sums + a bᵀ for tiles of codes [BM, BK / 2], [BN, BK / 2] and scale bytes."""
    if NATIVE:
        if BLOCK == 16:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(a, a_scale, "e2m1", b.T, b_scale, "e2m1", sums)
    else:
        left = _decoded(a, a_scale, BM, BK, BLOCK)
        right = _decoded(b, b_scale, BN, BK, BLOCK)
        return tl.dot(left, right.T, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def multiply(
    a_ptr, a_scale_ptr, row_ptr, b_ptr, b_scale_ptr, global_ptr, bias_ptr, out_ptr, M, N, K, global_step, has_bias,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, GLOBAL: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of BM × BN; K is a multiple of BK."""
    tiles_n = tl.cdiv(N, BN)
    m = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    m_row = tl.minimum(m, M - 1).to(tl.int64)
    n_row = tl.minimum(n, N - 1).to(tl.int64)
    byte = tl.arange(0, BK // 2)
    scale = tl.arange(0, BK // BLOCK)
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + m_row[:, None] * (K // 2) + (k // 2 + byte)[None, :])
        b = tl.load(b_ptr + n_row[:, None] * (K // 2) + (k // 2 + byte)[None, :])
        a_scale = tl.load(a_scale_ptr + m_row[:, None] * (K // BLOCK) + (k // BLOCK + scale)[None, :])
        b_scale = tl.load(b_scale_ptr + n_row[:, None] * (K // BLOCK) + (k // BLOCK + scale)[None, :])
        sums = _product(a, a_scale, b, b_scale, sums, BM, BN, BK, BLOCK, NATIVE)
    valid_n = n < N
    y = sums
    if GLOBAL != 0:
        factor = tl.load(global_ptr + n_row * global_step)
        if GLOBAL == 2:
            factor = tl.div_rn(tl.full([BN], 1.0, tl.float32), factor)
        y = y * factor[None, :]
    y = y * tl.load(row_ptr + m_row)[:, None]
    y += tl.load(bias_ptr + n, mask=valid_n & (has_bias != 0), other=0.0).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & valid_n[None, :])
