"""The error that float32 arithmetic can make, and how far a result is from it.

The bound follows from float32 arithmetic alone:

    |y - ref| <= gamma(K + 8) * sum_k |x_k| |w_k|  +  half an ulp of y's dtype

with gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). K products and
sums, plus at most 8 roundings of scales, globals, offsets and bias.
"""

from __future__ import annotations

import torch

__all__ = ["error_bound", "error_ratios", "worst_ratio"]

_UNIT_ROUNDOFF = 2.0**-24
_HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def error_bound(reference: torch.Tensor, magnitude: torch.Tensor, columns: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error that float32 accumulation and one rounding to ``out_dtype`` can make.

    Args:
        reference: float64 exact results.
        magnitude: float64, the sum over k of |x_k| |w_k| (plus |bias|), shaped as ``reference``.
        columns: K.
        out_dtype: dtype that y is rounded to.
    """
    steps = (columns + 8) * _UNIT_ROUNDOFF
    accumulated: torch.Tensor = steps / (1 - steps) * magnitude
    rounded: torch.Tensor = (reference.abs() + accumulated) * _HALF_ULP[out_dtype] + _TINY[out_dtype]
    return accumulated + rounded


def error_ratios(
    computed: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return each error over its bound, float64 throughout; NaN where a result is not finite and should be."""
    error = (computed - reference).abs()
    # Beyond the dtype's range an infinity of the right sign is right.
    beyond = reference.abs() + bound > torch.finfo(out_dtype).max
    error = torch.where(beyond & (computed == reference.sign() * torch.inf), 0.0, error)
    # A bound of zero (a block of zeros) allows no error at all.
    return torch.where(error == 0, 0.0, error / bound)


def worst_ratio(computed: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, out_dtype: torch.dtype) -> float:
    """Return the largest of ``error_ratios``; NaN where one is."""
    return float(error_ratios(computed, reference, bound, out_dtype).max())
