"""Plans and prepared weights of another process, made and proven anew with this process's plugins.

A plan's name holds, as JSON, what the plan was made of (``q4core.selection.plan``): programs of ``torch.export`` bring
that name and byte buffers along, and ``q4.export_prepared`` gives it with tensors. The backend of that name reads the
tensors by its own description of them, is selected as for any weight, and must come to the same plan: the same layout,
paths (and so the same instruction set), dtypes and shapes. It passes its self-probe on these very tensors before it
runs. Nothing is prepared again.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import Prepared, Request
from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import bound, emit, muted
from q4core.errors import (
    PLUGIN_FAULTS,
    BackendError,
    BackendUnavailableError,
    LifecycleError,
    Q4Error,
    UnknownBackendError,
)
from q4core.formats import BlockOrder, as_bytes
from q4core.machine.torch_state import outside_inference, require_outside_trace, without_casts
from q4core.ops.prepared_weight import PreparedWeight
from q4core.plugins.registry import default_registry
from q4core.policy.config import ActivationPrecision, SessionConfig, UnifiedMemoryPolicy
from q4core.probes.runner import Trial, can_export, prove_imported
from q4core.selection.cache import apply_config, select_for
from q4core.selection.plan import (
    damaged,
    dtype_of,
    exported_weight,
    make_plan,
    name_of,
    portable_facts,
    raise_broken_call,
    short_name,
    typed,
)
from q4core.selection.probe_results import probe_results
from q4core.selection.result import report_selection
from q4core.weight import Feature, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4core.backend import Backend
    from q4core.plugins.registry import Registry
    from q4core.selection.plan import Plan, Shapes

_VERSION = 2
_OF_WEIGHT = ("format", "scale_kind", "packing", "block_size", "out_features", "in_features")
_DISABLED = UnifiedMemoryPolicy.DISABLED
_AGAIN = "Export the program again on this machine"


def import_plan(key: str, shapes: Shapes, buffers: Sequence[torch.Tensor]) -> Plan:
    """Make the plan of an exported program, and prove it on one layer's weight.

    Args:
        key: The plan's name, as the program holds it.
        shapes: What the name says of sizes.
        buffers: The layer's byte buffers, of these sizes.

    Raises:
        LifecycleError: The name is damaged or not of an exported program, or this is inside a trace or a capture.
        UnknownBackendError: Its backend is not installed here.
        BackendUnavailableError, PolicyConflictError: Its backend can't run it here, or only by other paths or code.
        BackendError, ConfigError: It computes wrong numbers here, or can't read the layout.
    """
    require_outside_trace("an exported program can't be imported", "Call it once first, then compile or capture it.")
    registry = default_registry()
    with outside_inference(), without_casts("cpu"), without_casts("cuda"):
        try:
            facts = portable_facts(key)
            name = facts["backend"]
            backend = _backend(name, registry)
            spec, request = _request(facts, registry)
            options = {"gradients": facts["gradients"], "precision": ActivationPrecision(facts["precision"])}
            request = attrs.evolve(request, device=buffers[-1].device, **options)
            prepared = _prepared(backend, facts, typed(buffers[:-1], [*map(dtype_of, facts["dtypes"][:-1])]))
            weight = exported_weight(backend, prepared, None, (spec.out_features, spec.in_features))
            config = SessionConfig(backend=name, compute_path=facts["compute_path"])
            paths = _paths(facts)
        except Q4Error:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise damaged(key) from error
        weight.check_values()
        selection = select_for(request, config, registry)
        if not Trial(probe_results(registry), selection, backend, weight, weight).prove(prepared):
            what = f"backend {name!r} computes wrong numbers for this exported program here"
            raise BackendError(what, hint=f"{_AGAIN}, where another backend then runs it.")
        plan = make_plan(selection, backend, prepared, spec, layouts=shapes.layouts)
    own = portable_facts(plan.key)
    if plan.stem == _stem(key) and own == facts:
        return plan
    if paths != (offered := _paths(own)):
        what = f"this exported program runs on {', '.join(paths)} of backend {name!r}"
        raise BackendUnavailableError(
            f"{what}, which offers {', '.join(offered)} here",
            hint=f"{_AGAIN}, or let the backend run here as it ran there (cpu-native: Q4_CPU_ISA).",
            value=selection.native_state,
        )
    other = [fact for fact in own if own[fact] != facts.get(fact)] or ["code"]
    what = f"this exported program is of another version of backend {name!r}: {', '.join(other)} differs"
    raise BackendUnavailableError(what, hint=f"{_AGAIN}, or install the version that it was exported with.")


def export_weight(weight: PreparedWeight, name: str | None) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Return what ``import_weight`` takes; see ``q4core.export_prepared``."""
    backend, tensors = weight.plan.backend, weight.prepared.tensors
    if not _is_portable(backend):
        what = f"layer {name!r} can't be exported: backend {backend.name!r} does not describe its layout"
        raise LifecycleError(what, hint="Export its packed_weight() instead; it is prepared again where it is used.")
    if not all(tensor.is_contiguous() for tensor in tensors):
        what = f"layer {name!r} can't be exported: backend {backend.name!r} keeps views of its source"
        raise LifecycleError(what, hint="Export its packed_weight() instead; it costs the backend nothing to prepare.")
    header = {"version": _VERSION, "plan": weight.plan.key, "tensors": _layouts(tensors), **weight.labels, "name": name}
    return header, tensors


