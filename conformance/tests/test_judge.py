"""The judge passes what float32 arithmetic can give, and names what it can't."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
import torch

import q4core as q4
from q4_conformance.oracle.compare import Fault, error_bound, judge, judge_noise
from q4_conformance.oracle.exact import exact_linear, exact_weight
from q4_conformance.oracle.grids import draw_free, draw_on_grid
from q4_conformance.oracle.weights import WeightRecipe

if TYPE_CHECKING:
    from q4_conformance.oracle.exact import Reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
P = q4.Precision
RECIPE = WeightRecipe(format="nf4", n=64, k=512)


def _operands(recipe: WeightRecipe = RECIPE, rows: int = 9) -> tuple[q4.PackedWeight, torch.Tensor, Reference]:
    weight = recipe.build()
    x = draw_on_grid(P.W4A16, rows, recipe.k, dtype=torch.float32, seed=11)
    return weight, x, exact_linear(weight, x)


def _rounded(reference: Reference, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(reference.value).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_correctly_rounded_result_is_right(dtype: torch.dtype) -> None:
    """The exact result, rounded once to the dtype, is right with room to spare in the accumulation only."""
    _, _, reference = _operands()
    verdict = judge(_rounded(reference, dtype), reference, out_dtype=dtype)
    assert verdict.passed
    assert verdict.total == 9 * 64
    assert verdict.ratio <= 1.0


@pytest.mark.parametrize("order", ["forward", "backward", "pairwise", "blocks", "two_terms"])
@pytest.mark.parametrize("format_", ["nf4", "q4_1", "int4"])
def test_float32_in_any_order_is_right(order: str, format_: str) -> None:
    """Sums in float32 are right whatever their order, and where a kernel sums code and offset apart."""
    features = {q4.Feature.ZERO_POINT} if format_ == "int4" else set()
    weight, x, reference = _operands(WeightRecipe(format=format_, n=8, k=512, features=features))
    dense = exact_weight(weight).astype(np.float32)
    values = x.numpy()
    terms = values[:, None, :] * dense[None]
    if order == "backward":
        terms = terms[..., ::-1]
    if order in {"forward", "backward"}:
        total = np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]
    elif order == "blocks":
        total = np.cumsum(terms.reshape(9, 8, 16, 32).cumsum(-1, dtype=np.float32)[..., -1], -1)[..., -1]
    elif order == "two_terms":
        shift = np.float32(40.0)  # more than any weight here: cancels in the end
        total = (values @ (dense + shift).T) - shift * values.sum(-1, keepdims=True)
        size = np.abs(x.numpy().astype(np.float64)) @ (np.abs(exact_weight(weight)) + 2 * 40.0).T
        reference = attrs.evolve(reference, size=size)
    else:
        total = terms.sum(-1, dtype=np.float32)
    verdict = judge(torch.from_numpy(total.astype(np.float32)), reference, out_dtype=torch.float32)
    assert verdict.passed, verdict


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_zeroed_element_shows(dtype: torch.dtype) -> None:
    """Each single element that is not blind is found when it alone is zero; few are blind."""
    _, _, reference = _operands(rows=4)
    right = _rounded(reference, dtype)
    blind = judge(right, reference, out_dtype=dtype).blind
    assert blind.mean() < 0.01
    for row, column in zip(*np.nonzero(~blind), strict=True):
        wrong = right.clone()
        wrong[row, column] = 0
        verdict = judge(wrong, reference, out_dtype=dtype)
        assert verdict.fault is Fault.OUT_OF_BOUND
        assert verdict.wrong == 1
        assert verdict.worst is not None
        assert verdict.worst.index == (row, column)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ulp_beyond_rounding_shows_where_sums_are_exact(dtype: torch.dtype) -> None:
    """With one term per sum the bound is little more than half an ulp, so one ulp off is wrong."""
    weight = WeightRecipe(format="nf4", n=16, k=64).build()
    x = torch.zeros(1, 64)
    x[0, 5] = 1.0
    reference = attrs.evolve(exact_linear(weight, x), steps=0)
    right = _rounded(reference, dtype)
    assert judge(right, reference, out_dtype=dtype).passed
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[dtype]
    shown = 0
    for column in range(16):
        if right[0, column] == 0:
            continue
        wrong = right.clone()
        wrong.view(bits)[0, column] += 1
        assert judge(wrong, reference, out_dtype=dtype).wrong == 1
        shown += 1
    assert shown > 8


def test_half_precision_accumulation_shows() -> None:
    """Sums in bfloat16 or float16 are out of bound for a float32 result, and for their own dtype too."""
    weight, x, reference = _operands(WeightRecipe(format="nf4", n=16, k=512))
    terms = torch.from_numpy(exact_weight(weight)).to(torch.float32) * x[:, None, :]
    for narrow in (torch.bfloat16, torch.float16):
        total = torch.zeros(9, 16, dtype=narrow)
        for k in range(512):
            total += terms[..., k].to(narrow)
        assert judge(total.to(torch.float32), reference, out_dtype=torch.float32).fault is Fault.OUT_OF_BOUND
        assert judge(total, reference, out_dtype=narrow).fault is Fault.OUT_OF_BOUND


def test_forms_of_failure_are_told_apart() -> None:
    """Shape, dtype, NaN, infinity and all-zero results each have their own fault."""
    _, _, reference = _operands()
    right = _rounded(reference)
    assert judge(right[:-1], reference, out_dtype=torch.float32).fault is Fault.SHAPE
    assert judge(right.to(torch.bfloat16), reference, out_dtype=torch.float32).fault is Fault.DTYPE
    assert judge(right, reference, out_dtype=torch.float32, device=torch.device("meta")).fault is Fault.DEVICE
    for value in (float("nan"), float("inf")):
        broken = right.clone()
        broken[3, 7] = value
        verdict = judge(broken, reference, out_dtype=torch.float32)
        assert verdict.fault is Fault.NON_FINITE
        assert verdict.wrong == 1
    verdict = judge(torch.zeros_like(right), reference, out_dtype=torch.float32)
    assert verdict.fault is Fault.ALL_ZERO
    assert verdict.ratio > 1e3


def test_zero_rows_are_right_as_zero() -> None:
    """A weight whose rows are all zero gives zeros: right, not blind and not a fault."""
    weight = WeightRecipe(format="nf4", n=4, k=64).build()
    weight = attrs.evolve(weight, scale=torch.zeros(4, 1))
    x = draw_on_grid(P.W4A16, 3, 64, dtype=torch.float32, seed=0)
    verdict = judge(torch.zeros(3, 4), exact_linear(weight, x), out_dtype=torch.float32)
    assert verdict.passed
    assert not verdict.blind.any()


def test_draw_that_may_overflow_is_refused() -> None:
    """Where a result can't be held, nothing is judged."""
    weight, x, _ = _operands()
    huge = exact_linear(weight, x * 2.0**120)
    with pytest.raises(ArithmeticError):
        judge(_rounded(huge), huge, out_dtype=torch.float16)
    with pytest.raises(ArithmeticError):
        judge(_rounded(huge), exact_linear(weight, x.to(torch.float64) * 2.0**127), out_dtype=torch.float32)


