"""The core and its reference path pass the cases that concern them: detection, memory, training, mutable tensors."""

from __future__ import annotations

import pytest

import q4core
from q4_conformance import Case, Outcome, core_cases, run_case

PARAMETERS = [pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.is_slow else []) for case in core_cases()]


@pytest.mark.parametrize("case", PARAMETERS)
def test_core_passes(case: Case) -> None:
    """The case passes; a core whose tensors no processes share says so, and that is no pass."""
    result = run_case(case, None)
    is_there = case.id != "TC-13/processes" or hasattr(q4core, "SharedMutableTensor")
    assert result.outcome is (Outcome.PASS if is_there else Outcome.NOT_TESTABLE), result
