"""A certificate that was damaged, or says what its results don't, is refused with the name of what is wrong."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import documents
import pytest

from q4_conformance.execution.environment import versions
from q4_conformance.report.certificate import content_hash, to_text
from q4_conformance.report.files import write_files
from q4_conformance.report.status import widened_of
from q4_conformance.report.verify import CertificateError, check_census, installed_source, read_certificate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _rehashed(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "content_hash": content_hash(told)}


def _all_passed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "passed": True} for row in rows]


def _with_reason(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "results": [told["results"][0] | {"overrides": ["nobody declared"]}, *told["results"][1:]]}


def _with_run(told: dict[str, Any], **facts: object) -> str:
    return to_text(_rehashed({**told, "run": {**told["run"], **facts}}))


def _with_volatile(told: dict[str, Any], **facts: object) -> str:
    return to_text(_rehashed({**told, "volatile": {**told["volatile"], **facts}}))


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
    "a grander statement": lambda told: to_text(_rehashed({**told, "statement": "Certified by others."})),
    "another kind": lambda told: to_text(_rehashed({**told, "kind": "certificate"})),
    "a fairer sentence": lambda told: to_text(_rehashed({**told, "sentence": "every required case passed"})),
    "a format that passed": lambda told: to_text(_rehashed({**told, "formats": _all_passed(told["formats"])})),
    "a path that passed": lambda told: to_text(_rehashed({**told, "paths": _all_passed(told["paths"])})),
    "a path less": lambda told: to_text(_rehashed({**told, "paths": told["paths"][1:]})),
    "a cell less": lambda told: to_text(_rehashed({**told, "matrix": told["matrix"][1:]})),
    "a made-up interpreter": lambda told: to_text(
        _rehashed({**told, "device": {**told["device"], "interpreted": True}})
    ),
    "a manifest with a hole": lambda told: to_text(
        _rehashed({**told, "manifest": {**told["manifest"], "offered": None}})
    ),
    "a number without an end": lambda told: to_text(told).replace('"seconds": 3.0', '"seconds": 1e999'),
    "true for 1": lambda told: to_text(_rehashed({**told, "schema_version": True})),
    "time before it began": lambda told: _with_volatile(told, seconds=-1),
    "cases before it began": lambda told: _with_volatile(told, case_seconds=-1),
    "no time for a case": lambda told: _with_run(told, case_seconds=0),
    "less than no time": lambda told: _with_run(told, case_seconds=-1),
    "no process": lambda told: _with_run(told, processes=0),
    "no memory": lambda told: _with_run(told, memory_bytes=0),
    "a hidden override": lambda told: to_text(_rehashed(_with_reason(told))),
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
        ("a grander statement", "statement"),
        ("another kind", "kind"),
        ("a fairer sentence", "sentence"),
        ("a format that passed", "formats"),
        ("a path that passed", "paths"),
        ("a path less", "paths"),
        ("a cell less", "matrix"),
        ("a made-up interpreter", "device.interpreted"),
        ("a manifest with a hole", "document"),
        ("a hidden override", "results[0].overrides"),
        ("a number without an end", "file"),
        ("true for 1", "document.schema_version"),
        ("time before it began", "document.volatile.seconds"),
        ("cases before it began", "document.volatile.case_seconds"),
        ("no time for a case", "document.run.case_seconds"),
        ("less than no time", "document.run.case_seconds"),
        ("no process", "document.run.processes"),
        ("no memory", "document.run.memory_bytes"),
    ],
)
def test_a_damaged_certificate_is_refused(tmp_path: Path, what: str, name: str) -> None:
    """What is cut off, edited, of another make or version is refused, with the name of what is wrong."""
    path = tmp_path / "certificate.json"
    path.write_text(_EDITS[what](documents.document(documents.bad())), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    assert caught.value.name == name
    assert caught.value.where == str(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there, and a folder, are typed errors."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CertificateError):
            read_certificate(path)


def test_who_names_a_page_or_a_folder_is_told_the_document(tmp_path: Path) -> None:
    """Beside a page, or in a folder, the JSON document is named; where there is none, it is said what to look for."""
    pages = ("certificate.html", "certificate.md", "certificate.xml")
    write_files(tmp_path, documents.document(), [])
    document = str(tmp_path / "certificate.json")
    for path in (tmp_path, *(tmp_path / name for name in pages)):
        with pytest.raises(CertificateError) as caught:
            read_certificate(path)
        assert caught.value.hint == f"Check {document}."
    (tmp_path / "certificate.json").rename(tmp_path / "report.json")
    with pytest.raises(CertificateError, match=re.escape(str(tmp_path / "report.json"))):
        read_certificate(tmp_path)
    (tmp_path / "report.json").unlink()
    for path in (tmp_path, tmp_path / "certificate.html"):
        with pytest.raises(CertificateError, match=r"file that a run wrote|file that was written with it"):
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


def test_a_document_that_hides_a_case_is_found_by_the_table() -> None:
    """Results that add up to less than the kit's own list are refused, and so is a hidden gap in what was tested."""
    good = _of_this_kit(documents.document())
    assert "are accounted for" in check_census(good, "x.json")
    fewer = {**good, "results": good["results"][1:]}
    with pytest.raises(CertificateError, match=re.escape(good["results"][0]["case"])):
        check_census(fewer, "x.json")
    more = {**good, "results": [*good["results"], {"case": "TC-99/none", "outcome": "pass"}]}
    with pytest.raises(CertificateError, match="TC-99/none is none of this kit's"):
        check_census(more, "x.json")
    with pytest.raises(CertificateError, match="not_tested"):
        check_census({**good, "not_tested": good["not_tested"][1:]}, "x.json")


