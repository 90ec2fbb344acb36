"""Runs cases in a process of their own, so that a crash or a hang is a result and not the end of the run.

The parent asks for cases by id; the child tells when it starts each one and how it ended. Where the child dies, or says
nothing for too long, the case that it was at ends as CRASH or TIMEOUT, and another child takes up the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from q4_conformance.cases import cases_of, select_cases
from q4_conformance.outcome import CaseResult, Outcome, Report
from q4_conformance.runner import run_case
from q4_conformance.subject import BackendSubject

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from q4_conformance.table import Case

__all__ = ["run_isolated"]

_MARK = "\x1eq4-conformance "
"""Before each line that the child means for the parent; a backend may print what it likes."""
_START_SECONDS = 120.0


def run_isolated(  # noqa: PLR0913  # the facts of one run
    backend: str,
    formats: Iterable[str],
    *,
    device: str = "cpu",
    only: Iterable[str] = (),
    limit_seconds: float = 60.0,
    budget_seconds: float = math.inf,
) -> Report:
    """Judge a backend in processes of its own.

    Args:
        backend: Name of an installed backend, or ``module:function`` that returns one.
        formats: Names of the formats to judge it on.
        device: Where to compute.
        only: Texts with which the ids to run start; none runs all.
        limit_seconds: How long one case may take.
        budget_seconds: After which the run ends, within a case as well; the report then says that results are missing.
    """
    chosen = tuple(formats)
    cases = {case.id: case for case in select_cases(cases_of(chosen, device), only)}
    results: dict[str, CaseResult] = {}
    end = time.monotonic() + budget_seconds
    while len(results) < len(cases) and time.monotonic() < end:
        left = [name for name in cases if name not in results]
        before = len(results)
        child = _one_child(backend, chosen, device, [cases[name] for name in left], limit_seconds, end)
        with contextlib.closing(child):  # which ends the process, wherever it is
            for result in child:
                results[result.case] = result
                if time.monotonic() >= end:
                    break
        if len(results) == before:
            break  # the child ends before its first case: the report says that results are missing
    return Report(subject=backend, expected=tuple(cases), results=tuple(results.values()))


def _one_child(  # noqa: PLR0913  # the facts of one child
    backend: str, formats: tuple[str, ...], device: str, cases: list[Case], limit_seconds: float, end: float
) -> Generator[CaseResult]:
    """Run cases in one child until all are done, it ends, or the clock says ``end``."""
    request = {"backend": backend, "formats": formats, "device": device, "ids": [case.id for case in cases]}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(  # an interpreter like this one, with this module
        [sys.executable, "-m", "q4_conformance.isolated"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_pump, args=(child, lines), daemon=True)
    reader.start()
    by_id = {case.id: case for case in cases}
    current: str | None = None
    try:
        if child.stdin is not None:
            child.stdin.write(json.dumps(request))
            child.stdin.close()
        while True:
            limit = _START_SECONDS if current is None else limit_seconds
            line = lines.get(timeout=max(0.0, min(limit, end - time.monotonic())))
            if line is None:
                break
            message: dict[str, Any] = json.loads(line)
            if "start" in message:
                current = message["start"]
                continue
            current = None
            yield CaseResult.from_dict(message["result"])
    except queue.Empty:
        if current is not None and time.monotonic() < end:
            yield _ended(by_id[current], Outcome.TIMEOUT, f"no answer for {limit_seconds:g} s")
    else:
        if current is not None:
            yield _ended(by_id[current], Outcome.CRASH, f"the process ended with {child.wait()}")
    finally:
        child.kill()
        child.wait()
        reader.join()
        if child.stdout is not None:
            child.stdout.close()


def _ended(case: Case, outcome: Outcome, message: str) -> CaseResult:
    return CaseResult(case=case.id, contract=case.contract, outcome=outcome, message=message)


def _pump(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in child.stdout or ():
        if line.startswith(_MARK):
            lines.put(line.removeprefix(_MARK))
    lines.put(None)


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{_MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def _serve() -> None:
    """Run the cases that the parent asks for."""
    request: dict[str, Any] = json.loads(sys.stdin.read())
    module, separator, function = request["backend"].partition(":")
    backend = getattr(importlib.import_module(module), function)() if separator else request["backend"]
    subject = BackendSubject(backend, device=request["device"])
    cases = {case.id: case for case in cases_of(request["formats"], request["device"])}
    for name in request["ids"]:
        _tell({"start": name})
        _tell({"result": run_case(cases[name], subject).to_dict()})


if __name__ == "__main__":
    _serve()
