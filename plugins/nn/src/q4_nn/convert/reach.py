"""The methods of a module class that a forward pass reaches, with the weights of its children that they read.

A method of a base class counts where no class nearer overrides it, or where ``super()`` calls it.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import inspect
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from q4_nn.convert.source import SUPER, Call, Found, Scan, parameters_of, scan

if TYPE_CHECKING:
    from types import FunctionType

    from q4_nn.convert.expressions import Path

__all__ = ["Reach", "reach_of"]

_ENTRIES = ("forward", "__call__", "train", "eval")
_NO_PASS = re.compile(
    r"__(?!call__)\w+__|_?init_\w*|_initiali[sz]e\w*|reset_parameters|post_init|_?resize_\w+"
    r"|_?tie_\w+|_?(un)?freeze\w*|[gs]et_(in|out)put_embeddings"
)
"""Names of methods that make, freeze, tie or resize a model, and are no part of a pass."""
_OF_TRANSFORMERS = ("PreTrainedModel", "GenerationMixin")
_CALL = (ast.Name("call"), True)
"""A condition that a call decides."""


@attrs.frozen(eq=False)
class _Method:
    """A definition of a method, with the position of its class among those that its module's class derives from."""

    name: str
    function: Any
    position: int
    where: str
    is_property: bool
    is_bound: bool

    def given(self, paths: dict[str, tuple[Path, ...]]) -> dict[str, tuple[Path, ...]]:
        """Return the paths of parameters together with that of the module itself."""
        first = parameters_of(self.function)[:1] if self.is_bound else []
        return {**dict.fromkeys(first, ((),)), **paths}


@attrs.frozen
class Reach:
    """The methods and weights that the passes of a class reach.

    Args:
        found: Reads of its children's weights, those of methods that no pass reaches at the end.
        others: Names, or globs, of attributes of other objects.
    """

    found: tuple[Found, ...]
    others: frozenset[str]


@functools.cache
def _methods(kind: Any) -> dict[str, list[_Method]]:
    """Return the definitions of each method and property, the nearest first.

    torch's own classes are left out: their fast paths are avoided, and ``nn.MultiheadAttention`` marks what it reads.
    So are transformers' ``PreTrainedModel``, which resizes, ties and saves, and ``GenerationMixin``, with their bases.
    """
    found: dict[str, list[_Method]] = {}
    hidden = {base for owner in kind.__mro__ if owner.__name__ in _OF_TRANSFORMERS for base in owner.__mro__}
    for position, owner in enumerate(kind.__mro__):
        if owner in hidden or owner is object or owner.__module__.startswith("torch."):
            continue
        for name, item in vars(owner).items():
            inner = getattr(item, "fget", None) or getattr(item, "func", None) or getattr(item, "__func__", item)
            function = inspect.unwrap(inner) if callable(inner) else None
            if inspect.isfunction(function):
                is_property = isinstance(item, (property, functools.cached_property))
                is_bound = not isinstance(item, (staticmethod, classmethod))
                where = f"{owner.__name__}.{name}"
                found.setdefault(name, []).append(_Method(name, function, position, where, is_property, is_bound))
    return found


@functools.cache
def reach_of(kind: Any, taken: frozenset[str]) -> Reach:
    """Return what the passes of a class reach, where a model's classes take ``taken`` of others."""
    search = _Search(kind)
    is_container = "forward" not in search.methods
    for name in search.methods if is_container else (*_ENTRIES, *taken):
        search.take(name)
    for method in search.methods.get("__init__", ()):
        for name in _scanned(method).passed:  # a hook, or one of several methods to call
            search.take(name, are_properties=False)
    search.run()
    return Reach((*search.found, *search.unreached()), frozenset(search.others))


def _scanned(method: _Method) -> Scan:
    return scan(method.function, tuple(method.given({}).items()))


