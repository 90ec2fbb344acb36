"""A failure comes with the least that still fails: a smaller shape, its worst element, and a command that fails."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
import typer
from typer.testing import CliRunner

import q4_conformance
from q4_conformance import (
    Case,
    CaseResult,
    Outcome,
    Report,
    backend_cases,
    check_core,
    check_linear,
    linear_cases,
    run_case,
    run_cases,
    smaller_case,
)
from q4_conformance.command.conform import add_conform
from q4_conformance.execution.process import Limits
from q4_conformance.execution.query import Query
from q4_conformance.execution.reproducer import command_of, with_reproducer
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.dialect import DialectSubject
from q4_conformance.subjects.function import FunctionSubject
from q4_conformance.subjects.memory import MemorySubject
from q4_conformance_faults import FAULTS, FUNCTION_FAULTS, ToyKernel, function_of
from q4core import default_registry

if TYPE_CHECKING:
    import q4core as q4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = r"M = ([\d, ]+), N = (\d+), K = (\d+)"
SHAPE = re.compile(rf"smallest that fails: {_SIZES} \(the case: {_SIZES}\)")
CASE = smaller_case("TC-09/bias/nf4-plain-high_first-48x256b64-s0/float32/exact")
STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"
BACKENDS = {fault.name: fault for fault in FAULTS}
FUNCTIONS = {fault.name: fault for fault in FUNCTION_FAULTS}


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes find the backends of ``hostile.py``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _sizes(result: CaseResult) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return rows, N and K that were found, and those of the case."""
    found = SHAPE.search(result.reproducer)
    assert found is not None, result
    rows, n, k, was_rows, was_n, was_k = found.groups()
    few, many = (tuple(map(int, text.split(", "))) for text in (rows, was_rows))
    return (sum(few), int(n), int(k)), (sum(many), int(was_n), int(was_k))


def _first(report: Report) -> CaseResult:
    return next(result for result in report.failures() if result.reproducer)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("fault-half-precision-scales", (1, 1, 64)),
        ("fault-ignores-bias", (1, 1, 64)),
        ("fault-all-zero-for-m-127", (127, 1, 32)),
        ("fault-swaps-rows", (5, 1, 64)),
        ("fault-mutates-input", (1, 1, 64)),
    ],
)
def test_shape_is_the_smallest(name: str, least: tuple[int, int, int]) -> None:
    """Planted faults in a bare function are shown on the one row, out-feature and block that they need."""
    fault = BACKENDS[name]
    function = function_of(fault.make(name))
    result = _first(check_linear(function, fault.format, only=[fault.caught_by], dtypes=DTYPES))
    found, was = _sizes(result)
    assert found == least
    assert all(small <= large for small, large in zip(found, was, strict=True))
    assert found != was


def test_rows_that_the_layer_added_are_shown_alone() -> None:
    """A fault of a path that begins at 48 rows is shown at these, which no case names, and the call repeats them."""
    fault = BACKENDS["fault-forgets-bias-of-many-rows"]
    result = _first(run_cases(fault.make(fault.name), [fault.format], only=[fault.caught_by]))
    assert _sizes(result)[0] == (48, 1, 64)
    assert "rows=(48,), n=1, k=64" in result.reproducer


def test_the_worst_element_is_of_the_small_shape() -> None:
    """Index, value, exact value and bound are those of the smallest result."""
    fault = BACKENDS["fault-half-precision-sums"]
    function = function_of(fault.make("sums"))
    result = _first(check_linear(function, fault.format, only=[fault.caught_by]))
    assert re.search(r"there: M = 1: out_of_bound: 1 of 1 .* y\[0, 0\] = \S+, exact \S+ ± \S+", result.reproducer)


def test_backend_that_is_not_installed_is_shown_with_a_call() -> None:
    """The failure of a backend that no command would find names the call that fails again, on a smaller shape."""
    fault = BACKENDS["fault-nan-output"]
    backend = fault.make(fault.name)
    report = run_cases(backend, [fault.format], only=[fault.caught_by])
    result = _first(report)
    found, was = _sizes(result)
    assert found < was
    call = result.reproducer.splitlines()[-1]
    assert result.case in call
    again = eval(call, {"q4_conformance": q4_conformance, "subject": BackendSubject(backend)})  # noqa: S307  # ours
    assert again.outcome is Outcome.FAIL
    assert result.reproducer.splitlines()[0] in str(report)


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
    command = command_of(Query(name=name, profile=profile, limits=limits).words(), case)
    app = typer.Typer()
    add_conform(app)
    done = CliRunner().invoke(app, [*shlex.split(command)[2:], "--json"])
    assert done.exit_code == 1, done.output
    (result,) = json.loads(done.stdout)["certificate"]["results"]
    assert (result["case"], result["outcome"]) == (case, outcome)
    assert result["reproducer"].splitlines()[-1] == command


