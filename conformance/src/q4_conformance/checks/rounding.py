"""Check of stochastic rounding: each value becomes one of its two neighbours, and on average itself.

For a value v between neighbours a < b, rounding by chance gives b with probability p = (v - a) / (b - a). The mean of n
draws then has the expectation v and the standard deviation (b - a) sqrt(p (1 - p) / n). Of N such means, the largest
deviation stays below 6 standard deviations (chance 2e-9 each), and the sum of all of them, divided by sqrt(N), below 5
(chance 6e-7). A bias of one part in forty of a step shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from q4_conformance.checks.device import quantiser_of
from q4_conformance.contract.case import check, expect
from q4_conformance.oracle.decoding import decode_scales
from q4_conformance.oracle.exact import exact_weight
from q4_conformance.outcome import NotDeclaredError
from q4core import PackedWeight, Rounding
from q4core import quantize as quantize_ref

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import Format

_DRAWS = 400
_ROWS = 8
_NORMAL = 9.0
"""From this variance on, the number of draws that went up follows the normal law closely enough."""
_MOST_ONE = 6.0
_MOST_ALL = 5.0


def _levels(kind: Format) -> NDArray[np.float64]:
    """Return the values of the codes under a scale of one, rising."""
    codebook = kind.codebook or tuple(float(code - 8) for code in range(16))
    return np.unique(np.asarray(codebook, dtype=np.float64))


@check("stochastic")
def check_stochastic(case: Case, subject: BackendSubject) -> str:
    """Rounding by chance is unbiased, gives neighbours only, and follows its seed."""
    if Rounding.STOCHASTIC not in subject.backend.capabilities.roundings:
        raise NotDeclaredError("stochastic rounding is not declared")
    kind = case.weight_recipe.format
    generator = torch.Generator().manual_seed(case.seeds[0])
    levels = _levels(kind)
    low, high = float(levels[0]), float(levels[-1])
    dense = torch.rand(_ROWS, 2 * kind.block_size, generator=generator) * (high - low) + low
    dense[:, :: kind.block_size] = high if abs(high) >= abs(low) else low  # so that every block's scale is one
    plain = quantize_ref(dense, kind.name)
    quantize = quantiser_of(subject, plain, dense.dtype)

    def drawn(seed: int) -> PackedWeight:
        weight: PackedWeight = quantize(dense, rounding=Rounding.STOCHASTIC, seed=seed)
        return weight.to("cpu")

    first = drawn(0)
    expect(np.array_equal(exact_weight(drawn(0)), exact_weight(first)), "the same seed gave other codes")
    expect(not np.array_equal(exact_weight(drawn(1)), exact_weight(first)), "another seed gave the same codes")
    steps = np.repeat(decode_scales(first).astype(np.float64), kind.block_size, axis=1)
    value = dense.to(torch.float64).numpy()
    place = np.clip(np.searchsorted(levels, value / steps, side="right") - 1, 0, len(levels) - 2)
    below, above = levels[place] * steps, levels[place + 1] * steps
    total = np.zeros_like(value)
    for seed in range(_DRAWS):
        got = exact_weight(drawn(seed))
        near = (np.abs(got - below) <= 1e-6 * steps) | (np.abs(got - above) <= 1e-6 * steps)
        expect(near.all(), f"seed {seed}: {int((~near).sum())} values became none of their neighbours")
        total += got
    chance = np.clip((value - below) / (above - below), 0.0, 1.0)
    spread = (above - below) * np.sqrt(chance * (1 - chance) / _DRAWS)
    inside = chance * (1 - chance) * _DRAWS >= _NORMAL
    deviation = (total / _DRAWS - value)[inside] / spread[inside]
    worst, together = float(np.abs(deviation).max()), float(abs(deviation.sum()) / np.sqrt(deviation.size))
    expect(worst < _MOST_ONE, f"one mean is {worst:.2f} standard deviations off, {_MOST_ONE:g} at most")
    expect(
        together < _MOST_ALL, f"all means together are {together:.2f} standard deviations off, {_MOST_ALL:g} at most"
    )
    return f"{deviation.size} values in {_DRAWS} draws, worst {worst:.2f} σ, together {together:.2f} σ"
