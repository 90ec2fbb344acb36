"""``Candidate``: one backend's answer to a request, and its paths laid over the range of M under a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from q4core.backend import KernelPath, PathKind, Reason, ReasonCode, Request, Segment, Support
from q4core.diagnostics.errors_of_plugins import note_fault
from q4core.errors import PLUGIN_FAULTS
from q4core.formats import ScaleKind
from q4core.selection.result import Rejection
from q4core.weight import Feature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.backend import Backend, Capabilities
    from q4core.selection.probe_results import ProbeResults

__all__ = ["Candidate", "adapt_request", "assess", "assess_gradient"]

_INFINITY = 1 << 62
_TABLE_STEPS = 126
"""A table may be this part of the largest value off: half a step of one of ±63, which leaves NF4 at NMSE 9e-5."""


@attrs.frozen
class Candidate:
    """A backend that was asked.

    Args:
        name: Its name.
        request: The request as it sees it.
        support: Its answer.
        segments: Which of its paths would serve which M; empty where it can't serve.
        reasons: Why paths may not run on this machine; where it can't serve, every reason why.
    """

    name: str
    request: Request
    support: Support
    segments: tuple[Segment, ...]
    reasons: tuple[Reason, ...]

    @property
    def is_ruled_out(self) -> bool:
        """Whether it has working paths, and only the compute path and precision asked for keep it from serving."""
        codes = {reason.code for reason in self.reasons}
        return bool(self.support.paths) and ReasonCode.POLICY in codes <= {ReasonCode.POLICY, ReasonCode.SHAPE}

    def path_at(self, rows: int) -> KernelPath:
        """Return the path that would serve a number of rows."""
        return next(item.path for item in self.segments if item.low <= rows <= _end(item))

    def rejection(self, *more: Reason) -> Rejection:
        """Return why it does not serve: its own reasons, then ``more``."""
        return Rejection(self.name, (*self.reasons, *more), self.support.native_state)


def _end(segment: Segment) -> int:
    return _INFINITY if segment.high is None else segment.high


def adapt_request(request: Request, capabilities: Capabilities, *, any_precision: bool = False) -> Request:
    """Return the request as a backend would see it once the core has resolved what the backend does not read.

    A scale kind that none of the precisions asked for declares becomes PLAIN float32, if one of them declares that. A
    quantiser is asked for what is to be written, as it is.
    """
    if request.op != "linear":
        return request
    kinds = capabilities.readable_kinds(request, any_precision=any_precision)
    if request.scale_kind not in kinds and ScaleKind.PLAIN in kinds:
        features = request.features - {Feature.ROW_GLOBAL_SCALE}
        request = attrs.evolve(request, scale_kind=ScaleKind.PLAIN, scale_dtype=torch.float32, features=features)
    return request


def _ask(backend: Backend, request: Request, *, any_precision: bool) -> tuple[Request, Support]:
    """Ask the manifest, then the backend itself; a backend that raises has refused."""
    adapted = request
    try:
        capabilities = backend.capabilities
        adapted = adapt_request(request, capabilities, any_precision=any_precision)
        refusals = capabilities.refusals(adapted, any_precision=any_precision)
        if refusals:
            return adapted, Support.no(refusals, native_state="not asked")
        support: object = backend.check(adapted)
    except PLUGIN_FAULTS as error:
        return adapted, _at_fault(f"check raised {note_fault(backend.name, error)}", "failed")
    if not isinstance(support, Support):
        return adapted, _at_fault(f"check must return a Support, got {type(support).__name__}", "failed")
    fault = _fault_of_offer(support.paths, request, capabilities)
    return adapted, support if fault is None else _at_fault(fault, support.native_state)


def _fault_of_offer(paths: Sequence[KernelPath], request: Request, capabilities: Capabilities) -> str | None:
    """Say what of an offer breaks the contract, or None."""
    if len({path.name for path in paths}) != len(paths):
        return "offers two paths of one name"
    if request.op == "quantize":
        return None
    if any(path.kind is PathKind.QUANTIZE for path in paths):
        return "offers a quantiser where a product is asked for"
    undeclared = {path.precision for path in paths} - capabilities.precisions
    if undeclared:
        names = ", ".join(sorted(precision.value for precision in undeclared))
        return f"offers paths of precision {names}, which it did not declare"
    return None


def _fault_of_table(path: KernelPath, request: Request) -> Reason | None:
    """Judge the table by which a path approximates the codebook, once, against the format."""
    if path.codebook is None:
        return None
    wanted = request.format.codebook
    if Feature.CUSTOM_CODEBOOK in request.features or len(path.codebook) != len(wanted):
        message = f"path {path.name} declares a codebook of {len(path.codebook)} values, which is not the weight's"
        return Reason(ReasonCode.PROBE_FAILED, message)
    distance = max(abs(own - value) for own, value in zip(path.codebook, wanted, strict=True))
    peak = max(map(abs, wanted))
    if distance <= peak / _TABLE_STEPS:
        return None
    message = f"path {path.name} declares a codebook up to {distance / peak:.3g} of its peak from the format's"
    return Reason(ReasonCode.PROBE_FAILED, f"{message}; at most {1 / _TABLE_STEPS:.3g} is allowed")


def _at_fault(message: str, native_state: str) -> Support:
    return Support.no([Reason(ReasonCode.PLUGIN_ERROR, message)], native_state=native_state)


def _cover(paths: Sequence[KernelPath], wanted: tuple[int, int | None]) -> tuple[tuple[Segment, ...], str | None]:
    """Lay the best path over each stretch of M; say where none is."""
    low, high = wanted
    top = _INFINITY if high is None else high
    cuts = {low}
    for path in paths:
        cuts.add(max(low, path.m[0]))
        if path.m[1] is not None:
            cuts.add(path.m[1] + 1)
    starts = sorted(cut for cut in cuts if low <= cut <= top)
    segments: list[Segment] = []
    for start, following in zip(starts, [*starts[1:], top + 1], strict=True):
        serving = [path for path in paths if path.covers(start)]
        if not serving:
            end = "∞" if following > _INFINITY else following - 1
            return (), f"no path for M in {start}…{end}"
        best = min(serving, key=lambda path: (-path.tier, path.name))
        last = None if following > _INFINITY else following - 1
        if segments and segments[-1].path == best:
            segments[-1] = Segment(segments[-1].low, last, best)
        else:
            segments.append(Segment(start, last, best))
    return tuple(segments), None


def _sift(
    name: str, paths: Sequence[KernelPath], request: Request, results: ProbeResults
) -> tuple[list[KernelPath], list[Reason]]:
    """Return the paths that nothing has disqualified, and what has disqualified the others."""
    sound: list[KernelPath] = []
    faults: list[Reason] = []
    for path in paths:
        fault = _fault_of_table(path, request) or results.disqualified(name, path, request)
        if fault is None:
            sound.append(path)
        elif fault not in faults:
            faults.append(fault)
    return sound, faults


def _readable(
    paths: Sequence[KernelPath], request: Request, capabilities: Capabilities
) -> tuple[tuple[KernelPath, ...], list[Reason]]:
    """Return the paths whose precision declares the request's scale kind, and why not the others."""
    reading = tuple(
        path
        for path in paths
        if request.op != "linear" or request.scale_kind in capabilities.scale_kinds_of(path.precision)
    )
    kind = request.scale_kind.value
    return reading, [
        Reason(ReasonCode.FORMAT, f"path {path.name}: scale kind {kind!r} is not declared for {path.precision.value}")
        for path in paths
        if path not in reading
    ]


