"""The source of one function: the weights that it reads of the modules it is given, and the calls of them.

Each file is parsed once in a process.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import linecache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from q4_nn.convert.expressions import ANY, Locals, is_call_of, layer_of

if TYPE_CHECKING:
    from types import FunctionType

    from q4_nn.convert.expressions import Path

__all__ = ["FACTS", "SUPER", "Call", "Condition", "Found", "Scan", "parameters_of", "scan"]

FACTS = {
    "shape", "dtype", "device", "size", "dim", "ndim", "numel", "nelement", "element_size", "is_cuda", "is_meta",
    "is_floating_point", "requires_grad", "requires_grad_",
}  # fmt: skip
"""Attributes that a packed layer's weight has itself."""
_ASKING = {"isinstance", "hasattr", "type", "id", "len", "print", "repr", "str"}
_STATEMENTS = ("body", "orelse", "handlers", "finalbody", "cases")
SUPER = "super()"
Condition = tuple[ast.expr, bool]


@attrs.frozen
class Found:
    """A read in the source: the path of the layer, and the conditions on its path, each to be true or false."""

    path: Path
    is_change: bool
    conditions: tuple[Condition, ...]
    where: str = ""
    is_reached: bool = True


@attrs.frozen
class Call:
    """A call that is given modules.

    Args:
        receiver: Empty for a function, ``self``, ``SUPER``, or the name of a class or a Python module.
        name: What is called.
        given: Paths of each argument by position.
        named: Paths of each argument by name.
        conditions: Those on its path.
    """

    receiver: str
    name: str
    given: tuple[tuple[Path, ...], ...]
    named: tuple[tuple[str, tuple[Path, ...]], ...]
    conditions: tuple[Condition, ...]


@attrs.frozen
class Scan:
    """The reads and calls in the source of a function.

    Args:
        found: Its reads.
        calls: What it calls with modules.
        own: Names, or globs, of attributes that it reads of the module itself.
        passed: Those that it reads without calling them.
        inherited: The class, or ``SUPER``, and the name of an attribute of a base class.
        others: Names, or globs, of attributes of children, and of methods that it calls on other objects.
    """

    found: tuple[Found, ...] = ()
    calls: tuple[Call, ...] = ()
    own: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    inherited: frozenset[tuple[str, str]] = frozenset()
    others: frozenset[str] = frozenset()


@functools.cache
def _functions(file: str) -> dict[int, ast.FunctionDef]:
    """Return each function of a file by the number of its first line, decorators included."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    nodes, left = list[ast.FunctionDef](), list[Any]([tree])
    while left:  # statements alone, as functions are in no expression
        node = left.pop()
        nodes += [node] if isinstance(node, ast.FunctionDef) else []
        left += [item for name in _STATEMENTS for item in getattr(node, name, ())]
    return {min([node.lineno, *(item.lineno for item in node.decorator_list)]): node for node in nodes}


def _tree_of(function: FunctionType) -> ast.FunctionDef | None:
    return _functions(function.__code__.co_filename).get(function.__code__.co_firstlineno)


def parameters_of(function: FunctionType) -> list[str]:
    """Return the names of a function's parameters that are given by position."""
    tree = _tree_of(function)
    return [] if tree is None else [item.arg for item in (*tree.args.posonlyargs, *tree.args.args)]


@functools.cache
def scan(function: FunctionType, given: tuple[tuple[str, tuple[Path, ...]], ...]) -> Scan:
    """Return what a function does with modules; ``given`` are paths of those that its parameters may be."""
    tree = _tree_of(function)
    if tree is None:
        return Scan()
    visitor = _Visitor(dict(given), function.__globals__)
    for statement in tree.body:
        visitor.visit(statement)
    return Scan(
        tuple(visitor.found),
        tuple(visitor.calls),
        frozenset(visitor.own),
        frozenset(visitor.passed),
        frozenset(visitor.inherited),
        frozenset(visitor.others),
    )