def import_weight(
    header: Mapping[str, Any], tensors: Sequence[torch.Tensor], config: SessionConfig, registry: Registry
) -> PreparedWeight:
    """Return a prepared weight over tensors of another process; see ``q4core.adopt_prepared``."""
    heard = muted() if config.diagnostics is False else contextlib.nullcontext()
    name = None if header.get("name") is None else str(header["name"])
    with heard, without_casts("cpu"), without_casts("cuda"), outside_inference(), bound(layer=name):
        try:
            labels = {"name": name, "dialect": header.get("dialect"), "notes": (*header.get("notes", ()),)}
            return _imported(header, labels, tensors, config, registry)
        except LifecycleError:
            raise
        except PLUGIN_FAULTS as error:  # the header may hold anything
            raise _not_reusable(name, describe_exception(error)) from error


def _imported(
    header: Mapping[str, Any],
    labels: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    config: SessionConfig,
    registry: Registry,
) -> PreparedWeight:
    name, text, known = labels["name"], header["plan"], registry.selections
    if header["version"] != _VERSION:
        raise _not_reusable(name, f"its header is of version {header['version']}, not {_VERSION}")
    asked = known.get(("import", text))
    if asked is None:  # once for each kind of layer
        if " {" not in text:
            raise _not_reusable(name, f"its plan {text} does not say what it was made of")
        asked = known["import", text] = (facts := portable_facts(text), *_request(facts, registry))
    facts, spec, request = asked
    if (config.unified_memory or _DISABLED) is not _DISABLED:
        raise _not_reusable(name, "unified memory was asked for, and its tensors stay where they are")
    found = _layouts(tensors)
    if found != header["tensors"] or not all(item.is_contiguous() for item in tensors):
        raise _not_reusable(name, f"its tensors are {found}, contiguous or not, and not {header['tensors']}")
    request = attrs.evolve(request, device=tensors[0].device)  # their own, where the configuration names none
    selection = select_for(apply_config(request, config), config, registry)
    backend = registry.backends()[selection.backend]
    if backend.name != facts["backend"] or not _is_portable(backend):
        prepared_by = facts["backend"]
        raise _not_reusable(name, f"it was prepared by backend {prepared_by!r}, but {backend.name!r} is selected here")
    own = tuple(item.to(selection.request.device) for item in tensors)
    key = ("import", text, str(found), str(own[0].device), selection.segments, selection.gradients)
    plan = known.get(key)
    if plan is None:
        prepared = _prepared(backend, facts, own)
        some = None if spec.blocks is BlockOrder.FLAT else torch.zeros(1, dtype=torch.int64)
        # Raises where the layout is of other sizes than the tensors.
        exported_weight(backend, prepared, some, (spec.out_features, spec.in_features))
        plan = known[key] = make_plan(selection, backend, prepared, spec)
    if plan.stem != _stem(text):
        raise _not_reusable(name, f"it was prepared under plan {_stem(text)}, but {plan.stem} is selected here")
    if not prove_imported(probe_results(registry), selection, backend, Prepared(own, plan.meta)):
        raise _not_reusable(name, f"backend {backend.name!r} computes wrong numbers with it")
    selection = attrs.evolve(selection, proven=True)
    emit("q4.adopt", layer=name, backend=backend.name, bytes=sum(item.nbytes for item in own))
    report_selection(selection, name, spec.format.name)
    return PreparedWeight(
        spec=spec,
        labels=labels,
        config=config,
        dtype=plan.dtype,
        device=own[0].device,
        tensors=tuple(map(as_bytes, own)),
        plan=plan,
        selection=selection,
    )


