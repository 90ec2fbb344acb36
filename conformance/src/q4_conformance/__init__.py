"""The kit that certifies any q4core backend: an oracle, a judge and a table of cases.

``run_cases("my-backend", ["nf4", "nvfp4"])`` judges an installed backend, ``check_linear(function, "nf4")`` a bare
function, ``check_core()`` the core itself.
"""

from q4_conformance.cases import backend_cases, core_cases, device_cases, linear_cases
from q4_conformance.judge import Verdict, judge, judge_noise
from q4_conformance.oracle import Reference, exact_input_gradient, exact_linear, exact_weight
from q4_conformance.outcome import CaseResult, Outcome, Report
from q4_conformance.reproducer import smaller_case
from q4_conformance.runner import check_core, check_linear, run_case, run_cases
from q4_conformance.table import Case
from q4_conformance.weights import WeightRecipe

__all__ = [
    "Case",
    "CaseResult",
    "Outcome",
    "Reference",
    "Report",
    "Verdict",
    "WeightRecipe",
    "backend_cases",
    "check_core",
    "check_linear",
    "core_cases",
    "device_cases",
    "exact_input_gradient",
    "exact_linear",
    "exact_weight",
    "judge",
    "judge_noise",
    "linear_cases",
    "run_case",
    "run_cases",
    "smaller_case",
]
