"""Every reader here passes the cases of its profile, and each planted fault is caught by its own."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from q4_conformance import Outcome, Query, file_cases, make_certificate, run_case, run_target
from q4_conformance.execution.process import Limits
from q4_conformance.outcome import FailureError
from q4_conformance.subjects.files import READERS, FileSubject
from q4_conformance.subjects.profiles import cases_for, find_target, subject_for
from q4_conformance_faults import FILE_FAULTS, Fault, ToyReader

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = file_cases()
NAMES = sorted(q4.default_registry().items(READERS))
DEADLY = [fault for fault in FILE_FAULTS if fault.ends is not Outcome.FAIL]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
@pytest.mark.parametrize("name", [*NAMES, "toy-files"])
def test_reader_passes(name: str, case: object, install: Callable[..., None]) -> None:
    """A reader, found by its name, passes every case; without a writer, those of writing are NOT_DECLARED."""
    install("toy-files")
    target = find_target(name, profile="file")
    assert cases_for(target) == CASES
    subject = subject_for(target)
    (chosen,) = [item for item in CASES if item == case]
    result = run_case(chosen, subject)
    is_due = subject.writer is not None or chosen.contract == "EX-23"
    is_due &= (name, chosen.part) != ("onnx", "parts")  # ONNX has no models in several files
    assert result.outcome is (Outcome.PASS if is_due else Outcome.NOT_DECLARED), result


@pytest.mark.parametrize("fault", [item for item in FILE_FAULTS if item not in DEADLY], ids=lambda fault: fault.name)
def test_faulty_reader_is_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed reader with the fault fails the case meant for it, for the reason meant."""
    install(fault.name)
    (case,) = [case for case in CASES if case.id == fault.caught_by]
    result = run_case(case, subject_for(find_target(fault.name)))
    assert result.outcome is Outcome.FAIL, result
    assert fault.says in result.message


@pytest.mark.slow
@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.name)
def test_a_reader_that_hangs_is_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed reader that never answers is a result, of the case that was running."""
    install(fault.name)
    limits = Limits(case_seconds=6.0, slow_seconds=6.0)
    report = run_target(Query(name=fault.name, only=(fault.caught_by,), limits=limits)).report
    assert [result.outcome for result in report.results] == [fault.ends], report
    assert fault.says in report.results[0].message


def test_a_reader_without_files_is_not_judged() -> None:
    """A reader that nobody can make a file for is NOT_DECLARED in every case, with a hint."""
    subject = FileSubject(SimpleNamespace(name="mute", recognises=None, open=None))
    for case in CASES:
        result = run_case(case, subject)
        assert result.outcome is Outcome.NOT_DECLARED, result
    assert "give it make_file(path, tensors)" in subject.lacks


def test_what_is_no_reader_is_reported() -> None:
    """Whatever lacks a part of a reader is refused by the names of the parts."""
    with pytest.raises(FailureError, match="a reader must have recognises, open"):
        FileSubject(SimpleNamespace(name="nothing"))


def test_a_format_that_hides_names_is_not_judged_by_them(tmp_path: Path) -> None:
    """Where tensors don't lie in a file as they are, what needs their places is NOT_DECLARED."""

    class _Inverted(ToyReader):
        def make_file(self, path: Path, tensors: object, *part: object) -> None:
            path.write_bytes(bytes(64))

    ends = {case.part: run_case(case, FileSubject(_Inverted())).outcome for case in CASES if case.contract == "EX-23"}
    assert {ends[part] for part in ("cut", "hostile", "names")} == {Outcome.NOT_DECLARED}
    assert not [*tmp_path.iterdir()]


def test_what_a_function_makes_is_certified() -> None:
    """In a process of its own a reader is certified, as of its own package, by the command that the page shows."""
    name = "q4_conformance_faults:ToyReader"
    page = Path(__file__).parents[2] / "docs/write-a-backend/certify.md"
    assert f"    q4 conform {name} --profile file\n" in page.read_text(encoding="utf-8")
    document = make_certificate(run_target(Query(name=name, profile="file")), ["q4", "conform", name])
    assert document["standing"] == "certified", document["results"]
    assert document["source"]["package"] == "q4_conformance_faults"


def test_the_page_lists_every_part() -> None:
    """docs/write-a-backend/certify.md has a row for each case of files."""
    text = (Path(__file__).parents[2] / "docs/write-a-backend/certify.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(EX-2[34]/\w+)` \|", text, re.MULTILINE) == [case.id for case in CASES]
