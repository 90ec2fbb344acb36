"""What is claimed of a bare function decides what it is judged by, and no more."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

import q4core as q4
from q4_conformance import Outcome, check_linear, exact_linear, exact_weight, linear_cases
from q4_conformance.oracle.compare import error_bound, judge
from q4_conformance.oracle.exact import exact_input_gradient
from q4_conformance.oracle.grids import draw_on_grid
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance_faults import ToyKernel, function_of

VALUES = "TC-09/values/nf4-plain-high_first-48x256b64-s0/"
BFLOAT16 = f"{VALUES}bfloat16/exact"
HALF = f"{VALUES}float16/exact"


def _rounded(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by the weight rounded once to x's dtype."""
    y = x.double() @ torch.from_numpy(exact_weight(weight)).to(x.dtype).double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


@pytest.mark.parametrize(("case", "dtype"), [(BFLOAT16, torch.bfloat16), (HALF, torch.float16)])
def test_rounded_weights_pass_where_they_are_claimed_and_nowhere_else(case: str, dtype: torch.dtype) -> None:
    """A dense weight rounded to x's dtype fails by the float32 bound, and passes where one rounding is claimed."""
    assert not check_linear(_rounded, "nf4", only=[case], dtypes=[dtype]).passed
    assert check_linear(_rounded, "nf4", only=[case], dtypes=[dtype], roundings={dtype: 1}).passed
    other = {torch.float32: 1}
    assert not check_linear(_rounded, "nf4", only=[case], dtypes=[dtype], roundings=other).passed


def test_one_claimed_rounding_is_not_two() -> None:
    """Weights that are off by more than the roundings that are claimed fail."""
    weight = WeightRecipe(format="nf4").build()
    x = torch.ones(2, weight.in_features, dtype=torch.bfloat16)
    dense = exact_weight(weight)
    moved = dense + np.abs(dense) * (1 + 0.95 * 2.0**-8) ** 2 - np.abs(dense)
    y = torch.from_numpy(np.tile(moved.sum(axis=1), (2, 1))).float()
    assert not judge(y, exact_linear(weight, x, roundings=1), out_dtype=torch.float32).passed
    assert judge(y, exact_linear(weight, x, roundings=2), out_dtype=torch.float32).passed


def test_a_zeroed_element_shows_in_spite_of_claimed_roundings() -> None:
    """The wider bound of rounded weights still lets no zeroed element pass."""

    def function(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        y = _rounded(x, weight, bias)
        y[..., 7] = 0
        return y

    report = check_linear(function, "nf4", only=[BFLOAT16], dtypes=[torch.bfloat16], roundings={torch.bfloat16: 1})
    assert [result.outcome for result in report.results] == [Outcome.FAIL]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_slack_bounds_every_rounding_and_is_nearly_reached(dtype: torch.dtype) -> None:
    """Each weight moved by half an ulp, all in the worst direction, lies in the bound and uses most of the slack."""
    weight = WeightRecipe(format="nf4", k=64, block_size=64).build()
    dense = exact_weight(weight)
    x = torch.ones(1, 64, dtype=dtype)
    unit = torch.finfo(dtype).eps / 2
    moved = dense + np.abs(dense) * unit
    bound = error_bound(exact_linear(weight, x, roundings=1), torch.float32)
    error = np.abs(moved.sum(axis=1) - dense.sum(axis=1))
    assert (error <= bound[0]).all()
    assert (error >= bound[0] / (80 if dtype is torch.float32 else 2)).all()
    grad = torch.ones(1, weight.out_features, dtype=dtype)
    bound = error_bound(exact_input_gradient(weight, grad, roundings=1), torch.float32)
    assert (np.abs(moved.sum(axis=0) - dense.sum(axis=0)) <= bound[0]).all()


def test_a_limit_is_not_declared_and_never_a_pass() -> None:
    """A weight that the function does not claim to serve ends as NOT_DECLARED with the reason given."""

    def limit(weight: q4.PackedWeight, dtype: torch.dtype) -> str | None:
        odd = weight.out_features % 16 or dtype is torch.float16
        return "N must be a multiple of 16" if odd else None

    only = ["TC-11/awkward", BFLOAT16, HALF]
    report = check_linear(
        function_of(ToyKernel()), "nf4", only=only, limit=limit, dtypes=[torch.float32, torch.bfloat16, torch.float16]
    )
    refused = {result.case for result in report.results if result.message == "N must be a multiple of 16"}
    exact = {case.id: case for case in linear_cases(["nf4"]) if case.precision is q4.ActivationPrecision.EXACT}
    awkward = {name: case for name, case in exact.items() if case.check == "awkward"}
    odd = {n for n, case in awkward.items() if case.weight_recipe.n % 16 or case.dtype is torch.float16}
    assert odd <= refused == odd | {HALF}
    due = [result for result in report.results if result.case in exact]
    assert all(r.outcome is (Outcome.NOT_DECLARED if r.case in refused else Outcome.PASS) for r in due)


def test_a_bias_that_is_not_claimed_is_not_declared() -> None:
    """Cases with a bias end as NOT_DECLARED for a function that takes none; the others run."""
    report = check_linear(
        function_of(ToyKernel()), "nf4", only=["TC-09/bias", f"{VALUES}float32/exact"], has_bias=False
    )
    assert {r.case.split("/")[1] for r in report.results if r.outcome is Outcome.PASS} == {"values"}
    bias = f"TC-09/bias/{VALUES.removeprefix('TC-09/values/')}float32/exact"
    assert {r.message for r in report.results if r.case == bias} == {"a bias is not declared"}


def test_cases_of_another_size_can_be_judged() -> None:
    """A function that takes some sizes only is judged by the same cases with a weight of such a size."""
    cases = [
        attrs.evolve(case, recipe=attrs.evolve(case.weight_recipe, n=64))
        for case in linear_cases(["nf4"])
        if case.id.startswith(VALUES)
    ]
    report = check_linear(function_of(ToyKernel()), "nf4", cases=cases)
    assert report.passed
    assert all("64x256" in result.case for result in report.results)


def test_without_a_claim_the_bound_is_what_it_was() -> None:
    """No claimed rounding, no slack."""
    weight = WeightRecipe(format="q4_1").build()
    x = draw_on_grid(q4.Precision.W4A16, 3, weight.in_features, dtype=torch.bfloat16, seed=1)
    reference = exact_linear(weight, x)
    assert reference.slack == 0.0
    assert judge(torch.from_numpy(reference.value).to(torch.bfloat16), reference, out_dtype=torch.bfloat16).passed
