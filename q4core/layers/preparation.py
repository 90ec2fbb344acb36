"""Turns a weight into something that runs: select, convert, prepare, probe, and only then serve.

Everything slow happens here, once per layer, never inside a trace or a capture.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import PrepareContext, Prepared, Reason, ReasonCode
from q4core.diagnostics.errors_of_plugins import chained, note_fault
from q4core.diagnostics.events import bound, emit, muted, warn_once
from q4core.errors import PLUGIN_FAULTS, LifecycleError, PrepareError, Q4FallbackWarning
from q4core.formats import as_bytes
from q4core.machine import on_device, outside_inference, without_casts
from q4core.memory import Placer
from q4core.ops.plan import Plan, make_plan
from q4core.policy import SessionConfig, UnifiedMemoryPolicy
from q4core.probes.runner import SourceGuard, can_export, is_first_of_its_kind, prove
from q4core.selection.cache import layer_request, select_for
from q4core.selection.probe_results import probe_results

if TYPE_CHECKING:
    from q4core.backend import Backend, Request
    from q4core.memory import MemoryDecision
    from q4core.plugins.registry import Registry
    from q4core.selection.probe_results import ProbeResults
    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight

__all__ = ["PreparedLayer", "copy_prepared", "prepare_layer", "tell_memory"]


@attrs.frozen(eq=False, kw_only=True)
class PreparedLayer:
    """A weight in its backend's layout, with everything that a layer needs to call it and to tell about it.

    Args:
        plan: How it is called.
        buffers: uint8 buffers: the backend's, then the source's where the backend has no export.
        prepared: The backend's own view of them.
        selection: What was chosen, and why not the others.
        memory: What became of each buffer under the unified-memory policy; empty under DISABLED.
        source_bytes: Bytes of the source kept alive beside the prepared ones; 0 where the backend can export.
    """

    plan: Plan
    buffers: tuple[torch.Tensor, ...]
    prepared: Prepared
    selection: Selection
    memory: tuple[MemoryDecision, ...] = ()
    source_bytes: int = 0


def prepare_layer(  # noqa: PLR0913  # one argument per fact
    weight: PackedWeight,
    config: SessionConfig,
    registry: Registry,
    *,
    m: tuple[int, int | None] = (1, None),
    dtype: torch.dtype | None = None,
    name: str | None = None,
) -> PreparedLayer:
    """Select, prepare and prove a weight; every decision is sent as an event unless the configuration says no.

    Args:
        weight: The weight, on any device; its values are checked first.
        config: A resolved configuration.
        registry: The plugins to choose among.
        m: Rows of x that must be served.
        dtype: dtype of x; the configuration's, else the weight's own.
        name: The layer's name, for events and messages; the weight's own unless told.

    Returns:
        The prepared layer. A path that computes wrong numbers is disqualified, loudly, and the next one is asked.

    Raises:
        WeightError: A scale is not finite, or negative where it may not be.
        LifecycleError: Called inside a trace or a CUDA-graph capture.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: Nothing may serve.
        UnifiedMemoryError: Unified memory is required and can't be had.
    """
    heard = muted() if config.diagnostics is False else contextlib.nullcontext()
    with heard, chained(), without_casts("cpu"), without_casts("cuda"), outside_inference():
        # The name goes with the weight, because everything below tells of it.
        told = weight if name is None else weight.relabelled(name=name)
        with bound(layer=told.name):
            return _prepare_layer(_ordinary(told), config, registry, m, dtype)


def _ordinary(weight: PackedWeight) -> PackedWeight:
    """Return the weight without tensors of inference mode, which no call that records gradients may use."""
    if not any(tensor.is_inference() for _, tensor in weight.tensors()):
        return weight
    return weight.map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


def _prepare_layer(
    weight: PackedWeight,
    config: SessionConfig,
    registry: Registry,
    m: tuple[int, int | None],
    dtype: torch.dtype | None,
) -> PreparedLayer:
    _refuse_inside_trace(weight)
    weight.check_values()
    _require_memory(weight, config, registry)
    request = layer_request(weight, config, m, dtype)
    source = weight if weight.device == request.device else _moved(weight, request.device, config, registry)
    results = probe_results(registry)
    failures: dict[str, tuple[Reason, ...]] = {}
    while True:
        selection = select_for(request, config, registry, failures)
        backend = registry.backends()[selection.backend]
        adapted = _adapt(source, selection.backend_request)
        guard = SourceGuard(weight, adapted, is_first=is_first_of_its_kind(results, selection, backend))
        prepared = _prepare(backend, adapted, selection, guard, results, _context(config, registry, selection))
        if isinstance(prepared, tuple):
            if not _is_about_gradients(results, selection):
                failures[backend.name] = prepared
            continue
        if prove(results, backend, prepared, guard, selection):
            break
    # What was selected is what was prepared and proven; asking again could answer another one by now.
    return _assemble(weight, adapted, backend, prepared, attrs.evolve(selection, proven=True), config, registry)


def _context(config: SessionConfig, registry: Registry, selection: Selection) -> PrepareContext:
    """Return where ``prepare`` puts things: in managed memory from the start where the policy wants it."""
    device = selection.request.device
    paths: dict[str, Any] = {"paths": selection.segments, "gradient_paths": selection.gradients}
    placer = _placer(config, registry, device)
    empty = None if placer is None else placer.empty()
    if empty is None:
        return PrepareContext(device, **paths)
    return PrepareContext(device, empty, **paths)


def _placer(config: SessionConfig, registry: Registry, device: torch.device) -> Placer | None:
    """Return what places tensors under the unified-memory policy, or None under DISABLED."""
    policy = config.unified_memory or UnifiedMemoryPolicy.DISABLED
    if policy is UnifiedMemoryPolicy.DISABLED:
        return None
    return Placer(policy, device=device, providers=registry.memory_providers())


def _is_about_gradients(results: ProbeResults, selection: Selection) -> bool:
    """Return whether a refusal to prepare was to both linear and input gradients, so that linear alone may be tried."""
    both = (*selection.segments, *selection.gradients)
    return bool(selection.gradients and results.refused(selection.backend, both, selection.gradient_request))


def _prepare(  # noqa: PLR0913  # the facts of one attempt
    backend: Backend,
    adapted: PackedWeight,
    selection: Selection,
    guard: SourceGuard,
    results: ProbeResults,
    context: PrepareContext,
) -> Prepared | tuple[Reason, ...]:
    """Let a backend prepare a weight; what it refuses or what goes wrong there are reasons to ask the next one."""
    request = selection.backend_request
    weight = guard.weight
    started = time.perf_counter()
    fault = prepared = None
    refusals: tuple[Reason, ...] = ()
    is_lasting = True
    try:
        with on_device(request.device):
            prepared = _checked(backend.prepare(adapted, request, context), request.device)
    except PrepareError as error:
        refusals, is_lasting = error.reasons, not error.is_for_this_weight
        if not refusals or not all(isinstance(reason, Reason) for reason in refusals):
            fault = Reason(ReasonCode.PLUGIN_ERROR, f"prepare refused without a Reason, with {refusals!r}")
    except PLUGIN_FAULTS as error:
        fault = Reason(ReasonCode.PLUGIN_ERROR, f"prepare raised {note_fault(backend.name, error)}")
    if prepared is None or fault is not None:  # what was prepared is proven next, and the weight compared then
        fault = guard.bar_writer(results, backend) or fault
    if refusals and fault is None:
        if is_lasting:
            asked = selection.gradient_request if selection.gradients else request
            results.refuse(backend.name, (*selection.segments, *selection.gradients), asked, refusals)
        told = [str(reason) for reason in refusals]
        emit("q4.prepare", level=logging.WARNING, layer=weight.name, backend=backend.name, refused=told)
        return refusals
    if prepared is None or fault is not None:
        fault = fault or Reason(ReasonCode.PLUGIN_ERROR, "prepare gave nothing")
        emit("q4.prepare", level=logging.ERROR, layer=weight.name, backend=backend.name, error=fault.message)
        return (fault,)
    emit(
        "q4.prepare",
        layer=weight.name,
        backend=backend.name,
        bytes=prepared.nbytes,
        source_bytes=weight.nbytes,
        microseconds=round((time.perf_counter() - started) * 1e6),
    )
    return prepared


def _refuse_inside_trace(weight: PackedWeight) -> None:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing:
        raise LifecycleError(
            f"layer {weight.name!r} can't be prepared inside a trace or a capture",
            hint="Make the layer (session.linear) and move it to its device first, then compile.",
        )


def _require_memory(weight: PackedWeight, config: SessionConfig, registry: Registry) -> None:
    """Fail before anything is done where unified memory is required and can't be had, for want of the device too."""
    device = weight.device if config.device in {None, "auto"} else torch.device(str(config.device))
    placer = _placer(config, registry, device)
    if placer is not None and placer.policy is UnifiedMemoryPolicy.REQUIRE_UNIFIED:
        placer.weight(torch.empty(1), weight.name)


