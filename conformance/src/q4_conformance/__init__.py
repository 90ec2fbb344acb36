"""The kit that certifies what plugs into q4core: an oracle, a judge and a table of cases.

``run_target(Query(name="my-backend"))`` judges an installed backend, dialect, reader, memory provider or layer type in
processes of its own, and ``make_certificate`` makes the document of it. In this process, ``run_cases("my-backend",
["nf4"])`` judges a backend, ``check_linear(function, "nf4")`` a bare function, ``check_core()`` the core itself.
"""

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
