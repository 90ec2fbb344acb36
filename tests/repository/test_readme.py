"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import q4core as q4
from benchmarks import __main__ as benchmarks
from tests.support.limits import scaled

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
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
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr


def test_the_report_is_the_one_shown(tmp_path: Path) -> None:
    """What the README shows of ``session.report()`` is what its example prints, but for the instruction set."""
    (example,) = (text for text in EXAMPLES if "session.report()" in text)
    shown = re.findall(r"^    (\S.*(?:\n    .*)*)", README.partition("`session.report()` says")[2], re.MULTILINE)[0]
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=scaled(120), check=True
    )
    assert _without_isa(done.stdout).startswith(_without_isa(re.sub("^    ", "", shown, flags=re.MULTILINE)))


def _without_isa(text: str) -> str:
    named = re.sub(r"(avx2|avx512|avxvnni|neon_\w+?)(?=_panel|\W)", "ISA", text)
    return re.sub(r"\b(11|12|47|48)\b", "ROWS", named)  # from how many rows on panels pay, by instruction set


def test_commands_are_there() -> None:
    """``q4 --help`` lists each command that the README names."""
    command = [sys.executable, "-m", "q4_cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=True)
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", done.stdout)] == []


@pytest.mark.parametrize("dialect", [item for item in q4.dialects() if item.formats], ids=lambda item: item.name)
def test_table_names_the_dialects_of_each_format(dialect: q4.Dialect) -> None:
    """The row of each format that a dialect holds has the dialect's name, as ``--dialect`` takes it."""
    for name in dialect.formats:
        row = re.search(rf"^\|[^|]*\b{name}\b[^|]*\|([^|]*)\|", README, re.IGNORECASE | re.MULTILINE)
        assert row is not None, name
        assert f"`{dialect.name}`" in row.group(1), name


def test_benchmarks_that_are_named_are_there() -> None:
    """``python -m benchmarks`` names just the benchmarks that it has."""
    assert re.findall(r"\[(\w+)\]", benchmarks.__doc__ or "") == list(benchmarks.BENCHMARKS)
