"""Arithmetic in 16 bits, with twins for Triton's interpreter, which computes bfloat16 as if it were an integer."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dot", "multiply", "narrow", "subtract", "widen"]

TWIN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def widen(value):
    """Return value in float32."""
    if TWIN and value.dtype == tl.bfloat16:
        wide = (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = value.to(tl.float32)
    return wide


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """Return a float32 value in DTYPE, rounded to nearest, ties to even."""
    if TWIN and DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)  # noqa: PLR0124  # NaN is what differs
        short = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        short = value.to(DTYPE)
    return short


@triton.jit
def multiply(a, b):
    """Return a × b in their own dtype."""
    if TWIN:
        product = narrow(widen(a) * widen(b), a.dtype)
    else:
        product = a * b
    return product


@triton.jit
def subtract(a, b):
    """Return a − b in their own dtype."""
    if TWIN:
        difference = narrow(widen(a) - widen(b), a.dtype)
    else:
        difference = a - b
    return difference


@triton.jit
def dot(a, b, total):
    """Return total + a @ b, summed in float32."""
    if TWIN or a.dtype == tl.float32:
        total = tl.dot(widen(a), widen(b), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total
