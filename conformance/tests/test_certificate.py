"""A certificate says what ran, what did not, and only then "certified" when all that was due passed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import attrs
import documents
import jsonschema
import pytest

from q4_conformance import CaseResult, Outcome, Report
from q4_conformance.certificate import content_hash, to_text, verdict_hash
from q4_conformance.compare import compare
from q4_conformance.junit import to_junit
from q4_conformance.markdown import to_markdown
from q4_conformance.page import to_html
from q4_conformance.query import Query
from q4_conformance.verify import CertificateError, installed_source, read_certificate, schema
from q4_conformance.writing import write_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _bad(outcome: Outcome = Outcome.FAIL, message: str = "<b>wrong</b> | by\x1b[31m far") -> dict[str, CaseResult]:
    name = next(name for name in documents.run().report.expected if name.startswith("TC-09/bias/q4_0"))
    return {name: CaseResult(case=name, contract="TC-09", outcome=outcome, message=message)}


def test_a_whole_run_that_passes_is_a_certificate() -> None:
    """Every case is accounted for, and the standing is certified."""
    told = documents.document()
    assert (told["kind"], told["standing"]) == ("certificate", "certified")
    assert told["counts"]["cases"] == len(told["results"]) == len(documents.run().report.expected)
    assert told["run"]["command"] == documents.COMMAND
    assert "Self-certified" in told["statement"]


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT])
def test_one_bad_end_is_no_certificate(outcome: Outcome) -> None:
    """One failure, crash or time-out makes it a report that failed, and its message stands in it."""
    told = documents.document(_bad(outcome))
    assert (told["kind"], told["standing"]) == ("report", "failed")
    assert told["counts"][outcome.value] == 1
    assert [row["passed"] for row in told["formats"]] == [False, True]


def test_a_case_that_cannot_be_tested_here_leaves_no_certificate() -> None:
    """Required and not testable is not passed: the whole run is a report, and says why."""
    name = next(iter(documents.document()["results"]))["case"]
    result = CaseResult(case=name, contract="TC-09", outcome=Outcome.NOT_TESTABLE, message="no such hardware")
    told = documents.document({name: result})
    assert (told["kind"], told["standing"]) == ("report", "partial")
    assert "can't be tested here" in told["sentence"]


def test_a_partial_run_is_no_certificate() -> None:
    """A run over chosen cases or formats is a report, and says so; so is one of which results are missing."""
    for query in (Query(name="made-up", only=("TC-09",)), Query(name="made-up", formats=("q8_0",))):
        told = documents.document(query=query)
        assert (told["kind"], told["standing"]) == ("report", "partial")
        assert "no certificate" in told["sentence"]
    made = documents.run()
    cut = attrs.evolve(made.report, results=made.report.results[:-1])
    assert documents.document(report=cut)["standing"] == "failed"
    silent = Report(subject="made-up", expected=(), results=())
    assert documents.document(report=silent)["standing"] == "failed"


def test_an_interpreter_certifies_no_gpu() -> None:
    """What passed in an interpreter reads as that, in every form."""
    told = documents.document(standing="interpreted")
    assert (told["kind"], told["standing"]) == ("certificate", "interpreted")
    for text in (to_html(told), to_markdown(told)):
        assert "Interpreted" in text
        assert "certifies no GPU" in text
        assert "Certified" not in text


def test_the_matrix_adds_up() -> None:
    """Each case stands in the matrix under its format and the paths that it ran; paths are counted on their own."""
    told = documents.document()
    assert {row["path"] for row in told["matrix"]} == {"-", "dot/w4a32"}
    assert sum(row["cases"] for row in told["matrix"]) == told["counts"]["cases"]
    assert [(row["format"], row["path"], row["kind"], row["passed"]) for row in told["paths"]] == [
        ("q4_0", "dot/w4a32", "kernel", True),
        ("q8_0", "dot/w4a32", "kernel", True),
    ]


def test_what_was_not_tested_is_told() -> None:
    """Formats and paths that nobody came to, and what is not declared, stand with the reason."""
    told = {row["what"]: row["why"] for row in documents.document()["not_tested"]}
    assert told["format nf4"] == "not declared"
    assert told["path never/w4a8 of q8_0"].startswith("offered")
    assert told["TC-09/values"].startswith("not declared")


def test_overrides_are_told() -> None:
    """A wider bound and a known failure stand with their reasons, in every form."""
    wide = {"case": "TC-09", "reason": "sums in pairs", "bound": 2.0, "is_known_failure": False}
    known = {"case": "EX-03", "reason": "atomics", "bound": 1.0, "is_known_failure": True}
    told = documents.document(manifest={**documents.run().manifest, "overrides": [wide, known]})
    assert (told["overrides"], told["known_failures"]) == ([wide], [known])
    for text in (to_html(told), to_markdown(told)):
        assert "sums in pairs" in text
        assert "atomics" in text


def test_documents_follow_the_published_schema() -> None:
    """Certificates and reports are valid by the schema, which is itself valid; an unknown key is not."""
    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(schema())
    for told in (documents.document(), documents.document(_bad())):
        validator.validate(json.loads(to_text(told)))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**documents.document(), "more": 1})


def test_hashes_leave_out_what_is_volatile() -> None:
    """Two runs that end alike have one hash of verdicts; a case that ends otherwise has another."""
    one, two = documents.document(), documents.document(seconds=99.0)
    assert one["verdict_hash"] == two["verdict_hash"] == verdict_hash(json.loads(to_text(one)))
    assert one["content_hash"] != two["content_hash"]
    assert documents.document(_bad())["verdict_hash"] != one["verdict_hash"]
    assert content_hash(one) == one["content_hash"]


def _rehashed(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "content_hash": content_hash(told)}


_EDITS: dict[str, Callable[[dict[str, Any]], str]] = {
    "truncated": lambda told: to_text(told)[:-200],
    "not json": lambda _: "certified!",
    "a key twice": lambda told: to_text(told).replace('"kind":', '"kind": "certificate", "kind":', 1),
    "nan": lambda told: to_text(told).replace('"seconds": 3.0', '"seconds": NaN'),
    "a list": lambda _: "[]",
    "foreign": lambda told: to_text({**told, "schema": "somebody/else"}),
    "version": lambda told: to_text({**told, "schema_version": 99}),
    "lacking": lambda told: to_text({name: item for name, item in told.items() if name != "counts"}),
    "wrong word": lambda told: to_text({**told, "results": [{"case": "a", "outcome": "splendid"}]}),
    "edited": lambda told: to_text({**told, "sentence": "every case passed"}),
    "edited and hashed": lambda told: to_text(_rehashed({**told, "counts": {**told["counts"], "fail": 0}})),
    "another standing": lambda told: to_text(_rehashed({**told, "standing": "certified"})),
}
"""What may be done to a certificate."""


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("truncated", "file"),
        ("not json", "file"),
        ("a key twice", "file"),
        ("nan", "file"),
        ("a list", "document"),
        ("foreign", "schema"),
        ("version", "schema_version"),
        ("lacking", "document.counts"),
        ("wrong word", "document.results[0].outcome"),
        ("edited", "content_hash"),
        ("edited and hashed", "counts.fail"),
        ("another standing", "standing"),
    ],
)
def test_a_damaged_certificate_is_refused(tmp_path: Path, what: str, name: str) -> None:
    """What is cut off, edited, of another make or version is refused, with the name of what is wrong."""
    path = tmp_path / "certificate.json"
    path.write_text(_EDITS[what](documents.document(_bad())), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    assert caught.value.name == name
    assert caught.value.where == str(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there, and a folder, are typed errors."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CertificateError):
            read_certificate(path)


def test_a_certificate_is_read_back(tmp_path: Path) -> None:
    """What is written is what is read, and it says whether the plugin here is the one that was judged."""
    told = documents.document()
    files = write_files(tmp_path, told, [])
    assert {path.name for path in files} == {f"certificate.{kind}" for kind in ("json", "xml", "html", "md")}
    assert read_certificate(tmp_path / "certificate.json") == json.loads(json.dumps(told))
    assert installed_source(told) == "made_up is not installed here"
    other = {**told, "source": {**told["source"], "package": "q4_dequant_fallback"}}
    assert "NOT the one" in installed_source(other)


def test_files_of_another_kind_give_way(tmp_path: Path) -> None:
    """A whole run that failed takes the old certificate away; a partial one leaves it."""
    write_files(tmp_path, documents.document())
    write_files(tmp_path, documents.document(query=Query(name="made-up", only=("TC-09",))))
    assert (tmp_path / "certificate.json").exists()
    write_files(tmp_path, documents.document(_bad()))
    assert not list(tmp_path.glob("certificate.*"))
    write_files(tmp_path, documents.document())
    assert not list(tmp_path.glob("report.*"))


def test_comparing_tells_what_changed() -> None:
    """Verdicts, facts and counts that differ are told, each verdict with its direction; equal ones are not."""
    good, bad = documents.document(), documents.document(_bad())
    same = compare(good, documents.document(seconds=50.0))
    assert same["same_verdicts"]
    assert same["facts"] == same["counts"] == same["paths"] == []
    worse = compare(good, bad)
    assert not worse["same_verdicts"]
    assert [(item["before"], item["after"], item["change"]) for item in worse["verdicts"]] == [
        ("pass", "fail", "worse")
    ]
    assert {item["what"] for item in worse["counts"]} == {"counts.pass", "counts.fail"}
    assert compare(bad, good)["verdicts"][0]["change"] == "better"
    newer = documents.document(facts={**documents.run().facts, "versions": {"q4core": "2", "torch": "2"}})
    assert compare(good, newer)["facts"] == [{"what": "versions.q4core", "before": "1", "after": "2"}]
    fewer = {**good, "results": good["results"][1:]}
    assert [item["change"] for item in compare(good, fewer)["verdicts"]] == ["gone"]
    assert [item["change"] for item in compare(fewer, good)["verdicts"]] == ["new"]


def test_junit_counts_alike() -> None:
    """Suites by format hold every case; what is not declared is no pass there, and control characters are gone."""
    told = documents.document(_bad(Outcome.CRASH))
    root = ET.fromstring(to_junit(told).partition("\n")[2])  # noqa: S314  # our own
    assert [suite.get("name") for suite in root] == ["made-up.q4_0", "made-up.q8_0"]
    cases = root.findall(".//testcase")
    assert len(cases) == told["counts"]["cases"]
    assert len(root.findall(".//error")) == sum(int(suite.get("errors", 0)) for suite in root) == 1
    plain = [case for case in cases if not list(case)]
    assert len(plain) == told["counts"]["pass"]


def test_pages_are_whole_and_escaped() -> None:
    """The page needs nothing from elsewhere, holds no markup or control character of a message, and says all."""
    told = documents.document(_bad())
    page = to_html(told)
    assert "&lt;b&gt;wrong&lt;/b&gt;" in page
    assert "<b>wrong" not in page
    for outside in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert outside not in page
    assert page.count("<section>") >= 5
    text = to_markdown(told)
    assert "&lt;b>wrong&lt;/b> \\| by" in text
    assert "\x1b" not in page + text
    assert told["content_hash"] in page
    assert told["content_hash"] in text


def test_performance_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Measurements stand beside the document, and on the page, and never in what is hashed."""
    point = {"format": "q4_0", "point": "decode", "path": "dot", "precision": "exact", "rows": 1, "median_us": 5.0}
    point |= {"p10_us": 4.0, "p90_us": 6.0, "gb_per_s": 3.0, "gflop_per_s": 2.0}
    point |= {"share_of_read": 0.25, "share_of_copy": 0.5}
    told = documents.document(points=(point,))
    assert told["verdict_hash"] == documents.document()["verdict_hash"]
    write_files(tmp_path, told, [point])
    assert json.loads((tmp_path / "performance.json").read_text(encoding="utf-8"))["points"] == [point]
    assert "50%" in (tmp_path / "certificate.html").read_text(encoding="utf-8")
    assert "median_us" not in (tmp_path / "certificate.json").read_text(encoding="utf-8")
