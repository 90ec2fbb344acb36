"""y[M, N] = rows[m] · global[n] · Σ_k a[m, k] b[n, k] + bias[n] by ``tl.dot_scaled``, both operands E2M1, sums in float32.

Operands lie as ``cuda/gemm.cuh`` says. Not measured yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["multiply"]


@triton.jit(do_not_specialize=["M"])
def multiply(
    a_ptr, a_scale_ptr, row_ptr, b_ptr, b_scale_ptr, global_ptr, bias_ptr, out_ptr, M, N, K, global_step, has_bias,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, GLOBAL: tl.constexpr,
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
        if BLOCK == 16:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        sums = tl.dot_scaled(a, a_scale, "e2m1", b.T, b_scale, "e2m1", sums)
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
