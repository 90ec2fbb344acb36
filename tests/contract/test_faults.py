"""Every planted fault is caught, by the case that is meant to catch it."""

from __future__ import annotations

import pytest
import torch

from q4_conformance import Outcome, check_linear, run_cases
from q4_conformance.zoo import FAULTS, FUNCTION_FAULTS, Fault, FunctionFault, ToyKernel, function_of
from q4_conformance.zoo.boundary import Differentiates

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMERIC = [fault for fault in FAULTS if fault.is_numeric]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faulty_backend_is_caught(fault: Fault) -> None:
    """A backend with the fault fails the case meant for it, for the reason meant."""
    report = run_cases(fault.make(fault.name), [fault.format], only=[fault.caught_by])
    assert not report.passed
    caught = [result for result in report.failures() if fault.says in result.message]
    assert caught, report
    assert all(result.outcome is Outcome.FAIL for result in caught)
    assert all(("probe_failed" in result.message) is not fault.passes_probe for result in caught)


@pytest.mark.parametrize("fault", NUMERIC, ids=lambda fault: fault.name)
def test_faulty_function_is_caught_without_the_core(fault: Fault) -> None:
    """The same arithmetic in a bare function fails, so that the judge sees it without the core's self-probe."""
    function = function_of(fault.make(fault.name))
    report = check_linear(function, fault.format, only=[fault.caught_by], dtypes=DTYPES)
    assert report.failures(), report
    assert all("probe" not in result.message for result in report.failures())


@pytest.mark.parametrize("fault", FUNCTION_FAULTS, ids=lambda fault: fault.name)
def test_fault_of_functions_alone_is_caught(fault: FunctionFault) -> None:
    """A fault that the core does not let a backend make is caught in a bare function."""
    report = check_linear(
        fault.function, "nf4", only=[fault.caught_by], dtypes=DTYPES, has_out=True, has_gradients=True
    )
    assert [result for result in report.failures() if fault.says in result.message], report


def test_faultless_function_passes_where_faults_are_caught() -> None:
    """Without a fault the same cases pass, so that it is the fault that fails them."""
    prefixes = {(fault.format, fault.caught_by) for fault in NUMERIC}
    for format_ in sorted({format_ for format_, _ in prefixes}):
        only = [caught_by for of, caught_by in prefixes if of == format_]
        report = check_linear(function_of(ToyKernel()), format_, only=only, dtypes=DTYPES)
        assert report.passed, report


def test_a_right_gradient_of_the_backend_passes() -> None:
    """A backend that declares input gradients and computes them right passes, and the case says that it was asked."""
    report = run_cases(Differentiates("differentiates"), ["q4_0"], only=["EX-05/gradient"])
    assert report.passed
    assert all(result.message.startswith("by gradient") for result in report.results if result.outcome is Outcome.PASS)


def test_zoo_is_large_enough() -> None:
    """At least 25 faults are planted, under names that differ."""
    names = [fault.name for fault in FAULTS] + [fault.name for fault in FUNCTION_FAULTS]
    assert len(names) == len(set(names)) >= 25
