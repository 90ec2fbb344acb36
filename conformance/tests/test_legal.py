"""Whatever a stranger's texts hold, every file of a run is written and read back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs
import documents

from q4_conformance.execution.query import Query
from q4_conformance.report.certificate import make_certificate
from q4_conformance.report.files import write_files
from q4_conformance.report.verify import read_certificate

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_bytes_that_are_no_text_are_spelled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command and a variable with bytes that are no UTF-8 take no file away, and the document is read back."""
    name = os.fsdecode(b"caf\xe9")
    monkeypatch.setenv("Q4_CACHE", name)
    document = make_certificate(documents.run(), [*documents.COMMAND, "--report", name])
    assert len(write_files(tmp_path, document)) == 2
    run = read_certificate(tmp_path / "certificate.json")["run"]
    stranger = attrs.evolve(documents.TARGET, name=f"{name}:make")
    query = Query(name=stranger.name, only=("TC-09",))
    write_files(tmp_path, make_certificate(documents.run(target=stranger, query=query), query.command()))
    assert read_certificate(tmp_path / "report.json")["subject"]["name"] == r"caf\udce9:make"
    assert run["command"][-1] == run["environment"]["Q4_CACHE"] == r"caf\udce9"
