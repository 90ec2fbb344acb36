"""The kit keeps its own rules: no case skips, and it sees q4core through public names alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import q4core

SOURCE = Path(__file__).parents[1] / "src" / "q4_conformance"
FILES = sorted(SOURCE.rglob("*.py"))
PACKAGES = {"q4core", "q4_conformance", "attrs", "numpy", "torch"}
EXTRAS = {"command.py": {"rich", "typer"}, "plugin.py": {"typer"}, "__main__.py": {"typer"}}
"""What the extra ``cli`` brings, and who may use it."""


def _name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def _identifiers(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_there_is_source_to_look_at() -> None:
    """The files are found."""
    assert len(FILES) > 15


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_case_skips(path: Path) -> None:
    """No code of the kit calls anything named skip, xfail or importorskip."""
    names = _identifiers(ast.parse(path.read_text(encoding="utf-8")))
    assert not {name for name in names if "skip" in name.lower() or "xfail" in name.lower()}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_are_public(path: Path) -> None:
    """From q4core only what it exports is imported, from elsewhere only what the kit declares, and never a plugin."""
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
            assert top != "q4core" or module == "q4core", module
        if isinstance(node, ast.ImportFrom) and node.module == "q4core":
            assert {alias.name for alias in node.names} <= set(q4core.__all__)
