"""The run of all self-probes of a prepared weight, and the guard of the caller's weight."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from q4core.backend import Reason, ReasonCode
from q4core.diagnostics.events import emit, warn_once
from q4core.errors import BackendError, Q4ProbeWarning
from q4core.formats import same_bytes
from q4core.ops.plan import exported_weight
from q4core.probes.export import probe_export
from q4core.probes.gradient import probe_gradient
from q4core.probes.linear import probe_path
from q4core.selection.probe_results import ProbeResult, ProbeResults, row_counts

if TYPE_CHECKING:
    from q4core.backend import Backend, KernelPath, Prepared, Request
    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight

__all__ = ["SourceGuard", "can_export", "is_first_of_its_kind", "prove"]


def can_export(backend: Backend) -> bool:
    """Return whether a backend has the optional ``export``."""
    return callable(getattr(backend, "export", None))


class SourceGuard:
    """Notices whether a backend wrote to the weight that it was given, while it prepared or was probed.

    Writes through torch move a tensor's version; writes through an address do not, so the first weight of a kind is
    compared with a copy, byte by byte.

    Args:
        weight: The caller's weight.
        given: What the backend is given for it: often the same tensors.
        is_first: Whether to compare bytes.
    """

    def __init__(self, weight: PackedWeight, given: PackedWeight, *, is_first: bool) -> None:
        self.weight, self.given = weight, given
        self._tensors = tensors = [tensor for _, tensor in given.tensors()]
        self._versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]  # noqa: SLF001  # torch's documented counter of in-place changes
        self._copies = [tensor.clone() for tensor in tensors] if is_first else []

    def bar_writer(self, results: ProbeResults, backend: Backend) -> Reason | None:
        """Bar a backend that has written to the weight, and return the reason; None where it has not.

        Raises:
            BackendError: That weight is the caller's own, so it is damaged.
        """
        if not self._is_changed():
            return None
        reason = Reason(ReasonCode.PLUGIN_ERROR, "wrote to the caller's weight while it prepared or computed")
        results.bar(backend.name, reason)
        own = {tensor.untyped_storage().data_ptr() for _, tensor in self.weight.tensors()}
        if any(tensor.untyped_storage().data_ptr() in own for tensor in self._tensors):
            raise BackendError(
                f"backend {backend.name!r} changed the caller's weight {self.weight.name or ''!r}",
                hint="Read or quantise the weight again; the backend will not be asked again in this process.",
            )
        return reason

    def _is_changed(self) -> bool:
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if version is not None and tensor._version != version:  # noqa: SLF001  # as above
                return True
        return any(not same_bytes(copy, tensor) for copy, tensor in zip(self._copies, self._tensors, strict=False))


def is_first_of_its_kind(results: ProbeResults, selection: Selection, backend: Backend) -> bool:
    """Return whether a path of the selection, or the backend's export, has not been probed yet."""
    parts = _parts(selection, backend).items()
    return any(results.result(backend.name, part, request, rows) is None for (request, part), rows in parts)


def _parts(selection: Selection, backend: Backend) -> dict[tuple[Request, KernelPath | None], list[int]]:
    """Return what is to be probed, and with how many rows: each path where it serves, and None for an export."""
    request = selection.backend_request
    parts: dict[tuple[Request, KernelPath | None], list[int]] = {}
    for asked, segments in ((request, selection.segments), (selection.gradient_request, selection.gradients)):
        for segment in segments:
            parts.setdefault((asked, segment.path), []).extend(row_counts(segment.path, segment.m))
    return parts | ({(request, None): []} if can_export(backend) else {})


def prove(
    results: ProbeResults, backend: Backend, prepared: Prepared, guard: SourceGuard, selection: Selection
) -> bool:
    """Run the probes that have not run yet, each told as an event; return whether everything is right.

    Args:
        results: What has been shown so far; new results are added.
        backend: Who prepared.
        prepared: What it prepared.
        guard: The weight that it prepared, as it was given.
        selection: Which paths are to serve.

    Raises:
        BackendError: The backend wrote to the caller's weight.
    """
    found: dict[tuple[Request, KernelPath | None], ProbeResult] = {}
    fresh: dict[tuple[Request, KernelPath | None], list[int]] = {}
    for (request, part), rows in _parts(selection, backend).items():
        result = results.result(backend.name, part, request, rows)
        if result is None:
            fresh[request, part] = rows
            with torch.no_grad():
                result = _probe(backend, prepared, guard.given, request, part, rows)
        found[request, part] = result
    reason = guard.bar_writer(results, backend)  # first, because numbers from a weight that was changed mean nothing
    if reason is not None:
        emit("q4.probe", level=logging.ERROR, backend=backend.name, passed=False, fault=reason.message)
        return False
    for (request, part), rows in fresh.items():
        result = found[request, part]
        results.record(backend.name, part, request, result, rows)
        emit(
            "q4.probe",
            level=logging.DEBUG if result.fault is None else logging.ERROR,
            backend=backend.name,
            path="export" if part is None else part.name,
            op=request.op,
            format=request.format.name,
            device=str(request.device),
            passed=result.fault is None,
            worst_ratio=result.worst_ratio,
            microseconds=round(result.microseconds),
            fault=None if result.fault is None else result.fault.message,
        )
    for (request, part), result in found.items():
        if result.fault is None:
            continue
        name = "export" if part is None else part.name
        what = f"backend {backend.name!r} is not used"
        if request.op == "input_gradient":
            name = f"input gradient {name}"
            what = f"{name} of backend {backend.name!r} is not used, another one or the core computes it,"
        message = f"{what} for {request.format.name}: {result.fault.message}"
        warn_once((backend.name, name, request.format.name), Q4ProbeWarning, message)
    return all(result.fault is None for result in found.values())


def _probe(  # noqa: PLR0913  # the facts of one probe
    backend: Backend,
    prepared: Prepared,
    source: PackedWeight,
    request: Request,
    path: KernelPath | None,
    rows: list[int],
) -> ProbeResult:
    if path is not None and request.op == "input_gradient":
        return probe_gradient(backend, prepared, source, request, path, rows)
    if path is not None:
        return probe_path(backend, prepared, source, request, path, rows)

    def export(rows: torch.Tensor | None) -> PackedWeight:
        shape = (request.out_features if rows is None else rows.numel(), request.in_features)
        return exported_weight(backend, prepared, rows, shape)

    return probe_export(backend.name, export, source, request)
