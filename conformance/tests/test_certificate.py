"""A certificate says what ran, what did not, and only then "certified" when all that was due passed."""

from __future__ import annotations

import importlib.resources
import json
from typing import TYPE_CHECKING, Any

import attrs
import documents
import jsonschema
import pytest

from q4_conformance import CaseResult, Outcome, Report
from q4_conformance.execution.environment import manifest_of
from q4_conformance.execution.query import Query
from q4_conformance.report.certificate import content_hash, not_tested, to_text, verdict_hash
from q4_conformance.report.files import write_files
from q4_conformance.report.markdown import to_markdown
from q4_conformance.report.status import counted, facts_of, required_of, title_of
from q4_conformance.subjects.dialect import DialectSubject

if TYPE_CHECKING:
    from pathlib import Path


def test_a_whole_run_that_passes_is_a_certificate() -> None:
    """Every case is accounted for, and the standing is certified."""
    document = documents.document()
    assert (document["kind"], document["standing"]) == ("certificate", "certified")
    assert document["counts"]["cases"] == len(document["results"]) == len(documents.run().report.expected)
    assert document["run"]["command"] == documents.COMMAND
    assert "Self-certified" in document["statement"]


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT])
def test_one_bad_end_is_no_certificate(outcome: Outcome) -> None:
    """One failure, crash or time-out makes it a report that failed, and its message is in it."""
    document = documents.document(documents.bad(outcome))
    assert (document["kind"], document["standing"]) == ("report", "failed")
    assert document["counts"][outcome.value] == 1
    assert [row["passed"] for row in document["formats"]] == [False, True]


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT])
def test_a_bad_end_without_a_path_counts_against_every_path_of_its_format(outcome: Outcome) -> None:
    """A process that died reported no path, so that no path of the format may have passed; another format's may."""
    document = documents.document(documents.bad(outcome))
    assert [(row["format"], row["passed"], row[outcome.value]) for row in document["paths"]] == [
        ("q4_0", False, 1),
        ("q8_0", True, 0),
    ]
    page = to_markdown(document)
    assert "✗ does not stand" in page
    assert "✓ passed" in page


def test_a_bad_end_on_a_path_counts_against_that_path() -> None:
    """A failure on a path is no failure of the others."""
    failed = documents.bad(paths=["other|kernel|w4a32|ran"])
    passed = {(row["format"], row["path"]): row["passed"] for row in documents.document(failed)["paths"]}
    assert passed == {("q4_0", "dot/w4a32"): True, ("q4_0", "other/w4a32"): False, ("q8_0", "dot/w4a32"): True}


@pytest.mark.parametrize(("precision", "passed"), [("exact", False), ("int8", True)])
def test_what_cannot_be_tested_here_counts_against_the_paths_that_it_is_for(precision: str, passed: bool) -> None:
    """A case that needs other hardware leaves the paths alone that it could never have come to."""
    name = next(
        name
        for name in documents.run().report.expected
        if name.startswith("TC-09/values/q4_0") and name.endswith(f"/{precision}")
    )
    result = CaseResult(case=name, contract="TC-09", outcome=Outcome.NOT_TESTABLE, message="no such hardware")
    document = documents.document({name: result})
    assert [row["passed"] for row in document["paths"]] == [passed, True]
    assert [row["passed"] for row in document["formats"]] == [False, True]


def test_a_case_without_a_result_leaves_no_path_of_its_format() -> None:
    """What has no result has not passed."""
    made = documents.run()
    cut = attrs.evolve(made.report, results=[item for item in made.report.results if "TC-12/mix/q8_0" not in item.case])
    document = documents.document(report=cut)
    assert [row["passed"] for row in document["paths"]] == [True, False]
    assert [row["passed"] for row in document["formats"]] == [True, False]


def test_a_path_of_two_standings_has_the_lesser() -> None:
    """A path that an interpreter ran once was interpreted, and the device with it."""
    document = documents.document(documents.bad(Outcome.PASS, paths=["dot|kernel|w4a32|interpreted"]))
    assert [(row["path"], row["standing"]) for row in document["paths"]] == [
        ("dot/w4a32", "interpreted"),
        ("dot/w4a32", "ran"),
    ]
    assert document["standing"] == "interpreted"


