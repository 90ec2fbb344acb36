"""Proves a prepared weight before it may serve: its paths, its export, and that the caller's weight is untouched."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from q4core.backend import Reason, ReasonCode
from q4core.errors import BackendError, Q4ProbeWarning
from q4core.events import emit, warn_once
from q4core.export_probe import probe_export
from q4core.gradient_probe import probe_gradient
from q4core.plan import as_bytes, exported_weight
from q4core.probe import probe_path
from q4core.probe_book import ProbeBook, ProbeResult, row_counts

if TYPE_CHECKING:
    from q4core.backend import Backend, KernelPath, Prepared, Request
    from q4core.registry import Registry
    from q4core.selection import Selection
    from q4core.weight import PackedWeight

__all__ = ["SourceGuard", "bar_writer", "can_export", "is_first_of_its_kind", "probe_book", "prove"]

_books: weakref.WeakKeyDictionary[Registry, ProbeBook] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def probe_book(registry: Registry) -> ProbeBook:
    """Return what self-probes have shown of a registry's backends in this process."""
    book = _books.get(registry)
    if book is None:
        with _lock:
            book = _books.setdefault(registry, ProbeBook())
    return book


def can_export(backend: Backend) -> bool:
    """Return whether a backend has the optional ``export``."""
    return callable(getattr(backend, "export", None))


class SourceGuard:
    """Notices whether ``prepare`` wrote to the weight that it was given.

    Writes through torch move a tensor's version; writes through an address do not, so the first weight of a kind is
    compared with a copy as well.
    """

    def __init__(self, weight: PackedWeight, *, is_first: bool) -> None:
        tensors = [tensor for _, tensor in weight.tensors()]
        self._tensors = tensors
        self._versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]  # noqa: SLF001  # torch's documented counter of in-place changes
        self._copies = [tensor.clone() for tensor in tensors] if is_first else []

    def is_broken(self) -> bool:
        """Return whether a tensor has changed since the guard was set."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if version is not None and tensor._version != version:  # noqa: SLF001  # as above
                return True
        return any(
            not torch.equal(as_bytes(copy), as_bytes(tensor))  # NaN equals itself
            for copy, tensor in zip(self._copies, self._tensors, strict=False)
        )


def is_first_of_its_kind(book: ProbeBook, selection: Selection, backend: Backend) -> bool:
    """Return whether a path of the selection, or the backend's export, has not been probed yet."""
    parts = _parts(selection, backend).items()
    return any(book.result(backend.name, part, request, rows) is None for (request, part), rows in parts)


def _parts(selection: Selection, backend: Backend) -> dict[tuple[Request, KernelPath | None], list[int]]:
    """Return what is to be probed, and with how many rows: each path where it serves, and None for an export."""
    request = selection.backend_request
    parts: dict[tuple[Request, KernelPath | None], list[int]] = {}
    for asked, segments in ((request, selection.segments), (selection.gradient_request, selection.gradients)):
        for segment in segments:
            parts.setdefault((asked, segment.path), []).extend(row_counts(segment.path, segment.m))
    return parts | ({(request, None): []} if can_export(backend) else {})


def bar_writer(book: ProbeBook, backend: Backend, weight: PackedWeight, given: PackedWeight) -> None:
    """Bar a backend whose ``prepare`` wrote to the weight that it was given.

    Raises:
        BackendError: That weight is the caller's own, so it is damaged.
    """
    book.bar(backend.name, Reason(ReasonCode.PLUGIN_ERROR, "prepare wrote to the caller's weight"))
    own = {tensor.untyped_storage().data_ptr() for _, tensor in weight.tensors()}
    if any(tensor.untyped_storage().data_ptr() in own for _, tensor in given.tensors()):
        raise BackendError(
            f"prepare of backend {backend.name!r} changed the caller's weight {weight.name or ''!r}",
            hint="Read or quantise the weight again; the backend will not be asked again in this process.",
        )


def prove(book: ProbeBook, backend: Backend, prepared: Prepared, source: PackedWeight, selection: Selection) -> bool:
    """Run the probes that have not run yet, each told as an event; return whether everything is right.

    Args:
        book: What has been shown so far; results are added.
        backend: Who prepared.
        prepared: What it prepared.
        source: The weight that it prepared, as it was given.
        selection: Which paths are to serve.
    """
    good = True
    for (request, part), rows in _parts(selection, backend).items():
        result = book.result(backend.name, part, request, rows)
        name = "export" if part is None else part.name
        if result is None:
            with torch.no_grad():
                result = _probe(backend, prepared, source, request, part, rows)
            book.record(backend.name, part, request, result, rows)
            emit(
                "q4.probe",
                level=logging.DEBUG if result.fault is None else logging.ERROR,
                backend=backend.name,
                path=name,
                op=request.op,
                format=request.format.name,
                device=str(request.device),
                passed=result.fault is None,
                worst_ratio=result.worst_ratio,
                microseconds=round(result.microseconds),
                fault=None if result.fault is None else result.fault.message,
            )
        if result.fault is not None:
            good = False
            if request.op == "input_gradient":
                name = f"input gradient {name}"
                what = f"{name} of backend {backend.name!r} is not used, another one or the core computes it,"
            else:
                what = f"backend {backend.name!r} is not used"
            message = f"{what} for {request.format.name}: {result.fault.message}"
            warn_once((backend.name, name, request.format.name), Q4ProbeWarning, message)
    return good


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
