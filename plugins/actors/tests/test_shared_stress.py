"""Runs of the stress program, which must also find a protocol that is wrong."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.support.limits import scaled

FOLDER = pathlib.Path(__file__).parent
BROKEN = """
import shared_stress
from q4_actors.tensors.slots import Slots
from q4_actors.tensors.turns import Turns
begin, fill = Turns.try_write, Slots.fill
def broken(self, block, *, yields):
    slot = begin(self, block, yields=yields)
    if slot >= 0:  # whoever reads there
        slot = self.claimed = ((self._cells.current & 255) + 1) % 3
    return slot
def refill(self, slot, *others):
    segment = self._segment
    segment.slots[slot].copy_(segment.slots[segment.words[64] & 255])
    return fill(self, slot, *others)
Turns.try_write, Slots.fill = broken, refill
options = ["--operations", "3000000", "--kills", "0", "--kinds", "processes", "--modes", "versioned", "--slots", "3"]
shared_stress.main(options)
"""
BROKEN_IN_PLACE = """
import shared_stress
from q4_actors.tensors.turns import Turns
begin = Turns.try_write
def broken(self, block, *, yields):
    slot = begin(self, block, yields=yields)
    if slot == -2:  # readers
        slot = self.claimed = 0
    return slot
Turns.try_write = broken
shared_stress.main(["--operations", "3000000", "--kills", "0", "--kinds", "processes", "--modes", "in_place"])
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
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=scaled(1800))


@pytest.mark.parametrize(
    ("operations", "kills"),
    [(20_000, 10), pytest.param(1_000_000, 200, marks=[pytest.mark.slow, pytest.mark.soak])],
)
def test_nothing_is_found(operations: int, kills: int, tmp_path: pathlib.Path) -> None:
    """Threads, and processes whose writers are killed: no read is torn or stale, nothing hangs (TC-13)."""
    result = tmp_path / "result.json"
    options = ["--operations", str(operations), "--kills", str(kills), "--json", str(result)]
    done = _run("shared_stress.py", *options)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(result.read_text(encoding="utf-8"))
    assert {"commit", "date", "machine", "python", "torch"} <= set(record["environment"])
    races = record["races"]
    assert [(race["kind"], race["mode"]) for race in races] == [
        (kind, mode) for kind in ("processes", "threads") for mode in ("versioned", "in_place")
    ]
    assert all(race["operations"] >= operations and race["writes"] > 0 for race in races)
    assert [race["killed"] for race in races] == [kills, kills, 0, 0]
    assert [race["readers_killed"] for race in races] == [kills, kills, 0, 0]
    assert all((race["torn"], race["stale"], race["faults"]) == (0, 0, 0) for race in races)


@pytest.mark.slow
@pytest.mark.parametrize("program", [BROKEN, BROKEN_IN_PLACE], ids=["versioned", "in_place"])
def test_writers_that_look_at_no_reader_are_found_out(program: str) -> None:
    """Were slots written while they are read, the program would say so, and fail."""
    done = _run("-c", program)
    assert done.returncode != 0
    assert "torn: version" in done.stderr


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
