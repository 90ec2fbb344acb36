"""No package imports or reads a name with an underscore of another: what is shared is public."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGES = {
    folder.name: folder
    for pattern in ("q4core", "plugins/*/src/q4_*", "conformance/**/src/q4_*")
    for folder in sorted(ROOT.glob(pattern))
    if (folder / "__init__.py").is_file()
}


def is_private(name: str) -> bool:
    """Say whether a name is private to its package."""
    return name.startswith("_") and not name.endswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Return the private names that a module defines: functions, classes, variables, attributes and attrs fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Return the private names that a module reads from objects, and imports from elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != package:
            yield from ((node.lineno, name.name) for name in node.names if is_private(name.name))


def trees(folder: Path) -> dict[str, ast.AST]:
    """Return the modules of a package, parsed."""
    files = sorted(folder.rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


TREES = {name: trees(folder) for name, folder in PACKAGES.items()}
OWN = {
    name: {item for tree in found.values() for item in defined(tree) if is_private(item)}
    for name, found in TREES.items()
}


def borrowed(package: str) -> list[str]:
    """Return where a package uses a private name that only other packages of ours define."""
    theirs = set().union(*(names for name, names in OWN.items() if name != package)) - OWN[package]
    return [
        f"{file}:{line} {name}"
        for file, tree in TREES[package].items()
        for line, name in used(tree, package)
        if name in theirs - OF_OTHERS
    ]


OF_OTHERS = {"_version", "_sleep", "_parameters", "_buffers", "_modules", "_data"}
"""Names of torch's objects, and of ``os.environ``, that are names of ours, too."""


def test_a_private_name_of_another_package_is_found() -> None:
    """By an import, and by an attribute of any object; names of the module's own class are its own."""
    tree = ast.parse("from q4core.a import _b\nclass C:\n    def _d(self): return self._d() + x._e\n")
    assert sorted(name for _, name in used(tree, "q4_nn")) == ["_b", "_d", "_e"]
    assert sorted(name for _, name in used(tree, "q4core")) == ["_d", "_e"]
    assert set(defined(tree)) == {"C", "_d"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_uses_private_names_of_another(package: str) -> None:
    """``q4core.extension`` is there for what libraries need of layers."""
    assert len(PACKAGES) > 15  # a lower count: folders were not found
    assert borrowed(package) == []
