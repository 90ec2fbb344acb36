"""What an author declares against the kit's rules applies where it says, stands in the result, and has its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import q4core as q4
from q4_conformance import Outcome, dialect_cases, exact_linear, linear_cases, memory_cases, run_case
from q4_conformance.execution.environment import manifest_of
from q4_conformance.oracle.compare import error_bound
from q4_conformance.overrides import MOST_BOUND, Override, bound_factor, declared_by, overrides_of, overriding
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.dialect import DialectSubject
from q4_conformance.subjects.memory import MemorySubject
from q4_conformance_faults import ToyDialect, ToyKernel, ToyProvider

if TYPE_CHECKING:
    from collections.abc import Callable

CASE = next(case for case in linear_cases(["nf4"]) if case.id.startswith("TC-09/bias"))


def _declaring(*overrides: object) -> ToyKernel:
    kernel = ToyKernel("toy-that-declares")
    kernel.conformance_overrides = list(overrides)  # type: ignore[attr-defined]  # optional, so not on the class
    return kernel


def test_a_bound_is_wider_where_it_says() -> None:
    """Inside the block the float32 part of the bound is wider by the factor, for the cases it names alone."""
    weight, x = CASE.weight(), torch.ones(1, CASE.weight_recipe.k)
    reference = exact_linear(weight, x)
    plain = error_bound(reference, torch.float32)
    overrides = (Override(case="TC-09", reason="sums in pairs", bound=3.0),)
    with overriding(overrides, "TC-10/refusals") as mine:
        assert mine == ()
        assert bound_factor() == 1.0
    with overriding(overrides, CASE.id) as mine:
        assert mine == overrides
        wide = error_bound(reference, torch.float32)
    assert np.all(wide > 2 * plain)
    assert np.all(wide <= 3 * plain)
    assert np.array_equal(error_bound(reference, torch.float32), plain)


def test_an_override_stands_in_the_result() -> None:
    """A case that an override concerns carries its reason, whoever wrote it; another one does not."""
    subject = BackendSubject(_declaring({"case": CASE.id, "reason": "sums in pairs", "bound": 2}))
    result = run_case(CASE, subject)
    assert result.outcome is Outcome.PASS
    assert result.overrides == ("sums in pairs",)
    other = next(case for case in linear_cases(["nf4"]) if case.id.startswith("TC-09/leading"))
    assert run_case(other, subject).overrides == ()


def test_a_known_failure_changes_no_verdict() -> None:
    """A case that passes passes, and one that fails fails, whatever its author expects."""
    known = {"case": "TC-09", "reason": "known since long", "is_known_failure": True}
    assert run_case(CASE, BackendSubject(_declaring(known))).outcome is Outcome.PASS

    class Wrong(ToyKernel):
        conformance_overrides = (known,)

        def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, **facts: Any) -> None:
            super().linear(prepared, x, out, **facts)
            if x.shape[0] > 1:
                out[0, 0] = 0.0

    result = run_case(CASE, BackendSubject(Wrong("toy-wrong")))
    assert result.outcome is Outcome.FAIL
    assert result.overrides == ("known since long",)


@pytest.mark.parametrize(
    "declared",
    [
        "TC-09",
        {"case": "TC-09"},
        ["TC-09"],
        [{"case": "TC-09", "reason": " ", "bound": 2.0}],
        [{"case": "", "reason": "everything", "bound": 2.0}],
        [{"case": "TC-09", "reason": "too much", "bound": MOST_BOUND * 2}],
        [{"case": "TC-09", "reason": "too little", "bound": 0.5}],
        [{"case": "TC-09", "reason": "nothing"}],
        [{"case": "TC-09", "reason": "not quite true", "is_known_failure": 1}],
        [{"case": "TC-09", "reason": "unknown", "bound": 2.0, "colour": "red"}],
    ],
)
def test_what_is_no_override_is_refused(declared: object) -> None:
    """A list of mappings with a case, a reason and something to do is needed; anything else is a typed error."""
    kernel = ToyKernel("toy")
    kernel.conformance_overrides = declared  # type: ignore[attr-defined]  # optional, so not on the class
    with pytest.raises(q4.ConfigError):
        overrides_of(kernel)
    assert run_case(CASE, BackendSubject(kernel)).outcome is Outcome.FAIL


def test_paths_that_ran_stand_in_the_result() -> None:
    """The result of a case names each path that ran in it, and a refusal names none; the reference is a fallback."""
    result = run_case(CASE, BackendSubject(ToyKernel()))
    assert result.paths
    assert not result.is_fallback
    assert all(len(path.split("|")) == 4 for path in result.paths)
    reference = run_case(CASE, BackendSubject("dequant-fallback"))
    assert reference.is_fallback
    assert all("|reference|" in path for path in reference.paths)


_SUBJECTS: dict[str, Callable[..., Any]] = {
    "TC-02/detect/mxfp4": lambda **facts: DialectSubject(type("Declaring", (ToyDialect,), facts)()),
    "TC-21/empty": lambda **facts: MemorySubject(type("Declaring", (ToyProvider,), facts)()),
}
"""A case → makes who is judged by it, with further attributes."""
_CASES = {case.id: case for case in (*dialect_cases(), *memory_cases())}


@pytest.mark.parametrize("case", sorted(_SUBJECTS))
def test_a_known_failure_of_a_dialect_or_a_provider_stands_in_the_result(case: str) -> None:
    """What their authors know stands beside the cases that it concerns, and in the manifest, as a backend's does."""
    known = {"case": case, "reason": "known since long", "is_known_failure": True}
    subject = _SUBJECTS[case](conformance_overrides=[known])
    result = run_case(_CASES[case], subject)
    assert (result.outcome, result.overrides) == (Outcome.PASS, ("known since long",))
    assert [item["reason"] for item in manifest_of(subject)["overrides"]] == ["known since long"]


@pytest.mark.parametrize("case", sorted(_SUBJECTS))
def test_a_wider_bound_of_a_dialect_or_a_provider_is_refused(case: str) -> None:
    """Their cases have no bound to widen: one that is declared is told, and applies nowhere in silence."""
    subject = _SUBJECTS[case](conformance_overrides=[{"case": case, "reason": "rounds", "bound": 2.0}])
    with pytest.raises(q4.ConfigError, match=r"bound of .* must be 1 for a provider or a dialect"):
        declared_by(subject)
    result = run_case(_CASES[case], subject)
    assert (result.outcome, "must be 1 for a provider or a dialect" in result.message) == (Outcome.FAIL, True)
    assert "must be 1" in manifest_of(subject)["fault"]
