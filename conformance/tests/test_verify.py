"""A certificate that was damaged or edited is refused with the name of what is wrong."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import attrs
import documents
import pytest

from q4_conformance import CaseResult, Outcome, Report
from q4_conformance.report.certificate import content_hash, to_text
from q4_conformance.report.markdown import to_markdown
from q4_conformance.report.verify import CertificateError, installed_source, read_certificate, read_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _rehashed(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "content_hash": content_hash(document)}


_EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "truncated": ("file", lambda document: to_text(document)[:-200]),
    "not json": ("file", lambda _: "certified!"),
    "a list": ("schema", lambda _: "[]"),
    "foreign": ("schema", lambda document: to_text({**document, "schema": "somebody/else"})),
    "version": ("schema_version", lambda document: to_text({**document, "schema_version": 99})),
    "edited": ("content_hash", lambda document: to_text({**document, "sentence": "every case passed"})),
    "lacking": (
        "content_hash",
        lambda document: to_text({name: document[name] for name in document if name != "counts"}),
    ),
    "no results": (
        "document",
        lambda document: to_text(_rehashed({k: document[k] for k in document if k != "results"})),
    ),
}
"""What may be done to a certificate, and what the refusal names."""


@pytest.mark.parametrize("what", _EDITS)
def test_a_damaged_certificate_is_refused(tmp_path: Path, what: str) -> None:
    """Each kind of damage is a typed error that names the file and what is wrong with it."""
    name, edit = _EDITS[what]
    path = tmp_path / "certificate.json"
    path.write_text(edit(documents.document()), encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_certificate(path)
    assert (caught.value.name, caught.value.where) == (name, str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there, or a folder, is a typed error."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CertificateError) as caught:
            read_certificate(path)
        assert caught.value.name == "file"


def test_a_certificate_is_read_back(tmp_path: Path) -> None:
    """What was written is what is read."""
    path = tmp_path / "certificate.json"
    made = documents.document()
    path.write_text(to_text(made), encoding="utf-8")
    assert read_certificate(path) == made


def test_a_page_has_the_hash_of_the_verdicts(tmp_path: Path) -> None:
    """The Markdown page has the hash that a fresh run is compared with; a page without one is refused."""
    page = tmp_path / "certificate.md"
    made = documents.document()
    page.write_text(to_markdown(made), encoding="utf-8")
    assert read_page(page).verdict_hash == made["verdict_hash"]
    assert read_page(page).agrees(made)
    assert not read_page(page).agrees(documents.document(documents.bad()))
    page.write_text("# Nothing\n", encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        read_page(page)
    assert caught.value.name == "page"


def test_a_pairwise_choice_is_compared_cell_by_cell(tmp_path: Path) -> None:
    """It agrees where its cases end as all of their cells on the page did, and with those left out are as many."""
    page = tmp_path / "certificate.md"
    due = [result for result in documents.run().report.results if result.outcome is Outcome.PASS]
    page.write_text(to_markdown(documents.document(report=_report(due))), encoding="utf-8")
    chosen, left = due[::3], len(due) - len(due[::3])

    def agrees(results: list[CaseResult], left_out: int = left) -> bool:
        return read_page(page).agrees(documents.document(report=_report(results), left_out=left_out))

    assert agrees(chosen)
    assert not agrees(chosen, left - 1)
    for outcome in set(Outcome) - {Outcome.PASS}:
        assert not agrees([attrs.evolve(chosen[0], outcome=outcome), *chosen[1:]])
    mixed = [attrs.evolve(chosen[0], outcome=Outcome.NOT_DECLARED), *(item for item in due if item is not chosen[0])]
    page.write_text(to_markdown(documents.document(report=_report(mixed))), encoding="utf-8")
    assert not agrees(chosen)
    assert not agrees([mixed[0], *chosen[1:]])


def _report(results: list[CaseResult]) -> Report:
    return Report(subject="made-up", expected=[result.case for result in results], results=results)


@pytest.mark.parametrize("package", ["this.x", ".x", "os.path"])
def test_a_certificate_makes_nothing_be_imported(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that a file names is looked for, never imported, not even what a dotted name lies in."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    document = documents.document()
    document["source"] = {**document["source"], "package": package}
    assert installed_source(document) == f"{package} is not installed here"
    assert "this" not in sys.modules
