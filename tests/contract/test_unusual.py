"""Backends that are right in unusual ways pass every case: the kit judges what comes out, not how it was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from q4_conformance import Outcome, backend_cases, linear_cases, run_case, run_cases
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance_faults import UNUSUAL
from q4_conformance_faults.unusual import SlicedKernel
from q4core import BUILTIN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable


LONG = {"kind", "calls", "varied", "long", "wide", "rows", "counts", "neighbours"}
"""Parts that take most of the time, and have little to do with how these backends compute: not in every run."""
PAIRS = [
    ("unusual-lazy", "mxfp4", True),
    ("unusual-sliced", "nf4", True),
    *(
        pytest.param(kernel.name, name, False, marks=pytest.mark.soak)
        for kernel in UNUSUAL
        for name in sorted(BUILTIN_FORMATS)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format_", "is_short"), PAIRS)
def test_unusual_backend_passes_every_case(
    name: str, format_: str, is_short: bool, install: Callable[..., None]
) -> None:
    """Reordered sums, padded storage and late preparation pass, installed as plugins; what is not declared is told."""
    install(name)
    cases = (*linear_cases([format_]), *backend_cases([format_]))
    report = run_cases(name, [format_], only=[case.id for case in cases if case.part not in LONG] if is_short else ())
    assert report.passed, str(report)
    passed = sum(result.outcome is Outcome.PASS for result in report.results)
    told = [result.message for result in report.results if result.outcome is Outcome.NOT_DECLARED]
    assert passed + len(told) == len(report.expected)
    assert all("not declared" in message or "needs no feature" in message for message in told), told
    assert passed > 50


def test_a_few_rows_at_a_time_are_no_dense_weight() -> None:
    """A kernel that decodes eight rows at a time in torch holds no dense weight: what is alive at once is judged."""
    case = next(case for case in backend_cases(["nf4"]) if case.check == "kind")
    result = run_case(case, BackendSubject(SlicedKernel("unusual-sliced")))
    assert result.outcome is Outcome.PASS, result
