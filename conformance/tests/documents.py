"""A run made by hand, for tests of what is written about runs."""

from __future__ import annotations

from typing import Any

import attrs

from q4_conformance import CaseResult, Outcome, Report
from q4_conformance.execution.query import Query, Run
from q4_conformance.report.certificate import make_certificate
from q4_conformance.subjects.profiles import ConformanceTarget, cases_for

__all__ = ["COMMAND", "TARGET", "bad", "document", "run"]

COMMAND = ["q4", "conform", "made-up"]
TARGET = ConformanceTarget("kernel", "made-up", ("q4_0", "q8_0"))
_CAPABILITIES = {"formats": ["q4_0", "q8_0"], "precisions": ["w4a32"], "features": []}
_FACTS = {
    "versions": {"q4core": "1", "torch": "2"},
    "device": {"device": "cpu", "processor": "made up", "cores": 2},
}
_OFFERED: dict[str, Any] = {"standing": "ran"} | {
    "format": "q8_0",
    "path": "never",
    "kind": "kernel",
    "precision": "w4a8",
    "tier": 30,
    "m": [1, None],
    "standing": "ran",
}


def run(ends: dict[str, CaseResult] | None = None, *, standing: str = "ran", **facts: Any) -> Run:
    """Return a run in which every case passed, but for those of int8 and fp4 activations, and for those in ``ends``."""
    cases = cases_for(TARGET)
    results = []
    for case in cases:
        declared = case.precision.value == "exact"
        outcome, message = (Outcome.PASS, "right") if declared else (Outcome.NOT_DECLARED, "precision is not declared")
        paths = (f"dot|kernel|w4a32|{standing}",) if declared and case.check == "values" else ()
        result = CaseResult(case=case.id, contract=case.contract, outcome=outcome, message=message, paths=paths)
        results.append((ends or {}).get(case.id, result))
    source = {"distribution": "made-up", "version": "1", "package": "made_up", "with": {}, "files": 1, "sha256": "ab"}
    made = Run(
        query=Query(name="made-up"),
        target=TARGET,
        report=Report(subject="made-up", expected=[case.id for case in cases], results=results),
        facts=_FACTS,
        manifest={"name": "made-up", "capabilities": _CAPABILITIES, "source": source, "offered": [_OFFERED]},
        seconds=3.0,
    )
    return attrs.evolve(made, **facts)


def document(ends: dict[str, CaseResult] | None = None, *, standing: str = "ran", **facts: Any) -> dict[str, Any]:
    """Return the document of such a run."""
    return make_certificate(run(ends, standing=standing, **facts), COMMAND)


def bad(
    outcome: Outcome = Outcome.FAIL, message: str = "<b>wrong</b> | by\x1b[31m far", **facts: Any
) -> dict[str, CaseResult]:
    """Return an end of one case of q4_0, as ``document`` takes it."""
    name = next(name for name in run().report.expected if name.startswith("TC-09/bias/q4_0"))
    return {name: CaseResult(case=name, contract="TC-09", outcome=outcome, message=message, **facts)}
