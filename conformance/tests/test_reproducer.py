"""Every failure comes with what to type to run its case again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from q4_conformance import CaseResult, Outcome, check_core, check_linear, dialect_cases, memory_cases, run_cases
from q4_conformance.command.conform import add_conform
from q4_conformance.execution.in_process import with_command
from q4_conformance.execution.process import Limits
from q4_conformance.execution.query import Query
from q4_conformance.subjects.dialect import DialectSubject
from q4_conformance.subjects.memory import MemorySubject
from q4_conformance_faults import FAULTS, FUNCTION_FAULTS
from q4core import default_registry

STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes find the backends of ``hostile.py``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile", "case", "outcome"),
    [
        ("hostile:wrong", None, STRUCK, "fail"),
        ("hostile:leaves", None, STRUCK, "crash"),
        ("q4_conformance_faults:hanging", None, STRUCK, "timeout"),
        ("hostile:wrong_dialect", "dialect", "EX-11/round/mxfp4", "fail"),
        ("hostile:wrong_memory", "memory", "TC-21/convert", "fail"),
    ],
)
def test_the_command_fails_when_run(name: str, profile: str | None, case: str, outcome: str) -> None:
    """What is printed for a failure, of whatever profile and end, ends in the same way and prints itself again."""
    limits = Limits(case_seconds=3.0) if outcome == "timeout" else Limits()
    command = Query(name=name, profile=profile, limits=limits).command_of(case)
    app = typer.Typer()
    add_conform(app)
    done = CliRunner().invoke(app, [*shlex.split(command)[2:], "--json"])
    assert done.exit_code == 1, done.output
    (result,) = json.loads(done.stdout)["certificate"]["results"]
    assert (result["case"], result["outcome"]) == (case, outcome)
    assert result["reproducer"] == command


def test_a_dialect_and_a_memory_provider_that_are_installed_are_named_with_their_profile() -> None:
    """Their command names the profile, because a backend may have the same name."""
    provider = MemorySubject(default_registry().memory_providers()[0])
    for subject, case, profile in (
        (DialectSubject("simple-nf4"), dialect_cases()[1], "dialect"),
        (provider, memory_cases()[0], "memory"),
    ):
        result = CaseResult(case=case.id, contract=case.contract, outcome=Outcome.FAIL, message="wrong")
        told = with_command(result, case, subject)
        assert told.reproducer == f"q4 conform {subject.name} --profile {profile} --case {case.id}"


def test_a_backend_that_is_not_installed_and_a_function_are_shown_with_a_call() -> None:
    """Where no command finds who failed, the call that judges it again is named, with the case."""
    fault = next(fault for fault in FAULTS if fault.name == "fault-nan-output")
    (result,) = run_cases(fault.make(fault.name), [fault.format], only=[fault.caught_by]).failures()[:1]
    assert "q4_conformance.run_case(" in result.reproducer
    assert result.case in result.reproducer
    wrong = next(fault for fault in FUNCTION_FAULTS if fault.name == "ignores-out")
    (result,) = check_linear(wrong.make, "nf4", only=[wrong.caught_by], has_out=True).failures()[:1]
    assert result.reproducer.startswith('q4_conformance.check_linear(function, "nf4", only=["')


def test_the_core_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the core's is asked for again by ``q4 conform q4core``."""
    from q4_conformance.contract.case import CHECKS  # noqa: PLC0415  # filled by importing the checks
    from q4_conformance.outcome import FailureError  # noqa: PLC0415  # beside it

    def fails(*_: object) -> str:
        raise FailureError("no")

    monkeypatch.setitem(CHECKS, "detect_nf4", fails)
    (result,) = check_core(only=["TC-01"]).results
    assert result.reproducer == "q4 conform q4core --case TC-01/detect"
