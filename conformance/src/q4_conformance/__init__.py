"""The kit that certifies what plugs into q4core: an oracle, a judge and a table of cases.

``run_target(Query(name="my-backend"))`` judges an installed backend, dialect, reader, memory provider or layer type in
processes of its own, and ``make_certificate`` makes the document of it. In this process, ``run_cases("my-backend",
["nf4"])`` judges a backend, ``check_linear(function, "nf4")`` a bare function, ``check_core()`` the core itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.contract.cases import backend_cases, device_cases, linear_cases, program_cases
    from q4_conformance.contract.plain_cases import core_cases, dialect_cases, file_cases, layer_cases, memory_cases
    from q4_conformance.execution.in_process import check_core, check_linear, run_case, run_cases
    from q4_conformance.execution.isolated import run_target
    from q4_conformance.execution.query import Query, Run
    from q4_conformance.oracle.compare import Comparison, judge
    from q4_conformance.oracle.exact import Reference, exact_input_gradient, exact_linear, exact_weight
    from q4_conformance.oracle.weights import WeightRecipe
    from q4_conformance.outcome import CaseResult, Outcome, Report
    from q4_conformance.report.certificate import make_certificate
    from q4_conformance.report.files import write_files
    from q4_conformance.report.verify import read_certificate
    from q4_conformance.subjects.profiles import (
        ConformanceTarget,
        UnknownTargetError,
        cases_for,
        find_target,
        subject_for,
    )

__all__ = [
    "Case",
    "CaseResult",
    "Comparison",
    "ConformanceTarget",
    "Outcome",
    "Query",
    "Reference",
    "Report",
    "Run",
    "UnknownTargetError",
    "WeightRecipe",
    "backend_cases",
    "cases_for",
    "check_core",
    "check_linear",
    "core_cases",
    "device_cases",
    "dialect_cases",
    "exact_input_gradient",
    "exact_linear",
    "exact_weight",
    "file_cases",
    "find_target",
    "judge",
    "layer_cases",
    "linear_cases",
    "make_certificate",
    "memory_cases",
    "program_cases",
    "read_certificate",
    "run_case",
    "run_cases",
    "run_target",
    "subject_for",
    "write_files",
]

_HOMES = {
    "contract.case": "Case",
    "contract.cases": "backend_cases device_cases linear_cases program_cases",
    "contract.plain_cases": "core_cases dialect_cases file_cases layer_cases memory_cases",
    "execution.in_process": "check_core check_linear run_case run_cases",
    "execution.isolated": "run_target",
    "execution.query": "Query Run",
    "oracle.compare": "Comparison judge",
    "oracle.exact": "Reference exact_input_gradient exact_linear exact_weight",
    "oracle.weights": "WeightRecipe",
    "outcome": "CaseResult Outcome Report",
    "report.certificate": "make_certificate",
    "report.files": "write_files",
    "report.verify": "read_certificate",
    "subjects.profiles": "ConformanceTarget UnknownTargetError cases_for find_target subject_for",
}
"""Module → the names of it that are public here; imported when one is asked for, so that commands start at once."""

if not TYPE_CHECKING:  # for a checker, a name that is not here stays an error

    def __getattr__(name: str) -> Any:
        home = next((module for module, names in _HOMES.items() if name in names.split()), None)
        if home is None:
            what = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(what)
        found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
