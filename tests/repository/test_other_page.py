"""The page of what other libraries pass is made from the stored verdicts, and explains every failure."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from other_libraries import SUBJECTS
from other_page import EXPLANATIONS, PAGE, explanation_of, page_of

VERDICTS = json.loads((Path(__file__).parents[1] / "peers" / "verdicts.json").read_text(encoding="utf-8"))
RESULTS = [
    (subject, case, result["outcome"])
    for subject, formats in VERDICTS["verdicts"].items()
    for results in formats.values()
    for case, result in results.items()
]
BAD = [item for item in RESULTS if item[2] not in {"pass", "not_declared"}]


def test_page_is_up_to_date() -> None:
    """The page is what its maker makes of the stored verdicts."""
    assert PAGE.read_text(encoding="utf-8") == page_of(VERDICTS)


def test_every_failure_is_explained() -> None:
    """Each failure has a reason, each reason a failure, and every way to call a library passes something."""
    assert {explanation_of(*item) for item in BAD} == {item.text for item in EXPLANATIONS}
    for subject in SUBJECTS:
        assert sum(name == subject.name and outcome == "pass" for name, _, outcome in RESULTS) > 20


def test_a_failure_that_nobody_looked_into_is_an_error() -> None:
    """A new failure makes no page until its reason is entered."""
    verdicts = copy.deepcopy(VERDICTS)
    subject, name = SUBJECTS[0].name, SUBJECTS[0].formats[0]
    case = next(iter(verdicts["verdicts"][subject][name]))
    verdicts["verdicts"][subject][name][case] = {"outcome": "fail", "message": "planted"}
    with pytest.raises(LookupError, match="without an explanation"):
        page_of(verdicts)
