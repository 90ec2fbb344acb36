"""Every layer type here passes the cases of its profile, and each planted fault is caught by its own alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from q4_conformance import Outcome, Query, layer_cases, make_certificate, run_case, run_target
from q4_conformance.outcome import FailureError
from q4_conformance.subjects.layer_type import LayerSubject
from q4_conformance.subjects.profiles import cases_for, find_target, subject_for
from q4_conformance_faults import LAYER_FAULTS, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = layer_cases()
NAMES = sorted(q4.default_registry().items("q4_layers"))


@pytest.mark.parametrize("name", [*NAMES, "toy-layer"])
def test_layer_type_passes(name: str, install: Callable[..., None]) -> None:
    """A layer type, found by its name, passes every case."""
    install("toy-layer")
    target = find_target(name, profile="layer")
    assert cases_for(target) == CASES
    for case in CASES:
        result = run_case(case, subject_for(target))
        assert result.outcome is Outcome.PASS, result


@pytest.mark.parametrize("fault", LAYER_FAULTS, ids=lambda fault: fault.name)
def test_faulty_layer_type_is_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed layer type with the fault fails the case meant for it, for the reason meant, and no other."""
    install(fault.name)
    subject = subject_for(find_target(fault.name))
    results = {case.id: run_case(case, subject) for case in CASES}
    assert [name for name, result in results.items() if result.outcome is not Outcome.PASS] == [fault.caught_by]
    assert results[fault.caught_by].outcome is Outcome.FAIL
    assert f"layer type '{fault.name}'" in results[fault.caught_by].message
    assert fault.says in results[fault.caught_by].message


def test_a_layer_type_without_examples_is_not_judged() -> None:
    """A type without examples is NOT_DECLARED in every case, with a hint."""
    subject = LayerSubject(SimpleNamespace(name="mute", make=None, shape=None))
    for case in CASES:
        result = run_case(case, subject)
        assert result.outcome is Outcome.NOT_DECLARED, result
        assert "give it examples=" in result.message


def test_what_is_no_layer_type_is_reported() -> None:
    """Whatever lacks a part of a layer type is refused by the names of the parts."""
    with pytest.raises(FailureError, match="a layer type must have make, shape"):
        LayerSubject(SimpleNamespace(name="nothing"))


@pytest.mark.parametrize(
    ("name", "standing"),
    [("q4_conformance_faults.layers:ToyLayerType", "certified"), ("tests.contract.test_layer_faults:mute", "failed")],
)
def test_what_a_function_makes_is_certified(name: str, standing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own a layer type is certified, as of its own package; one without examples shows nothing."""
    monkeypatch.syspath_prepend(".")
    document = make_certificate(run_target(Query(name=name, profile="layer")), ["q4", "conform", name])
    assert document["standing"] == standing
    assert document["source"]["package"] == name.partition(".")[0]
    assert ("give it examples=" in document["sentence"]) is (standing == "failed")


def mute() -> SimpleNamespace:
    """Return a layer type without examples."""
    return SimpleNamespace(name="mute", make=mute, shape=mute, build=mute)