def test_a_dialect_and_a_memory_provider_that_are_installed_are_named_with_their_profile() -> None:
    """Cases of these profiles stand in the table, and their command names the profile."""
    for subject, case in (
        (DialectSubject("simple-nf4"), "EX-11/round/nf4"),
        (MemorySubject(default_registry().memory_providers()[0]), "TC-21/convert"),
    ):
        profile = "dialect" if isinstance(subject, DialectSubject) else "memory"
        result = CaseResult(case=case, contract=case[:5], outcome=Outcome.FAIL, message="wrong")
        told = with_reproducer(result, smaller_case(case), subject, run_case)
        assert told.reproducer == f"q4 conform {subject.name} --profile {profile} --case {case}"


@pytest.mark.parametrize("name", ["wrong-out-dtype", "forgets-leading-dimensions", "drops-gradients", "ignores-out"])
def test_the_snippet_fails_when_run(name: str) -> None:
    """What is printed for a function is a program of three lines that judges it by the small shape, and fails."""
    fault = FUNCTIONS[name]
    report = check_linear(
        fault.function, "nf4", only=[fault.caught_by], dtypes=DTYPES, has_out=True, has_gradients=True
    )
    lines = _first(report).reproducer.splitlines()[-3:]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "FAIL" in done.stdout
    assert fault.says in done.stdout
    if "gradient" in name:
        return  # the right toy function has none either
    right = lines[1].split(" import ")[0] + " import ToyKernel, function_of; function = function_of(ToyKernel())"
    program = "\n".join([lines[0], right, lines[2]])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_search_is_bounded() -> None:
    """However slow the subject, the search ends soon after its time; with none it looks for nothing."""
    calls = []

    def slow(case: object, subject: object) -> CaseResult:
        calls.append(case)
        time.sleep(0.2)
        return CaseResult(case="", contract="", outcome=Outcome.FAIL, message="wrong")

    case = CASE
    result = CaseResult(case=case.id, contract="TC-09", outcome=Outcome.FAIL, message="wrong")
    started = time.monotonic()
    with_reproducer(result, case, BackendSubject(ToyKernel()), slow, seconds=0.3)
    assert time.monotonic() - started < 1.0
    assert len(calls) == 2
    none = with_reproducer(result, case, BackendSubject(ToyKernel()), slow, seconds=0)
    assert len(calls) == 2
    assert "smallest" not in none.reproducer