class _Search:
    """The methods of a class that were reached, and those that are to be searched."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.methods = _methods(kind)
        self.found: list[Found] = []
        self.others: set[str] = set()
        self._reached: dict[_Method, None] = {}
        self._to_do: list[_Method] = []
        self._seen: dict[object, list[Found]] = {}

    def take(self, text: str, *, are_properties: bool = True) -> None:
        """Mark the nearest definitions of a name, or of names that fit a glob, as reached."""
        for name in fnmatch.filter(self.methods, text) if "*" in text else [text]:
            for method in self.methods.get(name, ())[:1]:
                if are_properties or not method.is_property:
                    self._reach(method)

    def _reach(self, method: _Method) -> None:
        if method not in self._reached and not _NO_PASS.fullmatch(method.name):
            self._reached[method] = None
            self._to_do.append(method)

    def run(self) -> None:
        """Search what is reached."""
        while self._to_do:
            method = self._to_do.pop()
            reads = self._reads_in(method.function, method.given({}), method.position)
            self.found += [attrs.evolve(read, where=method.where) for read in reads]

    def unreached(self) -> list[Found]:
        """Return the reads of the methods that only a user calls."""
        rest = [method for name in self.methods for method in self.methods[name] if method not in self._reached]
        return [
            attrs.evolve(read, where=method.where, is_reached=False)
            for method in rest
            if not _NO_PASS.fullmatch(method.name)
            for read in _scanned(method).found
        ]

    def _reads_in(self, function: FunctionType, given: dict[str, tuple[Path, ...]], position: int) -> list[Found]:
        """Return what a function reads of the modules that it is given."""
        key = (function, tuple(given.items()), position)
        if key in self._seen:
            return self._seen[key]
        self._seen[key] = []  # one that calls itself
        shown = scan(function, tuple(given.items()))
        self.others |= shown.others
        for name in shown.own:
            self.take(name)
        for base, name in shown.inherited:
            for method in self._inherited(base, name, function, position):
                self._reach(method)
        found = [*shown.found]
        for call in shown.calls:
            found += self._reads_of(call, function, position)
        self._seen[key] = found
        return found

    def _inherited(self, base: str, name: str, function: FunctionType, position: int) -> list[_Method]:
        """Return the method that ``super()``, or a class by its name, has under a name."""
        owner = function.__globals__.get(base)
        first = position + 1
        if base != SUPER:
            if owner not in self.kind.__mro__:
                return []
            first = self.kind.__mro__.index(owner)
        return [method for method in self.methods.get(name, ()) if method.position >= first][:1]

    def _reads_of(self, call: Call, function: FunctionType, position: int) -> list[Found]:
        """Return what a call reads of the modules that it is given."""
        if call.receiver in ("", "self") or isinstance(function.__globals__.get(call.receiver), ModuleType):
            methods = self.methods.get(call.name, ())[:1] if call.receiver == "self" else []
        else:
            methods = self._inherited(call.receiver, call.name, function, position)
        for method in methods:
            if _NO_PASS.fullmatch(method.name):
                return []
            is_explicit = not method.is_bound or call.receiver not in ("self", SUPER)
            names = parameters_of(method.function)[0 if is_explicit else 1 :]
            inner = self._reads_in(method.function, method.given(_bound(names, call)), method.position)
            return [attrs.evolve(item, conditions=(*call.conditions, *item.conditions)) for item in inner]
        holder = function.__globals__.get(call.receiver)
        other = getattr(holder, call.name, None) if holder else function.__globals__.get(call.name)
        if call.receiver == "self" or not callable(other) or _NO_PASS.fullmatch(call.name):
            return []
        other = inspect.unwrap(other)
        if not inspect.isfunction(other):
            return []
        inner = self._reads_in(other, _bound(parameters_of(other), call), position)
        # Conditions of a function are over its own names.
        return [
            attrs.evolve(item, conditions=(*call.conditions, *((_CALL,) if item.conditions else ()))) for item in inner
        ]


def _bound(names: list[str], call: Call) -> dict[str, tuple[Path, ...]]:
    given = dict(zip(names, call.given, strict=False)) | dict(call.named)
    return {name: paths for name, paths in given.items() if paths}
