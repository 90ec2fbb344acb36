"""Time limits of tests grow with the slowness of the machine, and say so where they expire."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import limits

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "plugins/*/tests", "conformance/tests")
FILES = sorted(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/**/*.py"))
HANG_S, ENDLESS_S = 5, 1e5
"""Between them are limits that end what hangs; shorter and longer ones are what a test is about."""
PRETENDED = "threading.Event()"  # nobody sets it: a plugin that hangs on purpose
EXPIRES = """
import subprocess, sys

def test_that_hangs():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1, check=False)
"""


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let the machine be one on which seven processes wait for each core, and return how slow that is."""
    monkeypatch.setattr(limits, "_measured", (-1e9, 1.0))
    monkeypatch.setattr(os, "getloadavg", lambda: (7.0 * (os.cpu_count() or 1), 0.0, 0.0))
    return 7.0


def test_a_busy_machine_has_longer_limits(busy: float) -> None:
    """Where cores are shared, a limit is as many times longer, or more where a little work takes longer still."""
    assert limits.scaled(10.0) >= 10 * busy
    with limits.within(0.2):
        time.sleep(0.3)


def test_an_idle_machine_has_the_limit_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine has a shorter limit than the one given."""
    monkeypatch.setattr(limits, "_measured", (-1e9, 1.0))
    monkeypatch.setattr(limits, "_WORK", 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert limits.scaled(10.0) == 10.0


def test_what_takes_longer_is_too_slow_here() -> None:
    """The error gives the limit of an idle machine, and how slow this one is."""
    with pytest.raises(limits.TooSlowError, match=r"at most 0 s on .*too slow here: now \d"), limits.within(0):
        limits.until(lambda: True)
    with pytest.raises(limits.TooSlowError, match=r"for 0\.01 s .*too slow here"):
        limits.until(lambda: False, 0.01)


def test_a_failure_says_that_the_machine_may_be_too_slow(tmp_path: Path) -> None:
    """Whatever raises when a limit expires, the report of the test has a section on it."""
    (tmp_path / "test_expires.py").write_text(EXPIRES, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "conftest", "-p", "no:cacheprovider"]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, str(tmp_path / "test_expires.py")],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=limits.scaled(120),
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "or the machine is too slow here: now" in done.stdout


def _is_hang_limit(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and HANG_S <= node.value < ENDLESS_S


def _unscaled(path: Path) -> list[str]:
    """Return the calls of a file with a time limit that is a bare number."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: word.value for word in node.keywords}
        limit = given.get("timeout")
        if limit is None and isinstance(node.func, ast.Attribute) and node.func.attr in {"wait", "join", "result"}:
            limit = node.args[0] if node.args and ast.unparse(node.func.value) != PRETENDED else None
        if _is_hang_limit(limit):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def _scaled_on_import(path: Path) -> list[str]:
    """Return the calls of a file that measure the machine when it is imported: in no function, or in its head."""
    found: list[str] = []
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"scaled", "slowness"}:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif not isinstance(node, ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return found


def test_nothing_is_scaled_on_import() -> None:
    """Workers that collect at different moments have the same tests: no name of one holds what was measured."""
    assert [place for path in FILES for place in _scaled_on_import(path)] == []


def test_every_limit_is_scaled() -> None:
    """No test ends what hangs after a number of seconds that holds on its author's machine alone."""
    assert len(FILES) > 300
    assert [place for path in FILES for place in _unscaled(path)] == []
