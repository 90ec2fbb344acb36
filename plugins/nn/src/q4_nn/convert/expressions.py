"""Values of the expressions of one function: modules and weights by their paths, and texts as globs."""

from __future__ import annotations

import ast
from typing import TypeGuard

__all__ = ["ANY", "DEEP", "Locals", "Path", "is_call_of", "layer_of"]

ANY, DEEP = "*", "**"
"""Parts of a path: any child, as an index gives it, and any module below, as ``modules()`` does."""
_PASSED = {"enumerate", "zip", "reversed", "list", "tuple", "iter"}
_LISTED = {"children": ANY, "named_children": ANY, "modules": DEEP, "named_modules": DEEP}

Path = tuple[str, ...]
"""Names from a module to one of its children, or to a weight; each may be a glob."""


def layer_of(path: Path) -> Path | None:
    """Return the path of the layer whose weight, or ``weight.data``, a path is."""
    while path and path[-1] == "data":
        path = path[:-1]
    return path[:-1] if path and path[-1] == "weight" else None


def is_call_of(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    """Return whether a node calls a function of one of these names."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


class Locals:
    """The values of a function's local names.

    Args:
        names: Local name → paths of the modules, or weights, that it may be.
    """

    def __init__(self, names: dict[str, tuple[Path, ...]]) -> None:
        self.names = names
        self.texts: dict[str, tuple[str, ...]] = {}
        """Local name → the texts that it may be."""

    def paths(self, node: ast.AST) -> tuple[Path, ...]:  # noqa: PLR0911  # one for each kind of expression
        """Return the paths of the modules, or weights, for which an expression may stand."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ())
        if isinstance(node, ast.Attribute):
            return tuple((*path, node.attr) for path in self.paths(node.value))
        if isinstance(node, ast.Subscript):
            part = node.slice.value if isinstance(node.slice, ast.Constant) else ANY
            paths = self.paths(node.value)
            return paths if isinstance(node.slice, ast.Slice) else tuple((*path, str(part)) for path in paths)
        if isinstance(node, ast.NamedExpr):
            return self.paths(node.value)
        if isinstance(node, ast.IfExp | ast.BoolOp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return tuple(path for part in parts for path in self.paths(part))
        if is_call_of(node, "getattr") and len(node.args) > 1:
            return tuple((*path, text) for path in self.paths(node.args[0]) for text in self.texts_of(node.args[1]))
        return ()

    def texts_of(self, node: ast.AST) -> tuple[str, ...]:
        """Return the texts that an expression may be, as globs."""
        if isinstance(node, ast.Name):
            return self.texts.get(node.id, (ANY,))
        if isinstance(node, ast.JoinedStr):
            parts = (str(item.value) if isinstance(item, ast.Constant) else ANY for item in node.values)
            return ("".join(parts),)
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(text for item in node.elts for text in self.texts_of(item))
        return (node.value,) if isinstance(node, ast.Constant) and isinstance(node.value, str) else (ANY,)

    def items(self, node: ast.AST) -> tuple[Path, ...]:
        """Return the paths of what a loop over an expression gives; all targets of ``zip`` and ``enumerate`` get it."""
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(path for item in node.elts for path in self.paths(item))
        if is_call_of(node, *_PASSED):
            return tuple(path for item in node.args for path in self.items(item))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("values", "items"):
                return self.items(node.func.value)
            if node.func.attr in _LISTED:
                return tuple((*path, _LISTED[node.func.attr]) for path in self.paths(node.func.value))
        return tuple((*path, ANY) for path in self.paths(node))

    def bind(
        self,
        target: ast.AST,
        paths: tuple[Path, ...],
        texts: tuple[str, ...] = (ANY,),
        *,
        is_sure: bool = True,
    ) -> None:
        """Bind a local name to modules and texts; under a condition its earlier values stay possible, too."""
        if isinstance(target, ast.Name):
            earlier = () if is_sure else self.names.get(target.id, ())
            self.names[target.id] = tuple(dict.fromkeys((*earlier, *paths)))
            texts_before = () if is_sure else self.texts.get(target.id, ())
            self.texts[target.id] = tuple(dict.fromkeys((*texts_before, *texts)))
        elif isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self.bind(item, paths, texts, is_sure=is_sure)
