"""The reference backend passes every case that concerns it, on every format."""

from __future__ import annotations

import pytest

from q4_conformance import Case, Outcome, backend_cases, linear_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split
from q4_conformance.subjects.reference import REFERENCE, reference_backend

CHOSEN = ("int4",)
"""In every run; its certificate is of all formats, and compared with a fresh run in CI."""
CASES = [
    pytest.param(case, id=case.id, marks=[] if case.weight_recipe.format.name in CHOSEN else pytest.mark.soak)
    for case in split((*linear_cases(), *backend_cases()), BackendSubject(reference_backend()))[0]
]
ABOUT_KERNELS = {"unavailable", "mix", "kind"}
"""Checks that concern backends with a kernel path, which the reference is not."""


@pytest.fixture(scope="module")
def subject() -> BackendSubject:
    """The reference backend."""
    return BackendSubject(REFERENCE)


def _expected(case: Case) -> Outcome:
    return Outcome.NOT_DECLARED if case.check in ABOUT_KERNELS else Outcome.PASS


@pytest.mark.parametrize("case", CASES)
def test_reference_passes(case: Case, subject: BackendSubject) -> None:
    """The case passes; what the reference does not declare is said to be so, and never counts as a pass."""
    result = run_case(case, subject)
    assert result.outcome is _expected(case), result
    assert result.is_fallback is (result.outcome is Outcome.PASS)
