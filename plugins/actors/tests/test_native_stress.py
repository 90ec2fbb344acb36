"""A short run of the stress program by atomics, which must also find a protocol that is wrong."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import shared_stress

FOLDER = pathlib.Path(shared_stress.__file__).parent
BROKEN = """
import shared_stress
from q4_actors.native_content import NativeContent
begin = NativeContent._begin_at_once
def broken(self, block):
    slot = begin(self, block)
    if slot >= 0:  # whoever reads there
        current = self.words[64] & 255
        slot = self.claimed = (current + 1) % len(self.slots)
        self.slots[slot].copy_(self.slots[current])
    return slot
NativeContent._begin_at_once = broken
options = ["--operations", "3000000", "--kills", "0", "--kinds", "native", "--modes", "versioned", "--slots", "3"]
shared_stress.main(options)
"""
BROKEN_IN_PLACE = """
import shared_stress
from q4_actors.native_in_place import NativeInPlace
def broken(self, block):  # whoever reads there
    if block.healing or not self.gate.try_write(block):
        return -3
    if not self.cells.try_turn():
        self._drop_write(block)
        return -3
    self.claimed, self.has_turn = 0, True
    return 0
NativeInPlace._begin_at_once = broken
shared_stress.main(["--operations", "3000000", "--kills", "0", "--kinds", "native", "--modes", "in_place"])
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", *arguments]  # of forks with threads; there are none
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=300)


def test_short_run_finds_nothing(tmp_path: pathlib.Path) -> None:
    """Processes whose writers and readers are killed: no read is torn or stale, nothing hangs (TC-13)."""
    result = tmp_path / "result.json"
    options = ("--kinds", "native", "--operations", "40000", "--kills", "10", "--slots", "3", "--json", str(result))
    done = _run("shared_stress.py", *options)
    assert (done.returncode, done.stderr) == (0, "")
    races = json.loads(result.read_text(encoding="utf-8"))["races"]
    assert [race["mode"] for race in races] == ["versioned", "in_place"]
    for race in races:
        assert (race["kind"], race["killed"], race["readers_killed"]) == ("native", 10, 10)
        assert race["operations"] >= 40_000
        assert race["writes"] > 0


@pytest.mark.parametrize("program", [BROKEN, BROKEN_IN_PLACE], ids=["versioned", "in_place"])
def test_writers_that_look_at_no_row_are_found_out(program: str) -> None:
    """Were slots written while they are read, the program would say so, and fail."""
    done = _run("-c", program)
    assert done.returncode != 0
    assert "torn: version" in done.stderr
