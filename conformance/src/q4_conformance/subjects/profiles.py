"""Targets and profiles: a profile selects the cases that concern an author."""

from __future__ import annotations

import pkgutil
import warnings
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.contract.cases import cases_of, program_cases
from q4_conformance.contract.plain_cases import core_cases, dialect_cases, file_cases, layer_cases, memory_cases
from q4_conformance.outcome import FailureError, as_tuple
from q4_conformance.subjects.backend import BackendSubject, plugin_of
from q4_conformance.subjects.dialect import DialectSubject
from q4_conformance.subjects.files import READERS, FileSubject
from q4_conformance.subjects.layer_type import LayerSubject
from q4_conformance.subjects.manifest import declared_in, with_cases
from q4_conformance.subjects.memory import MemorySubject
from q4_conformance.subjects.reference import NotFoundError
from q4_conformance.subjects.temporary_plugin import make
from q4core import BUILTIN_FORMATS, EVERY_FORMAT, ConfigError, Registry, default_registry, dialects
from q4core.plugin_api import PLUGIN_FAULTS, closest_name, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from q4_conformance.contract.case import Case
    from q4core import Backend, PluginRecord

CORE = "q4core"
_WHAT = "q4 conform"
_LONGEST_FAULT = 400


class UnknownTargetError(NotFoundError, code="unknown_target"):
    """No target has that name, or it can't be imported; ``available`` lists the names, ``closest`` is the likeliest."""

    def __init__(self, what: str, *, available: Sequence[str] = (), closest: str | None = None, **data: Any) -> None:
        self.available = tuple(available)
        self.closest = closest
        super().__init__(what, **data)


@attrs.frozen
class ConformanceTarget:
    """Who is judged, and on what.

    Args:
        profile: One of ``PROFILES``.
        name: Of an installed backend, provider, dialect, reader or layer type, ``module:function`` that returns one, or
            ``"q4core"``.
        formats: Names of the formats; () where the profile knows none.
        device: Where to compute.
    """

    profile: str
    name: str
    formats: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    device: str = "cpu"


def _refuse_profile(name: str, profile: str, choices: Iterable[str]) -> ConfigError:
    names = [*choices]
    rule = f"{'one of ' if len(names) > 1 else ''}{', '.join(names)} for {name!r}"
    return ConfigError(_WHAT, name="profile", rule=rule, value=profile)


def _backend_names() -> Iterable[str]:
    registry = default_registry()
    return {*registry.backends(), *(item.name for item in registry.invalid_backends())}


@attrs.frozen
class _Profile:
    """The names under a profile, their cases, and the subject that these are run against."""

    names: Callable[[], Iterable[str]]
    cases: Callable[[ConformanceTarget], tuple[Case, ...]]
    subject: Callable[[ConformanceTarget], Any]


_PROFILES = {
    "kernel": _Profile(
        _backend_names,
        lambda target: cases_of(target.formats, target.device),
        lambda target: BackendSubject(_backend(target.name), device=target.device),
    ),
    "memory": _Profile(
        lambda: (item.name for item in default_registry().memory_providers()),
        lambda _: memory_cases(),
        lambda target: MemorySubject(_made(target.name) or target.name, device=target.device),
    ),
    "dialect": _Profile(
        lambda: (item.name for item in dialects() if item.formats),
        lambda target: dialect_cases(target.formats or tuple(BUILTIN_FORMATS)),
        lambda target: DialectSubject(_made(target.name) or target.name),
    ),
    "file": _Profile(
        lambda: default_registry().items(READERS),
        lambda _: file_cases(),
        lambda target: FileSubject(_made(target.name) or target.name),
    ),
    "layer": _Profile(
        lambda: default_registry().items("q4_layers"),
        lambda _: layer_cases(),
        lambda target: LayerSubject(_made(target.name) or target.name),
    ),
    "program": _Profile(
        _backend_names,
        lambda target: program_cases(target.formats),
        lambda target: BackendSubject(_backend(target.name), device=target.device),
    ),
    "core": _Profile(lambda: (CORE,), lambda _: core_cases(), lambda _: None),
}
PROFILES = tuple(_PROFILES)


def target_names(profile: str | None = None) -> tuple[str, ...]:
    """Return the names of all that can be judged here, under one profile or under any.

    Raises:
        ConfigError: There is no such profile.
    """
    chosen = PROFILES if profile is None else (profile,)
    return tuple(sorted({name for item in chosen for name in _profile(item, "a target").names()}))


def find_target(
    name: str, *, profile: str | None = None, formats: Iterable[str] = (), device: str = "cpu"
) -> ConformanceTarget:
    """Return who is meant.

    Args:
        name: As ``ConformanceTarget.name``.
        profile: Under which profile. Defaults to the first that has the name.
        formats: Formats to judge it on. Defaults to all that it declares.
        device: Where to compute.

    Raises:
        UnknownTargetError: No target of that name is installed.
        ConfigError: The profile is none of that target, a format does not exist, or the profile knows no such device.
    """
    of_functions = [item for item in PROFILES if item != "core"]
    if ":" in name and profile is not None and profile not in of_functions:
        raise _refuse_profile(name, profile, of_functions)
    if ":" in name and not all(name.split(":", 1)):
        raise ConfigError(_WHAT, name="NAME", rule="module:function", value=name)
    found = profile if ":" in name else _profile_of(name, profile)
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        rule = "a device that torch knows, such as cpu or cuda:0"
        raise ConfigError(_WHAT, name="device", rule=rule, value=device) from error
    if found in {"core", "dialect", "file", "layer"} and kind != "cpu":
        raise ConfigError(_WHAT, name="device", rule=f"cpu for {name!r}, which computes nowhere else", value=device)
    chosen = _known_formats(formats)
    if found in {None, "kernel", "program"}:
        return ConformanceTarget(found or "kernel", name, chosen or formats_of(name), device)
    if found == "dialect":
        return ConformanceTarget("dialect", name, chosen or _dialect_formats(name), device)
    return ConformanceTarget(found or "kernel", name, (), device)


