"""Checks of isolation between plugins: a broken one is reported, and takes nothing from the others."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.checks.values import draw, expect_same_bits, judged_calls
from q4_conformance.contract.case import check, expect, raised
from q4_conformance.measurement.recording import recorded, unique
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.subjects.backend import plugin_of
from q4_conformance.subjects.reference import REFERENCE, reference_backend
from q4_conformance.subjects.wrappers import Proxy
from q4core import (
    API_VERSION,
    Backend,
    BackendUnavailableError,
    Q4PluginWarning,
    Registry,
    Session,
    SessionConfig,
    UnknownBackendError,
    hookimpl,
)

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import PluginRecord

_RAISING = "q4_conformance.subjects.raising"
"""A module that raises when it is imported."""


def _raises() -> list[Backend]:
    raise OSError("libmissing.so.7: cannot open shared object file")


def _broken_neighbours(backend: Backend) -> list[tuple[str, object]]:
    """Return plugins that are each broken in their own way."""
    major, minor = API_VERSION
    strangers: list[Any] = [object(), None, types.SimpleNamespace(name="half", api_version=API_VERSION)]
    plugins = (
        types.SimpleNamespace(q4_backends=hookimpl(_raises)),
        plugin_of(*strangers),
        plugin_of(Proxy(backend, name="of-next-major", api_version=(major + 1, 0))),
        plugin_of(Proxy(backend, name="of-newer-minor", api_version=(major, minor + 1))),
        plugin_of(Proxy(backend, name="of-no-version", api_version=None)),
        *(plugin_of(Proxy(backend, name="namesake")) for _ in range(2)),
    )
    return list(zip(_RECORDED, plugins, strict=True))


_RECORDED = {
    "raises-when-asked": "libmissing.so.7",
    "brings-strangers": "name",
    **dict.fromkeys(("next-major", "newer-minor", "no-version"), "api_version"),
    **dict.fromkeys(("first-namesake", "second-namesake"), "duplicate"),
}
"""Plugin → what its record must mention."""


def _expect_recorded(records: dict[str, PluginRecord]) -> None:
    for name, word in _RECORDED.items():
        errors = "; ".join(records[name].errors)
        expect(word in errors, f"the record of plugin {name!r} does not mention {word!r}: {errors!r}")


@check("isolation")
def _check_isolation(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    own = [(f"plugin of {subject.name}", plugin_of(subject.backend))]
    if subject.name != REFERENCE:
        own.append((REFERENCE, plugin_of(reference_backend())))
    alone = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    with recorded(Q4PluginWarning):
        registry = Registry([*_broken_neighbours(subject.backend), *own])
        config = subject.config(compute_dtype=case.dtype, activation_precision=case.precision)
        session = Session(config, registry=registry)
        module = session.linear(weight)
        expect(module.diagnostics().backend == subject.name, f"{module.diagnostics().backend!r} serves")
        layer = attrs.evolve(alone, module=module, session=session)
        calls = judged_calls(layer, [draw(case, layer, rows) for rows in case.rows])
        expect_same_bits(alone, calls, "the layer without broken plugins")
        _expect_recorded({record.name: record for record in registry.records()})
        twice = Registry([*own, ("second plugin", plugin_of(subject.backend))])
        call = functools.partial(Session(config, registry=twice).linear, weight)
        kinds = (UnknownBackendError, BackendUnavailableError)
        error = raised(kinds, call, "a backend served although its name is taken twice")
        expect("duplicate" in str(error), f"the error does not mention the duplicate name: {error}")
    return f"{len(_RECORDED)} broken neighbours, and a namesake"


@check("core_isolation")
def _check_core_isolation(_case: Case, _subject: object) -> str:
    reference = reference_backend()
    weight = attrs.evolve(WeightRecipe(format="nf4").build(), name=unique("proj"))
    with recorded(Q4PluginWarning) as recording:
        given = Registry([*_broken_neighbours(reference), (REFERENCE, plugin_of(reference))])
        _expect_serves(given, weight)
        _expect_recorded({record.name: record for record in given.records()})
        refused = {item.name: str(item.reason) for item in given.invalid_backends()}
        for name in ("of-next-major", "of-newer-minor", "namesake"):
            expect(name in refused, f"{name!r} is not among the refused backends: {refused}")
        by_module = Registry(environment={"Q4_PLUGIN_MODULES": f"{_RAISING},no_such_module_of_anyone"})
        _expect_serves(by_module, weight)
    records = {record.name: record for record in by_module.records()}
    for name, word in ((_RAISING, "raised at import"), ("no_such_module_of_anyone", "ModuleNotFoundError")):
        expect(records[name].state == "failed", f"{name}: state {records[name].state!r}")
        expect(any(word in error for error in records[name].errors), f"{name}: {records[name].errors}")
        expect(any(item.plugin == name for item in by_module.invalid_backends()), f"{name} is not among the rejections")
    logged = {fields["plugin"] for fields in recording.named("q4.plugin")}
    missing = {*_RECORDED, _RAISING} - logged
    expect(not missing, f"no event q4.plugin mentions {sorted(missing)}")
    return f"{len(_RECORDED)} broken plugins given, 2 broken modules"


def _expect_serves(registry: Registry, weight: Any) -> None:
    layer = Session(SessionConfig(device="cpu", backend=REFERENCE), registry=registry).linear(weight)
    expect(layer.diagnostics().backend == REFERENCE, f"{layer.diagnostics().backend!r} serves")