class _Visitor(ast.NodeVisitor):
    """Finds what one function does with modules.

    Args:
        names: Local name → paths of the modules, or weights, that it may be.
        globals_: The function's global names.
    """

    def __init__(self, names: dict[str, tuple[Path, ...]], globals_: dict[str, Any]) -> None:
        self.locals = Locals(names)
        self.globals = globals_
        self.found: list[Found] = []
        self.calls: list[Call] = []
        self.own: set[str] = set()
        self.passed: set[str] = set()
        self.inherited: set[tuple[str, str]] = set()
        self.others: set[str] = set()
        self.conditions: tuple[Condition, ...] = ()

    def _note(self, path: Path, *, is_change: bool) -> None:
        if path:  # its own weight is a layer's own matter
            self.found.append(Found(path, is_change, self.conditions))

    def _bind(self, target: ast.AST, paths: tuple[Path, ...], value: ast.AST) -> None:
        self.locals.bind(target, paths, self.locals.texts_of(value), is_sure=not self.conditions)

    # -- statements

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is None:
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for to, value in pairs:
                self._assign(to, value)

    visit_AnnAssign = visit_Assign  # noqa: N815  # ast's name

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Bind a name, to a weight too, which is read where the name is: its dtype may be all that is asked for."""
        paths = self.locals.paths(value)
        is_alias = isinstance(target, ast.Name) and isinstance(value, ast.Name | ast.Attribute)
        if not (is_alias and paths and all(map(layer_of, paths))):
            self.visit(value)
            paths = tuple(path for path in paths if layer_of(path) is None)
        if not isinstance(target, ast.Name):
            self._changed(target)
        self._bind(target, paths, value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self.locals.paths(node.value), node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._changed(node.target)

    def _changed(self, target: ast.AST) -> None:
        """Record what an assignment changes: ``x.weight[…]``, ``x.weight.data`` or ``x.weight``."""
        while isinstance(target, ast.Subscript):
            target = target.value
        for layer in filter(None, map(layer_of, self.locals.paths(target))):
            self._note(layer, is_change=True)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, self.locals.items(node.iter), node.iter)
        for item in (*node.body, *node.orelse):
            self.visit(item)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, self.locals.items(node.iter), node.iter)
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

    # -- expressions

    def _visit_asked(self, nodes: list[ast.expr]) -> None:
        """Visit expressions of which only facts are asked."""
        for node in nodes:
            if any(layer_of(path) is not None for path in self.locals.paths(node)):
                self._bind_inside(node)
            else:
                self.visit(node)

    def _bind_inside(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self._bind(inner.target, self.locals.paths(inner.value), inner.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        if all(isinstance(item, ast.Is | ast.IsNot) for item in node.ops):
            self._visit_asked([node.left, *node.comparators])
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        for layer in filter(None, map(layer_of, self.locals.paths(node))):
            self._note(layer, is_change=False)

    def visit_Call(self, node: ast.Call) -> None:
        if is_call_of(node, *_ASKING):
            self._visit_asked(node.args)
            return
        if is_call_of(node, "getattr", "setattr") and len(node.args) > 1:
            self._take_by_text(node.args[0], node.args[1], is_change=is_call_of(node, "setattr"))
        self._note_call(node)
        if isinstance(node.func, ast.Attribute):
            self._take(node.func, is_called=True)
        else:
            self.visit(node.func)
        for item in (*node.args, *node.keywords):
            self.visit(item)

    def _note_call(self, node: ast.Call) -> None:
        """Record a call that is given modules."""
        given = tuple(map(self.locals.paths, node.args))
        named = tuple((item.arg, self.locals.paths(item.value)) for item in node.keywords if item.arg is not None)
        if not any(given) and not any(paths for _, paths in named):
            return
        if isinstance(node.func, ast.Name):
            self.calls.append(Call("", node.func.id, given, named, self.conditions))
        elif isinstance(node.func, ast.Attribute):
            value = node.func.value
            paths, receiver = self.locals.paths(value), getattr(value, "id", "") or SUPER
            if () in paths or (not paths and (isinstance(value, ast.Name) or is_call_of(value, "super"))):
                self.calls.append(Call("self" if paths else receiver, node.func.attr, given, named, self.conditions))

    def _take_by_text(self, owner: ast.expr, name: ast.expr, *, is_change: bool) -> None:
        """Record what ``getattr`` and ``setattr`` access: a weight, a module, or a method."""
        for path in self.locals.paths(owner):
            for text in self.locals.texts_of(name):
                if fnmatch.fnmatchcase("weight", text):
                    self._note(path, is_change=is_change and text == "weight")
                if not path:
                    self.own.add(text)
                elif text != ANY:
                    self.others.add(text)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._take(node, is_called=False)

    def _take(self, node: ast.Attribute, *, is_called: bool) -> None:
        """Record an attribute of a module, of its weight, or of another object."""
        owners, is_weight = self.locals.paths(node.value), False
        for path in owners:
            if layer_of(path) is None:
                (self.others if path else self.own).add(node.attr)
                if not (path or is_called):
                    self.passed.add(node.attr)
                layer = layer_of((*path, node.attr))
            else:
                layer = layer_of(path)
            if layer is not None:
                is_weight = True
                if node.attr not in FACTS:  # weight.div_, weight.data, layer.weight
                    self._note(layer, is_change=node.attr.endswith("_"))
        if is_weight:
            self._bind_inside(node.value)
            return
        if not owners:
            base = getattr(node.value, "id", "")
            if base or is_call_of(node.value, "super"):
                self.inherited.add((base or SUPER, node.attr))
            if is_called and not isinstance(self.globals.get(base), ModuleType):
                self.others.add(node.attr)
        self.visit(node.value)