def test_a_case_that_cannot_be_tested_here_leaves_no_certificate() -> None:
    """Required and not testable is not passed: the whole run is a report, and says why."""
    name = next(iter(documents.document()["results"]))["case"]
    result = CaseResult(case=name, contract="TC-09", outcome=Outcome.NOT_TESTABLE, message="no such hardware")
    document = documents.document({name: result})
    assert (document["kind"], document["standing"]) == ("report", "partial")
    assert "can't be tested here" in document["sentence"]


def test_a_partial_run_is_no_certificate() -> None:
    """A run over chosen cases or formats is a report, and says so; so is one of which results are missing."""
    for query in (Query(name="made-up", only=("TC-09",)), Query(name="made-up", formats=("q8_0",))):
        document = documents.document(query=query)
        assert (document["kind"], document["standing"]) == ("report", "partial")
        assert "no certificate" in document["sentence"]
    made = documents.run()
    cut = attrs.evolve(made.report, results=made.report.results[:-1])
    assert documents.document(report=cut)["standing"] == "failed"
    silent = Report(subject="made-up", expected=(), results=())
    assert documents.document(report=silent)["standing"] == "failed"


def test_an_interpreter_certifies_no_gpu() -> None:
    """What passed in an interpreter reads as that."""
    document = documents.document(standing="interpreted")
    assert (document["kind"], document["standing"]) == ("certificate", "interpreted")
    text = to_markdown(document)
    assert "Interpreted" in text
    assert "certifies no GPU" in text
    assert "Certified" not in text


def test_a_format_of_which_nothing_passed_is_named() -> None:
    """A whole run that shows nothing of a declared format is not certified, and its sentence says of which."""
    other = [item for item in documents.run().report.expected if "/q8_0" in item]
    ends = {
        name: CaseResult(case=name, contract=name[:5], outcome=Outcome.NOT_DECLARED, message="refused")
        for name in other
    }
    document = documents.document(ends)
    assert document["standing"] == "failed"
    assert document["sentence"] == "not all that is required passed; no case passed of what is declared: q8_0"


def test_paths_add_up() -> None:
    """Each path that ran is counted on its own, under the format it ran in."""
    document = documents.document()
    assert [(row["format"], row["path"], row["kind"], row["passed"]) for row in document["paths"]] == [
        ("q4_0", "dot/w4a32", "kernel", True),
        ("q8_0", "dot/w4a32", "kernel", True),
    ]


def test_what_was_not_tested_is_reported() -> None:
    """Formats and paths that nobody came to, and what is not declared, stand with the reason."""
    reasons = {row["what"]: row["why"] for row in documents.document()["not_tested"]}
    assert reasons["format nf4"] == "not declared"
    assert reasons["path never/w4a8 of q8_0"].startswith("offered")
    assert reasons["TC-09/values"].startswith("not declared")


def test_a_path_that_a_part_did_not_come_to_is_reported() -> None:
    """A path says which parts never ran on it, though they ran on another path of the same precision."""
    usual, late = "dot|kernel|w4a32|ran", "late|kernel|w4a32|ran"
    case = "EX-01/rows/q8_0-plain-bytes-48x256b32-s0/float32/exact"
    end = CaseResult(case=case, contract="EX-01", outcome=Outcome.PASS, message="", paths=(usual, late))
    document = documents.document({case: end})
    rows = {row["what"]: row["why"] for row in document["not_tested"]}
    assert "path dot/w4a32 of q8_0" not in rows
    assert "TC-09/values" in rows["path late/w4a32 of q8_0"]
    assert "EX-01/rows" not in rows["path late/w4a32 of q8_0"]


