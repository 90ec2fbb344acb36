"""Each use case has a program that shows what must hold, in a process of its own."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.repository.test_examples import run_example
from tests.support.use_cases import USE_CASES
from tools.projects import Project

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "use_cases"
SCRIPTS = sorted(FOLDER.glob("uc_*.py"))
PAGE = (ROOT / "docs" / "use-cases.md").read_text(encoding="utf-8")
ABSENT = {"torch has no CUDA device", "no device with FP4 tensor cores", "no provider has managed memory on cpu"}
ABSENT |= {"ray is not installed"}
"""Why a statement may be left out where these tests run."""
EVIDENCE = {
    "UC-01": [r"up: nf4, by up.absmax", r"a.absmax must be there", r"\(shape\)", r"\(dtype\)", r"14 of 14 files equal"],
    "UC-02": [r"cpu-native, kernel_only: w4\w+ ran", r"nf4-cuda: device", r"feature 'custom codebook' is not declared"],
    "UC-03": [r"plugins: dequant-fallback; dequant-fallback ran", r"compiled files of ours in the process: 0"],
    "UC-04": [r"prefer_unified: fallback: ", r"processes: fallback: ", r"managedMemory=", r"the same storage: True"],
    "UC-05": [r"largest error: \d\d?% of its bound", r"layer 'layers.0.up': x must be", r"1,000 steps: loss [1-9]"],
    "UC-06": [r"mixes: \d+ ran, \d+ ran, with a fallback's reason", r"\d+ products right", r"67,108,864"],
    "UC-07": [r"processes, in_place: 400 updates .*: 0 torn, 0 back in time, 0 updates lost", r"they hold 0$"],
}
"""Use case → what its program must have seen."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the programs leave more out where there is no /proc")


def section(use_case: str) -> str:
    """Return a use case's part of the page."""
    return PAGE.partition(f"\n## {use_case}: ")[2].partition("\n## ")[0]


def statements(use_case: str) -> list[str]:
    """Return what must hold, a line each."""
    text = section(use_case).partition("**What must hold:**\n")[2].partition("\n\n**")[0]
    return [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]


def test_each_use_case_has_its_program() -> None:
    """The page names the program of each use case, which has its number and its title."""
    assert [f"UC-{script.stem[3:5]}" for script in SCRIPTS] == list(USE_CASES)
    for script, (use_case, title) in zip(SCRIPTS, USE_CASES.items(), strict=True):
        assert f"`python examples/use_cases/{script.name}`" in section(use_case)
        assert f"{use_case}: {title}" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem[:5])
def test_the_extras_bring_what_a_program_imports(script: Path) -> None:
    """Whoever installs the extras that the docstring names has every package that the program imports."""
    source = script.read_text(encoding="utf-8")
    (extras,) = re.findall(r'pip install "q4core\[([\w,]+)\]"', ast.get_docstring(ast.parse(source)) or "")
    brought = {name for extra in extras.split(",") for name in Project(ROOT).requirements[extra]}
    imported = {name.replace("_", "-") for name in re.findall(r"^from (q4_\w+)", source, re.MULTILINE)}
    assert imported <= {name.partition(">=")[0] for name in brought}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem[:5])
def test_a_program_shows_what_must_hold(script: Path, tmp_path: Path) -> None:
    """Each statement of the page is printed, in its order, and holds, or is left out for a device that is not here."""
    use_case = f"UC-{script.stem[3:5]}"
    done = run_example(f"use_cases/{script.name}", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    judged = re.findall(r"^([✓✗○]) (.*)$", done.stdout, re.MULTILINE)
    assert [statement for _, statement in judged] == statements(use_case)
    assert {sign for sign, _ in judged} <= {"✓", "○"}
    assert set(re.findall(r"^    not testable here: (.*)$", done.stdout, re.MULTILINE)) <= ABSENT
    for pattern in EVIDENCE[use_case]:
        assert re.search(pattern, done.stdout, re.MULTILINE), f"{pattern}\n{done.stdout}"
    assert list(tmp_path.iterdir()) == []


HIDE = """
import importlib.metadata, sys

everything = importlib.metadata.distributions
importlib.metadata.distributions = lambda: (item for item in everything() if not item.name.startswith("q4-"))
sys.modules.update(dict.fromkeys(("q4_actors", "q4_nn")))  # their import is an error
"""
"""What Python does as it starts, so that packages are as if they were not installed."""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem[:5])
def test_a_program_without_its_packages_names_them(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback of an import or of a backend: what is missing, and the command that installs it."""
    (tmp_path / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_example(f"use_cases/{script.name}", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    problem, hint = done.stderr.splitlines()
    (extras,) = re.findall(r'pip install "(q4core\[[\w,]+\])"', script.read_text(encoding="utf-8"))
    assert re.fullmatch(r"error: (the package q4-[\w-]+ is not installed(; )?)+", problem)
    assert hint == f'hint: python -m pip install "{extras}", and see what `q4 doctor` says'


@pytest.mark.slow
def test_a_program_whose_plugin_is_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that a variable disables is named, with its state."""
    monkeypatch.setenv("Q4_DISABLE_PLUGINS", "cpu-native")
    done = run_example("use_cases/uc_02_choose_who_computes.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error: the plugin 'cpu-native' is disabled"


@pytest.mark.slow
def test_a_program_fails_where_a_statement_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that are not whole are seen: the program says so, and ends with status 1."""
    source = (FOLDER / "uc_07_share_state.py").read_text(encoding="utf-8")
    torn = source.replace("tensor[SIZE // 2 :] += 1", "tensor[SIZE // 2 :] += 1 + tensor[0] % 2")
    only = torn.replace("    endure(case)\n    close(case)\n", "")
    for path in (FOLDER / "acceptance.py", tmp_path / "uc.py"):
        (tmp_path / path.name).write_text(only if path.name == "uc.py" else path.read_text("utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = run_example(str(tmp_path / "uc.py"), folder=tmp_path)
    assert done.returncode == 1
    assert re.search(r"^✗ No reader sees half an update", done.stdout, re.MULTILINE)


def test_a_statement_that_fails_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails makes the status 1; one that can't be judged does not."""
    spec = importlib.util.spec_from_file_location("acceptance", FOLDER / "acceptance.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    case = module.Acceptance("UC-00: none")
    case.judge("One holds.", "seen", holds=True)
    case.leave("One can't be judged.", "no device")
    assert case.end() == 0
    case.judge("One fails.", "a\nb", holds=False)
    assert case.end() == 1
    printed = capsys.readouterr().out
    assert "○ One can't be judged.\n    not testable here: no device" in printed
    assert "✗ One fails.\n    a\n    b\n" in printed
    assert printed.endswith("1 hold, 1 fail, 1 not testable here\n")
