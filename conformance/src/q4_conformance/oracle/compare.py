"""The judge: is a computed result right, element by element, by a bound that follows from arithmetic alone.

**Exact tier.** For activations on the path's own grid, a kernel that accumulates in float32 in any order computes

    y = round( Σ_k x_k w_k + bias ),   each float32 operation with a relative error of at most u = 2^-24

so that every term passes through at most n = K + 8 roundings (K - 1 sums, one product, and up to 8 for the levels of
the scale, zero point, offset, channel scale and bias), whatever the order of summation. By Higham's lemma 3.1 the
product of n factors (1 + δ), |δ| ≤ u, differs from 1 by at most γ_n = n u / (1 - n u), hence

    |y - exact| ≤ γ_n · size + underflow + half an ulp of y's dtype,

    size = Σ_k |terms of w_k| |x_k| + |bias|

where ``size`` takes the two terms of a weight with an offset or zero point apart, because a kernel may sum them
apart. A result that underflows is off by at most 2^-150, for the weight and then times |x|, and for the product:
2^-149 times Σ (1 + |x|)(1 + |channel scale|) covers both. The one rounding to y's dtype costs half an ulp at the
largest value that the rest of the bound allows. Nothing here was fitted to what passes.

A function may claim that each weight passes r roundings to x's dtype, of unit roundoff v, before it is multiplied. Then
the weights themselves may be off by ((1 + v)^r - 1) of their size, and r times half the dtype's smallest number where
they are subnormal; Σ |x| of that, the *slack*, is added to the bound, with its own float32 roundings.

**What the exact tier can't see.** An element whose exact value lies within its own bound would pass as zero. The
verdict names such *blind* elements, and whoever runs a case draws again until each element has been seen.

**Statistical tier.** Free-range activations meet the path's quantiser. Its noise is modelled as uniform: variance δ²/12
for a step δ, the coarsest that the precision allows (int8 per row: max |x| / 127; int16 per block of 32:
max |x| / 16383; E2M1 per block of 32: a third of max |x|). The normalised mean square error may be four times what that
predicts.

Reference:
    Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from q4_conformance.oracle.exact import exact_linear, exact_weight
from q4core import Precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from q4_conformance.oracle.exact import Reference
    from q4core import PackedWeight

_UNIT_ROUNDOFF = 2.0**-24
_UNDERFLOW = 2.0**-149
_NOISE_ALLOWANCE = 4.0
_BLOCK = 32
_BLOCK_STEPS = {Precision.W4I16: 16383.0, Precision.W4A4: 3.0}
"""How often the coarsest step goes into the largest of a block."""
_PRECISION_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
_LOWEST_EXPONENT = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14}


class Fault(enum.Enum):
    """What is wrong with a result."""

    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    NON_FINITE = "non_finite"
    ALL_ZERO = "all_zero"
    OUT_OF_BOUND = "out_of_bound"
    NOISY = "noisy"


@attrs.frozen
class Element:
    """One element of a result, next to what it should be."""

    index: tuple[int, ...]
    got: float
    exact: float
    bound: float

    def __str__(self) -> str:
        """Return place, value, exact value and bound."""
        return f"y{list(self.index)} = {self.got!r}, exact {self.exact!r} ± {self.bound:.3g}"


@attrs.frozen(kw_only=True, eq=False)
class Comparison:
    """What the judge found.

    Args:
        fault: What is wrong first; None when the result is right.
        message: The same in a sentence.
        worst: The element with the largest error over its bound.
        ratio: That error over its bound: at most 1 when right. For the statistical tier, error over allowance.
        wrong: How many elements are out of their bound.
        total: How many elements were judged.
        blind: bool, shaped as y: elements that are not zero (nor too small for the dtype) and that could not have been
            distinguished from zero.
    """

    fault: Fault | None
    message: str
    worst: Element | None = None
    ratio: float = 0.0
    wrong: int = 0
    total: int = 0
    blind: NDArray[np.bool_] = attrs.field(factory=lambda: np.zeros(0, dtype=bool), repr=False)

    @property
    def passed(self) -> bool:
        """Whether the result is right."""
        return self.fault is None

    def __str__(self) -> str:
        """Return the message."""
        return self.message


def _half_ulp(value: NDArray[np.float64], dtype: torch.dtype) -> NDArray[np.float64]:
    """Return half the spacing of ``dtype`` at ``value``."""
    _, exponent = np.frexp(value)  # value = m 2^exponent, m in [1/2, 1)
    exponent = np.maximum(exponent - 1, _LOWEST_EXPONENT[dtype])
    result: NDArray[np.float64] = np.ldexp(1.0, exponent - _PRECISION_BITS[dtype])
    return result


def error_bound(reference: Reference, out_dtype: torch.dtype) -> NDArray[np.float64]:
    """Return the largest error that a float32 computation of ``reference`` can make, float64, shaped as its value."""
    spread = reference.steps * _UNIT_ROUNDOFF
    growth = spread / (1 - spread)
    accumulated = growth * reference.size + (1 + growth) * reference.slack + _UNDERFLOW * reference.underflow
    return accumulated + _half_ulp(np.abs(reference.value) + accumulated, out_dtype)


def _require_range(reference: Reference, bound: NDArray[np.float64], out_dtype: torch.dtype) -> None:
    if not reference.value.size:
        return
    largest = float((np.abs(reference.value) + bound).max())
    if not largest < torch.finfo(out_dtype).max:  # NaN included
        raise ArithmeticError(f"results may overflow {out_dtype}: the draw can't be judged")
    if float((reference.size + bound).max()) >= torch.finfo(torch.float32).max:
        raise ArithmeticError("sums may overflow float32: the draw can't be judged")


def _unfit(y: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Comparison | None:
    """Return the verdict on a result that has not the form asked for, or None."""
    if not isinstance(y, torch.Tensor) or tuple(y.shape) != shape:
        got = list(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
        fault, message = Fault.SHAPE, f"the result must have shape {list(shape)}, got {got}"
    elif y.dtype != dtype:
        fault, message = Fault.DTYPE, f"the result must be {dtype}, got {y.dtype}"
    elif device is not None and y.device != device:
        fault, message = Fault.DEVICE, f"the result must be on {device}, got {y.device}"
    else:
        return None
    return Comparison(fault=fault, message=message, ratio=math.inf, total=math.prod(shape))


def judge(
    y: torch.Tensor, reference: Reference, *, out_dtype: torch.dtype, device: torch.device | None = None
) -> Comparison:
    """Judge every element of a result by the float32 bound.

    Args:
        y: The computed result.
        reference: What the oracle gives for the same operands.
        out_dtype: dtype that y must have: float32, bfloat16 or float16.
        device: Where y must be; not checked where None.

    Raises:
        ArithmeticError: Results or sums may overflow, or are not finite: such a draw proves nothing.
    """
    bound = error_bound(reference, out_dtype)
    _require_range(reference, bound, out_dtype)
    unfit = _unfit(y, reference.value.shape, out_dtype, device)
    if unfit is not None:
        return unfit
    got = y.detach().to("cpu", torch.float64).numpy()
    smallest = 2.0 ** (_LOWEST_EXPONENT[out_dtype] - _PRECISION_BITS[out_dtype] + 1)
    sizes = np.abs(reference.value)
    blind = (sizes <= bound) & (sizes > smallest) & ~reference.is_zero
    if not got.size:
        return Comparison(fault=None, message="right: no elements", blind=blind)
    finite = np.isfinite(got)
    ratios = np.where(finite, np.abs(np.where(finite, got, 0.0) - reference.value) / bound, np.inf)
    wrong = int((ratios > 1.0).sum())
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratios)), ratios.shape))
    worst = Element(place, float(got[place]), float(reference.value[place]), float(bound[place]))
    ratio = float(ratios[place])
    if wrong == 0:
        fault, message = None, f"right: {got.size} elements, worst error {ratio:.3g} of its bound"
    else:
        fault = Fault.OUT_OF_BOUND
        if not finite.all():
            fault = Fault.NON_FINITE
        elif not got.any():
            fault = Fault.ALL_ZERO
        message = f"{fault.value}: {wrong} of {got.size} elements are wrong; worst {worst}, {ratio:.3g} × its bound"
    return Comparison(fault=fault, message=message, worst=worst, ratio=ratio, wrong=wrong, total=got.size, blind=blind)


def _steps(x: NDArray[np.float64], precision: Precision) -> NDArray[np.float64]:
    """Return the coarsest legal quantisation step for each element of x."""
    sizes = np.abs(x)
    if precision is Precision.W4A8:
        return np.broadcast_to(sizes.max(axis=-1, keepdims=True) / 127.0, x.shape)
    if precision in _BLOCK_STEPS:
        starts = np.arange(0, x.shape[-1], _BLOCK)
        peaks = np.maximum.reduceat(sizes, starts, axis=-1)
        return np.repeat(peaks, _BLOCK, axis=-1)[..., : x.shape[-1]] / _BLOCK_STEPS[precision]
    return np.zeros_like(x)


def judge_noise(  # noqa: PLR0913  # the facts of one comparison
    y: torch.Tensor,
    weight: PackedWeight,
    x: torch.Tensor,
    precision: Precision,
    *,
    out_dtype: torch.dtype,
    codebook: Sequence[float] | None = None,
    roundings: int = 0,
) -> Comparison:
    """Judge the normalised mean square error for activations that a path may have to quantise.

    Args:
        y: The computed result [..., N].
        weight: The source weight.
        x: Free-range activations [..., K].
        precision: The path's precision, which says how coarse the quantiser may be.
        out_dtype: dtype that y must have.
        codebook: As in ``exact_weight``.
        roundings: As in ``exact_linear``.
    """
    reference = exact_linear(weight, x, codebook=codebook, roundings=roundings)
    unfit = _unfit(y, reference.value.shape, out_dtype, None)
    if unfit is not None:
        return unfit
    got = y.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(got).all():
        return Comparison(fault=Fault.NON_FINITE, message="the result is not finite", ratio=math.inf, total=got.size)
    dense = exact_weight(weight, codebook=codebook)
    steps = _steps(x.detach().to("cpu", torch.float64).numpy(), precision)
    variance = (steps**2 / 12.0) @ (dense**2).T
    allowed = _NOISE_ALLOWANCE * variance.sum() + (error_bound(reference, out_dtype) ** 2).sum()
    error = ((got - reference.value) ** 2).sum()
    signal = (reference.value**2).sum()
    ratio = float(error / allowed)
    nmse, limit = float(error / signal), float(allowed / signal)
    fault = Fault.NOISY if ratio > 1.0 else None
    message = f"{'right' if fault is None else fault.value}: NMSE {nmse:.3g}, allowed {limit:.3g}"
    return Comparison(fault=fault, message=message, ratio=ratio, total=got.size)
