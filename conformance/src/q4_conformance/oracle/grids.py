"""Activations that lie exactly on the grid of a path's precision.

On its own grid a path's quantisation of the activations loses nothing, so that the float32 bound applies to every
element of the result, and one element that is off shows. Each row has a power of two of its own, the same for all its
blocks, so that quantisers of int8 per block and per row are both without loss, and rows mixed up show.

| precision | values | in every block |
|---|---|---|
| w4a4 | E2M1 values, one power of two for all rows (a per-tensor global must not move a block's scale) | ±6 in 16 |
|      | which, where the weight has a static activation scale, lies within reach of block scales over it | |
| w4a8 | integers up to 127 | ±127 in 32 |
| w4i16 | integers up to 16383 where x is float32 | ±16383 in 32 |
|      | else up to 129, which divides 16383, so that int16 holds them, and int8 does not | ±129 in 32 |
| w4a16 | integers up to 255, exact in bfloat16 and float16, not in int8 | ±255 in 32 |
| w4a32 | integers up to 65535 where x is float32, exact in neither 16-bit dtype | ±65535 in 32 |
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from q4core import Precision

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import PackedWeight

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EXPONENTS = (-9, -5)
"""Powers of two that rows may have, both included: with values up to 255 and weights near 1, sums fit float16."""
_E4M3_EXPONENTS = (-6, 8)
"""Powers of two that are normal e4m3 numbers: what block scales over a static activation scale reach."""
_WIDE_EXPONENTS = (-17, -13)


def _peaks(
    values: NDArray[np.float64], block: int, peak: float, order: NDArray[np.int64] | None, random: np.random.Generator
) -> None:
    """Put one ±peak in every block, as the columns stand and in ``order``."""
    rows, columns = values.shape
    for view in (np.arange(columns), order):
        if view is None:
            continue
        for start in range(0, columns, block):
            members = view[start : start + block]
            values[np.arange(rows), random.choice(members, size=rows)] = peak


def _fp4_exponent(weight: PackedWeight | None, usual: int) -> int:
    """Return the power of two for E2M1 values: the usual one, or the nearest that a static activation scale allows."""
    if weight is None or weight.activation_scale is None:
        return usual
    above = math.ceil(math.log2(float(weight.activation_scale)))
    return above + min(max(usual - above, _E4M3_EXPONENTS[0]), _E4M3_EXPONENTS[1])


def draw_on_grid(  # noqa: PLR0913  # the facts of one draw
    precision: Precision,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype,
    seed: int,
    weight: PackedWeight | None = None,
    shift: int = 0,
) -> torch.Tensor:
    """Return activations [rows, columns] of ``dtype`` on the CPU that a path of ``precision`` takes without loss.

    They lie on the grid of the weight's static activation scale, permutation and channel scales (powers of two), times
    two to the ``shift``, where results would overflow. Equal seeds give equal draws.

    Raises:
        ArithmeticError: ``dtype`` does not hold the values exactly.
    """
    random = np.random.default_rng([seed, rows, columns, list(Precision).index(precision)])
    low, high = _EXPONENTS
    block, peak = 32, 127.0
    if precision is Precision.W4A4:
        values = random.choice(_E2M1, size=(rows, columns))
        low = high = _fp4_exponent(weight, high + shift) - shift
        block, peak = 16, 6.0
    else:
        if precision is Precision.W4I16:
            peak, (low, high) = (16383.0, _WIDE_EXPONENTS) if dtype == torch.float32 else (129.0, _EXPONENTS)
        elif precision is Precision.W4A16 or (precision is Precision.W4A32 and dtype != torch.float32):
            peak = 255.0
        elif precision is Precision.W4A32:
            peak, (low, high) = 65535.0, _WIDE_EXPONENTS
        values = random.integers(0, int(peak) + 1, size=(rows, columns)).astype(np.float64)
    permutation = None if weight is None or weight.input_permutation is None else weight.input_permutation
    order = None if permutation is None else permutation.cpu().numpy()
    _peaks(values, block, peak, order, random)
    values *= random.choice([-1.0, 1.0], size=values.shape)
    values *= np.ldexp(1.0, random.integers(low, high + 1, size=(rows, 1)) + shift)
    if weight is not None and weight.input_channel_scale is not None:
        scale = weight.input_channel_scale.to("cpu", torch.float64).numpy()
        if not np.all(np.frexp(np.abs(scale))[0] == 0.5) and not precision.is_exact:  # noqa: PLR2004  # a power of two
            raise ArithmeticError("input_channel_scale must be powers of two for an exact draw")
        if np.all(np.frexp(np.abs(scale))[0] == 0.5):  # noqa: PLR2004  # a power of two
            values /= scale
    exact = torch.from_numpy(values)
    result = exact.to(dtype)
    if not torch.equal(result.to(torch.float64), exact):
        raise ArithmeticError(f"{dtype} does not hold the grid of {precision.value} exactly")
    return result


def draw_free(rows: int, columns: int, *, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal activations [rows, columns] with an outlier of about ten sigma per row, on the CPU."""
    random = np.random.default_rng([seed, rows, columns])
    values = random.standard_normal((rows, columns))
    values[np.arange(rows), random.integers(0, columns, size=rows)] *= 10.0
    return torch.from_numpy(values).to(dtype)
