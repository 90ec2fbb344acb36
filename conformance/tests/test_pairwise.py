"""The pairwise choice has the pairs of values that it promises, and few of the product."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from q4_conformance import Query, cases_for, dialect_cases, find_target, layer_cases, run_target
from q4_conformance.contract.cases import cases_of
from q4_conformance.contract.pairwise import axes_of, pairs_of, pairwise
from q4_conformance.outcome import grouped
from q4core import BUILTIN_FORMATS, ActivationPrecision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4_conformance import Case

EVERY = cases_of(BUILTIN_FORMATS, "cpu")


def test_every_pair_of_each_part_is_chosen() -> None:
    """Whatever two values some case of a part has, a chosen case has both; but of formats, see ``pairs_of``."""
    chosen = grouped(pairwise(EVERY), lambda case: (case.contract, case.part))
    for part, cases in grouped(EVERY, lambda case: (case.contract, case.part)).items():
        missing = _every_pair(cases) - _every_pair(chosen[part])
        by_format = {pair for pair in missing if {axis for axis, _ in pair} in ({0, 1}, {0, 2})}
        assert missing == (set() if part == ("TC-09", "values") else by_format), part


def _every_pair(cases: Iterable[Case]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(axes_of(case)), 2)}


def test_the_choice_is_small_and_the_same_each_time() -> None:
    """It has less than half of the cases, in their order, and asking again gives the same."""
    chosen = pairwise(EVERY)
    assert len(chosen) < len(EVERY) / 2
    names = {case.id for case in chosen}
    assert [case for case in EVERY if case.id in names] == [*chosen]
    assert pairwise(EVERY) == chosen


def test_pairs_of_a_small_product_are_those_that_one_writes_down() -> None:
    """Of 3 dtypes and 4 precisions of one weight nothing is left out; with a second weight, not all is needed."""
    bias = [case for case in EVERY if case.id.startswith("TC-09/bias/nf4")]
    one = [case for case in bias if "48x256" in case.id]
    assert (len(one), len(bias)) == (12, 24)
    assert [*pairwise(one)] == one
    assert len(pairwise(bias)) < len(bias)
    first, second = axes_of(one[0])[1:3]
    assert (first, second) == (torch.float32, ActivationPrecision.EXACT)
    assert ((1, first), (2, second)) in pairs_of(one[0])


@pytest.mark.parametrize("cases", [dialect_cases(), layer_cases()], ids=["dialect", "layer"])
def test_what_is_no_product_is_chosen_whole(cases: tuple[object, ...]) -> None:
    """Cases without dtypes and weights are all chosen."""
    assert pairwise(cases) == cases  # type: ignore[arg-type]  # cases


def test_a_pairwise_run_reports_what_it_left_out() -> None:
    """A run of the choice counts the cases that it left out, and is partial where there are some."""
    name = "dequant-fallback"
    whole = [case for case in cases_for(find_target(name)) if case.id.startswith("TC-09/bias/nf4")]
    run = run_target(Query(name=name, formats=("nf4",), only=("TC-09/bias",), is_pairwise=True))
    assert run.report.passed
    assert len(run.report.expected) + run.left_out + len(run.report.undeclared) == len(whole)
    assert list(itertools.islice(run.report.expected, 1)) == [whole[0].id]
