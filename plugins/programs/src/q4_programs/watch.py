"""``Watch``: detection of changes to a network since its program was made."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Watch", "hook_of"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


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
        held = [(vars(module), module._parameters, module._modules) for module in modules]  # noqa: SLF001  # as below
        self._holders = [holder for holders in held for holder in holders]
        self._count = sum(map(len, self._holders))
        self._hooks = -1
        parts: list[tuple[Any, str, Any]] = [
            (parts, name, part)
            for module in modules
            for parts in (module._parameters, module._modules)  # noqa: SLF001  # torch has no other way to ask
            for name, part in parts.items()
        ]
        self._dicts, self._names, self._parts = ([part[column] for part in parts] for column in range(3))

    def change(self) -> str | None:
        """Return what has changed, or None."""
        if self._hooks != RemovableHandle.next_id:  # torch counts every hook that anybody registers
            for module in self._modules:
                if hook := hook_of(module, self._inert):
                    return f"{type(module).__name__} has a hook ({hook})"
            self._hooks = RemovableHandle.next_id
        if any(map(operator.itemgetter("training"), self._states)):
            return "training mode"
        if sum(map(len, self._holders)) != self._count:
            return "a module, a parameter or an attribute was added or removed"
        with contextlib.suppress(KeyError):
            if all(map(operator.is_, map(operator.getitem, self._dicts, self._names), self._parts)):
                return None
        return "a module or parameter was replaced"


def hook_of(module: nn.Module, inert: Sequence[str] = ()) -> str | None:
    """Return the name of a hook that a call of a module would run, but for those of some Python modules, or None."""
    names = [*(vars(module).get(name) for name in _HOOKS)]
    every = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks  # noqa: SLF001  # as above
    found = (hook for hooks in (*names, *every) if hooks for hook in hooks.values())
    return next((str(hook) for hook in found if getattr(hook, "__module__", None) not in inert), None)
