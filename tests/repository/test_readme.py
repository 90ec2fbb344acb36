"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import q4core as q4
from benchmarks import __main__ as benchmarks
from q4_cpu_native.isa import native
from tests.support.commands import run_python
from tests.support.limits import scaled

SHOWN = "avx512"
INT16_FAMILY = 2
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = sorted({found.group(1) for found in re.finditer(r"^q4 (\w+)", README, re.MULTILINE)})


def test_readme_has_examples() -> None:
    """The tests below have something to run."""
    assert EXAMPLES
    assert {"doctor", "inspect", "explain", "quantize", "generate", "bench"} <= set(COMMANDS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda _: "")
def test_example_runs(example: str, tmp_path: Path) -> None:
    """Each Python example runs unchanged, in an empty folder."""
    run_python(tmp_path, "-c", example)


def instruction_sets() -> dict[str, tuple[bool, int]]:
    """Return the CPU kernels' instruction sets: whether this machine has each, and from how many rows on panels pay."""
    module: Any = native()
    sets: dict[str, tuple[bool, int]] = {}
    while (name := module.isa_name(number := len(sets) + 1)) is not None:
        sets[name] = (module.has_isa(number) == 1, module.panel_from(number, INT16_FAMILY))
    return sets


def test_the_report_is_the_one_shown(tmp_path: Path) -> None:
    """What the README shows of ``session.report()`` is what its example prints on each instruction set of this machine.

    The README shows that of AVX-512. Another set has its own name and its own number of rows; all else is equal.
    """
    (example,) = (text for text in EXAMPLES if "session.report()" in text)
    block = re.findall(r"^    (\S.*(?:\n    .*)*)", README.partition("`session.report()` says")[2], re.MULTILINE)[0]
    shown = re.sub("^    ", "", block, flags=re.MULTILINE)
    sets = instruction_sets()
    rows = sets[SHOWN][1]
    assert all(text in shown for text in (f"({SHOWN})", f"M 1…{rows - 1}: ", f"M {rows}…∞: "))
    here = {name: few for name, (is_here, few) in sets.items() if is_here}
    assert here
    for name, few in here.items():
        expected = shown.replace(f"({SHOWN})", f"({name})").replace(f"_{SHOWN}", f"_{name.replace('-', '_')}")
        expected = expected.replace(f"M 1…{rows - 1}: ", f"M 1…{few - 1}: ").replace(f"M {rows}…∞: ", f"M {few}…∞: ")
        assert run_python(tmp_path, "-c", example, Q4_CPU_ISA=name).startswith(expected), name


def test_ci_runs_the_two_commands() -> None:
    """What the README begins with is run in CI, in a clone with the repository's name."""
    commands = re.findall(r"nox -s \w+", README.partition("## Two commands")[2].partition("\n## ")[0])
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert commands == ["nox -s demo", "nox -s tests"]
    assert all(f"\n{command} " in script.partition('/q4core"\n')[2] for command in commands)


@pytest.mark.parametrize("page", ["README.md", "docs/write-a-backend/index.md"])
def test_installing_from_a_clone_names_what_it_needs(page: str) -> None:
    """No index has our packages: those that pip is given depend on no other one, or pip would look there for it."""
    section = (ROOT / page).read_text(encoding="utf-8").partition("## Install")[2].partition("\n## ")[0]
    folders = set(re.findall(r"(?:-e |'\./)(\.|[a-z][\w/-]+)", section))
    projects = [(ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in folders]
    names = {re.findall(r'^name = "(.*)"', text, re.MULTILINE)[0] for text in projects}
    needed = {name for text in projects for name in re.findall(r'^    "(q4[\w-]+)', _dependencies(text), re.MULTILINE)}
    assert {"q4core", "q4-cli"} <= names
    assert needed - names == set()


def _dependencies(project: str) -> str:
    return project.partition("\ndependencies = [")[2].partition("\n]")[0]


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
