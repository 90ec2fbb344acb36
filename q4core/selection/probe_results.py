"""``ProbeResults``: which paths of one registry's backends have passed their self-probes, and which may not run."""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from typing import TYPE_CHECKING

import attrs

from q4core.backend import Request
from q4core.diagnostics.events import emit, warn_once
from q4core.errors import Q4ProbeWarning
from q4core.selection.proofs import Proofs

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from q4core.backend import KernelPath, Reason, Segment
    from q4core.plugins.registry import Registry

_UNRELATED = {"precision", "gradients", "m", "out_features", "in_features"}
_FACTS = operator.attrgetter(*(field.name for field in attrs.fields(Request) if field.name not in _UNRELATED))
"""What of a request a path's code may depend on, besides the tails of N and K."""
_OPEN_END_ROWS = 16
_MOST_ROWS = 128


@attrs.frozen
class ProbeResult:
    """What one probe showed: ``fault`` is None when the path is right."""

    fault: Reason | None
    worst_ratio: float
    """Largest error divided by its bound; at most 1 when right."""
    microseconds: float
    is_remembered: bool = False
    """Whether another process has shown it, on this machine and with the same build."""


class ProbeResults:
    """The results of self-probes in this process, the backends that are barred, and the refusals to prepare.

    Results are stored by all that a path's code may depend on. A path of None stands for the backend's ``export``.

    Args:
        proofs: Where paths that were right on this machine's CPU are remembered for the next process; None: nowhere.
    """

    def __init__(self, proofs: Proofs | None = None) -> None:
        self.proofs = proofs
        self._recalled: set[Hashable] = set()
        self._shown: dict[Hashable, tuple[ProbeResult, frozenset[int]]] = {}
        self._refusals: dict[Hashable, tuple[Reason, ...]] = {}
        self._barred: dict[str, Reason] = {}
        self._lock = threading.Lock()
        self.generation = 0

    @staticmethod
    def key(backend: str, path: KernelPath | None, request: Request) -> Hashable:
        """Return what a result holds for: backend, path, op, weight and call facts, device, tail classes of N and K."""
        return backend, path, _FACTS(request), request.out_features % 32, request.in_features % 256

    def record(
        self, backend: str, path: KernelPath | None, request: Request, result: ProbeResult, rows: Iterable[int] = ()
    ) -> None:
        """Store a result, with the numbers of rows it was found for, and report it; a path once wrong stays so."""
        key, rows = self.key(backend, path, request), frozenset(rows)
        with self._lock:
            known, seen = self._shown.get(key, (result, frozenset[int]()))
            self._shown[key] = (result if known.fault is None else known, seen | rows)
            self.generation += 1
        is_news = not known.is_remembered or not rows <= seen
        if self.proofs is not None and is_news and known.fault is result.fault is None and request.device.type == "cpu":
            what = f"{_label(path, request)}, {request.op} of {request.format.name}"
            self.proofs.add(backend, key, rows, what)
        elif self.proofs is not None and result.fault is not None:
            self.proofs.forget()  # where one path computes wrong, what others showed before is in doubt
        self._report(backend, path, request, result)

    @staticmethod
    def _report(backend: str, path: KernelPath | None, request: Request, result: ProbeResult) -> None:
        emit(
            "q4.probe",
            level=logging.DEBUG if result.fault is None else logging.ERROR,
            backend=backend,
            path=_label(path, request),
            op=request.op,
            format=request.format.name,
            device=str(request.device),
            passed=result.fault is None,
            remembered=result.is_remembered,
            worst_ratio=result.worst_ratio,
            microseconds=round(result.microseconds),
            fault=None if result.fault is None else result.fault.message,
        )

    def refuse(
        self, backend: str, segments: tuple[Segment, ...], request: Request, reasons: tuple[Reason, ...]
    ) -> None:
        """Store for which reasons a backend refused to prepare these paths."""
        with self._lock:
            self._refusals[self.key(backend, None, request), segments] = reasons
            self.generation += 1

    def bar(self, backend: str, reason: Reason) -> None:
        """Let nothing of a backend run any more."""
        with self._lock:
            self._barred[backend] = reason
            self.generation += 1

    def refused(self, backend: str, segments: tuple[Segment, ...], request: Request) -> tuple[Reason, ...]:
        """Return for which reasons a backend has refused to prepare these paths for requests like this one, or ()."""
        return self._refusals.get((self.key(backend, None, request), segments), ())

    def result(
        self, backend: str, path: KernelPath | None, request: Request, rows: Iterable[int] = ()
    ) -> ProbeResult | None:
        """Return what a probe showed, or None where none has run, or the path passed it for fewer numbers of rows."""
        key = self.key(backend, path, request)
        if self.proofs is not None and key not in self._recalled and request.device.type == "cpu":
            self._recall(self.proofs, backend, path, request)
        result, seen = self._shown.get(key, (None, frozenset[int]()))
        # A narrow range proves nothing about a wide one.
        return result if result is None or result.fault is not None or seen.issuperset(rows) else None

    def _recall(self, proofs: Proofs, backend: str, path: KernelPath | None, request: Request) -> None:
        """Take over what another process has proven."""
        key = self.key(backend, path, request)
        self._recalled.add(key)
        rows = proofs.rows(backend, key)
        if rows is None:
            return
        result = ProbeResult(None, 0.0, 0.0, is_remembered=True)
        with self._lock:
            known, seen = self._shown.get(key, (result, frozenset[int]()))
            self._shown[key] = known, seen | rows
        self._report(backend, path, request, result)

    def disqualified(self, backend: str, path: KernelPath, request: Request) -> Reason | None:
        """Return why a path may not run on this machine, or None."""
        shown = (self.result(backend, part, request) for part in (path, None))
        return self._barred.get(backend) or next((item.fault for item in shown if item and item.fault), None)

    def proven(self, backend: str, segment: Segment, request: Request) -> bool:
        """Return whether a path has passed its probe for this range of M in requests like this one."""
        result = self.result(backend, segment.path, request, row_counts(segment.path, segment.m))
        return result is not None and result.fault is None