def assess(  # noqa: PLR0913  # one argument per fact
    backend: Backend,
    request: Request,
    kinds: frozenset[PathKind],
    results: ProbeResults,
    failures: tuple[Reason, ...],
    *,
    any_precision: bool,
) -> Candidate:
    """Return how a backend would serve a request with paths of some kinds, or every reason why not.

    Args:
        backend: Who is asked.
        request: What is asked.
        kinds: Which kinds of path may serve.
        results: What self-probes have shown.
        failures: Why it could not prepare the weight at hand; it is asked for its state alone.
        any_precision: The request's precision does not count, as it does not for the reference.
    """
    adapted, support = _ask(backend, request, any_precision=any_precision)
    if support.reasons or failures:
        return Candidate(backend.name, adapted, support, (), support.reasons or failures)
    paths, unread = _readable(support.paths, adapted, backend.capabilities)
    sound, faults = _sift(backend.name, paths, adapted, results)
    reasons = [*faults, *unread]
    allowed = []
    for path in sound:
        if path.kind not in kinds:
            reasons.append(Reason(ReasonCode.POLICY, f"path {path.name} is of kind {path.kind.value}"))
        elif not any_precision and not request.allows(path.precision):
            message = f"path {path.name} computes in {path.precision.value}, asked for {request.precision.value}"
            reasons.append(Reason(ReasonCode.POLICY, message))
        else:
            allowed.append(path)
    segments, gap = _cover(allowed, request.m) if allowed else ((), None)
    if gap is not None:
        reasons.append(Reason(ReasonCode.SHAPE, gap))
    refusals = results.refused(backend.name, segments, adapted) if segments else ()
    if refusals:
        return Candidate(backend.name, adapted, support, (), (*refusals, *faults))
    return Candidate(backend.name, adapted, support, segments, tuple(faults if segments else reasons))


def assess_gradient(
    backend: Backend, winner: Candidate, kinds: frozenset[PathKind], results: ProbeResults
) -> tuple[tuple[Segment, ...], tuple[Reason, ...]]:
    """Return which input gradient of the winner serves which M, and why others may not; without one the core computes.

    Whatever precision forward has, gradients are exact.
    """
    adapted, support = _ask(backend, attrs.evolve(winner.request, op="input_gradient"), any_precision=True)
    if support.reasons:
        return (), support.reasons
    sound, reasons = _sift(backend.name, support.paths, adapted, results)
    allowed = []
    for path in sound:
        if path.kind not in kinds:
            reasons.append(Reason(ReasonCode.POLICY, f"input gradient {path.name} is of kind {path.kind.value}"))
        elif not path.precision.is_exact:
            message = f"input gradient {path.name} computes in {path.precision.value}, and must be exact"
            reasons.append(Reason(ReasonCode.POLICY, message))
        else:
            allowed.append(path)
    segments, gap = _cover(allowed, winner.request.m) if allowed else ((), None)
    if gap is not None:
        reasons.append(Reason(ReasonCode.SHAPE, f"{gap} among the input gradients"))
    refusals = results.refused(backend.name, (*winner.segments, *segments), adapted) if segments else ()
    return (() if refusals else segments), (*refusals, *reasons)
