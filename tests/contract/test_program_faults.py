"""The profile of programs: who declares them passes, and each planted fault is caught by the case meant for it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from q4_conformance import Outcome, Query, program_cases, run_case, run_target
from q4_conformance.execution.process import Limits
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.profiles import cases_for, find_target, subject_for
from q4_conformance_faults import PROGRAM_FAULTS, Fault, ToyKernel
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = program_cases(["nf4"])
IN_PROCESS = [fault for fault in PROGRAM_FAULTS if fault.ends is Outcome.FAIL]
DEADLY = [fault for fault in PROGRAM_FAULTS if fault.ends is not Outcome.FAIL]


REFERENCE = "q4_conformance_faults.programs:ToyPrograms"
"""A backend that runs programs by the reference of q4-programs."""


LONG = ("rounds", "pages")
"""Parts for which the reference takes seconds; the native engine passes them in every run."""


def require_programs_pass(name: str, *without: str) -> None:
    """Run every case of a backend but those of some parts; the reference may make tensors."""
    target = find_target(name, profile="program", formats=["nf4"])
    assert cases_for(target) == CASES
    for case in (case for case in CASES if case.part not in without):
        result = run_case(case, subject_for(target))
        is_free = name == REFERENCE and case.part == "quiet"
        assert result.outcome is (Outcome.FAIL if is_free else Outcome.PASS), result


def test_programs_pass() -> None:
    """The native engine passes every case."""
    require_programs_pass("cpu-native")


@pytest.mark.parametrize("without", [LONG, pytest.param((), marks=pytest.mark.soak)])
def test_programs_of_the_reference_pass(without: tuple[str, ...]) -> None:
    """The reference passes them, where MKL keeps the order of its sums: its products are torch's own."""
    program = f"import {__name__} as cases; cases.require_programs_pass(cases.REFERENCE, *{without})"
    variables = {**os.environ, "MKL_CBWR": "AVX2,STRICT", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False, timeout=scaled(120)
    )
    assert done.returncode == 0, done.stderr


def test_the_kit_without_the_contract_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without q4-programs programs can't be judged, and the result says what to install."""
    monkeypatch.setitem(sys.modules, "q4_programs", None)
    monkeypatch.delitem(sys.modules, "q4_conformance.subjects.scenes", raising=False)
    monkeypatch.delitem(sys.modules, "q4_conformance.oracle.operations", raising=False)
    monkeypatch.delitem(sys.modules, "q4_conformance.subjects.circuits", raising=False)
    result = run_case(CASES[0], subject_for(find_target("cpu-native", profile="program")))
    assert result.outcome is Outcome.NOT_TESTABLE
    assert "pip install q4-programs" in result.message


def test_programs_that_are_not_declared() -> None:
    """A backend without programs is not judged by them."""
    subject = BackendSubject(ToyKernel())
    assert {run_case(case, subject).outcome for case in CASES} == {Outcome.NOT_DECLARED}


@pytest.mark.filterwarnings("ignore::q4core.Q4ProbeWarning")
@pytest.mark.parametrize("fault", IN_PROCESS, ids=lambda fault: fault.name)
def test_faulty_programs_are_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed backend with the fault fails the case meant for it, for the reason meant."""
    install(fault.name)
    subject = subject_for(find_target(fault.name, profile="program"))
    case = next(case for case in CASES if case.id.startswith(fault.caught_by))
    result = run_case(case, subject)
    assert result.outcome is Outcome.FAIL, result
    assert fault.says in result.message


@pytest.mark.slow
@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.name)
def test_deadly_programs_are_caught(fault: Fault, install: Callable[..., None]) -> None:
    """A program that ends its process is a result, of the case that was running."""
    install(fault.name)
    query = Query(
        name=fault.name, profile="program", formats=("nf4",), only=(fault.caught_by,), limits=Limits(case_seconds=60.0)
    )
    results = run_target(query).report.results
    assert [result.outcome for result in results] == [fault.ends], results
    assert fault.says in results[0].message


def test_a_backend_s_programs_are_judged_by_their_own_profile() -> None:
    """By default a backend is judged by its products; programs must be asked for."""
    assert find_target("cpu-native").profile == "kernel"
    assert find_target("cpu-native", profile="program").profile == "program"
    assert q4.default_registry().backends()["cpu-native"].capabilities.ops >= {"program"}
