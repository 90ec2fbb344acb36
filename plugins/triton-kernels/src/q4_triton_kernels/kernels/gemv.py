"""gemv: y[M, N] = x[M, K] @ w[N, K]ᵀ for M ≤ 8, sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from q4_triton_kernels.kernels.decode import look_up, scale_of, second_of
from q4_triton_kernels.kernels.numbers import narrow, widen

__all__ = ["gemv"]


@triton.jit
def _joined(sums, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT tensors [T] of a tuple, from FIRST on at every STEP-th place, as one [T, COUNT]."""
    if COUNT == 1:
        whole = sums[FIRST][:, None]
    else:
        low = _joined(sums, FIRST, 2 * STEP, COUNT // 2)
        high = _joined(sums, FIRST + STEP, 2 * STEP, COUNT // 2)
        whole = tl.reshape(tl.join(low, high), [low.shape[0], COUNT])
    return whole


@triton.jit
def gemv(
    x_ptr, x_stride, q_ptr, s_ptr, z_ptr, g_ptr, table_ptr, bias_ptr, out_ptr,
    M, N, K, row_bytes, blocks, span, g_stride, has_bias,
    ROWS: tl.constexpr, R: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    SCALE: tl.constexpr, SECOND: tl.constexpr, GLOBAL: tl.constexpr, EVEN: tl.constexpr, TABLE: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """Compute R out-features of a span of units; with FINAL y itself, else float32 sums [splits, M, N]."""
    n0 = tl.program_id(0) * R
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, row_bytes // 16)
    p = tl.arange(0, 16)
    totals = ()
    for _ in tl.static_range(ROWS * R):
        totals = totals + (tl.zeros([T], tl.float32),)
    for start in range(first, last, T):
        u = start + tl.arange(0, T)
        inside = u < last
        codes = ()
        for r in tl.static_range(R):
            row = tl.minimum(n0 + r, N - 1).to(tl.int64)
            q_ptrs = q_ptr + row * row_bytes + (u * 16)[:, None] + p[None, :]
            codes = codes + (tl.load(q_ptrs, mask=inside[:, None], other=0).to(tl.int32),)
        low = (u // (HALF // 16)) * (2 * HALF) + (u % (HALF // 16)) * 16
        scales = ()
        seconds = ()
        for plane in tl.static_range(2):
            k = low + plane * HALF
            here = inside & (k < K)
            if plane == 0 or BLOCK % (2 * HALF) != 0:
                scales = ()
                seconds = ()
                for r in tl.static_range(R):
                    place = tl.minimum(n0 + r, N - 1).to(tl.int64) * blocks + k // BLOCK
                    scale = scale_of(tl.load(s_ptr + place, mask=here, other=0.0), SCALE)
                    scales = scales + (scale,)
                    if SECOND != 0:
                        second = second_of(tl.load(z_ptr + place, mask=here, other=0.0), scale, SECOND)
                        seconds = seconds + (second,)
            columns = k[:, None] + p[None, :]
            x_mask = here[:, None] if EVEN else (columns < K) & inside[:, None]
            xs = ()
            for m in tl.static_range(ROWS):
                x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * x_stride + columns
                xs = xs + (widen(tl.load(x_ptrs, mask=x_mask, other=0.0)),)
            added = ()
            for r in tl.static_range(R):
                code = codes[r] if plane == 0 else codes[r] >> 4
                value = look_up(code, table_ptr, TABLE).to(tl.float32, bitcast=True)
                for m in tl.static_range(ROWS):
                    part = totals[r * ROWS + m] + scales[r] * tl.sum(value * xs[m], axis=1)
                    if SECOND != 0:
                        part += seconds[r] * tl.sum(xs[m], axis=1)
                    added = added + (part,)
            totals = added
    y = tl.sum(_joined(totals, 0, 1, R * ROWS), axis=0)
    place = tl.arange(0, R * ROWS)
    m = place % ROWS
    n = n0 + place // ROWS
    valid = (n < N) & (m < M)
    if FINAL:
        if GLOBAL != 0:
            factor = tl.load(g_ptr + tl.minimum(n, N - 1) * g_stride)
            y = y * factor if GLOBAL == 1 else y / factor
        y += widen(tl.load(bias_ptr + n, mask=valid & (has_bias != 0), other=0.0))
        tl.store(out_ptr + m.to(tl.int64) * N + n, narrow(y, out_ptr.dtype.element_ty), mask=valid)
    else:
        tl.store(out_ptr + (tl.program_id(1) * M + m).to(tl.int64) * N + n, y, mask=valid)
