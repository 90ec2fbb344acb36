"""Every failure comes with what to type to run its case again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from q4_conformance.command.declared import conform
from q4_conformance.execution.process import Limits
from q4_conformance.execution.query import Query

STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes find the backends of ``hostile.py``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile", "case", "outcome"),
    [
        ("hostile:wrong", None, STRUCK, "fail"),
        ("hostile:leaves", None, STRUCK, "crash"),
        ("q4_conformance_faults:hanging", None, STRUCK, "timeout"),
        ("hostile:wrong_dialect", "dialect", "EX-11/round/mxfp4", "fail"),
        ("hostile:wrong_memory", "memory", "TC-21/convert", "fail"),
    ],
)
def test_the_command_fails_when_run(name: str, profile: str | None, case: str, outcome: str) -> None:
    """What is printed for a failure, of whatever profile and end, ends in the same way and prints itself again."""
    limits = Limits(case_seconds=3.0) if outcome == "timeout" else Limits()
    command = Query(name=name, profile=profile, limits=limits).command_of(case)
    app = typer.Typer()
    app.command()(conform)
    done = CliRunner().invoke(app, [*shlex.split(command)[2:], "--json"])
    assert done.exit_code == 1, done.output
    (result,) = json.loads(done.stdout)["certificate"]["results"]
    assert (result["case"], result["outcome"]) == (case, outcome)
    assert result["reproducer"] == command
