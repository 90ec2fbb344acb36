"""A run in progress: processes run cases, group by group, until each case has a result."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.execution.process import Child, Ended
from q4_conformance.outcome import BAD, CaseResult, Outcome
from q4_conformance.subjects.profiles import ConformanceTarget, UnknownTargetError
from q4_conformance.subjects.reference import MissingReferenceError
from q4core import ConfigError, Q4Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from q4_conformance.contract.case import Case
    from q4_conformance.execution.query import Query

_MODULE = "q4_conformance.execution.child"
_THREADS = 2
"""Of each process: enough to let kernels share their work, and the same on every machine."""


class Judging:
    """A run in progress."""

    def __init__(
        self,
        query: Query,
        watch: Callable[[CaseResult], object] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.query = query
        self.results: dict[str, CaseResult] = {}
        self.manifest: Mapping[str, Any] = {}
        self.facts: Mapping[str, Any] = {}
        self.undeclared: Mapping[str, str] = {}
        self.target: ConformanceTarget | None = None
        self._watch = watch
        self._is_over = is_over
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._end = time.monotonic() + query.budget_seconds
        self.fault: Ended | None = None
        """Why no process comes to its first case, once that was found."""

    def _over(self) -> bool:
        """Say whether no further case may begin."""
        return self._stopped.is_set() or self._is_over() or time.monotonic() >= self._end

    def stop(self) -> None:
        """Let no further case begin."""
        self._stopped.set()

    def open(self, *, survey: bool = False) -> Child:
        """Start a process and let it find the target; with ``survey`` keep its facts and manifest.

        Raises:
            Ended: It did not come so far.
            UnknownTargetError, ConfigError, MissingReferenceError: As ``run_target`` raises them.
        """
        query = self.query
        child = Child(_MODULE, query.limits, threads=_THREADS)
        try:
            asked = {name: getattr(query, name) for name in ("name", "profile", "formats", "device")}
            child.send(asked | {"survey": survey})
            message = self._answer(child, query.limits.start_seconds)
            if survey:
                self.target, self.facts = ConformanceTarget(**message["target"]), message["facts"]
            answer = self._answer(child, query.limits.load_seconds)
            if survey:
                self.manifest, self.undeclared = answer["manifest"], answer["undeclared"]
        except BaseException:
            child.close()
            raise
        return child

    def _answer(self, child: Child, seconds: float) -> dict[str, Any]:
        """Return what a process answers before its first case; ``Ended`` names the step, which has its own time."""
        step = ""
        try:
            while True:
                message = child.receive(seconds, is_over=self._over)
                if "refused" in message:
                    raise _refusal(message)
                if "step" not in message:
                    return message
                step, seconds = f"{message['step']}: ", self.query.limits.load_seconds
        except Ended as ended:
            raise Ended(ended.outcome, f"{step}{ended.reason}") from None

    def keep(self, result: CaseResult) -> None:
        """Keep a result, with the command that asks for it again where it is bad, and show it."""
        if result.outcome in BAD and not result.reproducer:
            result = attrs.evolve(result, reproducer=self.query.command_of(result.case))
        with self._lock:
            self.results[result.case] = result
            if self._watch is not None:
                self._watch(result)

    def run_group(self, cases: tuple[Case, ...], child: Child | None) -> None:
        """Run the cases of one group until each has a result."""
        limits, deaths, served = self.query.limits, 0, False
        last: Ended | None = None
        while left := self._left(cases):
            if self._over():
                break
            if self.fault is not None:
                self._give_up(left, self.fault.outcome, f"no process came to its first case: {self.fault.reason}")
                break
            if last is not None and deaths >= limits.deaths:
                why = f"not begun: {deaths} processes of this group had ended badly, the last so: {last.reason}"
                self._give_up(left, last.outcome, why)
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
                deaths, last = deaths + 1, ended
                if not served:
                    self.fault = ended
            child = None
        if child is not None:
            child.close()

    def _converse(self, child: Child, cases: list[Case]) -> None:
        """Let a process run cases; the one at which it ends gets its result here.

        Raises:
            Ended, TimeoutError: The process did not come to the end of them, or the time is spent.
        """
        limits, by_id = self.query.limits, {case.id: case for case in cases}
        child.send({"cases": list(by_id)})
        current: Case | None = None
        since = time.monotonic()
        try:
            while True:
                slow = current is not None and current.is_slow
                message = child.receive(limits.slow_seconds if slow else limits.case_seconds, is_over=self._over)
                if "start" in message:
                    current, since = by_id[message["start"]], time.monotonic()
                elif "result" in message and current is not None:
                    current = None
                    self.keep(CaseResult.from_dict(message["result"]))
                if message.get("done"):  # a case without a result now is not asked for again
                    self._give_up(self._left(cases), Outcome.CRASH, "its process ended well, and sent no result")
                    return
                if current is None and self._over():
                    raise TimeoutError
        except Ended as ended:
            if current is None and not self._left(cases):  # every case has its result
                raise
            if current is None:  # it ended between two cases: the one that it should have begun answers for it
                current, since = self._left(cases)[0], time.monotonic()
            self._give_up([current], ended.outcome, ended.reason, seconds=time.monotonic() - since)
            raise

    def _left(self, cases: Iterable[Case]) -> list[Case]:
        return [case for case in cases if case.id not in self.results]

    def _give_up(self, cases: Iterable[Case], outcome: Outcome, message: str, *, seconds: float = 0.0) -> None:
        for case in cases:
            result = CaseResult(case=case.id, contract=case.contract, outcome=outcome, message=message, seconds=seconds)
            self.keep(result)


def _refusal(message: dict[str, Any]) -> Q4Error:
    fields = dict(message["fields"])
    what = fields.pop("what")
    kinds: dict[str, type[Q4Error]] = {kind.__name__: kind for kind in (MissingReferenceError, UnknownTargetError)}
    return kinds.get(message["refused"], ConfigError)(what, **{key: item for key, item in fields.items() if item})
