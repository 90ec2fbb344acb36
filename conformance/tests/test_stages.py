"""What keeps a run from its first case is reported: which plugin, at what, and within the limit that was asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import documents
import hostile
import pytest

import q4core as q4
from q4_conformance import Outcome, run_case
from q4_conformance.contract.cases import cases_of
from q4_conformance.execution.environment import manifest_of
from q4_conformance.execution.isolated import run_target
from q4_conformance.execution.process import Limits
from q4_conformance.execution.query import Query
from q4_conformance.outcome import FailureError
from q4_conformance.report.certificate import make_certificate
from q4_conformance.report.files import write_files
from q4_conformance.report.verify import read_certificate
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.profiles import ConformanceTarget, UnknownTargetError, find_target, subject_for
from tests.support.limits import within

if TYPE_CHECKING:
    from q4_conformance import CaseResult

ONE = "TC-09/bias/nf4-plain-high_first-48x256b64-s0/float32/exact"
STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"
NEIGHBOUR = "q4_neighbour"
_JUNK = {
    "none": None,
    "number": 7,
    "nan": float("nan"),
    "object": object(),
    "text": "text",
    "list": [1, {"a": object()}],
}


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the processes find ``hostile.py`` and a module in the test's own folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a plugin that is loaded in addition to whoever is judged."""
    monkeypatch.setenv("Q4_PLUGIN_MODULES", NEIGHBOUR)
    return tmp_path / f"{NEIGHBOUR}.py"


def _judge(name: str, **limits: float) -> CaseResult:
    query = Query(name=name, formats=("nf4",), only=(ONE,), limits=Limits(**limits))  # type: ignore[arg-type]
    (result,) = run_target(query).report.results
    return result


def test_a_limit_reaches_what_comes_before_the_cases() -> None:
    """Who asks for a short limit waits no 90 seconds for a plugin that hangs; who asks for none waits that long."""
    assert Limits().load_seconds == 90.0
    assert Limits(case_seconds=3.0).load_seconds == 10.0  # so long an honest plugin may take to be imported
    assert Limits(case_seconds=200.0).load_seconds == 300.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [("hangs_when_asked", "asking 'hostile:hangs_when_asked' what it offers"), ("hangs_when_made", "making 'hostile:")],
)
def test_a_hang_before_the_first_case_is_placed(name: str, stage: str) -> None:
    """A ``check`` or a function that never comes back ends within the limit, and the reason says at what."""
    with within(60):
        result = _judge(f"hostile:{name}", load_seconds=2.0)
    assert result.outcome is Outcome.TIMEOUT
    assert f"no process came to its first case: {stage}" in result.message
    assert "no answer for 2 s" in result.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "outcome", "words"),
    [
        ("import time; time.sleep(600)", Outcome.TIMEOUT, "no answer for 5 s"),
        ("import os; os._exit(3)", Outcome.CRASH, "exit code 3"),
    ],
    ids=["hangs", "exits"],
)
def test_a_neighbour_that_ends_the_run_is_named(neighbour: Path, source: str, outcome: Outcome, words: str) -> None:
    """The plugin at whose import a process hung or ended is named, with the variable that disables it."""
    neighbour.write_text(source, encoding="utf-8")
    result = _judge("dequant-fallback", load_seconds=5.0)
    assert result.outcome is outcome
    assert f"importing the plugin {NEIGHBOUR!r}" in result.message
    assert f"Q4_DISABLE_PLUGINS={NEIGHBOUR}" in result.message
    assert words in result.message


@pytest.mark.slow
def test_a_plugin_that_fails_at_import_is_reported_by_any_of_its_names(neighbour: Path) -> None:
    """Nothing is judged; the error says why, under its own name or that of a backend that it would bring."""
    neighbour.write_text("raise ImportError('libnothing.so.3 is not here')", encoding="utf-8")
    fault = f"import raised ImportError: libnothing.so.3 is not here (in {neighbour.name}:1, <module>)"
    with pytest.raises(UnknownTargetError, match="NAME must be one that can be imported") as caught:
        run_target(Query(name=NEIGHBOUR))
    assert str(caught.value.hint).startswith(f"the plugin {NEIGHBOUR!r} failed at import: {fault}. Correct ")
    with pytest.raises(UnknownTargetError) as caught:
        run_target(Query(name="neighbour"))
    assert "libnothing.so.3 is not here" in str(caught.value.hint)
    assert f"the plugin {NEIGHBOUR!r} failed at import" in str(caught.value.hint)


