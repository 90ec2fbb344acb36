"""Finds and loads plugins: entry points, named modules, or objects given by a test; each in its own try."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING

import attrs
import pluggy

from q4core.errors import PLUGIN_FAULTS
from q4core.faults import said
from q4core.hooks import COMMAND_GROUP, ENTRY_POINT_GROUP, PROJECT, HookSpecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["REFERENCE_PLUGIN", "Discovered", "PluginRecord", "discover", "plugin_of_command"]

REFERENCE_PLUGIN = "dequant-fallback"
"""Entry-point name of the reference; ``Q4_PLUGINS`` never shuts it out."""
_HOOKS = tuple(sorted(name for name in vars(HookSpecs) if name.startswith("q4_")))


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


@attrs.frozen
class _Found:
    name: str
    source: str
    load: Callable[[], object]


@attrs.frozen
class Discovered:
    """The plugins that were found.

    Args:
        manager: pluggy's, with every plugin that loaded.
        records: What became of each, by name.
        faults: What is wrong, plugin by plugin, not recorded or told yet.
    """

    manager: pluggy.PluginManager
    records: dict[str, PluginRecord]
    faults: tuple[tuple[PluginRecord, str], ...]


def discover(given: Sequence[tuple[str, object]] | None, environment: Mapping[str, str]) -> Discovered:
    """Find and load plugins; nothing is told and nothing is raised.

    Args:
        given: (name, plugin object) pairs to use instead of the installed entry points, or None.
        environment: The ``Q4_PLUGIN*`` variables.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    records: dict[str, PluginRecord] = {}
    faults: list[tuple[PluginRecord, str]] = []
    for found in _candidates(given, environment):
        faults.extend(_register(manager, records, found, environment))
    if given is None or environment is not os.environ:  # the process's own variables name installed plugins
        faults.extend(_strangers(records, environment))
    return Discovered(manager, records, tuple(faults))


def plugin_of_command(word: str, environment: Mapping[str, str]) -> tuple[str, object] | None:
    """Return the one plugin that announces a command, as (name, plugin object), without loading any other.

    It is announced by an entry point in group ``q4core.commands`` that has the command's name, and the value of the
    plugin's own entry point.

    Args:
        word: The command.
        environment: The ``Q4_PLUGIN*`` variables.

    Returns:
        None where no plugin announces it, where two do, and where the plugin is shut out or does not load, of which
        whoever loads all plugins will tell.
    """
    values = {point.value for point in importlib.metadata.entry_points(group=COMMAND_GROUP, name=word)}
    points = [point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if point.value in values]
    if len(points) != 1 or not _allowed(points[0].name, environment, by_module=False):
        return None
    try:
        return points[0].name, points[0].load()
    except PLUGIN_FAULTS:
        return None


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


def _candidates(given: Sequence[tuple[str, object]] | None, environment: Mapping[str, str]) -> Iterator[_Found]:
    if given is not None:
        for name, plugin in given:
            yield _Found(name, "given", lambda plugin=plugin: plugin)  # type: ignore[misc]
        return
    modules = _names(environment.get("Q4_PLUGIN_MODULES"))
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for point in sorted(entry_points, key=lambda item: (item.name, item.value)):
        if point.value in modules:
            continue  # named by Q4_PLUGIN_MODULES: that copy is meant
        dist = point.dist
        source = f"{dist.name} {dist.version}" if dist is not None else point.value
        yield _Found(point.name, source, point.load)
    for module in modules:
        yield _Found(module, "Q4_PLUGIN_MODULES", lambda module=module: importlib.import_module(module))  # type: ignore[misc]


def _allowed(name: str, environment: Mapping[str, str], *, by_module: bool) -> bool:
    if name in _names(environment.get("Q4_DISABLE_PLUGINS")):
        return False
    wanted = _names(environment.get("Q4_PLUGINS"))
    return not wanted or by_module or name == REFERENCE_PLUGIN or name in wanted


def _strangers(records: dict[str, PluginRecord], environment: Mapping[str, str]) -> Iterator[tuple[PluginRecord, str]]:
    """Record the names in the environment that are no plugin's, and yield what is wrong with each."""
    known = sorted(records)
    for variable in ("Q4_PLUGINS", "Q4_DISABLE_PLUGINS"):
        for name in dict.fromkeys(_names(environment.get(variable))):
            if name in known:
                continue
            record = records.setdefault(name, PluginRecord(name, variable, "unknown"))
            close = difflib.get_close_matches(name, known, n=1)
            there = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known) or 'none'}"
            yield record, f"{variable} names {name!r}, and there is no such plugin; {there}"


def _register(
    manager: pluggy.PluginManager, records: dict[str, PluginRecord], found: _Found, environment: Mapping[str, str]
) -> list[tuple[PluginRecord, str]]:
    """Register one plugin, and return what is wrong with it."""
    if found.name in records:
        return [(records[found.name], f"a second plugin of the name {found.name!r} ({found.source}) was left out")]
    record = records[found.name] = PluginRecord(found.name, found.source, "loaded")
    if not _allowed(found.name, environment, by_module=found.source == "Q4_PLUGIN_MODULES"):
        record.state = "disabled"
        return []
    try:
        plugin = found.load()
        manager.register(plugin, name=found.name)
        named = [name for name in dir(plugin) if name.startswith("q4_")]
        marked = [name for name in named if manager.parse_hookimpl_opts(plugin, name) is not None]
        bare = [name for name in named if name in _HOOKS and name not in marked and callable(getattr(plugin, name))]
    except PLUGIN_FAULTS as error:
        record.state = "failed"
        return [(record, said(error))]
    known = ", ".join(_HOOKS)
    told = [f"unknown hook {name!r}; known hooks: {known}" for name in marked if name not in _HOOKS]
    if bare:
        told.append(f"not marked with @q4core.hookimpl, and so never called: {', '.join(bare)}")
    elif not marked:
        told.append(f"it brings no hook: nothing in it is marked with @q4core.hookimpl; known hooks: {known}")
    return [(record, error) for error in told]
