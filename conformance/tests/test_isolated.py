"""Whatever a subject does to its process, the run ends, and every case has a result with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from q4_conformance import CaseResult, Outcome, Report
from q4_conformance.execution.isolated import run_target
from q4_conformance.execution.process import Child, Ended, Limits, resident_bytes
from q4_conformance.execution.query import Query
from q4_conformance.report.certificate import make_certificate
from q4_conformance.report.files import write_files
from q4_conformance.subjects.profiles import UnknownTargetError
from tests.support.limits import within

STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"
BIAS, LEADING = (
    [f"TC-09/{part}/nf4-plain-high_first-48x256b64-s0/{dtype}/exact" for dtype in ("float32", "bfloat16", "float16")]
    for part in ("bias", "leading")
)
ONLY = [STRUCK, *BIAS]


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes find the backends of ``hostile.py``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _judge(name: str, *only: str, **limits: Any) -> Report:
    query = Query(
        name=f"hostile:{name}",
        formats=("nf4",),
        only=only or tuple(ONLY),
        limits=Limits(**{"case_seconds": 20.0} | limits),
    )
    return run_target(query).report


def _report(name: str, only: list[str], **facts: Any) -> Report:
    return run_target(Query(name=name, formats=("nf4",), only=tuple(only), **facts)).report


def _struck(report: Report) -> CaseResult:
    """Return the result of the case in which something happens; the three others must have passed."""
    assert report.missing == ()
    assert not report.passed
    ends = {result.case: result for result in report.results}
    struck = ends.pop(STRUCK)
    assert {result.outcome for result in ends.values()} == {Outcome.PASS}
    assert len(ends) == 3
    return struck


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [("says_much", "characters)"), ("says_unwritable", r"caf\udce9")])
def test_any_text_is_a_message(name: str, words: str, tmp_path: Path) -> None:
    """An error's text may be endless, or hold what can't be written: it is cut, or spelled out, and the run ends."""
    run = run_target(Query(name=f"hostile:{name}", formats=("nf4",), only=tuple(ONLY), limits=Limits(case_seconds=20)))
    struck = _struck(run.report)
    assert struck.outcome is Outcome.FAIL
    assert words in struck.message
    assert len(struck.message) < 1 << 17
    write_files(tmp_path, make_certificate(run, ["q4"]))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile", "formats"),
    [
        pytest.param("one_format", "kernel", ["nf4"], marks=pytest.mark.soak),
        ("right_dialect", "dialect", ["mxfp4"]),
    ],
)
def test_what_a_function_makes_is_judged_on_all_that_it_declares(name: str, profile: str, formats: list[str]) -> None:
    """A right subject of one format is certified for it, and nothing of any other format is due."""
    run = run_target(Query(name=f"hostile:{name}", profile=profile))
    document = make_certificate(run, ["q4", "conform", f"hostile:{name}", "--profile", profile])
    assert document["subject"]["formats"] == formats
    assert {row["format"] for row in document["formats"]} <= {*formats, "any"}
    assert (document["standing"], document["kind"]) == ("certified", "certificate"), document["sentence"]


@pytest.mark.slow
def test_a_dialect_that_does_nothing_has_no_certificate() -> None:
    """Formats of which no case passed are mere claims, whatever else passed."""
    run = run_target(Query(name="hostile:idle_dialect", profile="dialect"))
    assert {result.outcome for result in run.report.results} == {Outcome.PASS, Outcome.NOT_DECLARED}
    document = make_certificate(run, ["q4"])
    assert (document["standing"], document["kind"]) == ("failed", "report")
    assert document["sentence"].endswith("no case passed of what is declared: mxfp4")


@pytest.mark.slow
def test_a_hang_is_a_result() -> None:
    """The case that hangs ends as TIMEOUT after its time, and the others, which another process runs, pass."""
    report = _report("q4_conformance_faults:hanging", ONLY, limits=Limits(case_seconds=6.0))
    assert _struck(report).outcome is Outcome.TIMEOUT
    assert _struck(report).seconds > 5.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("crashes", ("SIGSEGV", "last words")),
        ("leaves", ("exit code 0",)),
        ("forks", ("SIGABRT",)),
    ],
)
def test_a_crash_is_a_result(name: str, words: tuple[str, ...]) -> None:
    """The case in which the process ends is a CRASH that says how, with what was printed last; the others pass."""
    result = _struck(_judge(name))
    assert result.outcome is Outcome.CRASH
    assert all(word in result.message for word in words), result.message


@pytest.mark.slow
def test_a_failure_brings_its_reproducer() -> None:
    """The first failure of a contract case reports the smallest failing shape and what to type, as in one process."""
    result = _struck(_judge("wrong"))
    assert result.outcome is Outcome.FAIL
    assert result.reproducer


@pytest.mark.slow
def test_memory_without_end_is_a_result() -> None:
    """The case that takes more memory than there may be is a CRASH that says so, and the run goes on."""
    result = _struck(_judge("eats", memory_bytes=2 << 30))
    assert result.outcome is Outcome.CRASH
    assert "of memory; the limit is 2.0 GiB" in result.message


@pytest.mark.slow
def test_forged_results_are_not_believed() -> None:
    """What a backend writes to any descriptor is no result, and takes none away."""
    report = _judge("shouts")
    assert report.passed, report
    assert all("forged" not in result.message for result in report.results)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["breeds", "hides"])
def test_processes_left_behind_are_ended(name: str) -> None:
    """A backend's own processes hold nothing up, and none of them outlives the run, wherever it hides."""
    with within(60):
        assert _judge(name).passed
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"q4-hostile-child" in (path.read_bytes() if path.exists() else b"")
    ]
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("never_made", Outcome.FAIL, "no kernel today"),
        ("crashes_when_made", Outcome.CRASH, "exit code 3; it printed: could not load libnothing.so"),
        ("hangs_when_made", Outcome.TIMEOUT, "no process came to its first case"),
    ],
)
def test_a_subject_that_cannot_be_had_has_results(name: str, outcome: Outcome, words: str) -> None:
    """Where no case can run, each one still ends, with the reason."""
    limits = {"load_seconds": 8.0} if outcome is Outcome.TIMEOUT else {}
    report = _judge(name, **limits)
    assert report.missing == ()
    assert {result.outcome for result in report.results} == {outcome}
    assert all(words in result.message for result in report.results), report
    command = f"q4 conform hostile:{name} --limit 20 --case "
    assert all(item.reproducer.splitlines()[-1] == command + item.case for item in report.results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [("always_crashes", Outcome.CRASH, "exit code 9"), ("always_hangs", Outcome.TIMEOUT, "no answer for 3 s")],
)
def test_a_group_of_bad_ends_is_given_up(name: str, outcome: Outcome, words: str) -> None:
    """After some crashes, or cases without an end, the rest is not begun; it counts as the last one and says why."""
    limits = {"case_seconds": 3.0, "slow_seconds": 3.0} if outcome is Outcome.TIMEOUT else {}
    report = _judge(name, *BIAS, *LEADING, deaths=2, **limits)
    assert report.missing == ()
    assert report.counts[outcome] == 6
    assert all(words in result.message for result in report.results), report
    assert sum("not begun: 2 processes of this group" in result.message for result in report.results) == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", ["dequant-fallback", "q4_conformance_faults:talking"])