@pytest.mark.parametrize("field", ["name", "api_version", "capabilities"])
@pytest.mark.parametrize("junk", _JUNK.values(), ids=_JUNK)
def test_junk_in_a_manifest_is_no_traceback(field: str, junk: object, tmp_path: Path) -> None:
    """Whatever is in the place of a field, the manifest is reported, and every file of it can be written."""
    kernel = hostile.wrong()
    subject = BackendSubject(kernel)
    setattr(kernel, field, junk)
    manifest = manifest_of(subject, ["nf4"])
    assert manifest["source"]["package"]


def test_an_error_without_a_text_is_a_failure() -> None:
    """An exception whose text raises is reported by its kind."""
    (case,) = (item for item in cases_of(("nf4",), "cpu") if item.id == STRUCK)
    result = run_case(case, BackendSubject(hostile.speaks_not()))
    assert result.outcome is Outcome.FAIL
    assert "SilentError, whose text raises SilentError" in result.message


def test_a_clock_that_a_subject_sets_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a case took is a number, whatever became of the system's clocks."""
    monkeypatch.setattr(time, "perf_counter", lambda: float("nan"))
    (case,) = (item for item in cases_of(("nf4",), "cpu") if item.id == ONE)
    assert 0 < run_case(case, BackendSubject("dequant-fallback")).seconds < 60


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("makes_nothing", "must have a name, got None"),
        ("no_version", "api_version must be"),
        ("never_made", "no kernel today"),
    ],
)
def test_what_is_no_backend_is_refused_with_the_reason(name: str, words: str) -> None:
    """A function that makes nothing, or what the core would not take, is refused before any case."""
    with pytest.raises((FailureError, RuntimeError), match=words):
        subject_for(ConformanceTarget("kernel", f"hostile:{name}", ("nf4",)))


@pytest.mark.parametrize("name", [":", "hostile:", ":wrong"])
def test_half_a_function_is_refused(name: str) -> None:
    """A name with a colon has a module before it and a function behind it."""
    with pytest.raises(q4.ConfigError, match="module:function"):
        find_target(name)


def test_a_disabled_plugin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the plugins that a variable disables."""
    monkeypatch.setenv("Q4_DISABLE_PLUGINS", "dialects")
    q4.reset_registry()
    try:
        with pytest.raises(UnknownTargetError, match="the plugin 'dialects' is disabled by") as caught:
            find_target("dialects")
    finally:
        q4.reset_registry()
    assert "dialects" not in caught.value.available


def test_a_manifest_of_a_class_without_a_module_is_verified(tmp_path: Path) -> None:
    """What can't be read of a subject makes no document contradict itself."""
    kernel = type("Nameless", (type(hostile.wrong()),), {})("made-up")
    type(kernel).__module__ = None  # type: ignore[assignment]
    manifest = manifest_of(BackendSubject(kernel))
    assert manifest["name"] == "made-up"
    assert manifest["fault"]
    run = documents.run(manifest={"name": "made-up", "capabilities": {}} | manifest)
    write_files(tmp_path, make_certificate(run, ["q4", "conform", "made-up"]))
    assert read_certificate(next(tmp_path.glob("*.json")))["manifest"]["fault"] == manifest["fault"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no_version", "no_number_for_a_name", "names_raise"])
def test_a_manifest_of_junk_gives_a_result_and_a_reason(name: str, tmp_path: Path) -> None:
    """A backend whose version or name is none fails its cases with a reason, and the report is written."""
    run = run_target(Query(name=f"hostile:{name}", formats=("nf4",), only=(ONE,)))
    (result,) = run.report.results
    assert result.outcome is Outcome.FAIL
    assert "Traceback" not in result.message
    assert "api_version" in result.message or "name" in result.message
    assert len(write_files(tmp_path, make_certificate(run, ["q4"]))) == 2
