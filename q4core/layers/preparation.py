"""The preparation of a weight: select, convert and prove, once for each layer, never inside a trace or a capture."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import PrepareContext, Prepared, Request
from q4core.diagnostics.events import bound, emit, muted
from q4core.formats import as_bytes
from q4core.machine.torch_state import outside_inference, require_outside_trace, without_casts
from q4core.ops.prepared_weight import LayerWeight, PreparedWeight
from q4core.policy.config import ActivationPrecision, SessionConfig, UnifiedMemoryPolicy
from q4core.probes.runner import Trial, can_export
from q4core.selection.cache import resolve_device, select_for
from q4core.selection.plan import make_plan
from q4core.selection.probe_results import probe_results
from q4core.selection.result import report_selection
from q4core.weight import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.backend import Backend, Reason
    from q4core.memory import MemoryDecision, MemoryPlacer
    from q4core.plugins.registry import Registry
    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight


def placer_for(config: SessionConfig, registry: Registry, device: torch.device) -> MemoryPlacer:
    """Return what places tensors under the configuration's unified-memory policy; DISABLED asks no plugin."""
    return registry.placer(config.unified_memory or UnifiedMemoryPolicy.DISABLED, device=device)


def prepare_weight(  # noqa: PLR0913  # one argument per fact
    weight: PackedWeight,
    config: SessionConfig,
    registry: Registry,
    *,
    m: tuple[int, int | None],
    dtype: torch.dtype | None,
    name: str,
    session: str | None = None,
) -> LayerWeight:
    """Select, convert and prove a weight; every decision is sent as an event unless the configuration says no.

    Args:
        weight: The weight, on any device; its values are checked first. On the meta device it waits for its numbers.
        config: A resolved configuration.
        registry: The plugins to choose among.
        m: Rows of x that must be served.
        dtype: dtype of x. Defaults to the configuration's, else the weight's own.
        name: The layer's name, for events and messages.
        session: The session's name, for events.

    Returns:
        The prepared weight. A path that computes wrong numbers is disqualified, loudly, and the next one is asked.

    Raises:
        WeightError: A scale is not finite, or negative where it may not be.
        LifecycleError: Called inside a trace or a CUDA-graph capture.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: No backend can run it.
        UnifiedMemoryError: Unified memory is required and can't be had.
    """
    dtype = dtype or config.compute_dtype or weight.dtype
    spec, labels = WeightSpec.of(weight), {"name": weight.name, "dialect": weight.dialect, "notes": weight.notes}
    if weight.device.type == "meta":
        empty = tuple(as_bytes(tensor) for _, tensor in weight.tensors())
        return LayerWeight(spec=spec, labels=labels, config=config, dtype=dtype, device=weight.device, tensors=empty)
    heard = muted() if config.diagnostics is False else contextlib.nullcontext()
    with (
        bound(session=session, layer=name), heard, without_casts("cpu"), without_casts("cuda"), outside_inference()
    ):  # fmt: skip
        hint = "Make the layer (session.linear) and move it to its device first, then compile."
        require_outside_trace(f"layer {name!r} can't be prepared", hint)
        weight = weight.relabelled(name=name)  # for the messages and events of what follows
        if any(tensor.is_inference() for _, tensor in weight.tensors()):  # no call that records gradients may use these
            weight = weight.map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
        weight.check_values()
        if config.unified_memory is UnifiedMemoryPolicy.REQUIRE_UNIFIED:  # fail before anything is done
            device = weight.device if config.device in {None, "auto"} else torch.device(str(config.device))
            placer_for(config, registry, device).weight(torch.empty(1), name)
        request = Request.for_weight(
            weight,
            m=m,
            dtype=dtype,
            device=resolve_device(config, weight.device),
            precision=config.activation_precision or ActivationPrecision.AUTO,
            gradients=bool(config.gradients),
        )
        placer = placer_for(config, registry, request.device)
        selection, backend, prepared, source = _proven(weight, request, config, registry, placer)
        held = None if can_export(backend) else source  # with the levels of its scales
        sources = [] if held is None else [tensor for _, tensor in held.tensors()]
        plan = make_plan(selection, backend, prepared, spec, held)
        buffers = [as_bytes(tensor.detach()) for tensor in (*prepared.tensors, *sources)]
        tensors, decisions = _place(buffers, placer, config, name)
        report_selection(selection, name, weight.format.name)
        return PreparedWeight(
            spec=spec,
            labels=labels,
            config=config,
            dtype=plan.dtype,
            device=tensors[0].device,
            tensors=tensors,
            plan=plan,
            selection=selection,
            memory=decisions,
            source_bytes=sum(tensor.nbytes for tensor in sources),
        )


def _proven(
    weight: PackedWeight, request: Request, config: SessionConfig, registry: Registry, placer: MemoryPlacer
) -> tuple[Selection, Backend, Prepared, PackedWeight]:
    """Return the selection whose backend converts the weight and computes right numbers with it, and from what."""
    results = probe_results(registry)
    failures: dict[str, tuple[Reason, ...]] = {}
    while True:
        selection = select_for(request, config, registry, failures)
        asked, segments, gradients = selection.backend_request, selection.segments, selection.gradients
        backend, source = registry.backends()[selection.backend], weight
        if weight.device != request.device:  # again for each backend: the one before may have written to it
            source = weight.map_tensors(lambda tensor: placer.source(tensor)[0])
        given = source if source.scale_kind is asked.scale_kind else source.with_plain_scale()
        trial = Trial(results, selection, backend, weight, given)
        # Managed memory from the start where the policy wants it.
        memory: dict[str, Any] = {} if (empty := placer.empty()) is None else {"empty": empty}
        prepared = trial.convert(PrepareContext(request.device, paths=segments, gradient_paths=gradients, **memory))
        if isinstance(prepared, Prepared):
            if trial.prove(prepared):
                # What was selected is what was proven; asking again could answer another one by now.
                return attrs.evolve(selection, proven=True), backend, prepared, source
        elif not gradients or not results.refused(backend.name, (*segments, *gradients), selection.gradient_request):
            failures[backend.name] = prepared  # else it refused both, and linear alone may be tried


def _place(
    buffers: Sequence[torch.Tensor], placer: MemoryPlacer, config: SessionConfig, layer: str | None = None
) -> tuple[tuple[torch.Tensor, ...], tuple[MemoryDecision, ...]]:
    if placer.policy is UnifiedMemoryPolicy.DISABLED:
        return tuple(buffers), ()
    placed = [placer.weight(buffer, layer) for buffer in buffers]
    for _, decision in placed:
        record_placement(decision, "weight", config, layer)
    return tuple(tensor for tensor, _ in placed), tuple(decision for _, decision in placed)


def record_placement(
    decision: MemoryDecision, kind: str, config: SessionConfig, layer: str | None, *, level: int = logging.INFO
) -> None:
    """Send what became of a ``"weight"`` or an ``"activation"`` under the unified-memory policy as an event."""
    if config.diagnostics is not False:
        fields = {**attrs.asdict(decision), "policy": decision.policy.value}
        emit("q4.memory", level=level, layer=layer, kind=kind, **fields)


def copy_weight(weight: PreparedWeight, buffers: Sequence[torch.Tensor], registry: Registry) -> PreparedWeight:
    """Return a prepared weight over copies of its buffers, placed under the same policy."""
    placed, decisions = _place(buffers, placer_for(weight.config, registry, weight.device), weight.config)
    return attrs.evolve(weight, tensors=placed, memory=decisions)
