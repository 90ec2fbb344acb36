"""The 16 values of a code, as the kernels look them up: 32 bits an entry."""

from __future__ import annotations

import functools

import torch

from q4core import Form, Format, WeightSpec

__all__ = ["HALF_POWER", "code_base", "codes_kind", "entries_of", "is_e2m1", "values_of"]

HALF_POWER = 256.0
"""What float16 pairs are multiplied by, so that their low halves are normal numbers."""
_SYMMETRIC_ZERO = 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def code_base(spec: WeightSpec) -> int | None:
    """Return b where a code's value is code − b, before a zero point is taken away; None where it is no such number."""
    if spec.format.form is Form.INTEGER:
        return 0 if "zero" in spec.fields else _SYMMETRIC_ZERO
    first = spec.format.codebook[0]
    is_integer = spec.format.codebook == tuple(first + code for code in range(16))
    return int(-first) if is_integer else None


def codes_kind(spec: WeightSpec) -> int:
    """Return the kernels' CODES for a weight: 0 table, 1 E2M1 bits, 2 integers."""
    if code_base(spec) is not None:
        return 2
    return 1 if is_e2m1(spec.format) else 0


def is_e2m1(kind: Format) -> bool:
    """Return whether a format's codes are E2M1 numbers."""
    return kind.codebook == (*_E2M1, *(-value for value in _E2M1))


def values_of(spec: WeightSpec) -> tuple[float, ...]:
    """Return the value of each code, before scale and second number."""
    base = code_base(spec)
    return spec.format.codebook if base is None else tuple(float(code - base) for code in range(16))


@functools.lru_cache(maxsize=256)
def entries_of(values: tuple[float, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return 16 words: a float32's bits, or a 16-bit number above what it lacks (× HALF_POWER in float16).

    Two bfloat16 hold a value to 2^-18 of itself, two float16 to 2^-22.
    """
    exact = torch.tensor(values, dtype=torch.float32)
    if dtype is torch.float32:
        return tuple(exact.view(torch.int32).tolist())
    exact = exact * (HALF_POWER if dtype is torch.float16 else 1.0)
    high = exact.to(dtype)
    low = (exact - high.to(torch.float32)).to(dtype)
    words = (high.view(torch.int16).to(torch.int32) << 16) | (low.view(torch.int16).to(torch.int32) & 0xFFFF)
    return tuple(words.tolist())
