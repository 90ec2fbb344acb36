"""Runs cases in processes of their own, so that a crash or a hang is a result and not the end of the run.

Cases of one format share a process, because starting one costs seconds. Where it dies, or says nothing for too long,
the case that it was at ends as CRASH or TIMEOUT, and another process takes up the rest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from q4_conformance.cases import select_cases
from q4_conformance.outcome import CaseResult, Outcome, Report
from q4_conformance.process import Child, Ended, Limits
from q4_conformance.profiles import PROFILES, Target, UnknownTargetError, cases_for
from q4_conformance.query import Query, Run
from q4core import BUILTIN_FORMATS, ConfigError, Q4Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from q4_conformance.table import Case

__all__ = ["group_of", "run_isolated", "run_target"]

_MODULE = "q4_conformance.child"
_THREADS = 2
"""Of each process: enough to let kernels share their work, and the same on every machine."""


def group_of(case: Case) -> str:
    """Return the name of the cases that share a process with this one."""
    return case.recipe.format.name if case.recipe is not None else case.profile


class _Runner:
    """One run under way."""

    def __init__(self, query: Query, watch: Callable[[CaseResult], object] | None) -> None:
        self.query = query
        self.results: dict[str, CaseResult] = {}
        self.points: list[Mapping[str, Any]] = []
        self.manifest: Mapping[str, Any] = {}
        self.facts: Mapping[str, Any] = {}
        self.target: Target | None = None
        self._watch = watch
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._end = time.monotonic() + query.budget_seconds
        self._fault: Ended | None = None
        """Why no process comes to its first case, once that was found."""

    def _over(self) -> bool:
        """Say whether no further case may begin."""
        return self._stopped.is_set() or time.monotonic() >= self._end

    def stop(self) -> None:
        """Let no further case begin."""
        self._stopped.set()

    def open(self, *, survey: bool = False, threads: int = _THREADS) -> Child:
        """Start a process and let it find the target.

        Raises:
            Ended: It did not come so far.
            UnknownTargetError, ConfigError: Nobody of that name is there.
        """
        query = self.query
        child = Child(_MODULE, query.limits, threads=threads)
        try:
            child.send(
                {
                    "name": query.name,
                    "profile": query.profile,
                    "formats": query.formats,
                    "device": query.device,
                    "survey": survey,
                }
            )
            message = child.receive(query.limits.start_seconds, is_over=self._over)
            if "refused" in message:
                raise _refusal(message)  # noqa: TRY301  # the process is ended below, whatever it was
            if survey:
                self.target, self.facts = Target(**message["target"]), message["facts"]
            manifest = child.receive(query.limits.start_seconds, is_over=self._over)["manifest"]
            if survey:
                self.manifest = manifest
        except BaseException:
            child.close()
            raise
        return child

    def keep(self, result: CaseResult) -> None:
        """Keep a result and show it."""
        with self._lock:
            self.results[result.case] = result
            if self._watch is not None:
                self._watch(result)

    def run_group(self, cases: tuple[Case, ...], child: Child | None) -> None:
        """Run the cases of one group until each has a result."""
        limits, deaths, served = self.query.limits, 0, False
        while left := [case for case in cases if case.id not in self.results]:
            if self._over():
                break
            if self._fault is not None or deaths >= limits.deaths:
                self._give_up(left, deaths)
                break
            try:
                child = child or self.open()
                served = True
                self._converse(child, left)
                child.finish()
            except TimeoutError:
                if child is not None:
                    child.close()
                break
            except Ended as ended:
                deaths += 1
                if not served:
                    self._fault = ended
            child = None
        if child is not None:
            child.close()

    def _converse(self, child: Child, cases: list[Case]) -> None:
        """Let a process run cases; the one at which it ends gets its result here.

        Raises:
            Ended: The process did not come to the end of them.
            TimeoutError: The time is spent.
        """
        by_id = {case.id: case for case in cases}
        current: Case | None = None
        is_reproducing = False
        child.send({"cases": list(by_id)})
        limits = self.query.limits
        try:
            while True:
                slow = current is not None and current.is_slow
                seconds = limits.slow_seconds if slow else limits.case_seconds
                message = child.receive(seconds, is_over=self._over)
                if message.get("done"):
                    return
                is_reproducing = "reproducing" in message
                if "start" in message:
                    current = by_id[message["start"]]
                elif "reproduced" in message:
                    self.results[message["reproduced"]["case"]] = CaseResult.from_dict(message["reproduced"])
                elif "result" in message and current is not None:
                    self.keep(CaseResult.from_dict(message["result"]))
                    current = None
                if current is None and self._over():
                    raise TimeoutError
        except Ended as ended:
            if is_reproducing:
                raise  # the failure itself was told, and no further case was begun
            if current is None:  # it ended between two cases: the one that it should have begun answers for it
                current = next(case for case in cases if case.id not in self.results)
            self.keep(_bad(current, ended.outcome, ended.reason))
            raise

    def _give_up(self, cases: Iterable[Case], deaths: int) -> None:
        for case in cases:
            if self._fault is not None:
                self.keep(_bad(case, self._fault.outcome, f"no process came to its first case: {self._fault.reason}"))
            else:
                self.keep(_bad(case, Outcome.CRASH, f"not begun: {deaths} processes of this group had ended badly"))

    def measure(self, formats: Iterable[str], seconds: float) -> None:
        """Measure, one format after the other, in a process of its own each."""
        for name in formats:
            with contextlib.suppress(Ended, TimeoutError):
                child = self.open(threads=os.cpu_count() or 1)
                with contextlib.closing(child):
                    child.send({"measure": name, "seconds": seconds})
                    self.points += child.receive(self.query.limits.slow_seconds, is_over=self._over)["points"]


def _bad(case: Case, outcome: Outcome, message: str) -> CaseResult:
    return CaseResult(case=case.id, contract=case.contract, outcome=outcome, message=message)


def _refusal(message: dict[str, Any]) -> Q4Error:
    fields = dict(message["fields"])
    what = fields.pop("what")
    kinds: dict[str, type[Q4Error]] = {"UnknownTargetError": UnknownTargetError}
    return kinds.get(message["refused"], ConfigError)(what, **{key: item for key, item in fields.items() if item})


def _groups(cases: Iterable[Case]) -> Iterator[tuple[Case, ...]]:
    """Yield the cases group by group, the group with most cases first, so that the last process is a short one."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(group_of(case), []).append(case)
    yield from (tuple(found[name]) for name in sorted(found, key=lambda name: (-len(found[name]), name)))


