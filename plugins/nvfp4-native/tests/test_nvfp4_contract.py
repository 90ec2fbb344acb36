"""The FP4 paths pass the w4a4 cases of the kit, by the kernels' own code in the emulator, through both launchers."""

from __future__ import annotations

import itertools

import pytest
import torch
from nvfp4_emulation import emulated_backend, emulated_library

from q4_conformance import Case, Outcome, device_cases, linear_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4core import ActivationPrecision, BackendUnavailableError, Feature, ReasonCode, ScaleKind, Session, SessionConfig

FORMATS = ("nvfp4", "mxfp4")
PRODUCTS = [case for case in device_cases(FORMATS) if case.contract == "TC-15"]
CASES = [case for case in (*linear_cases(FORMATS), *PRODUCTS) if case.precision is ActivationPrecision.FP4]
PLAIN = [case for case in CASES if case.weight_recipe.scale_kind is ScaleKind.PLAIN]
OFTEN = {"values", "bias", "out", "awkward", "strided", "static", "gradient"}
"""Parts that depend on the kernels' own code: in each run by one case, which takes the emulator seconds."""
FEW = {"values", "bias"}
"""Of these, what depends on the format as well, or on who launches."""


def _marked(cases: list[Case], often: dict[str, set[str]]) -> list[object]:
    """Return cases as parameters: the first of each part that is run often, and with the mark ``soak`` each in a dtype.

    The emulator takes ten seconds for a case. Of one in three dtypes it runs one; which one turns from case to case.
    """
    seen: set[tuple[str, str]] = set()
    found: list[object] = []
    for number, (_, group) in enumerate(itertools.groupby(cases, lambda case: case.id.rsplit("/", 2)[0])):
        alike = [*group]
        for index, case in enumerate(alike):
            key = (case.weight_recipe.format.name, f"{case.contract}/{case.part}")
            is_often = case.part in often[key[0]] and case.dtype is torch.float32 and key not in seen
            is_often = is_often or (case in PRODUCTS and case.dtype is torch.float32 and key[0] == "mxfp4")
            seen |= {key} if is_often else set()
            if is_often or index == number % len(alike):
                found.append(pytest.param(case, id=case.id, marks=() if is_often else pytest.mark.soak))
    return found


LIBRARY_CASES = [case for case in CASES if case.weight_recipe.format.name == "nvfp4"]


@pytest.fixture(scope="module")
def by_driver() -> BackendSubject:
    """The backend with kernels launched through the driver."""
    return BackendSubject(emulated_backend())


@pytest.fixture(scope="module")
def by_library() -> BackendSubject:
    """The backend with an external library's kernels."""
    return BackendSubject(emulated_backend(emulated_library(), driver=False))


def _run(case: Case, subject: BackendSubject) -> None:
    result = run_case(case, subject)
    recipe = case.weight_recipe
    is_served = Feature.CUSTOM_CODEBOOK not in recipe.features and recipe.scale_kind is not ScaleKind.PLAIN
    assert result.outcome is (Outcome.PASS if is_served else Outcome.NOT_DECLARED), result
    assert not result.is_fallback


@pytest.mark.parametrize("case", _marked(CASES, {"nvfp4": OFTEN, "mxfp4": FEW}))
def test_case(case: Case, by_driver: BackendSubject) -> None:
    """The case passes by our kernels; other codebooks and float scales are declared not to be served."""
    _run(case, by_driver)


@pytest.mark.parametrize("case", _marked(LIBRARY_CASES, {"nvfp4": FEW}))
def test_case_by_the_library(case: Case, by_library: BackendSubject) -> None:
    """The case passes by the functions of an external library."""
    _run(case, by_library)


def test_float_scales_are_refused_with_their_reason(by_driver: BackendSubject) -> None:
    """A weight with float scales can't be an operand of FP4 tensor cores: a `format` reason, no other precision."""
    weight = PLAIN[0].weight_recipe.build()
    config = SessionConfig(device="cpu", activation_precision=ActivationPrecision.FP4, backend="nvfp4-native")
    with pytest.raises(BackendUnavailableError) as caught:
        Session(config, registry=by_driver.registry).linear(weight)
    (rejection,) = caught.value.rejections
    assert [reason.code for reason in rejection.reasons] == [ReasonCode.FORMAT]
    assert "w4a4" in rejection.reasons[0].message


def test_float_scales_are_cases_of_the_contract() -> None:
    """The table has cases of float scales, which the manifest answers."""
    assert PLAIN