def _declaring(**declared: list[str]) -> dict[str, str]:
    """Return what a whole run on the CPU says was not tested, of a backend that declares these things."""
    manifest = documents.run().manifest
    capabilities = {**manifest["capabilities"], **declared}
    document = documents.document(manifest={**manifest, "capabilities": capabilities})
    assert document["standing"] == "certified"
    return {row["what"]: row["why"] for row in document["not_tested"]}


def test_a_declared_format_that_the_kit_does_not_know_is_reported() -> None:
    """A format of a plugin's own is declared and has no cases, and so have all of them where every one is declared."""
    reasons = _declaring(formats=["q4_0", "q8_0", "iq4_xs"])
    assert reasons["format iq4_xs"] == "declared; this kit has no cases for it"
    assert reasons["format nf4"] == "not declared"
    for declared in (["q4_0", "q8_0"], ["*"]):
        assert ("formats of plugins" in _declaring(formats=declared)) == (declared == ["*"])
    assert not any(what == "format *" for what in _declaring(formats=["*"]))


def test_a_declared_device_that_was_not_judged_is_reported() -> None:
    """Each declared device but the run's own is listed; a run on one of several GPUs judged that kind."""
    assert _declaring(devices=["cpu", "cuda"])["device cuda"].startswith("declared; ")
    assert "device cpu" not in _declaring(devices=["cpu", "cuda"])
    target = attrs.evolve(documents.TARGET, device="cuda:1")
    manifest = {**documents.run().manifest, "capabilities": {"formats": ["q4_0", "q8_0"], "devices": ["cpu", "cuda"]}}
    query = Query(name="made-up", device="cuda:1")
    rows = documents.document(target=target, query=query, manifest=manifest)["not_tested"]
    assert [row["what"] for row in rows if row["what"].startswith("device ")] == ["device cpu"]


def test_a_declared_format_that_a_dialect_was_not_judged_on_is_reported() -> None:
    """The manifest of a dialect has its formats; those not asked for or not known to the kit are reported."""
    manifest = manifest_of(DialectSubject("simple-nf4"))
    assert manifest["formats"] == ["fp4", "nf4"]
    subject = {"name": "some", "profile": "dialect", "formats": ["nf4"], "device": "cpu"}
    nothing: dict[str, Any] = {"results": [], "missing": [], "not_declared": [], "run": {"only": [], "left_out": 0}}
    rows = not_tested({"subject": subject, "manifest": {"formats": ["fp4", "iq4_xs", "nf4"]}, **nothing}, 0)
    assert [(row["what"], row["why"]) for row in rows] == [
        ("format fp4", "not asked for"),
        ("format iq4_xs", "declared; this kit has no cases for it"),
    ]
    assert not_tested({"subject": subject, "manifest": {}, **nothing}, 0) == []


def test_paths_have_their_standing() -> None:
    """The tables of paths say "interpreted" where an interpreter ran."""
    for standing, words in (("interpreted", "passed in an interpreter"), ("ran", "✓ passed")):
        document = documents.document(standing=standing)
        lines = [line for line in to_markdown(document).splitlines() if "`dot/w4a32`" in line]
        assert len(lines) == 2
        assert all(f"| {standing} |" in line and words in line for line in lines)


def test_a_path_may_have_any_name() -> None:
    """A name that holds what separates the words of a path loses nothing."""
    name = next(name for name in documents.run().report.expected if name.startswith("TC-09/bias/q4_0"))
    odd = CaseResult(case=name, contract="TC-09", outcome=Outcome.PASS, message="", paths=("a|b|kernel|w4a32|ran",))
    rows = [row for row in documents.document({name: odd})["paths"] if row["path"] == "a|b/w4a32"]
    assert [(row["kind"], row["standing"], row["passed"]) for row in rows] == [("kernel", "ran", True)]


def test_documents_follow_the_published_schema() -> None:
    """Certificates and reports are valid by the schema, which is itself valid; an unknown key is not."""
    file = importlib.resources.files("q4_conformance.report").joinpath("certificate.schema.json")
    schema = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for document in (documents.document(), documents.document(documents.bad())):
        validator.validate(json.loads(to_text(document)))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**documents.document(), "more": 1})


