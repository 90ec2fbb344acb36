"""Finds the ways in which a case could end without a judgement: skips, and returns before anything is judged."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["judging_names", "runners", "skips", "unjudged"]

_FORBIDDEN = {"unittest", "pytest", "nose"}
_EXCEPTIONS = {"FailureError", "NotDeclaredError", "NotTestableError"}


def skips(tree: ast.AST) -> set[str]:
    """Return what a module has to do with skipping: names, imports of test runners, and texts handed to ``getattr``."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.name for alias in node.names} | {alias.asname or "" for alias in node.names}
        if isinstance(node, ast.Call) and _called(node) == "getattr":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return {name for name in names if "skip" in name.lower() or "xfail" in name.lower()}


def runners(tree: ast.AST) -> set[str]:
    """Return the test runners that a module imports, with which it could skip by other names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found & _FORBIDDEN


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _functions(trees: Iterable[ast.AST]) -> Iterator[ast.FunctionDef]:
    for tree in trees:
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _raises(node: ast.AST) -> bool:
    raised = node.exc if isinstance(node, ast.Raise) else None
    return isinstance(raised, ast.Call) and _called(raised) in _EXCEPTIONS


def judging_names(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names of the functions that judge: they raise a verdict, or call one that does."""
    functions = list(_functions(trees))
    judging = {item.name for item in functions if any(_raises(node) for node in ast.walk(item))}
    while True:
        more = {
            item.name
            for item in functions
            if any(isinstance(node, ast.Call) and _called(node) in judging for node in ast.walk(item))
        }
        if more <= judging:
            return judging
        judging |= more


def unjudged(tree: ast.AST, judging: frozenset[str] | set[str]) -> list[str]:
    """Return what is wrong with a module's checks: a return without a judgement before it, or that says nothing."""
    found = []
    for function in _functions([tree]):
        if not any(isinstance(item, ast.Call) and _called(item) == "check" for item in function.decorator_list):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _called(node) in judging]
        judged = [node.lineno for node in calls if node not in function.decorator_list]
        judged += [node.lineno for node in ast.walk(function) if isinstance(node, ast.Raise) and _raises(node)]
        own = [node for node in _own_nodes(function) if isinstance(node, ast.Return)]
        if not own:
            found.append(f"{function.name} never says what it measured")
        for node in own:
            if not judged or node.lineno < min(judged):
                found.append(f"{function.name}, line {node.lineno}: returns before anything is judged")
            if node.value is None or (isinstance(node.value, ast.Constant) and not node.value.value):
                found.append(f"{function.name}, line {node.lineno}: returns nothing")
    return found


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, but not those of functions within it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
