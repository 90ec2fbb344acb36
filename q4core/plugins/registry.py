"""``Registry``: the plugins of a process, isolated from each other.

Loaded on first need; each plugin, and each hook call, in its own try. Nothing that a plugin does wrong stops the
others: it is recorded, shown by ``q4 doctor`` and listed among the rejections. No answer depends on the order of
registration.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import attrs

from q4core.backend import API_VERSION, Capabilities, Reason, ReasonCode
from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit, observe, unobserve, warn_once
from q4core.errors import PLUGIN_FAULTS, Q4PluginWarning
from q4core.formats import BUILTIN_FORMATS, Format
from q4core.memory.placement import take_providers_from
from q4core.plugins.discovery import REFERENCE_PLUGIN, PluginRecord, call_plugin, discover
from q4core.schema import Dialect

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import pluggy

    from q4core.backend import Backend

__all__ = ["REFERENCE_PLUGIN", "InvalidBackend", "PluginRecord", "Registry", "default_registry", "reset_registry"]


@attrs.frozen
class InvalidBackend:
    """A backend that is registered but may not serve, with the reason."""

    name: str
    plugin: str
    reason: Reason


class Registry:
    """The plugins of one process, or of one test.

    Args:
        plugins: (name, plugin object) pairs to use instead of the installed entry points.
        environment: Taken instead of ``os.environ`` for the ``Q4_PLUGIN*`` variables.
    """

    def __init__(
        self, plugins: Sequence[tuple[str, object]] | None = None, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._given = plugins
        self._environment = os.environ if environment is None else environment
        self._manager: pluggy.PluginManager | None = None
        self._records: dict[str, PluginRecord] = {}
        self._answers: dict[str, list[tuple[str, Any]]] = {}
        self._backends: tuple[dict[str, Backend], tuple[InvalidBackend, ...]] | None = None
        self._lock = threading.RLock()
        self.selections: dict[Hashable, Any] = {}
        """Warm answers of the dispatcher over these plugins."""
        self.time_limit_s: float | None = None
        """Seconds that one plugin's import, or one hook of it, may take; what hangs is recorded and asked no more.

        None waits. Under a limit plugins run in threads of their own.
        """

    # -- loading

    def _load(self) -> pluggy.PluginManager:
        with self._lock:
            if self._manager is not None:
                return self._manager
            found = discover(self._given, self._environment, limit_s=self.time_limit_s)
            # Everything is in place before anything is told, because a warning may be an error here.
            self._records, self._manager = found.records, found.manager
            if found.manager.hook.q4_event.get_hookimpls():
                self._watch()
            for record, error in found.faults:
                record.errors.append(error)
            for record, error in found.faults:
                _tell(record, error)
            return found.manager

    def _watch(self) -> None:
        """Pass events to the plugins that watch, for as long as this registry lives."""
        mine = weakref.ref(self)

        def forward(event: str, fields: dict[str, Any]) -> None:
            registry = mine()
            if registry is not None:
                registry._forward_event(event, fields)  # noqa: SLF001  # own class

        observe(forward)
        weakref.finalize(self, unobserve, forward).atexit = False

    def _report(self, record: PluginRecord, error: str) -> None:
        """Record and tell a fault, once, however often it is met."""
        if error not in record.errors:
            record.errors.append(error)
            _tell(record, error)

    # -- asking

    def _ask(self, hook: str) -> list[tuple[str, Any]]:
        """Return (plugin name, item) for every item of every plugin's answer to one hook."""
        with self._lock:
            if hook in self._answers:
                return self._answers[hook]
            manager = self._load()
            answers: list[tuple[str, Any]] = []
            for implementation in sorted(
                getattr(manager.hook, hook).get_hookimpls(), key=lambda item: item.plugin_name
            ):
                items = self._call(hook, implementation, lambda call=implementation.function: list(call()))
                answers.extend((implementation.plugin_name, item) for item in items or ())
            self._answers[hook] = answers
            return answers

    def _call(self, hook: str, implementation: pluggy.HookImpl, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call one plugin's hook and return its answer; None where it went wrong, which is recorded."""
        record = self._records[implementation.plugin_name]
        if record.state == "failed":  # it hangs in another hook
            return None
        answer, fault = call_plugin(record, f"hook {hook}", call, *arguments, limit_s=self.time_limit_s)
        if fault is not None:
            self._report(record, fault)
        return answer

    def _typed(self, hook: str, accept: Callable[[Any], str | None]) -> list[Any]:
        good: list[Any] = []
        for plugin, item in self._ask(hook):
            complaint = accept(item)
            if complaint is None:
                good.append(item)
            else:
                self._report(self._records[plugin], f"hook {hook}: {complaint}")
        return good

    def _unique(self, hook: str, items: list[Any], reserved: frozenset[str] = frozenset()) -> dict[str, Any]:
        counted: dict[str, list[Any]] = {}
        for item in items:
            counted.setdefault(item.name, []).append(item)
        for name, same in counted.items():
            if len(same) > 1 or name in reserved:
                owners = [plugin for plugin, item in self._ask(hook) if _name_of(item) == name]
                for owner in owners:
                    error = (
                        f"duplicate name {name!r} in {hook} (from {', '.join(sorted(owners))}); none of them is used"
                    )
                    self._report(self._records[owner], error)
        return {name: same[0] for name, same in counted.items() if len(same) == 1 and name not in reserved}

    def records(self) -> tuple[PluginRecord, ...]:
        """Return what became of every plugin, in the order of their names."""
        self._load()
        return tuple(self._records[name] for name in sorted(self._records))

    def formats(self) -> dict[str, Format]:
        """Return every format by name, the built-in ones included."""
        found = self._typed("q4_formats", _complain_of(Format))
        return {**BUILTIN_FORMATS, **self._unique("q4_formats", found, frozenset(BUILTIN_FORMATS))}

    def dialects(self) -> tuple[Dialect, ...]:
        """Return the plugins' dialects, in the order of their names."""
        found = self._unique("q4_dialects", self._typed("q4_dialects", _complain_of(Dialect)))
        return tuple(found[name] for name in sorted(found))

    def memory_providers(self) -> tuple[Any, ...]:
        """Return the providers of unified memory, in the order of their names."""
        found = self._unique("q4_memory_providers", self._typed("q4_memory_providers", _complain_of_name))
        return tuple(found[name] for name in sorted(found))

    def checkpoint_readers(self) -> tuple[Any, ...]:
        """Return the readers of checkpoint files, in the order of their names."""
        found = self._unique("q4_checkpoint_readers", self._typed("q4_checkpoint_readers", _complain_of_name))
        return tuple(found[name] for name in sorted(found))

    def checkpoint_writers(self) -> tuple[Any, ...]:
        """Return the writers of checkpoint files, in the order of their names."""
        found = self._unique("q4_checkpoint_writers", self._typed("q4_checkpoint_writers", _complain_of_name))
        return tuple(found[name] for name in sorted(found))

    def backends(self) -> dict[str, Backend]:
        """Return the backends that may serve, by name, in the order of their names."""
        return self._sorted_backends()[0]

    def invalid_backends(self) -> tuple[InvalidBackend, ...]:
        """Return the backends that may not serve at all, with the reason, and a line for each plugin that failed."""
        refused = self._sorted_backends()[1]  # first, because asking for backends may fail, too
        failed = tuple(
            InvalidBackend(record.name, record.name, Reason(ReasonCode.PLUGIN_ERROR, "; ".join(record.errors)))
            for record in self.records()
            if record.state == "failed" or any(error.startswith("hook q4_backends raised") for error in record.errors)
        )
        return (*refused, *failed)

    def _sorted_backends(self) -> tuple[dict[str, Backend], tuple[InvalidBackend, ...]]:
        with self._lock:
            if self._backends is not None:
                return self._backends
            refused: list[InvalidBackend] = []
            accepted: dict[str, list[tuple[str, Backend]]] = {}
            for plugin, item in self._ask("q4_backends"):
                reason = _refuse_backend(item)
                if reason is None:
                    accepted.setdefault(item.name, []).append((plugin, item))
                    continue
                name = _name_of(item)
                refused.append(InvalidBackend(name or plugin, plugin, reason))
                self._report(self._records[plugin], f"backend {name!r}: {reason}")
            serving: dict[str, Backend] = {}
            for name in sorted(accepted):
                owners = [plugin for plugin, _ in accepted[name]]
                if len(owners) == 1:
                    serving[name] = accepted[name][0][1]
                    continue
                message = f"duplicate backend name {name!r} (from plugins {', '.join(sorted(owners))}); none is used"
                for owner in sorted(set(owners)):
                    refused.append(InvalidBackend(name, owner, Reason(ReasonCode.PLUGIN_ERROR, message)))
                    self._report(self._records[owner], message)
            self._backends = serving, tuple(refused)
            return self._backends

    def add_commands(self, app: Any) -> None:
        """Let every plugin add its sub-commands to the ``q4`` command."""
        manager = self._load()
        for implementation in sorted(manager.hook.q4_commands.get_hookimpls(), key=lambda item: item.plugin_name):
            self._call("q4_commands", implementation, implementation.function, app)

    def _forward_event(self, event: str, fields: dict[str, Any]) -> None:
        """Pass one event to the plugins that watch; one that raises is told once for each kind of error."""
        if self._manager is None or event == "q4.plugin":
            return
        for implementation in self._manager.hook.q4_event.get_hookimpls():
            self._call("q4_event", implementation, implementation.function, event, dict(fields))


def _tell(record: PluginRecord, error: str) -> None:
    facts = {"plugin": record.name, "source": record.source, "state": record.state, "error": error}
    emit("q4.plugin", level=logging.WARNING, **facts)
    warn_once((record.name, error), Q4PluginWarning, f"q4core plugin {record.name!r}: {error}")


def _complain_of(kind: type) -> Callable[[Any], str | None]:
    def complain(item: Any) -> str | None:
        return None if isinstance(item, kind) else f"an item must be a {kind.__name__}, got {item!r}"

    return complain


def _complain_of_name(item: Any) -> str | None:
    return None if _name_of(item) else f"an item must have a name, got {item!r}"


def _name_of(item: Any) -> str | None:
    try:
        name: object = getattr(item, "name", None)
    except PLUGIN_FAULTS:
        return None  # what it raised is told when the whole item is looked at
    return name if isinstance(name, str) and name else None


def _refuse_backend(item: Any) -> Reason | None:
    try:
        return _fault_of_backend(item)
    except PLUGIN_FAULTS as error:
        return Reason(ReasonCode.PLUGIN_ERROR, f"looking at it raised {describe_exception(error)}")


def _fault_of_backend(item: Any) -> Reason | None:
    if _name_of(item) is None:
        return Reason(ReasonCode.PLUGIN_ERROR, f"a backend must have a name, got {item!r}")
    version = getattr(item, "api_version", None)
    if not _is_served_version(version):
        return Reason(ReasonCode.API_VERSION, f"api_version must be {API_VERSION} or an older minor, got {version!r}")
    if not isinstance(getattr(item, "capabilities", None), Capabilities):
        return Reason(ReasonCode.PLUGIN_ERROR, "capabilities must be a Capabilities")
    missing = [name for name in ("check", "prepare", "linear") if not callable(getattr(item, name, None))]
    declared = [name for name in ("quantize", "input_gradient") if name in item.capabilities.ops]
    missing += [name for name in declared if not callable(getattr(item, name, None))]
    if missing:
        return Reason(ReasonCode.PLUGIN_ERROR, f"a backend must have the methods {', '.join(missing)}")
    return None


def _is_served_version(version: object) -> bool:
    """Return whether a backend of that API version may serve: the same major, the same or an older minor."""
    if not isinstance(version, tuple) or len(version) != len(API_VERSION):
        return False
    major, minor = version
    return bool(major == API_VERSION[0] and isinstance(minor, int) and 0 <= minor <= API_VERSION[1])


_default: Registry | None = None
_default_lock = threading.Lock()


def default_registry() -> Registry:
    """Return the process's registry of installed plugins, made on first need."""
    global _default  # noqa: PLW0603  # one per process
    with _default_lock:
        if _default is None:
            _default = Registry()
        return _default


def reset_registry() -> None:
    """Forget the process's registry, so that the next need looks at the environment again (for tests)."""
    global _default  # noqa: PLW0603  # one per process
    with _default_lock:
        _default = None


take_providers_from(lambda: default_registry().memory_providers())
