"""Reads of ``<child>.weight`` in the source of a module's class, each with the conditions on the way to it.

Each class is parsed once in a process: every method but those that initialise, and the functions of its file to which a
method passes a child.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn

if TYPE_CHECKING:
    from types import FunctionType

__all__ = ["ANY", "Found", "Path", "reads_of"]

_FACTS = {"shape", "dtype", "device", "size", "dim", "numel", "requires_grad"}
"""What a packed layer's weight answers itself."""
_ASKING = {"isinstance", "hasattr", "type", "id"}
_INITIALISING = re.compile(r"__\w+__|_?init_\w*|_initiali[sz]e\w*|reset_parameters|post_init|tie_weights|_?resize_\w+")
ANY = "*"
"""Stands for any one part of a path, as an index or a loop gives."""
_PASSED = {"enumerate", "zip", "reversed", "list", "tuple", "iter"}
_DEEPEST = 4

_CALL = (ast.Name("call"), True)
"""A condition that a call decides."""
Path = tuple[str, ...]


@attrs.frozen
class Found:
    """A read in the source: the path of the layer, and the conditions on the way, each to be true or false."""

    path: Path
    is_change: bool
    conditions: tuple[tuple[ast.expr, bool], ...]
    where: str = ""


@functools.cache
def reads_of(kind: Any) -> tuple[Found, ...]:
    """Return what the code of a class reads of its children's weights.

    torch's own classes are left out: their fast paths are avoided, and ``nn.MultiheadAttention`` marks what it reads.
    """
    found: list[Found] = []
    for owner in kind.__mro__:
        is_torchs = owner.__module__.startswith("torch.")
        if is_torchs or not issubclass(owner, nn.Module) or owner.__name__ == "PreTrainedModel":
            continue
        for name, item in vars(owner).items():
            function = inspect.unwrap(item) if callable(item) else None
            if inspect.isfunction(function) and not _INITIALISING.fullmatch(name):
                where = f"{owner.__name__}.{name}"
                found += [attrs.evolve(read, where=where) for read in _reads_in(function, ((),), 0)]
    return tuple(found)


@functools.cache
def _functions(file: str) -> dict[int, ast.FunctionDef]:
    """Return each function of a file by the number of its first line, decorators included."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {min([node.lineno, *(item.lineno for item in node.decorator_list)]): node for node in nodes}


def _reads_in(function: FunctionType, given: tuple[Path | None, ...], depth: int) -> list[Found]:
    """Return what a function reads of the modules that it is given, in the order of its parameters."""
    tree = _functions(function.__code__.co_filename).get(function.__code__.co_firstlineno)
    if tree is None or depth > _DEEPEST:
        return []
    names = [item.arg for item in (*tree.args.posonlyargs, *tree.args.args)]
    visitor = _Visitor({name: path for name, path in zip(names, given, strict=False) if path is not None})
    for statement in tree.body:
        visitor.visit(statement)
    found = visitor.found
    for called, paths, conditions in visitor.calls:
        other = function.__globals__.get(called)
        if inspect.isfunction(other) and not _INITIALISING.fullmatch(called):
            inner = _reads_in(inspect.unwrap(other), paths, depth + 1)
            certain = [item for item in inner if not item.conditions]  # those of a helper are over its own names
            found += [attrs.evolve(item, conditions=conditions) for item in certain]
            found += [attrs.evolve(item, conditions=(*conditions, _CALL)) for item in inner if item.conditions]
    return found


class _Visitor(ast.NodeVisitor):
    """Finds reads of ``<child>.weight`` in one function.

    Args:
        names: Local name → path of the module that it stands for.
    """

    def __init__(self, names: dict[str, Path]) -> None:
        self.names = names
        self.found: list[Found] = []
        self.calls: list[tuple[str, tuple[Path | None, ...], tuple[tuple[ast.expr, bool], ...]]] = []
        """Functions that are called with modules."""
        self.conditions: tuple[tuple[ast.expr, bool], ...] = ()

    def _note(self, path: Path, *, is_change: bool) -> None:
        if path:  # its own weight is a layer's own matter
            self.found.append(Found(path, is_change, self.conditions))

    def _path(self, node: ast.AST) -> Path | None:
        """Return the path of the module for which an expression stands, or None."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            path = self._path(node.value)
            return None if path is None else (*path, node.attr)
        if isinstance(node, ast.Subscript):
            path = self._path(node.value)
            return None if path is None else path if isinstance(node.slice, ast.Slice) else (*path, ANY)
        return None

    def _bind(self, target: ast.AST, path: Path | None) -> None:
        if isinstance(target, ast.Name):
            self.names.pop(target.id, None)
            if path is not None:
                self.names[target.id] = path
        elif isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._bind(item, path)

    def _items(self, node: ast.AST) -> Path | None:
        """Return the path of what a loop over an expression gives; all targets of ``zip`` and ``enumerate`` get it."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PASSED:
            return next((path for path in map(self._items, node.args) if path is not None), None)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("values", "items")
        ):
            return self._items(node.func.value)
        path = self._path(node)
        return None if path is None else path if isinstance(node, ast.Subscript) else (*path, ANY)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for to, value in pairs:
                self._changed(to)
                path = self._path(value)
                self._bind(to, None if path and path[-1] == "weight" else path)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._changed(node.target)

    def _changed(self, target: ast.AST) -> None:
        """Note what an assignment changes: ``x.weight[…]``, ``x.weight.data`` or ``x.weight``."""
        while isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data"):
            target = target.value
        path = self._path(target)
        if path and path[-1] == "weight":
            self._note(path[:-1], is_change=True)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, self._items(node.iter))
        for item in (*node.body, *node.orelse):
            self.visit(item)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, self._items(node.iter))
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Visit what an expression loops over before what it makes of it."""
        for generator in getattr(node, "generators", ()):
            self.visit(generator)
        super().generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        outer = self.conditions
        for part, wanted in ((node.body, True), (node.orelse, False)):
            self.conditions = (*outer, (node.test, wanted))
            for item in part if isinstance(part, list) else [part]:
                self.visit(item)
        self.conditions = outer

    visit_IfExp = visit_If  # noqa: N815  # ast's name

    def visit_Compare(self, node: ast.Compare) -> None:
        if not all(isinstance(item, ast.Is | ast.IsNot) for item in node.ops):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            paths = tuple(self._path(item) for item in node.args)
            if node.func.id in _ASKING:
                return
            if any(path is not None for path in paths):
                self.calls.append((node.func.id, paths, self.conditions))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        inner = self._path(node.value)
        if inner and inner[-1] == "weight":  # weight.shape, weight.div_, weight.data
            if node.attr not in _FACTS:
                self._note(inner[:-1], is_change=node.attr.endswith("_"))
            return
        path = self._path(node)
        if path and path[-1] == "weight":
            self._note(path[:-1], is_change=False)
            return
        self.generic_visit(node)
