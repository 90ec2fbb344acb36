"""The page of what other libraries pass is made from the stored counts, and explains every failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from other_libraries import SUBJECTS
from other_page import BAD, EXPLANATIONS, PAGE, explanation_of, page_of, summary_of

from q4_conformance import CaseResult, Outcome

VERDICTS = json.loads((Path(__file__).parents[1] / "peers" / "verdicts.json").read_text(encoding="utf-8"))
ROWS = [VERDICTS["verdicts"][subject.name][name] for subject in SUBJECTS for name in subject.formats]


def test_page_is_up_to_date() -> None:
    """The page is what its maker makes of the stored counts, and its table has at most 40 rows."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_of(VERDICTS)
    assert page.count("\n|") <= 40


def test_every_failure_is_explained() -> None:
    """Each failure has a reason, each reason a failure, and every way to call a library passes something."""
    for row in ROWS:
        assert sum(row["why"].values()) == sum(row["ends"].get(outcome, 0) for outcome in BAD)
        assert row["ends"]["pass"] > 20
    assert {letter for row in ROWS for letter in row["why"]} == set("abcdefgh"[: len(EXPLANATIONS)])


def test_results_are_counted_by_outcome_and_reason() -> None:
    """What is stored of a run has each outcome, and each reason of what ended badly, with the number of its cases."""
    name = EXPLANATIONS[1].subject
    case = "TC-09/leading/nf4-plain/bfloat16/exact"
    ends = [Outcome.PASS, Outcome.CRASH, Outcome.CRASH, Outcome.NOT_DECLARED]
    results = [CaseResult(case=case, contract="TC-09", outcome=outcome, message="") for outcome in ends]
    assert summary_of(name, results) == {"ends": {"crash": 2, "not_declared": 1, "pass": 1}, "why": {"b": 2}}


def test_a_failure_that_nobody_looked_into_is_an_error() -> None:
    """A new failure makes no page until its reason is entered."""
    case = "TC-09/bias/nf4-plain/float32/exact"
    with pytest.raises(LookupError, match="without an explanation"):
        explanation_of(SUBJECTS[0].name, case, "fail")
