"""``Trial``: one backend's try at one weight, with the self-probes that it must pass before it serves."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from q4core.backend import Prepared, Reason, ReasonCode
from q4core.diagnostics.events import emit, note_fault
from q4core.errors import PLUGIN_FAULTS, BackendError, PrepareError
from q4core.formats import same_bytes
from q4core.machine.torch_state import on_device
from q4core.probes.export import probe_export
from q4core.probes.linear import probe_path
from q4core.selection.plan import exported_weight
from q4core.selection.probe_results import ProbeResult, ProbeResults, row_counts, warn_of_fault
from q4core.weight import Feature

if TYPE_CHECKING:
    from q4core.backend import Backend, KernelPath, PrepareContext, Request
    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight


_FEW_ELEMENTS, _FEW_ROWS = 1 << 15, (16, 128)
"""Out-features of an imported weight that are compared: torch decodes these in one thread, without a wait."""


def can_export(backend: Backend) -> bool:
    """Return whether a backend has the optional ``export``."""
    return callable(getattr(backend, "export", None))


class Trial:
    """One backend's try at one weight, of which it is ``given`` a form, often the same tensors, to read and not write.

    Writes through torch move a tensor's version; writes through an address do not, so the first weight of a kind is
    compared with a copy, byte by byte.
    """

    def __init__(
        self, results: ProbeResults, selection: Selection, backend: Backend, weight: PackedWeight, given: PackedWeight
    ) -> None:
        self._results, self._selection, self._backend = results, selection, backend
        self._weight, self._given = weight, given
        # Each path with the numbers of rows that it is probed with, and None for the export.
        self._parts: dict[tuple[Request, KernelPath | None], list[int]] = {}
        asked, gradients = selection.backend_request, selection.gradient_request
        for request, segments in ((asked, selection.segments), (gradients, selection.gradients)):
            for segment in segments:
                rows = self._parts.setdefault((request, segment.path), [])
                rows += row_counts(segment.path, segment.m)
        if can_export(backend):
            self._parts[asked, None] = []
        self._unproven = {part: rows for part, rows in self._parts.items() if self._known(*part, rows) is None}
        tensors = [tensor for _, tensor in given.tensors()]
        self._before = [(tensor, tensor._version, tensor.clone() if self._unproven else None) for tensor in tensors]  # noqa: SLF001  # torch's documented counter of in-place changes

    def _known(self, request: Request, path: KernelPath | None, rows: list[int]) -> ProbeResult | None:
        return self._results.result(self._backend.name, path, request, rows)

    def convert(self, context: PrepareContext) -> Prepared | tuple[Reason, ...]:
        """Let the backend prepare the weight; what it refuses or what goes wrong there are reasons to ask the next one.

        Raises:
            BackendError: The backend wrote to the caller's weight.
        """
        name, layer, request = self._backend.name, self._weight.name, self._selection.backend_request
        started = time.perf_counter()
        fault: Reason | None = None
        refusals: tuple[Reason, ...] = ()
        is_lasting = True
        try:
            with on_device(request.device):
                prepared = _checked(self._backend.prepare(self._given, request, context), request.device)
        except PrepareError as error:
            refusals, is_lasting = error.reasons, not error.is_for_this_weight
            if not refusals or not all(isinstance(reason, Reason) for reason in refusals):
                fault = Reason(ReasonCode.PLUGIN_ERROR, f"prepare refused without a Reason, with {refusals!r}")
        except PLUGIN_FAULTS as error:
            fault = Reason(ReasonCode.PLUGIN_ERROR, f"prepare raised {note_fault(name, error)}")
        else:  # it is proven next, and the weight compared then
            taken = round((time.perf_counter() - started) * 1e6)
            size, source = prepared.nbytes, self._weight.nbytes
            emit("q4.prepare", layer=layer, backend=name, bytes=size, source_bytes=source, microseconds=taken)
            return prepared
        fault = self._bar_writer() or fault
        if fault is not None:
            emit("q4.prepare", level=logging.ERROR, layer=layer, backend=name, error=fault.message)
            return (fault,)
        if is_lasting:
            segments, gradients = self._selection.segments, self._selection.gradients
            asked = self._selection.gradient_request if gradients else request
            self._results.refuse(name, (*segments, *gradients), asked, refusals)
        refused = [str(reason) for reason in refusals]
        emit("q4.prepare", level=logging.WARNING, layer=layer, backend=name, refused=refused)
        return refusals

    def _bar_writer(self) -> Reason | None:
        """Bar the backend if it has written to the weight, and return the reason; None where it has not.

        Raises:
            BackendError: That weight is the caller's own, so it is damaged.
        """
        if not any(
            tensor._version != version or (copy is not None and not same_bytes(copy, tensor))  # noqa: SLF001  # as above
            for tensor, version, copy in self._before
        ):
            return None
        reason = Reason(ReasonCode.PLUGIN_ERROR, "wrote to the caller's weight while it prepared or computed")
        self._results.bar(self._backend.name, reason)
        own = {tensor.untyped_storage().data_ptr() for _, tensor in self._weight.tensors()}
        if any(tensor.untyped_storage().data_ptr() in own for tensor, *_ in self._before):
            raise BackendError(
                f"backend {self._backend.name!r} changed the caller's weight {self._weight.name or ''!r}",
                hint="Read or quantise the weight again; the backend will not be asked again in this process.",
            )
        return reason

    def prove(self, prepared: Prepared) -> bool:
        """Run the probes that have not run yet, each reported as an event; return whether everything is right.

        Raises:
            BackendError: The backend wrote to the caller's weight.
        """
        name = self._backend.name
        backend, given = self._backend, self._given
        with torch.no_grad():
            shown = {
                (request, path): probe_export(backend, prepared, given)
                if path is None
                else probe_path(backend, prepared, given, request, path, rows)
                for (request, path), rows in self._unproven.items()
            }
        reason = self._bar_writer()  # first, because numbers from a weight that was changed mean nothing
        if reason is not None:
            emit("q4.probe", level=logging.ERROR, backend=name, passed=False, fault=reason.message)
            return False
        for (request, path), result in shown.items():
            self._results.record(name, path, request, result, self._unproven[request, path])
        is_right = True
        for (request, path), rows in self._parts.items():
            known = self._known(request, path, rows)
            if known is not None and known.fault is not None:
                is_right = False
                warn_of_fault(name, path, request, known.fault)
        return is_right


def prove_imported(results: ProbeResults, selection: Selection, backend: Backend, prepared: Prepared) -> bool:
    """Probe what another process has prepared and proven, the first of its kind here; return whether it is right.

    Its source is what the backend exports, of 16 to 128 out-features. Each path runs with the fewest rows that it
    serves, so that the next weight of the kind that this process prepares itself is probed as if there had been none.
    """
    asked, is_right = selection.backend_request, True
    parts = [(asked, segment) for segment in selection.segments]
    parts += [(selection.gradient_request, segment) for segment in selection.gradients]
    for request, segment in parts:
        path, rows = segment.path, row_counts(segment.path, segment.m)[:1]
        known = results.result(backend.name, path, request, rows)
        if known is None or known.is_remembered:  # nobody has read these tensors yet
            # An input gradient sums over all out-features, and blocks that run across rows are exported whole.
            is_whole = request is not asked or Feature.FLAT_BLOCKS in request.features
            columns = None if is_whole else _few(request.out_features, request.in_features)
            with torch.no_grad():
                source = exported_weight(backend, prepared, columns, (request.out_features, request.in_features))
                known = probe_path(backend, prepared, source, request, path, rows, columns)
            results.record(backend.name, path, request, known, rows)
        if known.fault is not None:
            is_right = False
            warn_of_fault(backend.name, path, request, known.fault)
    return is_right


def _few(total: int, columns: int) -> torch.Tensor:
    least, most = _FEW_ROWS
    count = min(total, most, max(least, _FEW_ELEMENTS // columns))
    return torch.linspace(0, total - 1, count, dtype=torch.float64).round().to(torch.int64)


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
