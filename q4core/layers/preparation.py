"""Turns a weight into something that runs: select, convert, prepare, probe, and only then serve.

Everything slow happens here, once per layer, never inside a trace or a capture.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import PrepareContext, Prepared, Request
from q4core.diagnostics.events import bound, emit, muted, warn_once
from q4core.errors import LifecycleError, Q4FallbackWarning
from q4core.formats import as_bytes
from q4core.machine import is_recorded, outside_inference, without_casts
from q4core.ops.registration import LiveLayer
from q4core.policy import ActivationPrecision, SessionConfig, UnifiedMemoryPolicy
from q4core.probes.runner import Trial, can_export
from q4core.selection.cache import resolve_device, select_for
from q4core.selection.plan import make_plan
from q4core.selection.probe_results import probe_results

if TYPE_CHECKING:
    from q4core.backend import Reason
    from q4core.memory import MemoryDecision, MemoryPlacer
    from q4core.plugins.registry import Registry
    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight


def placer_for(config: SessionConfig, registry: Registry, device: torch.device) -> MemoryPlacer:
    """Return what places tensors under the configuration's unified-memory policy; DISABLED asks no plugin."""
    return registry.placer(config.unified_memory or UnifiedMemoryPolicy.DISABLED, device=device)


def prepare_layer(  # noqa: PLR0913  # one argument per fact
    weight: PackedWeight,
    config: SessionConfig,
    registry: Registry,
    *,
    m: tuple[int, int | None],
    dtype: torch.dtype | None,
    name: str,
) -> LiveLayer:
    """Select, prepare and prove a weight; every decision is sent as an event unless the configuration says no.

    Args:
        weight: The weight, on any device; its values are checked first.
        config: A resolved configuration.
        registry: The plugins to choose among.
        m: Rows of x that must be served.
        dtype: dtype of x; the configuration's, else the weight's own.
        name: The layer's name, for events and messages.

    Returns:
        The prepared layer. A path that computes wrong numbers is disqualified, loudly, and the next one is asked.

    Raises:
        WeightError: A scale is not finite, or negative where it may not be.
        LifecycleError: Called inside a trace or a CUDA-graph capture.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: Nothing may serve.
        UnifiedMemoryError: Unified memory is required and can't be had.
    """
    heard = muted() if config.diagnostics is False else contextlib.nullcontext()
    with heard, without_casts("cpu"), without_casts("cuda"), outside_inference():
        own = weight.relabelled(name=name)  # because everything below tells of it
        if any(tensor.is_inference() for _, tensor in own.tensors()):  # no call that records gradients may use these
            own = own.map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
        with bound(layer=own.name):
            return _prepare(own, config, registry, m, dtype)


