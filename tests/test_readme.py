"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = sorted({found.group(1) for found in re.finditer(r"^q4 (\w+)", README, re.MULTILINE)})


def test_readme_has_examples() -> None:
    """The tests below have something to run."""
    assert EXAMPLES
    assert {"doctor", "inspect", "explain", "quantize", "generate", "bench"} <= set(COMMANDS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda _: "")
def test_example_runs(example: str, tmp_path: Path) -> None:
    """Each Python example runs as it stands, in an empty folder."""
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_are_there() -> None:
    """``q4 --help`` lists each command that the README names."""
    command = [sys.executable, "-m", "q4core.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", done.stdout)] == []
