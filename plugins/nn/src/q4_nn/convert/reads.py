"""Layers whose weight a model's own code reads.

A packed layer answers for its product alone. Code that takes ``self.dt_proj.weight`` for a product of its own, passes
it to a function of torch or changes it needs numbers. Conditions over a module's own numbers are decided for each
module: BLOOM reads weights with ``slow_but_exact`` alone.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
from typing import TYPE_CHECKING, Any

import attrs

from q4_nn.convert.expressions import DEEP
from q4_nn.convert.reach import reach_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from q4_nn.convert.expressions import Path
    from q4_nn.convert.reach import Reach

__all__ = ["Read", "weight_reads"]

_UNKNOWN = object()
_COMPARISONS: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


@attrs.frozen
class Read:
    """A read of a layer's weight.

    Args:
        where: ``Class.method`` that reads it.
        is_change: Whether it is changed in place there.
        is_certain: Whether each call of the method gets there; else a condition decides that the config does not.
        is_reached: Whether a forward pass may call the method; else a user does, as for a penalty.
    """

    where: str
    is_change: bool = False
    is_certain: bool = True
    is_reached: bool = True

    @property
    def weight(self) -> int:
        """The rank of a read among others of the same weight."""
        return 4 * self.is_reached + 2 * self.is_change + self.is_certain

    @property
    def reason(self) -> str | None:
        """The reason to leave the layer dense, or None where a packed one may return a dequantised weight."""
        return self.pass_reason if self.is_change or self.is_certain else None

    @property
    def pass_reason(self) -> str | None:
        """The use of the weight in a forward pass, under a condition or not; None for no use."""
        return f"its weight is {'changed' if self.is_change else 'read'} by {self.where}" if self.is_reached else None


def weight_reads(model: nn.Module) -> dict[str, Read]:
    """Return the path of each module whose weight is read for its numbers by another one's code."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    reads: dict[str, Read] = {}
    reaches = _reaches({type(module) for module in model.modules()})
    for module in model.modules():
        for found in reaches[type(module)].found:
            verdicts = {_verdict(test, module, wanted=wanted) for test, wanted in found.conditions}
            if False in verdicts:
                continue
            read = Read(found.where, found.is_change, None not in verdicts, found.is_reached)
            for child in _children(module, found.path):
                for name in names[id(child)]:
                    if name not in reads or read.weight > reads[name].weight:
                        reads[name] = read
    return reads


def _reaches(kinds: set[Any]) -> dict[Any, Reach]:
    """Return what the passes of each class reach, where each may call methods of all."""
    taken: frozenset[str] = frozenset()
    while True:
        reaches = {kind: reach_of(kind, taken) for kind in kinds}
        more = frozenset().union(*(reach.others for reach in reaches.values()))
        if more <= taken:
            return reaches
        taken |= more


def _children(module: nn.Module, path: Path) -> Iterator[nn.Module]:
    """Yield the modules that a path from a module fits."""
    if not path:
        yield module
        return
    if path[0] == DEEP:
        for inner in module.modules():
            yield from _children(inner, path[1:])
        return
    for name, child in module._modules.items():  # noqa: SLF001  # named_children leaves out what has two names
        if child is not None and fnmatch.fnmatchcase(name, path[0]):
            yield from _children(child, path[1:])


def _verdict(test: ast.expr, module: nn.Module, *, wanted: bool) -> bool | None:
    """Return whether a condition is as wanted for a module, or None where a call decides."""
    value = _value(test, module)
    return None if value is _UNKNOWN else bool(value) is wanted


def _value(node: ast.expr, module: nn.Module) -> Any:  # noqa: C901, PLR0911  # one for each kind of expression
    """Return what an expression over a module's numbers, texts and truths is; ``training`` changes, and is unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, module)
        return value if value is _UNKNOWN else not value
    if isinstance(node, ast.BoolOp):
        deciding = isinstance(node.op, ast.Or)
        values = [_value(item, module) for item in node.values]
        if any(value is not _UNKNOWN and bool(value) is deciding for value in values):
            return deciding
        return _UNKNOWN if _UNKNOWN in values else not deciding
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        left, right = _value(node.left, module), _value(node.comparators[0], module)
        try:
            return _UNKNOWN if _UNKNOWN in (left, right) else _COMPARISONS[type(node.ops[0])](left, right)
        except TypeError:
            return _UNKNOWN
    if isinstance(node, ast.Attribute) and node.attr != "training":
        names = [node.attr]
        inner: ast.AST = node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        value = module if isinstance(inner, ast.Name) and inner.id == "self" else _UNKNOWN
        for name in reversed(names):
            try:
                value = getattr(value, name, _UNKNOWN)
            except Exception:  # noqa: BLE001  # a user's property
                return _UNKNOWN
        return value if isinstance(value, bool | int | float | str | None) else _UNKNOWN
    return _UNKNOWN
