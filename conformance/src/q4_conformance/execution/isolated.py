"""Runs of cases in processes of their own, so that a crash or a hang is a result and not the end of the run.

Cases of one format share a process, because starting one costs seconds. Where it dies, or says nothing for too long,
the case that it was at ends as CRASH or TIMEOUT, and another process runs the rest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from typing import TYPE_CHECKING, Any

from q4_conformance.contract.case import part_order
from q4_conformance.contract.cases import select_cases
from q4_conformance.contract.pairwise import pairwise
from q4_conformance.execution.process import Child, Ended
from q4_conformance.execution.query import Query, Run
from q4_conformance.execution.run import Judging
from q4_conformance.outcome import CaseResult, Report, grouped
from q4_conformance.subjects.manifest import declared_in
from q4_conformance.subjects.profiles import PROFILES, ConformanceTarget, cases_for, narrowed
from q4core import BUILTIN_FORMATS, ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from q4_conformance.contract.case import Case


def group_of(case: Case) -> str:
    """Return the name of the cases that share a process with this one."""
    return case.recipe.format.name if case.recipe is not None else case.profile


def _groups(cases: Iterable[Case]) -> Iterator[tuple[Case, ...]]:
    """Yield the cases group by group, the group with most cases first, so that the last process is a short one."""
    found = grouped(cases, group_of)
    yield from (tuple(found[name]) for name in sorted(found, key=lambda name: (-len(found[name]), name)))


def _stand_in(query: Query) -> ConformanceTarget:
    """Return the target of a run whose processes all end before they find it: every case of it is due."""
    profile = query.profile if query.profile in PROFILES else "kernel"
    return ConformanceTarget(profile or "kernel", query.name, query.formats or tuple(BUILTIN_FORMATS), query.device)


def _chosen(cases: tuple[Case, ...], only: tuple[str, ...], manifest: Mapping[str, Any]) -> tuple[Case, ...]:
    """Return the cases that are asked for; each text must ask for one at least."""
    if only and not cases:
        rule = f"such that one of them has cases: {', '.join(BUILTIN_FORMATS)}"
        declared = ", ".join(declared_in(manifest) or ()) or "none"
        raise ConfigError("q4 conform", name="formats that the manifest declares", rule=rule, value=declared)
    for text in only:
        if not any(case.id.startswith(text) for case in cases):
            raise ConfigError(
                "q4 conform", name="--case", rule="the beginning of a case's id", value=text, hint=_nearest(text, cases)
            )
    return select_cases(cases, only)


def _nearest(text: str, cases: tuple[Case, ...]) -> str:
    """Return what may have been meant, as far into an id as the text goes, and which contracts there are."""
    words = text.rstrip("/").count("/") + 1
    beginnings = dict.fromkeys("/".join(case.id.split("/")[:words]) for case in cases)
    close = closest_name(text, beginnings, cutoff=0.3)
    contracts = sorted({case.contract for case in cases}, key=part_order)
    meant = f"Did you mean {close}? " if close else ""
    return f"{meant}There are {', '.join(contracts)}."


def due_cases(query: Query) -> tuple[tuple[Case, ...], dict[str, str]]:
    """Return the cases that a run of a query would run, and id → reason of those that its manifest does not declare.

    A process is asked; where it ends before it answers, every case is due. Raises as ``run_target`` does.
    """
    runner = Judging(query)
    with contextlib.suppress(Ended, TimeoutError), contextlib.closing(runner.open(survey=True)):
        pass
    return _split(runner)[1:]


def _split(runner: Judging) -> tuple[ConformanceTarget, tuple[Case, ...], dict[str, str]]:
    """Return who is judged, the cases that are due, and id → reason of those that are not declared."""
    query, target = runner.query, runner.target or _stand_in(runner.query)
    if not (query.formats or query.only):  # where cases are named, those of other formats are reported as undeclared
        target = narrowed(target, runner.manifest)
    chosen = _chosen(cases_for(target), query.only, runner.manifest)
    undeclared = {case.id: runner.undeclared[case.id] for case in chosen if case.id in runner.undeclared}
    return target, tuple(case for case in chosen if case.id not in undeclared), undeclared


def run_target(  # the facts of one run
    query: Query,
    *,
    watch: Callable[[CaseResult], object] | None = None,
    announce: Callable[[int], object] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Run:
    """Judge a target in processes of its own. Whatever it does there, every case gets a result.

    Args:
        query: Who, and on what.
        watch: Called with each result as soon as it is whole; a failure brings its reproducer.
        announce: Called with the number of cases before the first.
        is_over: Says when to end, within a case as well; the report then says that results are missing.

    Raises:
        UnknownTargetError: No target has that name, or its import raises. One that hangs or ends the process is judged.
        ConfigError: The query asks for what does not exist.
        MissingReferenceError: The reference is not installed, which the kit needs in addition to the subject.
    """
    started = time.monotonic()
    runner = Judging(query, watch, is_over)
    child: Child | None = None
    with contextlib.suppress(TimeoutError):
        try:
            child = runner.open(survey=True)
        except Ended as ended:
            runner.fault = ended
    try:
        target, due, undeclared = _split(runner)
        cases = pairwise(due) if query.is_pairwise else due
        if announce is not None:
            announce(len(cases))
        _run_groups(runner, list(_groups(cases)), child)
    finally:
        if child is not None:
            child.close()
    expected = tuple(case.id for case in cases)
    ordered = [runner.results[name] for name in expected if name in runner.results]
    return Run(
        query=query,
        target=target,
        report=Report(subject=query.name, expected=expected, results=ordered, undeclared=undeclared),
        facts=runner.facts,
        manifest=runner.manifest,
        left_out=len(due) - len(cases),
        seconds=time.monotonic() - started,
    )


def _run_groups(runner: Judging, groups: list[tuple[Case, ...]], first: Child | None) -> None:
    """Run all groups, some at once; the process that found the target begins with the first."""
    with concurrent.futures.ThreadPoolExecutor(runner.query.processes) as pool:
        futures = [
            pool.submit(runner.run_group, cases, first if index == 0 else None) for index, cases in enumerate(groups)
        ]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            runner.stop()
            for future in futures:
                future.cancel()
            raise
