"""Turns a weight into something that runs: select, convert, prepare, probe, and only then serve.

Everything slow happens here, once per layer, never inside a trace or a capture.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import PrepareContext, Prepared, Reason, ReasonCode, Request
from q4core.dispatch import select_backend
from q4core.errors import ConfigError, LifecycleError, Q4FallbackWarning, Q4ProbeWarning
from q4core.events import emit, warn_once
from q4core.memory import apply_mutable_policy, apply_policy
from q4core.plan import Plan, as_bytes, make_plan
from q4core.policy import ActivationPrecision, ComputePath, SessionConfig, UnifiedMemoryPolicy
from q4core.probe import ProbeBook, probe_path
from q4core.selection import ProbeHistory, Selection

if TYPE_CHECKING:
    from q4core.backend import Backend, KernelPath
    from q4core.memory import MemoryDecision
    from q4core.registry import Registry
    from q4core.weight import PackedWeight

__all__ = ["PROBES", "PreparedLayer", "layer_request", "prepare_layer", "select_for"]

PROBES = ProbeBook()
"""What self-probes have shown in this process."""

_CACHE_LIMIT = 4096


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


class _WithFailures(ProbeHistory):
    """The process's probes, plus the backends that failed to prepare just now."""

    def __init__(self, failures: dict[str, Reason]) -> None:
        self._failures = failures

    def disqualified(self, backend: str, path: KernelPath, request: Request) -> Reason | None:
        return self._failures.get(backend) or PROBES.disqualified(backend, path, request)

    def proven(self, backend: str, path: KernelPath, request: Request) -> bool:
        return PROBES.proven(backend, path, request)


def resolve_device(config: SessionConfig, weight_device: torch.device) -> torch.device:
    """Return the device that a configuration means for a weight.

    Raises:
        ConfigError: It names a device that is not there.
    """
    if config.device in {None, "auto"}:
        return weight_device
    device = torch.device(str(config.device))
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                "session",
                name="device",
                rule=f"there; torch sees {count} CUDA devices",
                value=str(device),
                hint='Use device="cpu", or see `q4 doctor`.',
            )
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return device


def layer_request(
    weight: PackedWeight, config: SessionConfig, m: tuple[int, int | None], dtype: torch.dtype | None = None
) -> Request:
    """Return the request that a layer over ``weight`` makes under a resolved configuration."""
    return Request.for_weight(
        weight,
        m=m,
        dtype=dtype or config.compute_dtype or weight.dtype,
        device=resolve_device(config, weight.device),
        precision=config.activation_precision or ActivationPrecision.AUTO,
        gradients=bool(config.gradients),
    )


def select_for(
    request: Request, config: SessionConfig, registry: Registry, history: ProbeHistory = PROBES
) -> Selection:
    """Select under a resolved configuration; warm answers come from a cache.

    Raises:
        UnknownBackendError, PolicyConflictError, BackendUnavailableError: As ``select_backend``.
    """
    compute_path = config.compute_path or ComputePath.AUTO
    key = (PROBES.generation, request, compute_path, config.backend)
    known: Selection | None = registry.selections.get(key) if history is PROBES else None
    if known is not None:
        return known
    selection = select_backend(
        request,
        registry.backends(),
        compute_path=compute_path,
        override=config.backend,
        refused=registry.refused_backends(),
        history=history,
    )
    if history is PROBES:
        if len(registry.selections) >= _CACHE_LIMIT:
            registry.selections.clear()
        registry.selections[key] = selection
    return selection


def prepare_layer(
    weight: PackedWeight,
    config: SessionConfig,
    registry: Registry,
    *,
    m: tuple[int, int | None] = (1, None),
    dtype: torch.dtype | None = None,
) -> PreparedLayer:
    """Select, prepare and prove a weight.

    Args:
        weight: The weight, on any device; its values are checked first.
        config: A resolved configuration.
        registry: The plugins to choose among.
        m: Rows of x that must be served.
        dtype: dtype of x; the configuration's, else the weight's own.

    Returns:
        The prepared layer. A path that computes wrong numbers is disqualified, loudly, and the next one is asked.

    Raises:
        WeightError: A scale is not finite, or negative where it may not be.
        LifecycleError: Called inside a trace or a CUDA-graph capture.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: Nothing may serve.
        UnifiedMemoryError: Unified memory is required and can't be had.
    """
    _refuse_inside_trace(weight)
    weight.check_values()
    request = layer_request(weight, config, m, dtype)
    _require_memory(config, registry, request.device)
    source = weight if weight.device == request.device else weight.to(request.device)
    failures: dict[str, Reason] = {}
    while True:
        selection = select_for(request, config, registry, _WithFailures(failures) if failures else PROBES)
        backend = registry.backends()[selection.backend]
        adapted = _adapt(source, selection.backend_request)
        started = time.perf_counter()
        try:
            prepared = _checked(
                backend,
                backend.prepare(
                    adapted, selection.backend_request, PrepareContext(request.device, _stream(request.device))
                ),
            )
        except Exception as error:  # noqa: BLE001  # the plugin boundary; becomes a rejection
            failures[backend.name] = Reason(ReasonCode.PLUGIN_ERROR, f"prepare raised {type(error).__name__}: {error}")
            emit("q4.prepare", level=logging.ERROR, layer=weight.name, backend=backend.name, error=str(error))
            continue
        emit(
            "q4.prepare",
            layer=weight.name,
            backend=backend.name,
            bytes=prepared.nbytes,
            source_bytes=weight.nbytes,
            microseconds=round((time.perf_counter() - started) * 1e6),
        )
        if _prove(backend, prepared, adapted, selection):
            break
    return _assemble(
        weight,
        adapted,
        backend,
        prepared,
        select_for(request, config, registry, _WithFailures(failures)),
        config,
        registry,
    )


