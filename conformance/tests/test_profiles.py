"""A target is found by name under a profile, and who is not there is refused with the names there are."""

from __future__ import annotations

import pickle

import pytest

import q4core as q4
from q4_conformance.execution.isolated import run_target
from q4_conformance.execution.query import Query
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.profiles import (
    PROFILES,
    ConformanceTarget,
    UnknownTargetError,
    cases_for,
    find_target,
    narrowed,
    subject_for,
)
from q4_conformance.subjects.reference import MissingReferenceError


def test_a_backend_is_found_with_the_formats_it_declares() -> None:
    """The reference declares every format, and its target has them all, in the core's order."""
    target = find_target("dequant-fallback")
    assert target == ConformanceTarget("kernel", "dequant-fallback", tuple(q4.BUILTIN_FORMATS), "cpu")


def test_the_core_is_a_target_of_its_own() -> None:
    """q4core is judged under the core profile, by cases that need no subject."""
    target = find_target("q4core")
    assert target.profile == "core"
    assert {case.profile for case in cases_for(target)} == {"core"}
    assert subject_for(target) is None


def test_chosen_formats_choose_cases() -> None:
    """A format asked for by name is the only one judged."""
    target = find_target("dequant-fallback", formats=["q8_0"])
    assert target.formats == ("q8_0",)
    assert {case.weight_recipe.format.name for case in cases_for(target)} == {"q8_0"}
    assert isinstance(subject_for(target), BackendSubject)


def test_an_unknown_name_lists_the_names_there_are() -> None:
    """The error is a LookupError with the names, the closest one, and both in the text; it pickles."""
    with pytest.raises(UnknownTargetError) as caught:
        find_target("dequant-fallbck")
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # our own
    assert isinstance(error, UnknownTargetError)
    assert issubclass(UnknownTargetError, LookupError)
    assert {"dequant-fallback", "q4core"} <= set(error.available)
    assert error.closest == "dequant-fallback"
    assert "There are " in str(error)
    assert "Did you mean 'dequant-fallback'?" in str(error)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dequant-fallback", {"profile": "core"}),
        ("dequant-fallback", {"profile": "no-such-profile"}),
        ("q4core", {"profile": "kernel"}),
        ("dequant-fallback", {"formats": ["nf5"]}),
        ("q4core", {"device": "cuda"}),
        ("nobody:nothing", {"profile": "core"}),
        ("simple-nf4", {"device": "cuda:0"}),
        ("dequant-fallback", {"device": "nowhere"}),
    ],
)
def test_what_does_not_fit_is_refused(name: str, options: dict[str, object]) -> None:
    """A profile, a format or a device that the target does not have is a configuration error."""
    with pytest.raises(q4.ConfigError):
        find_target(name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "profile", "rule"),
    [
        ("dequant-fallback", "kernal", "one of kernel, program for 'dequant-fallback'"),
        ("dequant-fallback", "memory", "one of kernel, program for 'dequant-fallback'"),
        ("q4core", "kernal", "core for 'q4core'"),
        ("some:function", "kernal", "one of kernel, memory, dialect, file, layer, program for 'some:function'"),
        ("nobody", "kernal", "one of kernel, memory, dialect, file, layer, program, core for 'a target'"),
    ],
)
def test_a_refused_profile_lists_those_of_the_name(name: str, profile: str, rule: str) -> None:
    """Only what the name can be judged under is offered; where nobody has the name, every profile is."""
    with pytest.raises(q4.ConfigError) as caught:
        find_target(name, profile=profile)
    assert caught.value.rule == rule


def test_a_factory_is_not_imported_to_be_found() -> None:
    """``module:function`` is believed until its cases run, in a process that may die of it."""
    assert find_target("no_such_module:function", formats=["nf4"]).profile == "kernel"


def test_what_was_made_is_judged_on_what_it_declares() -> None:
    """A manifest narrows what stood for every format; where there is none, or a name was installed, nothing changes."""
    made = find_target("no_such_module:function")
    assert made.formats == tuple(q4.BUILTIN_FORMATS)
    assert narrowed(made, {"capabilities": {"formats": ["q8_0", "nf4", "nf5"]}}).formats == ("nf4", "q8_0")
    assert narrowed(made, {"formats": [["odd"], "mxfp4"]}).formats == ("mxfp4",)
    for manifest in ({}, {"capabilities": {"formats": ["*"]}}):
        assert narrowed(made, manifest) == made
    named = find_target("dequant-fallback")
    assert narrowed(named, {"capabilities": {"formats": ["nf4"]}}) == named


def test_a_plugin_that_did_not_load_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin whose import raised is a target, and making its subject is an error that says why."""
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "q4_no_such_plugin")
    q4.reset_registry()
    try:
        with pytest.warns(q4.Q4PluginWarning):
            target = find_target("q4_no_such_plugin", formats=["nf4"])
        with pytest.raises(UnknownTargetError, match="No module named 'q4_no_such_plugin'"):
            subject_for(target)
    finally:
        monkeypatch.undo()
        q4.reset_registry()


def test_without_the_reference_nobody_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that needs the reference is refused by a typed error that names it, instead of failing every case."""
    monkeypatch.setenv("Q4_DISABLE_PLUGINS", "dequant-fallback")
    for name, profile in (
        ("q4_conformance_faults:talking", None),
        ("q4core", None),
        ("q4_conformance_faults:x", "memory"),
    ):
        with pytest.raises(MissingReferenceError, match="Install q4-dequant-fallback") as caught:
            run_target(Query(name=name, profile=profile))
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), LookupError)  # noqa: S301  # our own


def test_profiles_are_the_seven() -> None:
    """The profiles' names are fixed."""
    assert PROFILES == ("kernel", "memory", "dialect", "file", "layer", "program", "core")