def test_right_subjects_pass(target: str) -> None:
    """An installed backend is judged by its name, and one that prints while it computes does no harm."""
    report = _report(target, BIAS)
    assert report.passed, report
    assert report.passed_by_fallback == (3 if target == "dequant-fallback" else 0)
    assert all(result.paths for result in report.results)


@pytest.mark.slow
def test_an_unknown_name_is_an_error_with_the_names() -> None:
    """A name that nobody has is refused with the names there are, as the process that looked found them."""
    with pytest.raises(UnknownTargetError) as caught:
        run_target(Query(name="no-such-backend"))
    assert "dequant-fallback" in caught.value.available


@pytest.mark.slow
def test_formats_run_in_processes_of_their_own() -> None:
    """Groups that run at once give the results that one after the other would, in the table's order."""
    query = Query(name="dequant-fallback", formats=("nf4", "q8_0", "int4"), only=("TC-09/bias",), jobs=2)
    seen: list[str] = []
    run = run_target(query, watch=lambda result: seen.append(result.case))
    assert [result.case for result in run.report.results] == list(run.report.expected)
    assert sorted(seen) == sorted(run.report.expected)
    assert run.report.passed
    assert run.manifest["source"]["distribution"] == "q4-dequant-fallback"
    assert run.facts["versions"]["torch"]


@pytest.mark.slow
def test_a_spent_budget_leaves_cases_missing() -> None:
    """Where no time is left, no case is begun, and the report says which are missing instead of passing."""
    report = _report("dequant-fallback", ["TC-09/bias"], budget_seconds=0.0)
    assert report.results == ()
    assert report.missing == tuple(sorted(report.expected))
    assert not report.passed


@pytest.mark.slow
def test_a_budget_ends_within_a_case() -> None:
    """A case that hangs longer than the budget is missing, and no timeout: it had less than its limit."""
    limits = Limits(case_seconds=100.0)
    with within(60):
        report = _report("q4_conformance_faults:hanging", [STRUCK], limits=limits, budget_seconds=10.0)
    assert report.missing == (STRUCK,)


def test_memory_of_a_process_is_read() -> None:
    """The resident memory of this process is more than nothing; that of none is nothing."""
    import os  # noqa: PLC0415  # for this one number

    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes(2**22 + 1) == 0


def test_a_process_may_end_after_its_last_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case keeps the result that was reported; nobody is asked for a case that is not there."""
    converse = Child.receive

    def receive(child: Child, *arguments: Any, **options: Any) -> dict[str, Any]:
        message = converse(child, *arguments, **options)
        if message.get("done"):
            raise Ended(Outcome.CRASH, "gone")
        return message

    monkeypatch.setattr(Child, "receive", receive)
    report = _judge("one_format", STRUCK)
    assert {result.outcome for result in report.results} == {Outcome.PASS}
