"""A crash or a hang of the subject is a result, and the cases after it run all the same."""

from __future__ import annotations

import time

import pytest

from q4_conformance import Outcome
from q4_conformance.isolated import run_isolated

STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"
ONLY = [STRUCK, "TC-09/bias"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "outcome"), [("crashing", Outcome.CRASH), ("hanging", Outcome.TIMEOUT)])
def test_crash_and_hang_are_results(target: str, outcome: Outcome) -> None:
    """The case that meets M = 7 ends so, and the others, which another process takes up, pass."""
    report = run_isolated(f"q4_conformance.zoo:{target}", ["nf4"], only=ONLY, limit_seconds=6.0)
    assert report.missing == ()
    assert not report.passed
    ends = {result.case: result.outcome for result in report.results}
    assert ends.pop(STRUCK) is outcome
    assert set(ends.values()) == {Outcome.PASS}
    assert len(ends) == 3


@pytest.mark.slow
def test_a_subject_that_cannot_be_had_leaves_its_cases_missing() -> None:
    """Where no child comes to its first case, the run ends, and does not pass."""
    report = run_isolated("q4_conformance.zoo:nothing_of_that_name", ["nf4"], only=ONLY)
    assert not report.passed
    assert report.missing == tuple(sorted(report.expected))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["dequant-fallback", "q4_conformance.zoo:talking"])
def test_right_subjects_pass(target: str) -> None:
    """An installed backend is judged by its name, and one that prints while it computes does no harm."""
    report = run_isolated(target, ["nf4"], only=["TC-09/bias"])
    assert report.passed, report
    assert report.passed_by_fallback == (3 if target == "dequant-fallback" else 0)


@pytest.mark.slow
def test_a_spent_budget_leaves_cases_missing() -> None:
    """Where no time is left, no case is begun, and the report says which are missing instead of passing."""
    report = run_isolated("dequant-fallback", ["nf4"], only=["TC-09/bias"], budget_seconds=0.0)
    assert report.results == ()
    assert report.missing == tuple(sorted(report.expected))
    assert not report.passed


@pytest.mark.slow
def test_a_budget_ends_within_a_case() -> None:
    """A case that hangs longer than the budget is missing, and no timeout: it had less than its limit."""
    started = time.monotonic()
    report = run_isolated(
        "q4_conformance.zoo:hanging", ["nf4"], only=[STRUCK], limit_seconds=100.0, budget_seconds=10.0
    )
    assert time.monotonic() - started < 60
    assert report.missing == (STRUCK,)
