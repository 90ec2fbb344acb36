"""A right kernel backend, with exact and int8 paths, passes every case that concerns it."""

from __future__ import annotations

import pytest
import torch

from q4_conformance import Case, Outcome, backend_cases, linear_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split, undeclared_reason
from q4_conformance_faults import ToyKernel
from q4core import ActivationPrecision, Feature

FORMATS = ("nf4", "nvfp4", "q4_1", "int4")
"""One of each kind: a table with flat blocks, in each run; two scale levels, an offset, zero points."""
LONG = {"calls", "varied", "frozen", "dispose", "kind", "long", "wide"}
"""Parts of thousands of calls or of large weights: ``nox -s conformance`` judges backends that serve by them."""
DTYPE_OF = {ActivationPrecision.EXACT: torch.float32, ActivationPrecision.INT8: torch.bfloat16}
"""The one dtype of a case for each precision; those sessions judge backends in every dtype for each."""
FEW = {"noise", "modes", "settings", "forked", "dtypes"}
"""Parts that have no case in that dtype, or that concern dtypes."""


def _is_in_every_run(case: Case) -> bool:
    is_met = case.part in FEW or case.dtype is DTYPE_OF[case.precision]
    return case.weight_recipe.format.name == FORMATS[0] and case.part not in LONG and is_met


CASES = [
    pytest.param(case, id=case.id, marks=[] if _is_in_every_run(case) else pytest.mark.soak)
    for case in split((*linear_cases(FORMATS), *backend_cases(FORMATS)), BackendSubject(ToyKernel()))[0]
]


@pytest.fixture(scope="module")
def subject() -> BackendSubject:
    """The toy kernel."""
    return BackendSubject(ToyKernel())


@pytest.mark.parametrize("case", CASES)
def test_kernel_passes(case: Case, subject: BackendSubject) -> None:
    """Every case of what the kernel declares passes.

    Another process finds installed backends alone; faulty ones that are installed run that case.
    """
    result = run_case(case, subject)
    expected = Outcome.NOT_TESTABLE if case.check == "elsewhere" else Outcome.PASS
    assert result.outcome is expected, result
    assert not result.is_fallback


def test_what_is_not_declared_never_counts_as_a_pass() -> None:
    """A manifest without a feature keeps its cases from running, and no other; run nevertheless, they say so."""
    kernel = ToyKernel("toy-without-zero-points", features=frozenset(Feature) - {Feature.ZERO_POINT})
    poor = BackendSubject(kernel)
    for case in linear_cases(["int4"]):
        if (case.check, case.dtype, case.precision) != ("values", torch.float32, ActivationPrecision.EXACT):
            continue
        needs = Feature.ZERO_POINT in case.weight_recipe.features
        assert (run_case(case, poor).outcome is Outcome.NOT_DECLARED) == needs, case.id
        assert (undeclared_reason(case, poor) == "feature 'zero point'") == needs, case.id