def _request(facts: Mapping[str, Any], registry: Registry) -> tuple[WeightSpec, Request]:
    """Return the spec of a plan's weight and the request that was made for it, but for options and device."""
    spec = WeightSpec.from_json(json.dumps(facts["spec"]), formats=registry.formats().values())
    low, high = facts["m"]
    request = Request(
        **{name: getattr(spec, name) for name in _OF_WEIGHT},
        features=frozenset(map(Feature, facts["features"])),
        has_activation_scale="activation_scale" in spec.fields,
        scale_dtype=dtype_of(facts["scale_dtype"]),
        second_dtype=None if facts["second_dtype"] is None else dtype_of(facts["second_dtype"]),
        dtype=dtype_of(facts["dtype"]),
        m=(low, high),
    )
    return spec, request


def _backend(name: object, registry: Registry) -> Backend:
    """Return this process's backend of that name."""
    backends = registry.backends()
    if name not in backends:
        rule, hint = f"one of {', '.join(backends)}", "Install the plugin that brings it; see `q4 doctor`."
        raise UnknownBackendError(
            "exported program", name="backend", rule=rule, value=name, available=tuple(backends), hint=hint
        )
    return backends[str(name)]


def _prepared(backend: Backend, facts: Mapping[str, Any], tensors: tuple[torch.Tensor, ...]) -> Prepared:
    """Return tensors as the backend reads them by its own description."""
    meta_from: Any = getattr(backend, "meta_from", None)  # optional method of the contract
    try:
        return Prepared(tensors, meta_from(facts["meta"]))
    except PLUGIN_FAULTS as error:
        raise_broken_call(error, backend, "meta_from")


def _is_portable(backend: Backend) -> bool:
    names = ("describe", "meta_from")
    return can_export(backend) and all(callable(getattr(backend, name, None)) for name in names)


def _layouts(tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"dtype": name_of(item.dtype), "shape": list(item.shape)} for item in tensors]


def _stem(key: str) -> str:
    return short_name(key).partition("#")[0]


def _paths(facts: Mapping[str, Any]) -> list[str]:
    """Return which path runs which rows, as texts."""
    paths = [*facts["paths"], *facts["gradient_paths"]]
    return [f"{name} (M {low}…{'∞' if high is None else high})" for low, high, name in paths]


def _not_reusable(name: str | None, why: str) -> LifecycleError:
    emit("q4.adopt", level=logging.WARNING, layer=name, refused=why)
    hint = "Prepare the layer from its weight (session.linear)."
    return LifecycleError(f"cannot reuse prepared layer {name or ''!r}: {why}", hint=hint)