def warn_of_fault(backend: str, path: KernelPath | None, request: Request, fault: Reason) -> None:
    """Warn that what a backend offers is not used, once for each format."""
    what, text = _label(path, request), f"backend {backend!r} is not used"
    if request.op == "input_gradient":
        what = f"input gradient {what}"
        text = f"{what} of backend {backend!r} is not used, another one or the core computes it,"
    message = f"{text} for {request.format.name}: {fault.message}"
    warn_once((backend, what, request.format.name), Q4ProbeWarning, message)


def _label(path: KernelPath | None, request: Request) -> str:
    if path is None:
        return "export"
    return f"{path.name}, {request.rounding.value}" if request.op == "quantize" else path.name


def row_counts(path: KernelPath, wanted: tuple[int, int | None]) -> list[int]:
    """Return the rows of x that a path is probed with in a range of M.

    These are its ends, an open or far one cut, and those of the path's further rows that lie in it.
    """
    low = max(path.m[0], wanted[0])
    ends = [end for end in (path.m[1], wanted[1]) if end is not None]
    top = min(ends, default=None)
    high = low + _OPEN_END_ROWS if top is None else top
    further = {rows for rows in path.probe_rows if low <= rows and (top is None or rows <= top)}
    return sorted({low, min(low + 1, high), min(high, max(low, _MOST_ROWS))} | further)


_results: weakref.WeakKeyDictionary[Registry, ProbeResults] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def probe_results(registry: Registry) -> ProbeResults:
    """Return the results of one registry's backends in this process."""
    results = _results.get(registry)
    if results is None:
        with _lock:
            proofs = Proofs.here(registry) if registry.is_installed else None
            results = _results.setdefault(registry, ProbeResults(proofs))
    return results
