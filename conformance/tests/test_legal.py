"""Whatever a stranger's texts hold, every file of a run is written, and every parser reads it."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import attrs
import documents
import pytest

from q4_conformance.execution.query import Query
from q4_conformance.report.certificate import make_certificate
from q4_conformance.report.files import write_files
from q4_conformance.report.junit import to_junit
from q4_conformance.report.verify import read_certificate

if TYPE_CHECKING:
    from pathlib import Path

FORBIDDEN = ["\0", "\b", "\x1b", "\r", "\ud800", "\udfff", "\ufffe", "\uffff"]
"""What XML 1.0 has no place for, and what a reader changes."""


@pytest.mark.parametrize("letter", FORBIDDEN, ids=lambda letter: f"{ord(letter):04x}")
def test_junit_is_well_formed_whatever_a_text_holds(letter: str) -> None:
    """A character that XML 1.0 forbids is spelled out in messages and names alike."""
    told = documents.document(documents.bad(message=f"left{letter}right"))
    told["subject"] = {**told["subject"], "name": f"made{letter}up"}
    root = ET.fromstring(to_junit(told, {}).encode())  # noqa: S314  # our own
    spelled = f"\\u{ord(letter):04x}"
    assert [item.get("message") for item in root.iter("failure")] == [f"fail: left{spelled}right"]
    assert f"made{spelled}up" in root.attrib["name"]
    assert all(f"made{spelled}up" in item.attrib["classname"] for item in root.iter("testcase"))


def test_junit_keeps_what_xml_can_hold() -> None:
    """Letters of any script, tabs and ends of lines stay what they are."""
    text = "<é> \t\n\x85 \ue000 \ufffd \U00010000 😀"
    root = ET.fromstring(to_junit(documents.document(documents.bad(message=text)), {}).encode())  # noqa: S314  # our own
    assert [item.get("message") for item in root.iter("failure")] == [f"fail: {text}"]


def test_bytes_that_are_no_text_are_spelled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command and a variable with bytes that are no UTF-8 take no file away, and the document is read back."""
    name = os.fsdecode(b"caf\xe9")
    monkeypatch.setenv("Q4_CACHE", name)
    told = make_certificate(documents.run(), [*documents.COMMAND, "--report", name])
    assert len(write_files(tmp_path, told)) == 4
    run = read_certificate(tmp_path / "certificate.json")["run"]
    stranger = attrs.evolve(documents.TARGET, name=f"{name}:make")
    query = Query(name=stranger.name, only=("TC-09",))
    write_files(tmp_path, make_certificate(documents.run(target=stranger, query=query), query.command()))
    assert read_certificate(tmp_path / "report.json")["subject"]["name"] == r"caf\udce9:make"
    assert run["command"][-1] == run["environment"]["Q4_CACHE"] == r"caf\udce9"
