"""Which plugin is being imported, told before its first line runs: it may be the last that a process tells."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GROUP = "q4core.plugins"
_MODULES = "Q4_PLUGIN_MODULES"


def _names() -> dict[str, str]:
    """Return every module that brings a plugin, with the name by which the plugin is shut out."""
    points = importlib.metadata.entry_points(group=_GROUP)
    found = {point.value.partition(":")[0].strip(): point.name for point in points}
    # A plugin in a package begins with the package.
    found |= {module.partition(".")[0]: name for module, name in found.items() if module.partition(".")[0] not in found}
    modules = (name.strip() for name in os.environ.get(_MODULES, "").split(","))
    return found | {module: module for module in modules if module}


class _Watcher:
    """Stands first among the finders of modules, finds none, and so sees each import begin."""

    def __init__(self, names: dict[str, str], begin: Callable[[list[str]], None]) -> None:
        self._names = names
        self._begin = begin
        self._begun: list[str] = []

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Tell of a module that brings a plugin, after those that import it and have not ended."""
        del path, target
        if fullname in self._names:
            self._begun = [name for name in self._begun if _is_under_way(name)]
            self._begun.append(fullname)
            self._begin(list(dict.fromkeys(self._names[name] for name in self._begun)))


def _is_under_way(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


@contextlib.contextmanager
def steps(tell: Callable[[str], None], name: str) -> Iterator[None]:
    """Tell of each plugin whose import begins inside the ``with`` block.

    Args:
        tell: Called with what is done, in words.
        name: Who is judged, and is not told to be shut out.
    """
    names = _names()

    def begin(plugins: list[str]) -> None:
        hint = "" if plugins[0] == name else f" (Q4_DISABLE_PLUGINS={plugins[0]} shuts it out)"
        tell(f"importing the plugin {', which imports '.join(map(repr, plugins))}{hint}")

    tell("loading plugins")
    watcher = _Watcher(names, begin)
    sys.meta_path.insert(0, watcher)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(watcher)