def _moved(weight: PackedWeight, device: torch.device, config: SessionConfig, registry: Registry) -> PackedWeight:
    """Return the weight on the device that prepares it: where the policy says so, uncopied or written once."""
    placer = _placer(config, registry, device)
    return weight.to(device) if placer is None else weight.map_tensors(lambda tensor: placer.source(tensor)[0])


def _adapt(weight: PackedWeight, request: Request) -> PackedWeight:
    return weight if weight.scale_kind is request.scale_kind else weight.with_plain_scale()


def _checked(prepared: object, device: torch.device) -> Prepared:
    if not isinstance(prepared, Prepared):
        raise TypeError(f"the result must be a Prepared, got {type(prepared).__name__}")
    if not prepared.tensors:
        raise TypeError("Prepared.tensors must hold at least one tensor, got none")
    for tensor in prepared.tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Prepared.tensors must be tensors, got {type(tensor).__name__}")
        is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or tensor.device != device:
            raise TypeError(
                f"Prepared.tensors must be plain strided ones on {device}, got {tensor.layout} {tensor.device}"
            )
    hash(prepared.meta)
    repr(prepared.meta)
    if prepared.meta != prepared.meta:  # plans are found by comparing it
        raise TypeError("Prepared.meta must equal itself")
    return prepared


