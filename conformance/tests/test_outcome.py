"""A report passes only if something ran, nothing ended badly, and the results add up to the table."""

from __future__ import annotations

from typing import Any

import pytest

from q4_conformance import CaseResult, Outcome, Report

BAD = (Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT)


def _result(name: str, outcome: Outcome = Outcome.PASS, **facts: Any) -> CaseResult:
    return CaseResult(case=name, contract="TC-09", outcome=outcome, message="so it was", **facts)


def test_all_passing_passes() -> None:
    """Only passes: passed."""
    report = Report(subject="s", expected=("a", "b"), results=(_result("a"), _result("b")))
    assert report.passed
    assert report.counts[Outcome.PASS] == 2
    assert "2 cases: 2 pass" in str(report)


def test_nothing_ran_is_no_pass() -> None:
    """An empty run, and one in which nothing was declared, do not pass."""
    assert not Report(subject="s", expected=(), results=()).passed
    silent = Report(subject="s", expected=("a",), results=(_result("a", Outcome.NOT_DECLARED),))
    assert not silent.passed
    assert not silent.failures()


@pytest.mark.parametrize("outcome", BAD)
def test_one_bad_end_fails(outcome: Outcome) -> None:
    """One failure, crash or time-out among passes is no pass, and is listed."""
    report = Report(subject="s", expected=("a", "b"), results=(_result("a"), _result("b", outcome)))
    assert not report.passed
    assert [result.case for result in report.failures()] == ["b"]
    assert "NOT PASSED" in str(report)


@pytest.mark.parametrize("outcome", [Outcome.NOT_DECLARED, Outcome.NOT_TESTABLE])
def test_what_was_not_tested_is_printed_and_not_counted(outcome: Outcome) -> None:
    """What is not declared or not testable neither passes nor fails, and is in the text."""
    report = Report(subject="s", expected=("a", "b"), results=(_result("a"), _result("b", outcome)))
    assert report.passed
    assert report.counts[Outcome.PASS] == 1
    assert outcome.name in str(report)


def test_results_must_add_up() -> None:
    """A case without a result, a result without a case, and a result that comes twice do not pass."""
    assert Report(subject="s", expected=("a", "b"), results=(_result("a"),)).missing == ("b",)
    assert Report(subject="s", expected=("a",), results=(_result("a"), _result("c"))).missing == ("c",)
    twice = Report(subject="s", expected=("a",), results=(_result("a"), _result("a")))
    assert twice.missing == ("a",)
    assert not twice.passed
    assert "do not add up" in str(twice)


def test_passes_by_fallback_have_a_column() -> None:
    """Passes of the reference are counted apart."""
    report = Report(subject="s", expected=("a", "b"), results=(_result("a", is_fallback=True), _result("b")))
    assert report.passed_by_fallback == 1
    assert "1 passes by fallback" in str(report)


def test_results_are_read_back() -> None:
    """Each result can be read back from plain values."""
    results = (_result("a"), _result("b", Outcome.CRASH))
    assert [CaseResult.from_dict(item.to_dict()) for item in results] == list(results)
