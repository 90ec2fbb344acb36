"""The core and its reference path pass the cases that concern them; ``q4 conform q4core`` runs the slow ones too."""

from __future__ import annotations

import pytest

from q4_conformance import Case, Outcome, core_cases, run_case

PARAMETERS = [
    pytest.param(case, id=case.id, marks=[pytest.mark.slow, pytest.mark.soak] if case.is_slow else [])
    for case in core_cases()
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_core_passes(case: Case) -> None:
    """The case passes."""
    result = run_case(case, None)
    assert result.outcome is Outcome.PASS, result
