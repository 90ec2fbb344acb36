"""The 16 values of a code, as the kernels look them up: 32 bits an entry."""

from __future__ import annotations

import functools

import torch

from q4core import BUILTIN_FORMATS, Form, Format, WeightSpec

__all__ = ["code_base", "codes_kind", "entries_of", "is_e2m1", "pair_factor", "values_of"]

_HALF_POWER = 256.0
"""What float16 pairs are multiplied by, so that their low halves are normal numbers."""
_FACTORS = {BUILTIN_FORMATS["nf4"].codebook: 1.3462367057800293, BUILTIN_FORMATS["fp4"].codebook: 3.0}
"""What codebooks are multiplied by before they are cut into 16 bits, and sums divided by afterwards. Of 12 million
factors, NF4's leaves the least behind two bfloat16: 2^-20.6 of a value, where 1 would leave 2^-17.5. Three times FP4's
values are short numbers: one bfloat16 holds each to 2^-25 of itself."""
_SHORT_BOUND = 2.0**-24
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
    """Return the kernels' CODES for a weight: 0 pair table, 1 E2M1 bits, 2 integers, 3 table of 16-bit values."""
    if code_base(spec) is not None:
        return 2
    if is_e2m1(spec.format):
        return 1
    exact = torch.tensor(values_of(spec), dtype=torch.float64) * pair_factor(values_of(spec), torch.bfloat16)
    rest = (exact - exact.to(torch.bfloat16).to(torch.float64)).abs()
    return 3 if bool((rest <= _SHORT_BOUND * exact.abs()).all()) else 0


def is_e2m1(kind: Format) -> bool:
    """Return whether a format's codes are E2M1 numbers."""
    return kind.codebook == (*_E2M1, *(-value for value in _E2M1))


def values_of(spec: WeightSpec) -> tuple[float, ...]:
    """Return the value of each code, before scale and second number."""
    base = code_base(spec)
    return spec.format.codebook if base is None else tuple(float(code - base) for code in range(16))


def pair_factor(values: tuple[float, ...], dtype: torch.dtype) -> float:
    """Return what the entries of a 16-bit table are multiplied by."""
    return _FACTORS.get(values, 1.0) * (_HALF_POWER if dtype is torch.float16 else 1.0)


@functools.lru_cache(maxsize=256)
def entries_of(values: tuple[float, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return 16 words: a float32's bits, or a 16-bit number above what it lacks, both × ``pair_factor``."""
    exact = torch.tensor(values, dtype=torch.float64)
    if dtype is torch.float32:
        return tuple(exact.to(torch.float32).view(torch.int32).tolist())
    exact = exact * pair_factor(values, dtype)
    high = exact.to(dtype)
    low = (exact - high.to(torch.float64)).to(dtype)
    words = (high.view(torch.int16).to(torch.int32) << 16) | (low.view(torch.int16).to(torch.int32) & 0xFFFF)
    return tuple(words.tolist())