def _prepare(
    weight: PackedWeight,
    config: SessionConfig,
    registry: Registry,
    m: tuple[int, int | None],
    dtype: torch.dtype | None,
) -> LiveLayer:
    hint = "Make the layer (session.linear) and move it to its device first, then compile."
    refuse_inside_trace(f"layer {weight.name!r} can't be prepared", hint)
    weight.check_values()
    if config.unified_memory is UnifiedMemoryPolicy.REQUIRE_UNIFIED:  # fail before anything is done
        device = weight.device if config.device in {None, "auto"} else torch.device(str(config.device))
        placer_for(config, registry, device).weight(torch.empty(1), weight.name)
    request = Request.for_weight(
        weight,
        m=m,
        dtype=dtype or config.compute_dtype or weight.dtype,
        device=resolve_device(config, weight.device),
        precision=config.activation_precision or ActivationPrecision.AUTO,
        gradients=bool(config.gradients),
    )
    placer = placer_for(config, registry, request.device)
    results = probe_results(registry)
    failures: dict[str, tuple[Reason, ...]] = {}
    while True:
        selection = select_for(request, config, registry, failures)
        asked, segments, gradients = selection.backend_request, selection.segments, selection.gradients
        backend = registry.backends()[selection.backend]
        source = weight
        if weight.device != request.device:  # again for each backend: the one before may have written to it
            source = weight.map_tensors(lambda tensor: placer.source(tensor)[0])
        given = source if source.scale_kind is asked.scale_kind else source.with_plain_scale()
        trial = Trial(results, selection, backend, weight, given)
        # Managed memory from the start where the policy wants it.
        memory: dict[str, Any] = {} if (empty := placer.empty()) is None else {"empty": empty}
        context = PrepareContext(request.device, paths=segments, gradient_paths=gradients, **memory)
        prepared = trial.prepare(context)
        if isinstance(prepared, Prepared):
            if trial.prove(prepared):
                break
        elif not gradients or not results.refused(backend.name, (*segments, *gradients), selection.gradient_request):
            failures[backend.name] = prepared  # else it refused both, and linear alone may be tried
    # What was selected is what was prepared and proven; asking again could answer another one by now.
    selection = attrs.evolve(selection, proven=True)
    kept = None if can_export(backend) else source  # with the levels of its scales
    sources = [] if kept is None else [tensor for _, tensor in kept.tensors()]
    plan = make_plan(selection, backend, prepared, kept)
    buffers = [as_bytes(tensor.detach()) for tensor in (*prepared.tensors, *sources)]
    buffers, decisions = _place(buffers, placer, config, weight.name)
    tell_selection(selection, weight.name, weight.format.name)
    return LiveLayer(
        plan=plan,
        tensors=tuple(buffers),
        selection=selection,
        memory=decisions,
        source_bytes=sum(tensor.nbytes for tensor in sources),
    )


def refuse_inside_trace(what: str, hint: str) -> None:
    """Raise a ``LifecycleError`` inside a trace or a CUDA-graph capture."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_recorded() or capturing:
        raise LifecycleError(f"{what} inside a trace or a capture", hint=hint)


def emit_selection(selection: Selection, name: str | None, format_: str) -> None:
    """Send what serves a weight as events."""
    reason = selection.fallback_reason
    emit(
        "q4.select",
        level=logging.INFO,
        layer=name,
        format=format_,
        backend=selection.backend,
        paths=[path.name for path in selection.paths],
        compute_path=selection.compute_path.value,
        native_load_state=selection.native_state,
        proven=selection.proven,
        fallback_reason=reason,
        rejections=[str(item) for item in selection.rejections],
    )
    if reason is not None:
        emit("q4.fallback", level=logging.WARNING, layer=name, backend=selection.backend, reason=reason)


def tell_selection(selection: Selection, name: str | None, format_: str) -> None:
    """Send what serves a weight as events, and warn once of a fallback."""
    emit_selection(selection, name, format_)
    if (reason := selection.fallback_reason) is not None:
        warn_once((format_, reason), Q4FallbackWarning, f"{format_}: {reason}")


def _place(
    buffers: list[torch.Tensor], placer: MemoryPlacer, config: SessionConfig, layer: str | None = None
) -> tuple[list[torch.Tensor], tuple[MemoryDecision, ...]]:
    if placer.policy is UnifiedMemoryPolicy.DISABLED:
        return buffers, ()
    placed, decisions = [], []
    for buffer in buffers:
        tensor, decision = placer.weight(buffer, layer)
        placed.append(tensor)
        decisions.append(decision)
        tell_memory(decision, "weight", config, layer)
    return placed, tuple(decisions)


def tell_memory(
    decision: MemoryDecision, kind: str, config: SessionConfig, layer: str | None, *, level: int = logging.INFO
) -> None:
    """Send what became of a ``"weight"`` or an ``"activation"`` under the unified-memory policy as an event."""
    if config.diagnostics is not False:
        fields = {**attrs.asdict(decision), "policy": decision.policy.value}
        emit("q4.memory", level=level, layer=layer, kind=kind, **fields)


def copy_layer(live: LiveLayer, buffers: list[torch.Tensor], config: SessionConfig, registry: Registry) -> LiveLayer:
    """Return a layer like ``live`` over copies of its buffers, placed under the same policy."""
    placed, decisions = _place(buffers, placer_for(config, registry, live.device), config)
    return attrs.evolve(live, tensors=tuple(placed), memory=decisions)