def _assemble(  # noqa: PLR0913  # the facts of one layer
    weight: PackedWeight,
    adapted: PackedWeight,
    backend: Backend,
    prepared: Prepared,
    selection: Selection,
    config: SessionConfig,
    registry: Registry,
) -> PreparedLayer:
    keeps_source = not can_export(backend)
    plan = make_plan(selection, backend, prepared, adapted if keeps_source else None)
    kept = [tensor for _, tensor in adapted.tensors()] if keeps_source else []
    buffers = [as_bytes(tensor.detach()) for tensor in (*prepared.tensors, *kept)]
    buffers, decisions = _place(buffers, config, registry, selection.request.device, weight.name)
    emit(
        "q4.select",
        level=logging.INFO,
        layer=weight.name,
        format=weight.format.name,
        backend=selection.backend,
        paths=[path.name for path in selection.paths],
        compute_path=selection.compute_path.value,
        native_load_state=selection.native_state,
        proven=selection.proven,
        fallback_reason=selection.fallback_reason,
        rejections=[str(item) for item in selection.rejections],
    )
    if selection.fallback_reason is not None:
        emit(
            "q4.fallback",
            level=logging.WARNING,
            layer=weight.name,
            backend=selection.backend,
            reason=selection.fallback_reason,
        )
        key = (weight.format.name, selection.fallback_reason)
        warn_once(key, Q4FallbackWarning, f"{weight.format.name}: {selection.fallback_reason}")
    return PreparedLayer(
        plan=plan,
        buffers=tuple(buffers),
        prepared=plan.prepared(buffers),
        selection=selection,
        memory=decisions,
        source_bytes=sum(tensor.numel() * tensor.element_size() for tensor in kept),
    )


def _place(
    buffers: list[torch.Tensor],
    config: SessionConfig,
    registry: Registry,
    device: torch.device,
    layer: str | None = None,
) -> tuple[list[torch.Tensor], tuple[MemoryDecision, ...]]:
    placer = _placer(config, registry, device)
    if placer is None:
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
    if config.diagnostics is False:
        return
    fields = {**attrs.asdict(decision), "policy": decision.policy.value}
    emit("q4.memory", level=level, layer=layer, kind=kind, **fields)


def copy_prepared(
    prepared: PreparedLayer, buffers: list[torch.Tensor], config: SessionConfig, registry: Registry
) -> PreparedLayer:
    """Return a prepared layer over copies of its buffers, placed under the same policy."""
    placed, decisions = _place(buffers, config, registry, prepared.selection.request.device)
    return attrs.evolve(prepared, buffers=tuple(placed), prepared=prepared.plan.prepared(placed), memory=decisions)
