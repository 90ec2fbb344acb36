"""A short run of the stress program, which must also find a protocol that is wrong."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent
BROKEN = """
import shared_stress
from q4core.mutable.process_locks import ProcessLocks
ProcessLocks.try_shared = lambda self, place: True
shared_stress.main(["--operations", "1000000", "--kills", "0", "--kinds", "processes", "--modes", "in_place"])
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", *arguments]  # of forks with threads; there are none
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=300)


def test_short_run_finds_nothing(tmp_path: pathlib.Path) -> None:
    """Threads, and processes whose writers are killed: no read is torn or stale, nothing hangs (TC-13)."""
    result = tmp_path / "result.json"
    done = _run("shared_stress.py", "--operations", "20000", "--kills", "10", "--json", str(result))
    assert (done.returncode, done.stderr) == (0, "")
    races = json.loads(result.read_text(encoding="utf-8"))
    assert [(race["kind"], race["mode"]) for race in races] == [
        (kind, mode) for kind in ("processes", "threads") for mode in ("versioned", "in_place")
    ]
    assert all(race["operations"] >= 20_000 and race["writes"] > 0 for race in races)
    assert [race["killed"] for race in races] == [10, 10, 0, 0]


@pytest.mark.slow
def test_readers_without_locks_are_found_out() -> None:
    """Were readers not kept out, the program would say so, and fail."""
    done = _run("-c", BROKEN)
    assert done.returncode != 0
    assert "torn: version" in done.stderr
