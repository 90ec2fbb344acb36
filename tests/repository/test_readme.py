"""What the README and the pages that it leads to show is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from q4_cpu_native.isa import native
from tests.support.commands import run_python
from tests.support.limits import scaled
from tools.projects import projects

SHOWN = "avx512"
INT16_FAMILY = 2
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
FIRST_STEPS = (ROOT / "docs/first-steps.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"^\| `q4 (\w+)", (ROOT / "docs/cli.md").read_text(encoding="utf-8"), re.MULTILINE)))


def test_readme_is_short() -> None:
    """It has one picture, three programs and fewer than 120 lines."""
    assert len(README.splitlines()) < 120
    assert len(EXAMPLES) == 3
    assert len(re.findall(r"!\[", README)) == 1


def test_links_of_the_readme_lead_somewhere() -> None:
    """Each link to a file or folder of the repository has it."""
    targets = [link for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link]
    assert len(targets) > 20
    assert [link for link in targets if not (ROOT / link).exists()] == []


def test_states_of_backends_are_those_of_the_support_page() -> None:
    """Each backend's formats and state are in both tables, word for word."""
    support = (ROOT / "docs/support.md").read_text(encoding="utf-8")
    section = support.partition("## Backends\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    stated = re.findall(r"^\| (`[\w-]+`)[^|]* \| ([^|]+) \| (.+) \|$", README, re.MULTILINE)
    assert stated == [(row[0], row[1], row[-1].replace("](gpu.md)", "](docs/gpu.md)")) for row in rows]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda _: "")
def test_example_runs(example: str, tmp_path: Path) -> None:
    """Each Python example runs unchanged, in an empty folder."""
    run_python(tmp_path, "-c", example)


def brought(*asked: str) -> set[str]:
    """Return the packages of ours that requirements bring, with what these bring in their turn."""
    known = {project.name: project.requirements for project in projects()}
    found: set[tuple[str, str]] = set()
    left = [*asked]
    while left:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", left.pop()).groups()  # type: ignore[union-attr]  # a requirement
        new = {(name, extra) for extra in ("", *filter(None, (extras or "").split(",")))} - found
        found |= new
        left += [line for name, extra in new if name in known for line in known[name][extra]]
    return {name for name, _ in found}


def test_the_install_command_brings_what_the_examples_import() -> None:
    """Who has run it can run each example; one that needs another extra says so in front of it."""
    (asked,) = re.findall(r"^    python -m pip install --find-links dist '(q4core\[[\w,]+\])'$", README, re.MULTILINE)
    assert "q4-actors" not in brought(asked)
    assert {"q4-nn", "q4-safetensors", "q4-quantize"} <= brought(asked)
    for example in EXAMPLES:
        intro = README.partition(example)[0].removesuffix("```python\n").rstrip().rpartition("\n\n")[2]
        extras = re.findall(r"\bextra `(\w+)`", intro.replace("\n", " "))
        needed = {name.replace("_", "-") for name in re.findall(r"^(?:import|from) (q4_\w+)", example, re.MULTILINE)}
        assert needed <= brought(asked, *(f"q4core[{extra}]" for extra in extras)), intro


def instruction_sets() -> dict[str, tuple[bool, int]]:
    """Return the CPU kernels' instruction sets: whether this machine has each, and from how many rows on panels pay."""
    module: Any = native()
    sets: dict[str, tuple[bool, int]] = {}
    while (name := module.isa_name(number := len(sets) + 1)) is not None:
        sets[name] = (module.has_isa(number) == 1, module.panel_from(number, INT16_FAMILY))
    return sets


def test_the_report_is_the_one_shown(tmp_path: Path) -> None:
    """What the first steps show of ``session.report()`` is what they print on each instruction set of this machine.

    The page shows that of AVX-512. Another set has its own name and its own number of rows; all else is equal.
    """
    programs = re.findall(r"^```python\n(.*?)^```", FIRST_STEPS, re.DOTALL | re.MULTILINE)
    (last,) = (number for number, text in enumerate(programs) if "session.report()" in text)
    (shown,) = re.findall(r"^```text\n(linear: .*?)\n^```", FIRST_STEPS, re.DOTALL | re.MULTILINE)
    sets = instruction_sets()
    rows = sets[SHOWN][1]
    assert all(text in shown for text in (f"({SHOWN})", f"M 1…{rows - 1}: ", f"M {rows}…∞: "))
    here = {name: few for name, (is_here, few) in sets.items() if is_here}
    assert here
    for name, few in here.items():
        expected = shown.replace(f"({SHOWN})", f"({name})").replace(f"_{SHOWN}", f"_{name.replace('-', '_')}")
        expected = expected.replace(f"M 1…{rows - 1}: ", f"M 1…{few - 1}: ").replace(f"M {rows}…∞: ", f"M {few}…∞: ")
        printed = run_python(tmp_path, "-c", "".join(programs[: last + 1]), Q4_CPU_ISA=name)
        assert expected in printed, name


def test_ci_runs_the_two_commands() -> None:
    """What the README begins with is run in CI, in a clone with the repository's name."""
    commands = re.findall(r"nox -s \w+", README.partition("## Two commands")[2].partition("\n## ")[0])
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert commands == ["nox -s demo", "nox -s tests"]
    assert all(f"\n{command} " in script.partition('/q4core"\n')[2] for command in commands)


@pytest.mark.parametrize(
    ("page", "title"), [("docs/install.md", "## From a clone"), ("docs/write-a-backend/index.md", "## Install")]
)
def test_installing_from_a_clone_names_what_it_needs(page: str, title: str) -> None:
    """No index has our packages: those that pip is given depend on no other one, or pip would look there for it."""
    section = (ROOT / page).read_text(encoding="utf-8").partition(title)[2].partition("\n## ")[0]
    folders = set(re.findall(r"(?:-e |'\./)(\.|[a-z][\w/-]+)", section))
    projects = [(ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in folders]
    names = {re.findall(r'^name = "(.*)"', text, re.MULTILINE)[0] for text in projects}
    needed = {name for text in projects for name in re.findall(r'^    "(q4[\w-]+)', _dependencies(text), re.MULTILINE)}
    assert {"q4core", "q4-cli"} <= names
    assert needed - names == set()


def _dependencies(project: str) -> str:
    return project.partition("\ndependencies = [")[2].partition("\n]")[0]


def test_commands_are_there() -> None:
    """``q4 --help`` lists each command of the page of commands, and the page has each that is listed."""
    command = [sys.executable, "-m", "q4_cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=True)
    assert sorted(re.findall(r"^\W*([a-z]+)  ", done.stdout.partition("Commands")[2], re.MULTILINE)) == COMMANDS


def test_every_package_is_on_the_page_of_packages() -> None:
    """Each distribution of the repository has a row."""
    text = (ROOT / "docs/packages.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(q4[\w-]+)` \|", text, re.MULTILINE)) == sorted(item.name for item in projects())


def test_benchmarks_that_are_named_are_there() -> None:
    """``python -m benchmarks`` names just the benchmarks that it has."""
    assert re.findall(r"\[(\w+)\]", benchmarks.__doc__ or "") == list(benchmarks.BENCHMARKS)
