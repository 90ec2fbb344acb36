"""The stamps of rings under a thread sanitizer."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import scaled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="Linux and g++ are needed"),
]
SOURCE = Path(__file__).parents[1] / "native/tests/stamps.cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build the program of ``native/tests/stamps.cpp``, and return how to run it."""
    found = tmp_path_factory.mktemp("stamps") / "stamps"
    options = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-Wno-tsan", "-pthread"]
    compiler = shutil.which("g++") or "g++"
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(found)], check=True, timeout=scaled(120.0))
    fixed = shutil.which("setarch")  # thread sanitizers stumble on random addresses
    return [*((fixed, platform.machine(), "-R") if fixed else ()), str(found)]


def test_no_race(program: list[str]) -> None:
    """Actors that wait for stamps, redo chunks and publish read what was written, without a race."""
    done = subprocess.run(program, capture_output=True, text=True, timeout=scaled(120.0), check=False)
    assert (done.returncode, done.stdout) == (0, "stamps: passed\n"), done.stderr


def test_the_sanitizer_is_at_work(program: list[str]) -> None:
    """Without the waits it reports a race."""
    done = subprocess.run([*program, "race"], capture_output=True, text=True, timeout=scaled(120.0), check=False)
    assert "data race" in done.stderr