def _profile_of(name: str, profile: str | None) -> str:
    having = [item for item, found in _PROFILES.items() if name in {*found.names()}]
    if not having:
        names = target_names(profile)  # which refuses a profile that there is not
        close = closest_name(name, names)
        there = f"There are {', '.join(names)}." if names else "None is installed."
        there = " ".join([*(f"It may be of one that is not there: {item}." for item in _broken()), there])
        hint = f"Did you mean {close!r}? {there}" if close else there
        raise UnknownTargetError(
            _WHAT, name="NAME", rule="installed", value=name, hint=hint, available=names, closest=close
        )
    if profile is None:
        return having[0]
    if profile not in having:
        raise _refuse_profile(name, profile, having)
    return profile


def _broken() -> Iterator[str]:
    """Yield what is wrong with each plugin that brings less than it should, or that is disabled."""
    for record in default_registry().records():
        if record.errors:
            yield _fault_of(record)
        elif record.state == "disabled":
            yield f"the plugin {record.name!r} is disabled by Q4_PLUGINS or Q4_DISABLE_PLUGINS"


def _fault_of(record: PluginRecord) -> str:
    at = "failed at import: " if record.state == "failed" else "is faulty: "
    return f"the plugin {record.name!r} {at}{'; '.join(record.errors)[:_LONGEST_FAULT]}"


def _known_formats(formats: Iterable[str]) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(formats))
    for item in chosen:
        if item not in BUILTIN_FORMATS:
            raise ConfigError(_WHAT, name="--format", rule=f"one of {', '.join(BUILTIN_FORMATS)}", value=item)
    return chosen


def formats_of(name: str) -> tuple[str, ...]:
    """Return the formats that a backend declares; every one where it is not there to be asked."""
    backend = default_registry().backends().get(name)
    return with_cases({EVERY_FORMAT} if backend is None else backend.capabilities.formats)


def _dialect_formats(name: str) -> tuple[str, ...]:
    """Return the formats that a dialect declares; every one where it is not there to be asked."""
    return with_cases(next((item.formats for item in dialects() if item.name == name), {EVERY_FORMAT}))


def narrowed(target: ConformanceTarget, manifest: Mapping[str, Any]) -> ConformanceTarget:
    """Return a target on the formats that it turned out to declare once ``module:function`` had made it.

    Where it could not be made it stays as it is: every case then says why.
    """
    declared = declared_in(manifest)
    if ":" not in target.name or not declared:
        return target
    return attrs.evolve(target, formats=[item for item in target.formats if item in with_cases(declared)])


def cases_for(target: ConformanceTarget) -> tuple[Case, ...]:
    """Return every case that concerns a target. It is not asked anything, and need not be there.

    Raises:
        ConfigError: There is no such profile.
    """
    return _profile(target.profile, target.name).cases(target)


def subject_for(target: ConformanceTarget) -> Any:
    """Return what the cases of a target are run against; None for the core.

    Raises:
        ConfigError: There is no such profile.
        UnknownTargetError: The target can't be imported; the hint has the error.
        FailureError: The target was found, but did not load; the message has the reasons.
    """
    return _profile(target.profile, target.name).subject(target)


def _profile(profile: str, name: str) -> _Profile:
    if profile not in _PROFILES:
        raise _refuse_profile(name, profile, PROFILES)
    return _PROFILES[profile]


def _made(name: str) -> Any:
    """Return what ``module:function`` makes; None for any other name."""
    if ":" not in name:
        return None
    try:
        pkgutil.resolve_name(name)
    except PLUGIN_FAULTS as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # the place is not this one
        raise _not_importable(name, f"import raised {describe_exception(error)}") from error
    return make(name)


def _not_importable(name: str, fault: str) -> UnknownTargetError:
    hint = f"{fault}. Correct the name or the module, or install what it imports."
    return UnknownTargetError(_WHAT, name="NAME", rule="one that can be imported", value=name, hint=hint)


def _served(name: str, made: Backend) -> Backend:
    """Return what a function made, where the core takes it for a backend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is raised below
        refused = Registry([(name, plugin_of(made))]).invalid_backends()
    if refused:
        raise FailureError(f"what {name!r} made is no backend: {refused[0].reason.message}")
    return made


def _backend(name: str) -> Backend:
    if ":" in name:
        return _served(name, _made(name))
    registry = default_registry()
    if name in registry.backends():
        return registry.backends()[name]
    failed = [record for record in registry.records() if record.name == name and record.state == "failed"]
    if failed:
        raise _not_importable(name, _fault_of(failed[0]))
    reasons = [str(item.reason) for item in registry.invalid_backends() if item.name == name]
    raise FailureError(f"{name!r} does not load: {'; '.join(reasons) or 'no such backend is installed'}")
