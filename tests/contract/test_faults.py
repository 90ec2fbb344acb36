"""Every planted fault is caught, by the case that is meant to catch it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs
import pytest
import torch

import q4core
from q4_conformance import (
    Case,
    CaseResult,
    Outcome,
    Query,
    check_core,
    check_linear,
    device_cases,
    run_case,
    run_cases,
    run_target,
)
from q4_conformance.contract.cases import cases_of, select_cases
from q4_conformance.contract.pairwise import pairwise
from q4_conformance.execution.process import Limits
from q4_conformance.measurement.recording import recorded
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split
from q4_conformance.subjects.profiles import UnknownTargetError, find_target, subject_for
from q4_conformance_faults import DEVICE_FAULTS, FAULTS, FUNCTION_FAULTS, Fault, ToyKernel, function_of
from q4_conformance_faults.boundary import Differentiates
from q4_conformance_faults.devices import ToyQuantiser
from q4core import BUILTIN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IN_PROCESS = [fault for fault in FAULTS if fault.ends is Outcome.FAIL]
DEADLY = [fault for fault in FAULTS if fault.ends is not Outcome.FAIL]
NUMERIC = [fault for fault in FAULTS if fault.is_numeric]
_HIDDEN = "in-torch", "in-halves", "for-bfloat16", "for-many-rows"
IN_SOAK = {
    *(f"fault-hidden-dense-{where}" for where in _HIDDEN),
    *("fault-hidden-levels-for-many-rows", "fault-keeps-dense-scratch", "fault-keeps-levels-when-hot"),
    *("fault-hides-dense", "fault-hides-levels-in-shared-memory", "fault-hides-levels-behind-descriptor"),
}
"""Faults of memory, of seconds each, that differ from one of every run in where, or for which calls, it is taken."""

CAUGHT: dict[str, str] = {}
"""Fault → the case that it failed in this process: what one test has shown, another one need not run again."""


def _by_length(fault: Fault) -> pytest.ParameterSet:
    return pytest.param(fault, id=fault.name, marks=[pytest.mark.soak] if fault.name in IN_SOAK else [])


@pytest.mark.parametrize("fault", [_by_length(fault) for fault in IN_PROCESS])
def test_faulty_backend_is_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed backend with the fault fails the case meant for it, for the reason meant."""
    chosen = {case.id for case in _choice(fault.make(fault.name).capabilities)}
    install(fault.name)
    subject = BackendSubject(fault.name)
    results = []
    meant = select_cases(cases_of([fault.format], "cpu"), [fault.caught_by])
    for case in sorted(meant, key=lambda case: case.id not in chosen):
        results.append(run_case(case, subject))
        if fault.says in results[-1].message:
            break
    assert results[-1].outcome is Outcome.FAIL, results
    assert fault.says in results[-1].message, results
    CAUGHT[fault.name] = results[-1].case
    assert ("probe_failed" in results[-1].message) is not fault.passes_probe


@pytest.mark.parametrize("fault", DEVICE_FAULTS, ids=lambda fault: fault.name)
def test_fault_of_devices_is_caught_on_the_cpu(fault: Fault, install: Callable[..., None]) -> None:
    """A case that runs on devices alone fails for the installed fault on the CPU, too, for the reason meant."""
    install(fault.name)
    case = next(case for case in device_cases([fault.format]) if case.id.startswith(fault.caught_by))
    result = run_case(case, BackendSubject(fault.name))
    assert result.outcome is Outcome.FAIL, result
    assert fault.says in result.message


@pytest.mark.slow
@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.name)
def test_deadly_backend_is_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed backend that ends or stops its process is a result, of the case that was running."""
    install(fault.name)
    limits = Limits(case_seconds=6.0)
    report = run_target(Query(name=fault.name, formats=(fault.format,), only=(fault.caught_by,), limits=limits)).report
    assert [result.outcome for result in report.results] == [fault.ends], report
    assert fault.says in report.results[0].message


def test_a_plugin_that_raises_at_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for a backend whose plugin does not load states why, and the case meant for it stops no other."""
    module = "q4_conformance.subjects.raising"
    monkeypatch.setenv("Q4_PLUGIN_MODULES", module)
    q4core.reset_registry()
    try:
        with recorded(q4core.Q4PluginWarning):  # told once in a process, and perhaps before this test
            records = {record.name: record for record in q4core.default_registry().records()}
        assert records[module].state == "failed"
        with pytest.raises(UnknownTargetError, match="raised at import"):
            subject_for(find_target(module, profile="kernel"))
        assert check_core(only=["EX-12"]).passed
    finally:
        monkeypatch.undo()
        q4core.reset_registry()


@pytest.mark.parametrize("fault", NUMERIC, ids=lambda fault: fault.name)
def test_faulty_function_is_caught_without_the_core(fault: Fault) -> None:
    """The same arithmetic in a bare function fails, so that the judge sees it without the core's self-probe."""
    function = function_of(fault.make(fault.name))
    report = check_linear(function, fault.format, only=[fault.caught_by], dtypes=DTYPES)
    assert report.failures(), report
    assert all("probe" not in result.message for result in report.failures())


