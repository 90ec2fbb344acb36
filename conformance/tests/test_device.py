"""The checks of what matters on a device catch what they are for, and say what this machine can't show."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_conformance import Case, Outcome, device_cases, run_case
from q4_conformance.contract.cases import cases_of
from q4_conformance.contract.plain_cases import core_cases, memory_cases
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.memory import MemorySubject
from q4_conformance_faults import ToyKernel
from q4_conformance_faults.devices import FourBits, ToyQuantiser
from q4_conformance_faults.toy_provider import ToyProvider

FORMAT = "nvfp4"


def test_a_cuda_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where "cuda" is asked for, backends are asked about the current device by its index, as by the core."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert BackendSubject(ToyKernel(), device="cuda").device == torch.device("cuda:3")
    assert BackendSubject(ToyKernel(), device="cuda:1").device == torch.device("cuda:1")
    assert BackendSubject(ToyKernel()).device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda:9", "xpu:7"])
@pytest.mark.parametrize("ops", [{"linear"}, {"linear", "quantize"}], ids=["linear", "quantize"])
def test_what_is_declared_for_an_absent_device_is_not_testable(device: str, ops: set[str]) -> None:
    """Nothing of it passes or fails: what is not declared is reported as usual. TC-17 alone needs no device."""
    kind = torch.device(device).type
    subject = BackendSubject(ToyKernel(devices=frozenset({kind}), ops=ops), device=device)
    for case in cases_of([FORMAT], device):
        if case.contract != "TC-17":
            result = run_case(case, subject)
            assert result.outcome in {Outcome.NOT_TESTABLE, Outcome.NOT_DECLARED}, result


def test_training_through_a_quantiser_is_judged_on_declared_formats() -> None:
    """Of a format that a quantiser does not declare, no gradient is judged, wherever it is."""
    case = next(case for case in cases_of([FORMAT], "cpu") if case.check == "ste_native")
    backend = ToyKernel(devices={"cuda"}, ops={"linear", "quantize"}, formats={"nf4"})
    result = run_case(case, BackendSubject(backend, device="cuda:9"))
    assert (result.outcome, "format" in result.message) == (Outcome.NOT_DECLARED, True), result


@pytest.mark.parametrize("name", ["ste_gradients", "train_long"])
def test_training_is_not_judged_without_q4_nn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where q4-nn is not installed, its part is not testable, and the command that installs it is named."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    case = next(case for case in core_cases() if case.check == name)
    result = run_case(case, None)
    assert (result.outcome, "pip install q4-nn" in result.message) == (Outcome.NOT_TESTABLE, True), result


@pytest.mark.parametrize("case", memory_cases(), ids=lambda case: case.id)
def test_a_provider_is_not_judged_on_an_absent_device(case: Case) -> None:
    """Without the device a provider's cases are not testable; what it says of devices that are absent is judged."""
    result = run_case(case, MemorySubject(ToyProvider(), device="cuda:9"))
    expected = Outcome.PASS if case.check == "capability" else Outcome.NOT_TESTABLE
    assert result.outcome is expected, result


def _case(check: str, **facts: Any) -> Case:
    found = [case for case in device_cases([FORMAT]) if case.check == check]
    return attrs.evolve(found[0], **facts)


def test_a_right_quantiser_passes() -> None:
    """The reference's own bytes pass."""
    result = run_case(_case("native_quantiser"), BackendSubject(ToyQuantiser()))
    assert result.outcome is Outcome.PASS, result


def test_a_right_product_of_four_bits_passes() -> None:
    """What is computed exactly is within the bound on the grid, and less noisy than it may be elsewhere."""
    result = run_case(_case("native_product"), BackendSubject(FourBits()))
    assert result.outcome is Outcome.PASS, result


def test_no_quantiser_is_not_declared() -> None:
    """A backend without the op does not pass for want of a test."""
    assert run_case(_case("native_quantiser"), BackendSubject(ToyKernel())).outcome is Outcome.NOT_DECLARED


def test_a_kernel_is_picked() -> None:
    """The toy outranks the reference, and the record names its path."""
    result = run_case(_case("picked"), BackendSubject(ToyKernel()))
    assert result.outcome is Outcome.PASS, result
    assert "gemv_w4a32" in result.message


@pytest.mark.parametrize("check", ["graph", "quiet", "stream"])
def test_what_needs_a_cuda_device_says_so(check: str) -> None:
    """On the CPU these cases are not testable, and no pass."""
    result = run_case(_case(check), BackendSubject(ToyKernel()))
    assert result.outcome is Outcome.NOT_TESTABLE
    assert "CUDA" in result.message


@pytest.mark.parametrize(
    ("codes", "outcome"),
    [
        ([q4.ReasonCode.ARCH], Outcome.NOT_TESTABLE),
        ([q4.ReasonCode.ARCH, q4.ReasonCode.TOOLCHAIN], Outcome.FAIL),
        ([q4.ReasonCode.SHAPE], Outcome.FAIL),
    ],
)
def test_missing_hardware_differs_from_a_broken_build(codes: list[q4.ReasonCode], outcome: Outcome) -> None:
    """A refusal for hardware alone makes a case not testable; one for anything else is a failure."""

    class _Refusing(ToyKernel):
        def check(self, request: q4.Request) -> q4.Support:
            return q4.Support.no([q4.Reason(code, f"because of {code.value}") for code in codes], native_state="no")

    subject = BackendSubject(_Refusing("refusing", precisions={q4.Precision.W4A32, q4.Precision.W4A4}))
    result = run_case(_case("native_product"), subject)
    assert result.outcome is outcome, result
    assert "because of" in result.message


def test_a_cuda_device_adds_its_cases() -> None:
    """A run on a CUDA device takes every device case; one on the CPU those that need no graph and no stream."""
    extra = {case.id for case in cases_of([FORMAT], "cuda:0")} - {case.id for case in cases_of([FORMAT], "cpu")}
    assert extra == {case.id for case in device_cases([FORMAT]) if case.contract == "EX-18"}
