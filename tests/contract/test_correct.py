"""Backends that are right in unusual ways pass every case: the kit judges what comes out, not how it was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from q4_conformance import Outcome, backend_cases, linear_cases, run_case, run_cases
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split
from q4_conformance_faults import UNUSUAL

if TYPE_CHECKING:
    from collections.abc import Callable


OFTEN = {"values", "bias", "out", "strided", "repeat"}
"""Parts that show how these backends compute; the whole table is for ``soak``."""
EACH = [kernel.name for kernel in UNUSUAL]


@pytest.mark.parametrize("name", EACH)
def test_unusual_backend_computes_what_is_asked(name: str, install: Callable[..., None]) -> None:
    """Reordered sums, padded storage and late preparation pass the cases of one format that ask for numbers."""
    install(name)
    subject = BackendSubject(name)
    cases = split((*linear_cases(["nf4"]), *backend_cases(["nf4"])), subject)[0]
    chosen = {case.part: case for case in cases if case.part in OFTEN}
    assert chosen.keys() == OFTEN
    for case in chosen.values():
        result = run_case(case, subject)
        assert result.outcome is Outcome.PASS, result.message


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("format_", ["nf4", "nvfp4", "q4_1"])
@pytest.mark.parametrize("name", EACH)
def test_unusual_backend_passes_every_case(name: str, format_: str, install: Callable[..., None]) -> None:
    """Reordered sums, padded storage and late preparation pass as plugins; what is not declared is reported."""
    install(name)
    report = run_cases(name, [format_])
    assert report.passed, str(report)
    passed = sum(result.outcome is Outcome.PASS for result in report.results)
    told = [result.message for result in report.results if result.outcome is Outcome.NOT_DECLARED]
    assert passed + len(told) == len(report.expected)
    assert all("not declared" in message or "needs no feature" in message for message in told), told
    assert passed > 50


def test_a_few_rows_at_a_time_are_no_dense_weight(install: Callable[..., None]) -> None:
    """A kernel that decodes eight rows at a time in torch holds no dense weight: what is alive at once is judged."""
    install("unusual-sliced")
    (case,) = (case for case in backend_cases(["nf4"]) if case.check == "kind")
    (result,) = run_cases("unusual-sliced", ["nf4"], only=[case.id]).results
    assert result.outcome is Outcome.PASS, result.message