@pytest.mark.parametrize("fault", FUNCTION_FAULTS, ids=lambda fault: fault.name)
def test_fault_of_functions_alone_is_caught(fault: Fault) -> None:
    """A fault that the core does not let a backend make is caught in a bare function."""
    report = check_linear(
        fault.make,
        "nf4",
        only=[fault.caught_by],
        dtypes=DTYPES,
        has_out=True,
        has_gradients=True,
    )
    assert [result for result in report.failures() if fault.says in result.message], report


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.soak) for dtype in DTYPES[1:])])
def test_faultless_function_passes_where_faults_are_caught(dtype: torch.dtype) -> None:
    """Without a fault the same cases pass, so that it is the fault that fails them."""
    prefixes = {(fault.format, fault.caught_by) for fault in NUMERIC}
    for format_ in sorted({format_ for format_, _ in prefixes}):
        only = [caught_by for of, caught_by in prefixes if of == format_]
        report = check_linear(function_of(ToyKernel()), format_, only=only, dtypes=[dtype])
        assert report.passed, report


def test_a_right_gradient_of_the_backend_passes() -> None:
    """A backend that declares input gradients and computes them right passes, and the case says that it was asked."""
    report = run_cases(Differentiates("differentiates"), ["q4_0"], only=["EX-05/gradient"])
    assert report.passed
    assert all(result.message.startswith("by gradient") for result in report.results if result.outcome is Outcome.PASS)


def test_every_run_sees_each_way_to_notice_dense_weights() -> None:
    """What ``nox -s soak`` alone plants is similar to a fault of every run: each message that reports one is met."""
    kinds = {fault.name: fault.says.rpartition(": ")[2] for fault in FAULTS if fault.caught_by == "EX-14/kind"}
    assert kinds.keys() >= IN_SOAK
    assert {kinds[name] for name in kinds.keys() - IN_SOAK} == set(kinds.values())


@functools.cache
def _choice(capabilities: q4core.Capabilities) -> tuple[Case, ...]:
    """Return the pairwise choice of what a backend declares, as ``nox -s conformance`` judges it."""
    subject = BackendSubject(ToyKernel("chooses", **attrs.asdict(capabilities, recurse=False)))
    return pairwise(split(cases_of(BUILTIN_FORMATS, "cpu"), subject)[0])


def _alikeness(case: Case, fault: Fault) -> int:
    words = {*fault.caught_by.split("/"), fault.format}
    return -len(words & {*case.id.split("/"), case.weight_recipe.format.name})


@pytest.mark.slow
def test_the_pairwise_choice_finds_every_fault(install: Callable[..., None]) -> None:
    """A chosen case of the part that is meant for a fault fails for it, for the reason meant."""
    missed = []
    for fault in (*FAULTS, *DEVICE_FAULTS):
        subject = BackendSubject(fault.make(fault.name))
        chosen = _choice(subject.backend.capabilities)
        if CAUGHT.get(fault.name) in {case.id for case in chosen}:
            continue
        if fault in IN_PROCESS:  # some cases ask it in another process
            install(fault.name)
            subject = BackendSubject(fault.name)
        part = "/".join(fault.caught_by.split("/")[:2])
        alike = sorted((case for case in chosen if case.id.startswith(part)), key=lambda case: _alikeness(case, fault))
        meant = [case for case in alike if case.id.startswith(fault.caught_by)]
        meant = [case for case in meant if case.weight_recipe.format.name == fault.format]
        if meant and (fault.ends is not Outcome.FAIL or fault in DEVICE_FAULTS or fault.name in IN_SOAK):
            continue  # the tests above, or the long run, show that it is caught there, in a process or on a device
        if not any(_is_caught(run_case(case, subject), fault) for case in (*meant, *alike)):
            missed.append(fault.name)
    assert missed == []


def _is_caught(result: CaseResult, fault: Fault) -> bool:
    return result.outcome is fault.ends and fault.says in result.message


def test_there_are_faults_enough() -> None:
    """At least 25 faults are planted, under names that differ."""
    names = [fault.name for fault in (*FAULTS, *DEVICE_FAULTS)] + [fault.name for fault in FUNCTION_FAULTS]
    assert len(names) == len(set(names)) >= 25


@pytest.mark.parametrize("only", ["EX-13", pytest.param("TC-18/quantiser", marks=pytest.mark.soak)])
@pytest.mark.parametrize("format_", ["nf4", *(pytest.param(name, marks=pytest.mark.soak) for name in ("fp4", "mxfp4"))])
def test_a_right_quantiser_passes(format_: str, only: str) -> None:
    """The reference's bytes, and unbiased rounding by chance, pass ten thousand calls and a statistical test."""
    report = run_cases(ToyQuantiser(), [format_], only=[only])
    assert {result.outcome for result in report.results} == {Outcome.PASS}, str(report)