def test_bound_is_the_formula() -> None:
    """For one element, the bound is γ(K + 8) size + underflow + half an ulp, written out."""
    weight, x, reference = _operands(WeightRecipe(format="nf4", n=1, k=64), rows=1)
    n = 64 + 8
    gamma = n * 2.0**-24 / (1 - n * 2.0**-24)
    size = float(np.abs(x.numpy()[0].astype(np.float64)) @ np.abs(exact_weight(weight))[0])
    accumulated = gamma * size + 2.0**-149 * float((2 * (1 + x.abs().double())).sum())
    exponent = np.floor(np.log2(abs(reference.value[0, 0]) + accumulated))
    for dtype, bits in ((torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)):
        assert error_bound(reference, dtype)[0, 0] == pytest.approx(accumulated + 2.0 ** (exponent - bits), rel=1e-12)


@pytest.mark.parametrize("precision", [P.W4A16, P.W4A8, P.W4A4])
def test_quantised_activations_pass_the_statistical_tier_only_at_their_precision(precision: q4.Precision) -> None:
    """A quantiser of the precision's own coarseness passes; the next coarser one is noisy."""
    weight = RECIPE.build()
    x = draw_free(8, 512, dtype=torch.float32, seed=3)
    values = x.to(torch.float64)
    dense = torch.from_numpy(exact_weight(weight)).T

    def computed(step: torch.Tensor) -> torch.Tensor:
        return ((values / step).round() * step @ dense).to(torch.float32)

    peak = values.abs().amax(-1, keepdim=True)
    block_peak = values.abs().unflatten(-1, (-1, 32)).amax(-1).repeat_interleave(32, -1)
    steps = {P.W4A16: peak * 2.0**-40, P.W4A8: peak / 127, P.W4A4: block_peak / 3}
    coarser = {P.W4A16: peak / 127, P.W4A8: peak / 7, P.W4A4: block_peak}
    good = judge_noise(computed(steps[precision]), weight, x, precision, out_dtype=torch.float32)
    bad = judge_noise(computed(coarser[precision]), weight, x, precision, out_dtype=torch.float32)
    assert good.passed, good
    assert bad.fault is Fault.NOISY, bad


def test_statistical_tier_knows_the_other_faults() -> None:
    """Wrong shape, dtype and NaN are faults in the statistical tier, too."""
    weight = RECIPE.build()
    x = draw_free(8, 512, dtype=torch.float32, seed=3)
    right = torch.from_numpy(exact_linear(weight, x).value).to(torch.float32)
    arguments = (weight, x, P.W4A8)
    assert judge_noise(right, *arguments, out_dtype=torch.float32).passed
    assert judge_noise(right[1:], *arguments, out_dtype=torch.float32).fault is Fault.SHAPE
    assert judge_noise(right.to(torch.float16), *arguments, out_dtype=torch.float32).fault is Fault.DTYPE
    assert judge_noise(right / 0, *arguments, out_dtype=torch.float32).fault is Fault.NON_FINITE