def test_another_failure_is_not_taken_for_it() -> None:
    """A smaller shape that fails in another way is no reproducer."""

    def function(x: torch.Tensor, weight: object, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.out_features < 16:  # type: ignore[attr-defined]
            raise RuntimeError("N is too small")
        return function_of(ToyKernel())(x, weight, bias) * 2

    subject = FunctionSubject(function=function)
    result = with_reproducer(run_case(CASE, subject), CASE, subject, run_case)
    assert _sizes(result)[0] == (1, 16, 64)
    assert "function = ...  # yours" in result.reproducer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fault-gives-up-on-long-rows", "fault-counts-in-16-bits", "fault-splits-unevenly"])
def test_a_failed_proof_is_shown_at_a_size_that_fails_by_itself(name: str) -> None:
    """A self-probe that failed at a large size stands for smaller ones, too; what is shown fails without it."""
    fault = BACKENDS[name]
    case = next(case for case in linear_cases([fault.format]) if case.id.startswith(fault.caught_by))
    subject = BackendSubject(fault.make(name))
    found = run_case(case, subject)
    assert found.message.startswith("declared, then refused: probe_failed: ")
    rows, n, k = SHAPE.search(with_reproducer(found, case, subject, run_case).reproducer).group(1, 2, 3)  # type: ignore[union-attr]
    sizes = {"rows": tuple(map(int, rows.split(", "))), "n": int(n), "k": int(k)}
    again = run_case(smaller_case(case.id, **sizes), BackendSubject(fault.make(name)))  # type: ignore[arg-type]
    assert again.outcome is Outcome.FAIL, sizes
    assert "probe_failed" in again.message


def test_where_no_smaller_case_fails_it_says_so() -> None:
    """The case is not called a smaller one than itself."""

    def function(x: torch.Tensor, weight: object, bias: torch.Tensor | None) -> torch.Tensor:
        right: torch.Tensor = function_of(ToyKernel())(x, weight, bias)
        return right * 2 if (x.shape[0], *weight.shape) == (1, 48, 256) else right  # type: ignore[attr-defined]

    case = smaller_case(CASE.id, rows=(1,))
    subject = FunctionSubject(function=function)
    told = with_reproducer(run_case(case, subject), case, subject, run_case).reproducer
    shown, *rest = told.splitlines()
    assert re.fullmatch(
        r"smallest that fails: M = 1, N = 48, K = 256, the case itself; \d+ smaller did not fail so", shown
    )
    assert not any(line.startswith("there: ") for line in rest)


def test_what_did_not_fail_has_none() -> None:
    """Passes and what is not declared come without a reproducer, and results keep theirs in JSON."""
    report = check_linear(function_of(ToyKernel()), "nf4", only=["TC-09/bias", "TC-09/out"])
    assert {result.reproducer for result in report.results} == {""}
    told = CaseResult(case="c", contract="TC-09", outcome=Outcome.FAIL, message="m", reproducer="r")
    assert CaseResult.from_dict(told.to_dict()) == told


def test_only_the_first_failure_of_a_contract_case_is_shrunk() -> None:
    """Forty failures of one cause do not take forty searches."""
    fault = BACKENDS["fault-swapped-nibbles"]
    report = check_linear(function_of(fault.make("x")), "nf4", only=["TC-09/values", "EX-10/edges"])
    assert all(f'smaller_case("{result.case}"' in result.reproducer for result in report.failures())
    shown = [result.contract for result in report.failures() if "smallest that fails" in result.reproducer]
    assert shown == ["TC-09", "EX-10"]
    assert len(report.failures()) > 4


def test_no_search_where_none_is_wanted() -> None:
    """With ``reproduce=False`` a function is called for its cases alone."""
    calls = []

    def function(x: torch.Tensor, weight: object, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(x.shape)
        return x[..., :48] * 0

    report = check_linear(function, "nf4", only=[CASE.id], reproduce=False)
    assert len(calls) == 1
    assert [result.reproducer for result in report.failures()] == [""]


def test_no_smaller_weight_is_looked_for_where_memory_is_judged() -> None:
    """Of a small weight memory says nothing, so the case of hidden dense weights is its own reproducer."""
    case = next(case for case in backend_cases(["nf4"]) if case.check == "kind")
    failed = CaseResult(case=case.id, contract=case.contract, outcome=Outcome.FAIL, message="memory peaked")
    tried: list[object] = []

    def run(case: Case, subject: object) -> CaseResult:
        del subject
        tried.append(case)
        return failed

    shown = with_reproducer(failed, case, BackendSubject(ToyKernel()), run).reproducer
    assert tried == []
    assert case.id in shown
    assert "smallest" not in shown


def test_no_smallest_is_told_where_none_was_looked_for() -> None:
    """Without time for a search, nothing is said about the smallest sizes that fail."""
    subject = BackendSubject(ToyKernel())
    failed = CaseResult(case=CASE.id, contract=CASE.contract, outcome=Outcome.FAIL, message="wrong")
    shown = with_reproducer(failed, CASE, subject, run_case, seconds=0.0).reproducer
    assert CASE.id in shown
    assert "smallest" not in shown


def test_no_rows_are_tried_last() -> None:
    """A failure for every number of rows is shown on one row, and M = 0, which may do worse, is not tried."""
    case = smaller_case("EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact")
    tried = []

    def function(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        tried.append(x.shape[0])
        return function_of(ToyKernel())(x, weight, bias) * 2

    subject = FunctionSubject(function=function)
    result = with_reproducer(run_case(case, subject), case, subject, run_case)
    assert _sizes(result)[0] == (1, 1, 64)
    assert 0 not in tried


def test_a_case_of_ones_own_says_so() -> None:
    """A case that the table does not have gets no command that would not find it."""
    case = attrs.evolve(CASE, recipe=attrs.evolve(CASE.weight_recipe, n=40))
    subject = FunctionSubject(function=lambda x, weight, bias: x @ x.T)
    result = with_reproducer(run_case(case, subject), case, subject, run_case)
    assert result.reproducer.endswith("run_case(case, subject) runs it again")


def test_core_names_itself() -> None:
    """A case without a weight gives its command alone."""
    case = smaller_case("TC-01/detect")
    result = CaseResult(case=case.id, contract="TC-01", outcome=Outcome.FAIL, message="wrong")
    assert with_reproducer(result, case, None, run_case).reproducer == "q4 conform q4core --case TC-01/detect"
    assert check_core(only=["TC-01"]).passed


def test_an_unknown_case_says_so() -> None:
    """An id that the table does not have is an error that names it."""
    with pytest.raises(LookupError, match="TC-99"):
        smaller_case("TC-99/none")
