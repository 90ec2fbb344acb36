"""``Watch``: detection of changes to a network since its program was made."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Watch", "hook_of"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_all = itertools.chain.from_iterable


class Watch:
    """Detects changes to a network since its program was made.

    Args:
        modules: Those that emitted.
        inert: Python modules whose hooks change nothing.
    """

    def __init__(self, modules: Sequence[nn.Module], *, inert: Sequence[str] = ()) -> None:
        self._inert = inert
        lists = [child for module in modules for child in module.children() if isinstance(child, nn.ModuleList)]
        modules = self._modules = (*modules, *lists)  # lists emit nothing, but hold what does
        self._states = [vars(module) for module in modules]
        self._size = sum(map(len, self._states))
        self._hooks = -1
        self._plain, self._others = list[dict[str, Any]](), list[dict[str, Any]]()
        for module in modules:
            for parts in (module._parameters, module._modules):  # noqa: SLF001  # torch has no other way to ask
                is_plain = all(type(part).__eq__ is object.__eq__ for part in parts.values())  # to itself alone
                (self._plain if is_plain else self._others).append(parts)
        # Compared as wholes, in one step for all modules; tensors, whose == compares numbers, one by one.
        self._known = [parts.copy() for parts in self._plain]
        self._names, self._parts = [*_all(self._others)], [*_all(map(dict.values, self._others))]

    @property
    def has_new_hooks(self) -> bool:
        """Whether anybody has registered a hook, on any module, since ``change`` last found none here."""
        return self._hooks != RemovableHandle.next_id

    def change(self) -> str | None:
        """Return what has changed, or None."""
        if self._hooks != RemovableHandle.next_id:  # torch counts every hook that anybody registers
            for module in self._modules:
                if hook := hook_of(module, self._inert):
                    return f"{type(module).__name__} has a hook ({hook})"
            self._hooks = RemovableHandle.next_id
        if any(map(operator.itemgetter("training"), self._states)):
            return "training mode"
        if sum(map(len, self._states)) != self._size:
            return "an attribute of a module was added or removed"
        is_same = self._plain == self._known and [*_all(self._others)] == self._names
        if is_same and all(map(operator.is_, _all(map(dict.values, self._others)), self._parts)):
            return None
        return "a module or parameter was added, replaced or removed"


def hook_of(module: nn.Module, inert: Sequence[str] = ()) -> str | None:
    """Return the name of a hook that a call of a module would run, but for those of some Python modules, or None."""
    names = [*(vars(module).get(name) for name in _HOOKS)]
    every = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks  # noqa: SLF001  # as above
    found = (hook for hooks in (*names, *every) if hooks for hook in hooks.values())
    return next((str(hook) for hook in found if getattr(hook, "__module__", None) not in inert), None)