def test_a_whole_run_of_some_formats_is_found() -> None:
    """A document that leaves out a declared format can't say that it left out nothing."""
    told = _of_this_kit(documents.document())
    declared = {**told["manifest"]["capabilities"], "formats": ["q4_0", "q8_0", "nf4"]}
    with pytest.raises(CertificateError, match="nf4"):
        check_census({**told, "manifest": {**told["manifest"], "capabilities": declared}}, "x.json")


def test_the_census_of_another_kit_is_told_to_be_unknown() -> None:
    """The list of cases of another version is not this kit's to judge."""
    assert "can't know" in check_census(documents.document(), "x.json")


def _of_this_kit(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "versions": versions()}


def test_an_interpreter_cannot_be_edited_away(tmp_path: Path) -> None:
    """Where a path ran in an interpreter, the device and the standing follow from it."""
    told = documents.document(standing="interpreted")
    path = tmp_path / "certificate.json"
    path.write_text(to_text(_rehashed({**told, "standing": "certified"})), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    assert caught.value.name == "standing"
    hidden = {**told, "device": {**told["device"], "interpreted": False}}
    path.write_text(to_text(_rehashed(hidden)), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    assert caught.value.name == "device.interpreted"


def test_an_override_cannot_be_edited_out_of_the_results() -> None:
    """What passed by a wider bound follows from the bounds that are declared, whatever the results say of it."""
    told = documents.widened()
    bare = [{key: value for key, value in item.items() if key != "overrides"} for item in told["results"]]
    assert widened_of({**told, "results": bare}) == widened_of(told)
    assert widened_of(told)[0] > 1


@pytest.mark.parametrize("package", ["this.x", ".x", "os.path"])
def test_a_certificate_makes_nothing_be_imported(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that a file names is looked for, never imported, not even what a dotted name lies in."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    told = documents.document()
    told["source"] = {**told["source"], "package": package}
    assert installed_source(told) == f"{package} is not installed here"
    assert "this" not in sys.modules


@pytest.mark.parametrize("change", [{"device": "qqq"}, {"formats": ["zzz"]}])
def test_a_subject_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    """A device or a format that does not exist is a refusal that names the file, not a fault."""
    told = documents.document()
    told["versions"] = versions()
    told["subject"] = {**told["subject"], **change}
    with pytest.raises(CertificateError) as caught:
        check_census(told, "some.json")
    assert caught.value.where == "some.json"
