"""Kernels around a library GEMM and after a split sum: dequantised weights, and finished sums."""

from __future__ import annotations

import triton
import triton.language as tl

from q4_triton_kernels.kernels.decode import look_up, scale_of, second_of
from q4_triton_kernels.kernels.numbers import narrow, widen

__all__ = ["dense", "finish"]


@triton.jit
def dense(
    q_ptr, s_ptr, z_ptr, table_ptr, out_ptr, N, K, row_bytes, blocks,
    R: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TERMS: tl.constexpr,
    SCALE: tl.constexpr, SECOND: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Write w, without the global scale, as TERMS tensors [N, 2 × row_bytes] whose sum it is.

    Each program writes R rows of 128 in-features.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0) * R + tl.arange(0, R)
    row = tl.minimum(n, N - 1).to(tl.int64)
    h = tl.arange(0, HALF)
    for unit in tl.static_range(128 // (2 * HALF)):
        q = tl.load(q_ptr + row[:, None] * row_bytes + (tl.program_id(1) * 64 + unit * HALF + h)[None, :])
        for plane in tl.static_range(2):
            base = tl.program_id(1) * 128 + (2 * unit + plane) * HALF
            code = q if plane == 0 else q >> 4
            place = row * blocks + base // BLOCK
            here = base < K
            scale = scale_of(tl.load(s_ptr + place, mask=here, other=0.0), SCALE)
            value = look_up(code, table_ptr, TABLE).to(tl.float32, bitcast=True) * scale[:, None]
            if SECOND != 0:
                stored = tl.load(z_ptr + place, mask=here, other=0.0)
                value += second_of(stored, scale, SECOND)[:, None]
            where = row[:, None] * (2 * row_bytes) + (base + h)[None, :]
            for term in tl.static_range(TERMS):
                rounded = narrow(value, DTYPE)
                tl.store(out_ptr + term * N.to(tl.int64) * (2 * row_bytes) + where, rounded, mask=(n < N)[:, None])
                value -= widen(rounded)


@triton.jit
def finish(
    part_ptr, g_ptr, bias_ptr, out_ptr, M, N, slabs, g_stride, out_stride, has_bias,
    BM: tl.constexpr, BN: tl.constexpr, GLOBAL: tl.constexpr,
):  # fmt: skip
    """Sum slabs [slabs, M, N] of float32 in their order, apply the global scale, add the bias, round once.

    y is [M, N] with rows ``out_stride`` apart.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid = (m < M)[:, None] & (n < N)[None, :]
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    y = tl.zeros([BM, BN], tl.float32)
    for slab in range(slabs):
        y += tl.load(part_ptr + slab * (M.to(tl.int64) * N) + place, mask=valid, other=0.0)
    if GLOBAL != 0:
        factor = tl.load(g_ptr + n * g_stride, mask=n < N, other=1.0)[None, :]
        y = y * factor if GLOBAL == 1 else y / factor
    y += widen(tl.load(bias_ptr + n, mask=(n < N) & (has_bias != 0), other=0.0))[None, :]
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :], narrow(y, out_ptr.dtype.element_ty), mask=valid
    )
