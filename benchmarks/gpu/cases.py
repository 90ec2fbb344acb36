"""Every contract case of the GPU backends, each backend and format in a process of its own, several at once."""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING, Any

import q4core as q4
from benchmarks.gpu import ours
from q4_conformance import Outcome, Query, run_target
from q4_conformance.contract.cases import cases_of
from q4_conformance.execution.process import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place
    from q4_conformance import Report

__all__ = ["run", "summary"]

_MESSAGE = 600
"""Characters of a message that are stored."""
_LIMITS = Limits(case_seconds=180.0, slow_seconds=max(180.0, Limits().slow_seconds), memory_bytes=24 << 30)
"""A case may compile a dozen kernels, by several compilers at once, next to CUDA's own libraries."""


def _asked(format_: str, place: Place, only: Sequence[str]) -> tuple[str, ...]:
    """Return those of the texts with which an id of a format's cases starts."""
    ids = [case.id for case in cases_of([format_], str(place.device))]
    return tuple(text for text in only if any(name.startswith(text) for name in ids))


def run(place: Place, deadline: Deadline, *, jobs: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run the cases of every backend that is here, format by format.

    Args:
        place: Where.
        deadline: Cases that have not begun by then are missing from the result, which says so.
        jobs: Processes at once.
        only: Texts with which the ids to run start; none runs all.

    Returns:
        ``reports``: for each backend and format the counts, and every case that did not pass; ``cases``: id and
        outcome of each.
    """
    wanted = [
        (name, format_)
        for name, backend in ours.backends().items()
        for format_ in q4.BUILTIN_FORMATS
        if backend.capabilities.formats & {q4.EVERY_FORMAT, format_}
    ]
    asked = {format_: _asked(format_, place, only) for format_ in q4.BUILTIN_FORMATS}
    wanted = [(name, format_) for name, format_ in wanted if asked[format_] or not only]

    def one(pair: tuple[str, str]) -> tuple[Report, float]:
        started = time.perf_counter()
        query = Query(
            name=pair[0],
            profile="kernel",
            formats=(pair[1],),
            device=str(place.device),
            only=asked[pair[1]],
            jobs=max(1, jobs // len(wanted)),
            limits=_LIMITS,
            budget_seconds=deadline.left,
        )
        report = run_target(query).report
        print(f"{pair[0]}, {pair[1]}: {str(report).splitlines()[-1][:200]}", flush=True)
        return report, time.perf_counter() - started

    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        done = dict(zip(wanted, pool.map(one, wanted), strict=True))
    done = {pair: judged for pair, judged in done.items() if judged[0].expected}
    return {
        "only": [*only],
        "backends": sorted(ours.backends()),
        "reports": {f"{name}, {format_}": summary(*judged) for (name, format_), judged in done.items()},
        "cases": {
            f"{name}: {result.case}": result.outcome.value
            for (name, _), (report, _) in done.items()
            for result in report.results
        },
    }


def summary(report: Report, seconds: float) -> dict[str, Any]:
    """Return what the result file stores of a report."""
    untestable = {one.message[:_MESSAGE] for one in report.results if one.outcome is Outcome.NOT_TESTABLE}
    return {
        "passed": report.passed,
        "cases": len(report.expected),
        "counts": {outcome.value: count for outcome, count in report.counts.items() if count},
        "not_run": len(report.missing),
        "passed_by_fallback": report.passed_by_fallback,
        "failures": [
            {"case": one.case, "outcome": one.outcome.value, "message": one.message[:_MESSAGE]}
            for one in report.failures()
        ],
        "why_not_testable": sorted(untestable),
        "seconds": round(seconds, 1),
    }