def _stand_in(query: Query) -> Target:
    """Return the target of a run whose processes all end before they find it: every case of it is due."""
    profile = query.profile if query.profile in PROFILES else "kernel"
    return Target(profile or "kernel", query.name, query.formats or tuple(BUILTIN_FORMATS), query.device)


def _chosen(cases: tuple[Case, ...], only: tuple[str, ...]) -> tuple[Case, ...]:
    """Return the cases that are asked for; each text must ask for one at least."""
    for text in only:
        if not any(case.id.startswith(text) for case in cases):
            close = difflib.get_close_matches(text, [case.id for case in cases], n=1, cutoff=0.3)
            contracts = ", ".join(dict.fromkeys(case.contract for case in cases))
            hint = f"Did you mean {close[0]}? " if close else ""
            hint += f"There are {contracts}."
            raise ConfigError("q4 conform", name="--case", rule="the beginning of a case's id", value=text, hint=hint)
    return select_cases(cases, only)


def run_target(
    query: Query,
    *,
    watch: Callable[[CaseResult], object] | None = None,
    announce: Callable[[int], object] | None = None,
    measure_seconds: float = 0.0,
) -> Run:
    """Judge a target in processes of its own. Whatever it does there, every case gets a result.

    Args:
        query: Who, and on what.
        watch: Called with each result as it comes.
        announce: Called with the number of cases before the first.
        measure_seconds: How long to measure each point after the cases; 0 measures nothing.

    Raises:
        UnknownTargetError, ConfigError: Nobody of that name is there, or the query asks for what there is not.
    """
    started = time.monotonic()
    runner = _Runner(query, watch)
    child: Child | None = None
    with contextlib.suppress(TimeoutError):
        try:
            child = runner.open(survey=True)
        except Ended as ended:
            runner._fault = ended  # noqa: SLF001  # own class
    target = runner.target or _stand_in(query)
    try:
        cases = _chosen(cases_for(target), query.only)
        if announce is not None:
            announce(len(cases))
        _run_groups(runner, list(_groups(cases)), child)
        if measure_seconds:
            runner.measure(target.formats, measure_seconds)
    finally:
        if child is not None:
            child.close()
    expected = tuple(case.id for case in cases)
    ordered = [runner.results[name] for name in expected if name in runner.results]
    return Run(
        query=query,
        target=target,
        report=Report(subject=query.name, expected=expected, results=ordered),
        facts=runner.facts,
        manifest=runner.manifest,
        points=tuple(runner.points),
        seconds=time.monotonic() - started,
    )


def _run_groups(runner: _Runner, groups: list[tuple[Case, ...]], first: Child | None) -> None:
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


def run_isolated(  # noqa: PLR0913  # the facts of one run
    backend: str,
    formats: Iterable[str],
    *,
    device: str = "cpu",
    only: Iterable[str] = (),
    limit_seconds: float = 60.0,
    budget_seconds: float = math.inf,
) -> Report:
    """Judge a backend in processes of its own, one after the other.

    Args:
        backend: Name of an installed backend, or ``module:function`` that returns one.
        formats: Names of the formats to judge it on.
        device: Where to compute.
        only: Texts with which the ids to run start; none runs all.
        limit_seconds: How long one case may take.
        budget_seconds: After which the run ends, within a case as well; the report then says that results are missing.

    Raises:
        UnknownTargetError: No backend of that name is installed.
    """
    limits = Limits(case_seconds=limit_seconds, slow_seconds=max(limit_seconds, Limits().slow_seconds))
    query = Query(
        name=backend,
        profile="kernel",
        formats=tuple(formats),
        device=device,
        only=tuple(only),
        jobs=1,
        limits=limits,
        budget_seconds=budget_seconds,
    )
    return run_target(query).report
