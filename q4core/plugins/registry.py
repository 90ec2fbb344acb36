"""``Registry``: the plugins of a process, isolated from each other.

Loaded on first need; each plugin, and each hook call, in its own try. Nothing that a plugin does wrong stops the
others: it is recorded, shown by ``q4 doctor`` and listed among the rejections. No answer depends on the order of
registration.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import attrs

from q4core.backend import SERVED_VERSIONS, Capabilities, Reason, ReasonCode
from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit, observe, warn_once
from q4core.errors import PLUGIN_FAULTS, Q4PluginWarning
from q4core.formats import BUILTIN_FORMATS, Format
from q4core.memory import MemoryPlacer
from q4core.plugins.discovery import PluginRecord, call_plugin, discover
from q4core.schema import Dialect

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    import pluggy
    import torch

    from q4core.backend import Backend
    from q4core.memory import MemoryProvider
    from q4core.policy.config import UnifiedMemoryPolicy


_KINDS: dict[str, type] = {"q4_formats": Format, "q4_dialects": Dialect}
_broken = functools.partial(Reason, ReasonCode.PLUGIN_ERROR)


@attrs.frozen
class InvalidItem:
    """What a plugin registers and may not be used, such as a backend, with the reason."""

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
        self._items: dict[str, tuple[dict[str, Any], tuple[InvalidItem, ...]]] = {}
        self._lock = threading.RLock()
        self.selections: dict[Hashable, Any] = {}
        """Warm answers of the dispatcher over these plugins."""

    @property
    def is_installed(self) -> bool:
        """Whether the plugins are those of the installed distributions, and no objects that were given."""
        return self._given is None

    def _load(self) -> pluggy.PluginManager:
        with self._lock:
            if self._manager is None:
                self._manager, self._records, faults = discover(self._given, self._environment)
                if self._manager.hook.q4_event.get_hookimpls():
                    observe(self._forward_event)
                self._report(faults)
            return self._manager

    def _report(self, faults: Iterable[tuple[PluginRecord, str]]) -> None:
        """Record faults, each once, and then report them: where warnings are errors, that raises."""
        fresh = []
        for record, error in faults:
            if error not in record.errors:
                record.errors.append(error)
                fresh.append((record, error))
        for record, error in fresh:
            facts = {"plugin": record.name, "source": record.source, "state": record.state, "error": error}
            emit("q4.plugin", level=logging.WARNING, **facts)
            warn_once((record.name, error), Q4PluginWarning, f"q4core plugin {record.name!r}: {error}")

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        return sorted(getattr(self._load().hook, hook).get_hookimpls(), key=lambda item: item.plugin_name)

    def _call(self, hook: str, implementation: pluggy.HookImpl, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call one plugin's hook and return its answer; None where it went wrong, which is recorded."""
        record = self._records[implementation.plugin_name]
        answer, fault = call_plugin(record, f"hook {hook}", call, *arguments)
        if fault is not None:
            self._report([(record, fault)])
        return answer

    def _named(self, hook: str) -> tuple[dict[str, Any], tuple[InvalidItem, ...]]:
        """Return every plugin's items from one hook, by name and in that order, and what may not be used, and why."""
        with self._lock:
            if hook in self._items:
                return self._items[hook]
            given: dict[str, list[tuple[str, Any]]] = {}
            invalid: list[InvalidItem] = []
            for implementation in self._implementations(hook):
                plugin = implementation.plugin_name
                for item in self._call(hook, implementation, lambda call=implementation.function: list(call())) or ():
                    try:
                        reason = _fault_of(item, hook)
                    except PLUGIN_FAULTS as error:
                        reason = _broken(f"looking at it raised {describe_exception(error)}")
                    if reason is None:
                        given.setdefault(item.name, []).append((plugin, item))
                    else:
                        invalid.append(InvalidItem(_name_of(item) or plugin, plugin, reason))
            reserved = BUILTIN_FORMATS if hook == "q4_formats" else {}
            duplicates = {name for name, same in given.items() if len(same) > 1 or name in reserved}
            for name in sorted(duplicates):
                owners = sorted({plugin for plugin, _ in given[name]})
                message = f"duplicate name {name!r} in {hook} (from {', '.join(owners)}); none of them is used"
                invalid += [InvalidItem(name, owner, _broken(message)) for owner in owners]
            valid = {name: given[name][0][1] for name in sorted(given.keys() - duplicates)}
            self._items[hook] = valid, tuple(invalid)
            self._report((self._records[item.plugin], f"hook {hook}: {item.name}: {item.reason}") for item in invalid)
            return self._items[hook]

    def records(self) -> tuple[PluginRecord, ...]:
        """Return what became of every plugin, in the order of their names."""
        self._load()
        return tuple(self._records[name] for name in sorted(self._records))

    def formats(self) -> dict[str, Format]:
        """Return every format by name, the built-in ones included."""
        return {**BUILTIN_FORMATS, **self._named("q4_formats")[0]}

    def dialects(self) -> tuple[Dialect, ...]:
        """Return the plugins' dialects, in the order of their names."""
        return tuple(self._named("q4_dialects")[0].values())

    def memory_providers(self) -> tuple[Any, ...]:
        """Return the providers of unified memory, in the order of their names."""
        return tuple(self._named("q4_memory_providers")[0].values())

    def placer_type(self) -> type[MemoryPlacer]:
        """Return the class that places tensors: the first by its name, else the core's, which asks no provider."""
        return next(iter(self._named("q4_placers")[0].values()), MemoryPlacer)

    def placer(
        self,
        policy: UnifiedMemoryPolicy | str,
        *,
        device: torch.device | str,
        providers: Iterable[MemoryProvider] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> MemoryPlacer:
        """Return what places tensors for a device under a unified-memory policy.

        Args:
            policy: What is asked for. Where it or ``Q4_DISABLE_UM`` wants no promotion, no plugin is loaded.
            device: The device that computes.
            providers: The providers to ask. Defaults to those of the plugins.
            environment: Defaults to ``os.environ``.

        Raises:
            ConfigError: ``policy``, ``device``, a provider or ``Q4_DISABLE_UM`` is not legal.
        """
        placer = MemoryPlacer(policy, device=device, environment=environment)
        if placer.is_idle:
            return placer
        asked = self.memory_providers() if providers is None else providers
        return self.placer_type()(policy, device=device, providers=asked, environment=environment)

    def items(self, hook: str) -> dict[str, Any]:
        """Return what every plugin gives to a hook of named items, such as ``q4_layers``, by name and in that order."""
        return self._named(hook)[0]

    def backends(self) -> dict[str, Backend]:
        """Return the backends that may serve, by name, in the order of their names."""
        return self._named("q4_backends")[0]

    def invalid_backends(self) -> tuple[InvalidItem, ...]:
        """Return the backends that may not serve at all, with the reason, and a line for each plugin that failed."""
        refused = self._named("q4_backends")[1]  # first, because asking for backends may fail, too
        failed = tuple(
            InvalidItem(record.name, record.name, _broken("; ".join(record.errors)))
            for record in self.records()
            if record.state == "failed" or any(error.startswith("hook q4_backends raised") for error in record.errors)
        )
        return (*refused, *failed)

    def _forward_event(self, event: str, fields: dict[str, Any]) -> None:
        """Pass one event to the plugins that watch."""
        if self._manager is None or event == "q4.plugin":
            return
        for implementation in self._manager.hook.q4_event.get_hookimpls():
            self._call("q4_event", implementation, implementation.function, event, dict(fields))


def _name_of(item: Any) -> str | None:
    try:
        name: object = getattr(item, "name", None)
    except PLUGIN_FAULTS:
        return None  # what it raised is reported when the whole item is looked at
    return name if isinstance(name, str) and name else None


def _fault_of(item: Any, hook: str) -> Reason | None:
    """Return why an item that a hook gave may not be used, or None."""
    if hook == "q4_placers" and not (isinstance(item, type) and issubclass(item, MemoryPlacer)):
        return _broken(f"an item must be a subclass of MemoryPlacer, got {item!r}")
    if not isinstance(item, kind := _KINDS.get(hook, object)):
        return _broken(f"an item must be a {kind.__name__}, got {item!r}")
    if _name_of(item) is None:
        return _broken(f"an item must have a name, got {item!r}")
    if hook == "q4_quantizers" and not (
        isinstance(getattr(item, "rules", None), frozenset) and callable(getattr(item, "quantize", None))
    ):
        return _broken("a quantizer must have rules, a frozenset, and the method quantize")
    return _fault_of_backend(item) if hook == "q4_backends" else None


def _fault_of_backend(item: Any) -> Reason | None:
    version, declared = getattr(item, "api_version", None), getattr(item, "capabilities", None)
    if not _is_served_version(version):
        served = " or ".join(map(str, SERVED_VERSIONS))
        return Reason(ReasonCode.API_VERSION, f"api_version must be {served}, or an older minor, got {version!r}")
    if not isinstance(declared, Capabilities):
        return _broken("capabilities must be a Capabilities")
    methods = ["check", "prepare", "linear", *(op for op in ("quantize", "input_gradient") if op in declared.ops)]
    missing = [name for name in methods if not callable(getattr(item, name, None))]
    return _broken(f"a backend must have the methods {', '.join(missing)}") if missing else None


def _is_served_version(version: object) -> bool:
    """Return whether a backend of that API version may serve: the same or an older minor of a served one."""
    if not isinstance(version, tuple) or len(version) != 2:  # noqa: PLR2004  # major, minor
        return False
    major, minor = version
    return any(major == known and isinstance(minor, int) and 0 <= minor <= newest for known, newest in SERVED_VERSIONS)


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
