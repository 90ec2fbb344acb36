"""The kit keeps its own rules: no case skips, and it sees q4core through public names alone."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from skips import judging_names, runners, skips, unjudged

import q4core
from q4_conformance.subjects.reference import REFERENCE

SOURCE = Path(__file__).parents[1] / "src" / "q4_conformance"
PYTEST_SIDE = SOURCE.parent / "pytest_q4_conformance.py"
FILES = [*sorted(SOURCE.rglob("*.py")), PYTEST_SIDE]
PUBLIC_MODULES = {"q4core", "q4core.extension", "q4core.moved", "q4core.plugin_api"}
PACKAGES = {"q4core", "q4_conformance", "attrs", "numpy", "torch"}
EXTRAS = {
    "checks/programs.py": {"q4_programs"},
    "oracle/operations.py": {"q4_programs"},
    "oracle/spiking.py": {"q4_programs"},
    "subjects/circuits.py": {"q4_programs"},
    "subjects/scenes.py": {"q4_programs"},
    "command/conform.py": {"rich", "typer"},
    "command/declared.py": {"typer"},
    "report/terminal.py": {"rich"},
    PYTEST_SIDE.name: {"pytest"},
}
"""What the extras ``cli`` and ``programs`` bring, or pytest's side needs, and who may use it."""


def _name(path: Path) -> str:
    return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else path.name


RUNNER_FILES = {PYTEST_SIDE}
"""The module that is a plugin of pytest."""
CHECKS = [path for path in FILES if path.parent.name == "checks"]
UNJUDGED = {
    "hides a skip": "import pytest\n@check('a')\ndef f(case, subject):\n    pytest.skip('no')\n",
    "hides a skip of unittest's": "from unittest import SkipTest as Stop\ndef f():\n    raise Stop\n",
    "hides a skip in a text": "getattr(runner, 'skip')('no')\n",
    "imports one by a name": "from pytest import importorskip as need\n",
}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _judging() -> frozenset[str]:
    return frozenset(judging_names(map(_tree, FILES)))


def test_there_is_source_to_look_at() -> None:
    """The files are found."""
    assert len(FILES) > 15
    assert set(FILES) >= RUNNER_FILES
    assert all(path.exists() for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_case_skips(path: Path) -> None:
    """No code of the kit names anything that skips, or imports what could."""
    assert not skips(_tree(path))
    assert path in RUNNER_FILES or not runners(_tree(path))


@pytest.mark.parametrize("path", CHECKS, ids=_name)
def test_no_check_ends_before_it_judges(path: Path) -> None:
    """Each return of a check comes after something that can fail, and says what was measured."""
    assert unjudged(_tree(path), _judging()) == []


@pytest.mark.parametrize("name", sorted(UNJUDGED))
def test_planted_skips_are_found(name: str) -> None:
    """The rule above finds skips under each of their names."""
    assert skips(ast.parse(UNJUDGED[name])), name


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    return 'done'\n", "before anything is judged"),
        ("    if True:\n        return 'too early'\n    expect(1, 'one')\n    return 'ok'\n", "line 6"),
        ("    expect(1, 'one')\n    return None\n", "returns nothing"),
        ("    expect(1, 'one')\n    return ''\n", "returns nothing"),
        ("    expect(1, 'one')\n", "never says"),
        ("    quiet()\n    return 'ok'\n", "before anything is judged"),
    ],
)
def test_planted_checks_without_judgement_are_found(body: str, says: str) -> None:
    """A check that returns at once, early, nothing, or after calls that can't fail, is found."""
    source = "def quiet():\n    pass\n@check('a')\ndef f(case, subject):\n" + body
    faults = unjudged(ast.parse(source), _judging())
    assert any(says in fault for fault in faults), faults


def test_a_check_that_judges_passes() -> None:
    """A judgement may stand in a helper, and a refusal may end a check early once something could have failed."""
    source = (
        "@check('a')\ndef f(case, subject):\n    layer = helper(subject)\n"
        "    if layer:\n        return 'refused'\n    return 'ok'\n"
        "def helper(subject):\n    raise FailureError('no')\n"
    )
    tree = ast.parse(source)
    assert unjudged(tree, judging_names([tree])) == []


def test_the_reference_is_a_dependency() -> None:
    """What the kit asks for by its name at run time comes with it, although nothing imports it."""
    project = (SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = project.partition("\ndependencies = [")[2].partition("]")[0]
    assert f'"q4-{REFERENCE}>=' in dependencies


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_are_public(path: Path) -> None:
    """From q4core only its public names are imported, from elsewhere only what the kit declares, and never a plugin."""
    import sys  # noqa: PLC0415  # for the names of the standard library

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            top = module.partition(".")[0]
            allowed = PACKAGES | EXTRAS.get(_name(path), set())
            assert top in allowed or top in sys.stdlib_module_names, module
            assert top != "q4core" or module in PUBLIC_MODULES, module
        if isinstance(node, ast.ImportFrom) and node.module == "q4core":
            assert {alias.name for alias in node.names} <= set(q4core.__all__)
