"""Every way in which a subject can end a case becomes a result, and every case has one."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_conformance import CaseResult, Outcome, check_core, check_linear, core_cases, linear_cases, run_case, run_cases
from q4_conformance.subjects.backend import BackendSubject, make_registry
from q4_conformance.subjects.function import FunctionSubject
from q4_conformance_faults import ToyKernel, function_of

CASE = linear_cases(["nf4"])[0]


def _run(function: object, **claims: object) -> Outcome:
    subject = FunctionSubject(function=function, **claims)  # type: ignore[arg-type]
    return run_case(CASE, subject).outcome


def test_right_function_passes() -> None:
    """A right function passes."""
    assert _run(function_of(ToyKernel())) is Outcome.PASS


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), MemoryError(), SystemError("y"), KeyError(3), SystemExit(0)])
def test_an_exception_is_a_failure_that_says_where(error: BaseException) -> None:
    """Whatever a subject raises, or exits with, is a FAIL with its class and place."""

    def function(*_: object) -> torch.Tensor:
        raise error

    result = run_case(CASE, FunctionSubject(function=function))
    assert result.outcome is Outcome.FAIL
    assert type(error).__name__ in result.message
    assert result.message.endswith(", function)")


@pytest.mark.parametrize("answer", [None, 3.0, "y", torch.zeros(3), torch.zeros(48, 1, device="meta")])
def test_an_answer_that_is_no_result_is_a_failure(answer: object) -> None:
    """What is no tensor of the right shape and device fails."""
    assert _run(lambda *_: answer) is Outcome.FAIL


def test_what_a_function_does_not_claim_is_not_declared() -> None:
    """dtypes, precisions, gradients and out= that are not claimed end as NOT_DECLARED."""
    report = check_linear(function_of(ToyKernel()), "nf4", only=["TC-09", "EX-05"])
    assert report.passed
    silent = {result.case for result in report.results if result.outcome is Outcome.NOT_DECLARED}
    assert all("float32/exact" not in case for case in silent if case.startswith(("TC-09/values", "TC-09/bias")))
    assert {case.split("/")[1] for case in silent if case.endswith("float32/exact")} == {"out", "gradient"}


def test_a_path_that_raised_is_in_the_failure() -> None:
    """A path that the core does not count, because its call raised, is named where the case failed for it."""

    class Raises(ToyKernel):
        def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, **facts: Any) -> None:
            if x.shape[0] == 7:
                raise RuntimeError("no")
            super().linear(prepared, x, out, **facts)

    sweep = next(case for case in linear_cases(["nf4"]) if case.contract == "EX-01" and 7 in case.rows)
    only = attrs.evolve(sweep, rows=(7,))
    result = run_case(only, BackendSubject(Raises("toy-raises")))
    assert (result.outcome, "RuntimeError: no" in result.message) == (Outcome.FAIL, True)
    (path,) = result.paths
    assert path in run_case(only, BackendSubject(ToyKernel("toy"))).paths


def test_every_case_has_one_result() -> None:
    """A run's results are its table, in order; the watcher sees each."""
    seen: list[CaseResult] = []
    report = check_linear(function_of(ToyKernel()), "q8_0", only=["TC-09/bias", "TC-11"], watch=seen.append)
    assert [result.case for result in report.results] == list(report.expected)
    assert tuple(seen) == report.results
    assert report.missing == ()


def test_a_selection_of_nothing_does_not_pass() -> None:
    """A run over no case is no pass."""
    assert not check_linear(function_of(ToyKernel()), "nf4", only=["TC-99"]).passed


def test_backend_is_found_by_name_or_refused() -> None:
    """An installed backend is judged by its name; a name that nobody has is an error that lists the names."""
    report = run_cases("dequant-fallback", ["q4_0"], only=["TC-09/bias"])
    assert report.passed
    assert report.passed_by_fallback == 6
    with pytest.raises(LookupError, match="dequant-fallback"):
        run_cases("no-such-backend", ["q4_0"])


def test_core_runs_by_part() -> None:
    """The core's cases run by the start of their ids."""
    report = check_core(only=["TC-01", "TC-02"])
    assert report.passed
    assert [result.contract for result in report.results] == ["TC-01", "TC-02"]
    assert len(core_cases()) == 11


def test_replaced_backend_is_a_failure() -> None:
    """Where another backend serves than the one judged, the case fails, whatever the numbers."""
    subject = BackendSubject(ToyKernel("toy-replaced"))
    subject.config = q4.SessionConfig  # type: ignore[assignment,method-assign]
    subject.registry = make_registry()
    result = run_case(CASE, subject)
    assert result.outcome is Outcome.FAIL
    assert "'dequant-fallback' serves" in result.message


@pytest.mark.parametrize("variable", ["Q4_PLUGINS", "Q4_DISABLE_PLUGINS"])
def test_a_list_of_plugins_does_not_exclude_the_subject(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's lists name installed plugins; who is judged was found among those that they leave."""
    monkeypatch.setenv(variable, "dequant-fallback" if variable == "Q4_PLUGINS" else "plugin of toy")
    report = run_cases(ToyKernel("toy"), ["nf4"], only=["TC-09/bias/nf4-plain-high_first-48x256b64-s0/float32/exact"])
    assert report.passed, str(report)


def test_paths_that_ran_stand_in_the_result() -> None:
    """The result of a case names each path that ran in it; the reference is a fallback."""
    case = next(case for case in linear_cases(["nf4"]) if case.id.startswith("TC-09/bias"))
    result = run_case(case, BackendSubject(ToyKernel()))
    assert result.paths
    assert not result.is_fallback
    assert all(len(path.split("|")) == 4 for path in result.paths)
    reference = run_case(case, BackendSubject("dequant-fallback"))
    assert reference.is_fallback
    assert all("|reference|" in path for path in reference.paths)
