"""``take_up_plan``: a plan that another process exported, made and proven anew with this process's plugins.

``torch.export`` keeps of a layer its byte buffers and its plan's name; the name says what the plan was made of. The
backend of that name reads the buffers by its own description of them, gives the weight back, offers the same paths, and
passes its self-probe on that weight; only then does the program run. Nothing is prepared again and nothing replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4core.backend import Prepared, Request
from q4core.errors import PLUGIN_FAULTS, BackendError, BackendUnavailableError, Q4Error, UnknownBackendError
from q4core.layers.preparation import refuse_inside_trace
from q4core.machine import outside_inference, without_casts
from q4core.plugins.registry import default_registry
from q4core.policy import SessionConfig
from q4core.probes.runner import Trial
from q4core.selection.cache import select_for
from q4core.selection.plan import (
    damaged,
    exported_weight,
    make_plan,
    portable_facts,
    raise_broken_call,
    shapes_of,
    short_name,
    typed,
)
from q4core.selection.probe_results import probe_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.backend import Backend
    from q4core.selection.plan import Plan

_AGAIN = "Export the program again on this machine"


def take_up_plan(key: str, buffers: Sequence[torch.Tensor]) -> Plan:
    """Make the plan of an exported program, and prove it on one layer's weight.

    Args:
        key: The plan's name, as the program holds it.
        buffers: The layer's byte buffers, of the sizes that the name tells.

    Raises:
        LifecycleError: The name is damaged or not of an exported program, or this is inside a trace or a capture.
        UnknownBackendError: Its backend is not installed here.
        BackendUnavailableError, PolicyConflictError: Its backend can't serve here, or only by other paths or code.
        BackendError, ConfigError: It computes wrong numbers here, or can't read the layout.
    """
    refuse_inside_trace("an exported program can't be taken up", "Call it once first, then compile or capture it.")
    with outside_inference(), without_casts("cpu"), without_casts("cuda"):
        try:
            facts, shapes = portable_facts(key), shapes_of(key)
            name, dtypes = facts["backend"], [getattr(torch, dtype) for dtype in facts["dtypes"]]
            backend = _backend(name)
            prepared = Prepared(typed(buffers[:-1], dtypes[:-1]), _meta(backend, facts["meta"]))
            weight = exported_weight(backend, prepared, None, (shapes.out_features, shapes.in_features))
            request = Request.for_weight(
                weight,
                m=tuple(facts["m"]),
                dtype=shapes.dtype,
                precision=facts["precision"],
                gradients=facts["gradients"],
            )
            config = SessionConfig(backend=name, compute_path=facts["compute_path"])
            paths = _told(facts["paths"]) + _told(facts["gradient_paths"])
        except Q4Error:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise damaged(key) from error
        weight.check_values()
        registry = default_registry()
        selection = select_for(request, config, registry)
        if not Trial(probe_results(registry), selection, backend, weight, weight).prove(prepared):
            what = f"backend {name!r} computes wrong numbers for this exported program here"
            raise BackendError(what, hint=f"{_AGAIN}, where another backend then serves.")
        plan = make_plan(selection, backend, prepared, None, shapes.layouts)
    own = portable_facts(plan.key)
    if plan.stem == short_name(key).partition("#")[0] and own == facts:
        return plan
    offered = _told(own["paths"]) + _told(own["gradient_paths"])
    if paths != offered:
        what = f"this exported program runs on {', '.join(paths)} of backend {name!r}"
        raise BackendUnavailableError(
            f"{what}, which offers {', '.join(offered)} here",
            hint=f"{_AGAIN}, or let the backend run here as it ran there (cpu-native: Q4_CPU_ISA).",
            value=selection.native_state,
        )
    other = [fact for fact in own if own[fact] != facts.get(fact)] or ["code"]
    what = f"this exported program is of another version of backend {name!r}: {', '.join(other)} differs"
    raise BackendUnavailableError(what, hint=f"{_AGAIN}, or install the version that it was exported with.")


def _backend(name: object) -> Backend:
    """Return this process's backend of that name."""
    backends = default_registry().backends()
    if name not in backends:
        rule, hint = f"one of {', '.join(backends)}", "Install the plugin that brings it; see `q4 doctor`."
        raise UnknownBackendError(
            "exported program", name="backend", rule=rule, value=name, available=tuple(backends), hint=hint
        )
    return backends[str(name)]


def _meta(backend: Backend, facts: object) -> Any:
    """Return ``Prepared.meta`` as the backend describes it."""
    meta_from: Any = getattr(backend, "meta_from", None)  # optional method of the contract
    try:
        return meta_from(facts)
    except PLUGIN_FAULTS as error:
        raise_broken_call(error, backend, "meta_from")


def _told(paths: list[tuple[int, int | None, str]]) -> list[str]:
    """Return which path serves which rows, as texts."""
    return [f"{name} (M {low}…{'∞' if high is None else high})" for low, high, name in paths]