def test_hashes_leave_out_what_is_volatile() -> None:
    """Two runs that end alike have one hash of verdicts; a case that ends otherwise has another."""
    one, two = documents.document(), documents.document(seconds=99.0)
    assert one["verdict_hash"] == two["verdict_hash"] == verdict_hash(json.loads(to_text(one)))
    assert one["content_hash"] != two["content_hash"]
    assert documents.document(documents.bad())["verdict_hash"] != one["verdict_hash"]
    assert content_hash(one) == one["content_hash"]


def test_files_of_another_kind_give_way(tmp_path: Path) -> None:
    """A whole run that failed takes the old certificate away; a partial one leaves it."""
    write_files(tmp_path, documents.document())
    write_files(tmp_path, documents.document(query=Query(name="made-up", only=("TC-09",))))
    assert (tmp_path / "certificate.json").exists()
    write_files(tmp_path, documents.document(documents.bad()))
    assert not list(tmp_path.glob("certificate.*"))
    write_files(tmp_path, documents.document())
    assert not list(tmp_path.glob("report.*"))


def test_pages_are_whole_and_escaped() -> None:
    """The page holds no markup or control character of a message, and has the command and the hash."""
    document = documents.document(documents.bad(reproducer="q4 conform made-up --case one"))
    text = to_markdown(document)
    assert "&lt;b>wrong&lt;/b> \\| by" in text
    assert "\x1b" not in text
    assert "q4 conform made-up --case one" in text
    assert document["content_hash"] in text


def test_the_command_has_the_variables_that_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who copies the command from a page repeats the run, in an interpreter or with a plugin that is not installed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "my toys")
    document = documents.document()
    assert {"TRITON_INTERPRET", "Q4_PLUGIN_MODULES"} <= document["run"]["environment"].keys()
    line = next(text for label, text in facts_of(document) if label == "Command")
    assert line.endswith("q4 conform made-up")
    assert "Q4_PLUGIN_MODULES='my toys' " in line
    assert "TRITON_INTERPRET=1 " in line
    assert line in to_markdown(document)


def test_pages_say_who_was_judged() -> None:
    """Name, distribution and version stand at the top; a dialect is never taken for the library of that name."""
    document = documents.document()
    assert to_markdown(document).startswith("# made-up 1 on cpu: ")
    other = {**document, "source": {**document["source"], "distribution": "q4-made-up"}}
    assert to_markdown(other).startswith("# made-up of q4-made-up 1 on cpu: ✓ Certified\n")
    dialect = {**other, "subject": {**document["subject"], "profile": "dialect"}}
    page = to_markdown(dialect)
    assert "dialect made-up of q4-made-up 1 on cpu" in page
    assert "how q4-made-up reads and writes this layout" in page
    assert "how q4-made-up reads" not in to_markdown(other)
    core = {**document, "subject": {**document["subject"], "name": "q4core"}, "source": {"package": "q4core"}}
    assert title_of(core) == "q4core 1"
    assert title_of({**document, "source": {"package": "mine"}}) == "made-up of mine, of no version"
    assert title_of({**document, "source": {}}) == "made-up"


def test_pages_say_how_much_was_required() -> None:
    """What passed is reported next to what was required, and the rest is said to be no part of the claim."""
    document = documents.document(documents.bad())
    counts = document["counts"]
    due = counts["cases"] - counts["not_declared"]
    assert required_of(document) == (due - 1, due)
    assert required_of({**document, "missing": ["one"]}) == (due - 1, due + 1)
    said = f"{due - 1:,} of {due:,} required cases passed; {counts['not_declared']:,} others test what made-up"
    assert said in to_markdown(document)
    nothing = {**document, "counts": {**counts, "not_declared": counts["cases"], "pass": 0}}
    assert counted(nothing).startswith("no case was required; ")
    assert counted({**document, "counts": {**counts, "not_declared": 0, "cases": 1, "pass": 1}}) == (
        "1 of 1 required case passed"
    )
