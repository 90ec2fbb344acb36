"""A short run of the stress program, which must also find a protocol that is wrong."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent
BROKEN = """
import shared_stress, sys
from q4_actors.process_locks import ProcessLocks
ProcessLocks.try_shared = lambda self, place: True
options = ["--operations", "1000000", "--kills", "0", "--kinds", "processes", "--modes", "in_place"]
shared_stress.main([*options, "--json", sys.argv[1]])
"""
ENDS_BADLY = """
import os, shared_stress, sys, time
shared_stress.STUCK_S = 1.0
work = shared_stress.Worker.run
def run(self):
    work(self)
    os._exit(3) if sys.argv[1] == "fails" else time.sleep(600)
shared_stress.Worker.run = run
kind = sys.argv[2]
shared_stress.main(["--operations", "200", "--kills", "0", "--kinds", kind, "--modes", "versioned"])
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", *arguments]  # of forks with threads; there are none
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=300)


def test_short_run_finds_nothing(tmp_path: pathlib.Path) -> None:
    """Threads, and processes whose writers are killed: no read is torn or stale, nothing hangs (TC-13)."""
    result = tmp_path / "result.json"
    done = _run("shared_stress.py", "--operations", "20000", "--kills", "10", "--json", str(result))
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(result.read_text(encoding="utf-8"))
    assert {"commit", "date", "machine", "python", "torch"} <= set(record["environment"])
    races = record["races"]
    assert [(race["kind"], race["mode"]) for race in races] == [
        (kind, mode) for kind in ("processes", "threads") for mode in ("versioned", "in_place")
    ]
    assert all(race["operations"] >= 20_000 and race["writes"] > 0 for race in races)
    assert [race["killed"] for race in races] == [10, 10, 0, 0]
    assert all((race["torn"], race["stale"], race["faults"]) == (0, 0, 0) for race in races)


@pytest.mark.slow
def test_readers_without_locks_are_found_out(tmp_path: pathlib.Path) -> None:
    """Were readers not kept out, the program would say so, count the torn reads, and fail."""
    result = tmp_path / "result.json"
    done = _run("-c", BROKEN, str(result))
    assert done.returncode != 0
    assert "torn: version" in done.stderr
    (race,) = json.loads(result.read_text(encoding="utf-8"))["races"]
    assert race["torn"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("fails", "processes", "a worker ended with exit code 3"),
        ("hangs", "processes", "stuck at the end"),
        ("hangs", "threads", "stuck at the end"),
    ],
)
def test_worker_that_does_not_end_well_is_a_failure(how: str, kind: str, told: str) -> None:
    """A process that ends with an error, or a worker that doesn't end, fails the program, which then waits for none."""
    done = _run("-c", ENDS_BADLY, how, kind)
    assert done.returncode != 0
    assert told in done.stderr