def _refuse_inside_trace(weight: PackedWeight) -> None:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing:
        raise LifecycleError(
            f"layer {weight.name!r}",
            name="layer",
            rule="prepared before it is traced or captured",
            hint="Make the layer (session.linear) and move it to its device first, then compile.",
        )


def _require_memory(config: SessionConfig, registry: Registry, device: torch.device) -> None:
    """Fail before anything is done where unified memory is required and can't be had."""
    policy = config.unified_memory or UnifiedMemoryPolicy.DISABLED
    if policy is UnifiedMemoryPolicy.REQUIRE_UNIFIED:
        apply_mutable_policy(torch.empty(1), policy, device=device, providers=registry.memory_providers())


def _stream(device: torch.device) -> object | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _adapt(weight: PackedWeight, request: Request) -> PackedWeight:
    if weight.scale_kind is not request.scale_kind:
        weight = weight.with_plain_scale()
    return weight.repack(request.packing)


def _checked(backend: Backend, prepared: object) -> Prepared:
    if not isinstance(prepared, Prepared) or not all(isinstance(item, torch.Tensor) for item in prepared.tensors):
        raise TypeError(f"prepare of {backend.name!r} must return a Prepared of tensors, got {type(prepared).__name__}")
    hash(prepared.meta)
    return prepared


def _prove(backend: Backend, prepared: Prepared, source: PackedWeight, selection: Selection) -> bool:
    """Run the probes that have not run yet; return whether every path is right."""
    request = selection.backend_request
    good = True
    for path in selection.paths:
        result = PROBES.result(backend.name, path, request)
        if result is None:
            with torch.no_grad():
                result = probe_path(backend, prepared, source, request, path)
            PROBES.record(backend.name, path, request, result)
            emit(
                "q4.probe",
                level=logging.DEBUG if result.fault is None else logging.ERROR,
                backend=backend.name,
                path=path.name,
                format=request.format.name,
                device=str(request.device),
                passed=result.fault is None,
                worst_ratio=result.worst_ratio,
                microseconds=round(result.microseconds),
                fault=None if result.fault is None else result.fault.message,
            )
        if result.fault is not None:
            good = False
            message = f"backend {backend.name!r} is not used for {request.format.name}: {result.fault.message}"
            warn_once((backend.name, path.name, request.format.name), Q4ProbeWarning, message)
    return good


def _assemble(  # noqa: PLR0913  # the facts of one layer
    weight: PackedWeight,
    adapted: PackedWeight,
    backend: Backend,
    prepared: Prepared,
    selection: Selection,
    config: SessionConfig,
    registry: Registry,
) -> PreparedLayer:
    keeps_source = not callable(getattr(backend, "export", None))
    plan = make_plan(selection, backend, prepared, adapted if keeps_source else None)
    kept = [tensor for _, tensor in adapted.tensors()] if keeps_source else []
    buffers = [as_bytes(tensor.detach()) for tensor in (*prepared.tensors, *kept)]
    buffers, decisions = _place(buffers, config, registry, selection.request.device)
    emit(
        "q4.select",
        layer=weight.name,
        format=weight.format.name,
        backend=selection.backend,
        paths=[path.name for path in selection.paths],
        compute_path=selection.compute_path.value,
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
    buffers: list[torch.Tensor], config: SessionConfig, registry: Registry, device: torch.device
) -> tuple[list[torch.Tensor], tuple[MemoryDecision, ...]]:
    policy = config.unified_memory or UnifiedMemoryPolicy.DISABLED
    if policy is UnifiedMemoryPolicy.DISABLED:
        return buffers, ()
    placed, decisions = [], []
    for buffer in buffers:
        tensor, decision = apply_policy(buffer, policy, device=device, providers=registry.memory_providers())
        placed.append(tensor)
        decisions.append(decision)
        fields: dict[str, Any] = {key: str(value) for key, value in attrs.asdict(decision, recurse=False).items()}
        emit("q4.memory", **fields)
    return placed, tuple(decisions)
