"""The discovery and loading of plugins: entry points, named modules, or objects of a test, each in its own try."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from q4core.diagnostics.describe_exception import describe_exception
from q4core.errors import closest_name
from q4core.plugins.hooks import ENTRY_POINT_GROUP, PROJECT, HookSpecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

REFERENCE_PLUGINS = frozenset({"dequant-fallback", "quantize"})
"""Entry-point names of the references; ``Q4_PLUGINS`` never disables them."""
HOOKS = tuple(sorted(name for name in vars(HookSpecs) if name.startswith("q4_")))


@attrs.define
class PluginRecord:
    """What became of one plugin.

    Args:
        name: Entry-point name, or module name for ``Q4_PLUGIN_MODULES``.
        source: Distribution and version, or where else it came from.
        state: ``loaded``, ``failed``, ``disabled``, or ``unknown``: a variable names it, but there is none.
        errors: Everything that went wrong, in the order in which it was found.
    """

    name: str
    source: str
    state: str
    errors: list[str] = attrs.field(factory=list)


def call_plugin(record: PluginRecord, what: str, call: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Call a plugin's code, and return its answer, or None and what went wrong. Only Ctrl-C is raised."""
    try:
        return call(*arguments), None
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"in {what} of plugin {record.name!r}") from error
    except BaseException as error:  # noqa: BLE001  # pytest's outcomes and CancelledError are no Exception
        return None, f"{what} raised {describe_exception(error)}"


def discover(
    given: Sequence[tuple[str, object]] | None, environment: Mapping[str, str]
) -> tuple[pluggy.PluginManager, dict[str, PluginRecord], list[tuple[PluginRecord, str]]]:
    """Find and load plugins, the ``given`` ones or those of entry points, and raise nothing.

    Returned are pluggy's manager with every plugin that loaded, what became of each by name, and what is wrong, not
    yet reported.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    records: dict[str, PluginRecord] = {}
    faults: list[tuple[PluginRecord, str]] = []
    for name, source, load in _candidates(given, environment):
        if name in records:
            faults.append((records[name], f"a second plugin of the name {name!r} ({source}) was left out"))
            continue
        record = records[name] = PluginRecord(name, source, "loaded")
        if _allowed(name, environment, by_module=source == "Q4_PLUGIN_MODULES"):
            faults += [(record, error) for error in _register(manager, record, load)]
        else:
            record.state = "disabled"
    if given is None or environment is not os.environ:  # the process's own variables name installed plugins
        faults += _unmatched(records, environment)
    return manager, records, faults


def names_of_plugins(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the plugins that these variables enable, each once, without loading any."""
    names = (
        name
        for name, source, _ in _candidates(None, environment)
        if _allowed(name, environment, by_module=source == "Q4_PLUGIN_MODULES")
    )
    return tuple(dict.fromkeys(names))


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


def _candidates(
    given: Sequence[tuple[str, object]] | None, environment: Mapping[str, str]
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield name, source and loader of each plugin."""
    if given is not None:
        for name, plugin in given:
            yield name, "given", lambda plugin=plugin: plugin  # type: ignore[misc]
        return
    modules = _names(environment.get("Q4_PLUGIN_MODULES"))
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for point in sorted(entry_points, key=lambda item: (item.name, item.value)):
        if point.value not in modules:  # else that copy is meant
            yield point.name, f"{point.dist.name} {point.dist.version}" if point.dist else point.value, point.load
    for module in modules:
        yield module, "Q4_PLUGIN_MODULES", functools.partial(importlib.import_module, module)


def _allowed(name: str, environment: Mapping[str, str], *, by_module: bool) -> bool:
    if name in _names(environment.get("Q4_DISABLE_PLUGINS")):
        return False
    wanted = _names(environment.get("Q4_PLUGINS"))
    return not wanted or by_module or name in REFERENCE_PLUGINS or name in wanted


def _unmatched(records: dict[str, PluginRecord], environment: Mapping[str, str]) -> Iterator[tuple[PluginRecord, str]]:
    """Record the names in the environment that are no plugin's, and yield what is wrong with each."""
    known = sorted(records)
    for variable in ("Q4_PLUGINS", "Q4_DISABLE_PLUGINS"):
        for name in dict.fromkeys(_names(environment.get(variable))):
            if name not in known:
                close = closest_name(name, known)
                there = f"did you mean {close!r}?" if close else f"there are: {', '.join(known) or 'none'}"
                record = records.setdefault(name, PluginRecord(name, variable, "unknown"))
                yield record, f"{variable} names {name!r}, and there is no such plugin; {there}"


def _register(manager: pluggy.PluginManager, record: PluginRecord, load: Callable[[], object]) -> list[str]:
    """Load and register one plugin, and return what is wrong with it."""
    plugin, fault = call_plugin(record, "import", load)
    if fault is None:
        names, fault = call_plugin(record, "registration", _register_hooks, manager, plugin, record.name)
    if fault is not None:
        record.state = "failed"
        return [fault]
    marked, bare = names
    known = ", ".join(HOOKS)
    faults = [f"unknown hook {name!r}; known hooks: {known}" for name in marked if name not in HOOKS]
    if bare:
        faults.append(f"not marked with @q4core.hookimpl, and so never called: {', '.join(bare)}")
    elif not marked:
        faults.append(f"it brings no hook: nothing in it is marked with @q4core.hookimpl; known hooks: {known}")
    return faults


def _register_hooks(manager: pluggy.PluginManager, plugin: object, name: str) -> tuple[list[str], list[str]]:
    """Register a plugin, and return the names of the hooks that it marks, and of those that it forgot to mark."""
    manager.register(plugin, name=name)
    named = [item for item in dir(plugin) if item.startswith("q4_")]
    marked = [item for item in named if manager.parse_hookimpl_opts(plugin, item) is not None]
    bare = [item for item in named if item in HOOKS and item not in marked and callable(getattr(plugin, item))]
    return marked, bare
