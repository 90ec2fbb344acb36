"""The FP4 paths pass the w4a4 cases of the kit, by the kernels' own code in the emulator, through both launchers."""

from __future__ import annotations

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
LONG = {
    *("long", "threads", "counts", "rows", "tiles", "neighbours", "awkward", "values", "inference", "shapes"),
    *("bias", "out", "static", "strided"),
}
"""Parts that take an emulator seconds: in each run by float32, in the others by the marker ``soak``."""
SIZES = {"long", "threads", "counts", "rows", "tiles", "neighbours", "shapes"}
"""Of these, what is about how work is divided: the same for both formats and both launchers, so for one of each."""
MANY = {"wide", "many"}
"""Parts that take it minutes."""
USUAL_K = 10_000
"""Rows beyond take it half a minute: the part that is about them is in each run."""


def _marked(case: Case) -> object:
    is_long = case.weight_recipe.k > USUAL_K and (case.part != "long" or case.weight_recipe.k > 2 * USUAL_K)
    is_other = case.weight_recipe.format.name != "nvfp4"
    is_again = (case.part in LONG or is_other) and case.dtype is not torch.float32
    is_rare = is_long or is_again or case.part in MANY or (is_other and case.part in SIZES)
    return pytest.param(case, id=case.id, marks=pytest.mark.soak if is_rare else ())


LIBRARY_CASES = [case for case in CASES if case.weight_recipe.format.name == "nvfp4" and case.part not in SIZES]


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


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_case(case: Case, by_driver: BackendSubject) -> None:
    """The case passes by our kernels; other codebooks and float scales are declared not to be served."""
    _run(case, by_driver)


@pytest.mark.parametrize("case", [_marked(case) for case in LIBRARY_CASES])
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
