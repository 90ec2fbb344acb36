"""``Candidate``: one backend's answer to a request, and its paths laid over the range of M under a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from q4core.backend import KernelPath, PathKind, Precision, Reason, ReasonCode, Request, Segment, Support
from q4core.diagnostics.events import note_fault
from q4core.errors import PLUGIN_FAULTS
from q4core.formats import ScaleKind
from q4core.selection.result import Rejection
from q4core.weight import Feature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.backend import Backend, Capabilities
    from q4core.selection.probe_results import ProbeResults

_INFINITY = 1 << 62
_TABLE_STEPS, _WORD_STEPS = 126, 16382
"""A table may be this part of the largest value off: half a step of one of ±63, which leaves NF4 at NMSE 9e-5; with
int16 activations, of one of ±8191, which leaves it below 4e-9."""


@attrs.frozen
class Candidate:
    """A backend that was asked, with the request as it sees it, and its answer."""

    name: str
    request: Request
    support: Support
    segments: tuple[Segment, ...] = ()
    """Which of its paths would serve which M; empty where it can't serve."""
    faults: tuple[Reason, ...] = ()
    """Why paths may not run on this machine; where it refuses altogether, every reason why."""
    against: tuple[Reason, ...] = ()
    """Why the request rules out further paths."""

    @property
    def is_ruled_out(self) -> bool:
        """Whether it has working paths, and only the compute path and precision asked for keep it from serving."""
        codes = {reason.code for reason in (*self.faults, *self.against)}
        return bool(self.support.paths) and ReasonCode.POLICY in codes <= {ReasonCode.POLICY, ReasonCode.SHAPE}

    def path_at(self, rows: int) -> KernelPath:
        """Return the path that would serve a number of rows."""
        return next(item.path for item in self.segments if item.low <= rows <= (item.high or _INFINITY))

    def rejection(self, *more: Reason) -> Rejection:
        """Return why it does not serve: its own reasons, then ``more``."""
        against = () if self.segments else self.against
        return Rejection(self.name, (*self.faults, *against, *more), self.support.native_state)


def _ask(backend: Backend, request: Request, *, any_precision: bool) -> tuple[Request, Support]:
    """Ask the manifest, then the backend itself, with the request as it sees it; a backend that raises has refused."""
    try:
        capabilities = backend.capabilities
        kinds = capabilities.readable_kinds(request, any_precision=any_precision)
        # What no allowed precision reads, the core resolves first; a quantiser is asked for what is to be written.
        if request.op == "linear" and request.scale_kind not in kinds and ScaleKind.PLAIN in kinds:
            features = request.features - {Feature.ROW_GLOBAL_SCALE}
            # The offsets of a super-block are resolved with its scales.
            is_super = request.scale_kind is ScaleKind.SUPER_BLOCK and request.second_dtype is not None
            second = torch.float32 if is_super else request.second_dtype
            request = attrs.evolve(
                request,
                scale_kind=ScaleKind.PLAIN,
                scale_dtype=torch.float32,
                second_dtype=second,
                features=features,
            )
        refusals = capabilities.refusals(request, any_precision=any_precision)
        if refusals:
            return request, Support.no(refusals, native_state="not asked")
        support: object = backend.check(request)
    except PLUGIN_FAULTS as error:
        return request, _at_fault(f"check raised {note_fault(backend.name, error)}", "failed")
    if not isinstance(support, Support):
        return request, _at_fault(f"check must return a Support, got {type(support).__name__}", "failed")
    fault = _fault_of_offer(support.paths, request, capabilities)
    return request, support if fault is None else _at_fault(fault, support.native_state)


def _at_fault(message: str, native_state: str) -> Support:
    return Support.no([Reason(ReasonCode.PLUGIN_ERROR, message)], native_state=native_state)


def _fault_of_offer(paths: Sequence[KernelPath], request: Request, capabilities: Capabilities) -> str | None:
    """Say what of an offer breaks the contract, or None."""
    if len({path.name for path in paths}) != len(paths):
        return "offers two paths of one name"
    if request.op == "quantize":
        return None
    if any(path.kind is PathKind.QUANTIZE for path in paths):
        return "offers a quantiser where a product is asked for"
    undeclared = sorted(precision.value for precision in {path.precision for path in paths} - capabilities.precisions)
    return f"offers paths of precision {', '.join(undeclared)}, which it did not declare" if undeclared else None


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
    steps = _WORD_STEPS if path.precision is Precision.W4I16 else _TABLE_STEPS
    if distance <= peak / steps:
        return None
    message = f"path {path.name} declares a codebook up to {distance / peak:.3g} of its peak from the format's"
    return Reason(ReasonCode.PROBE_FAILED, f"{message}; at most {1 / steps:.3g} is allowed")


def _cover(paths: Sequence[KernelPath], wanted: tuple[int, int | None]) -> tuple[tuple[Segment, ...], str | None]:
    """Lay the best path over each stretch of M; say where none is."""
    low, high = wanted
    top = _INFINITY if high is None else high
    cuts = {low, *(path.m[0] for path in paths), *(path.m[1] + 1 for path in paths if path.m[1] is not None)}
    starts = sorted(cut for cut in cuts if low <= cut <= top)
    segments: list[Segment] = []
    for start, following in zip(starts, [*starts[1:], top + 1], strict=True):
        last = None if following > _INFINITY else following - 1
        serving = [path for path in paths if path.covers(start)]
        if not serving:
            return (), f"no path for M in {start}…{'∞' if last is None else last}"
        best = min(serving, key=lambda path: (-path.tier, path.name))
        if segments and segments[-1].path == best:
            start = segments.pop().low  # noqa: PLW2901  # one stretch
        segments.append(Segment(start, last, best))
    return tuple(segments), None


def assess(  # noqa: PLR0913  # one argument per fact
    backend: Backend,
    request: Request,
    kinds: frozenset[PathKind],
    results: ProbeResults,
    failures: tuple[Reason, ...] = (),
    forward: tuple[Segment, ...] = (),
) -> Candidate:
    """Return how a backend would serve a request with paths of some kinds, or every reason why not.

    With ``failures``, for which it could not prepare the weight at hand, it is asked for its state alone. ``forward``
    is what it serves forward with, where its input gradients are asked for.
    """
    name, is_gradient = backend.name, request.op == "input_gradient"
    # Which precision is asked for does not count for the reference, nor for gradients, which are always exact.
    any_precision = is_gradient or kinds == {PathKind.REFERENCE}
    adapted, support = _ask(backend, request, any_precision=any_precision)
    if support.reasons or failures:
        return Candidate(name, adapted, support, faults=support.reasons or failures)
    allowed: list[KernelPath] = []
    faults: dict[Reason, None] = {}
    against: list[Reason] = []
    for path in support.paths:
        what = f"{'input gradient' if is_gradient else 'path'} {path.name}"
        precision, kind = path.precision, adapted.scale_kind
        if request.op == "linear" and kind not in backend.capabilities.scale_kinds_of(precision):
            message = f"{what}: scale kind {kind.value!r} is not declared for {precision.value}"
            against.append(Reason(ReasonCode.FORMAT, message))
        elif fault := _fault_of_table(path, adapted) or results.disqualified(name, path, adapted):
            faults[fault] = None
        elif path.kind not in kinds:
            against.append(Reason(ReasonCode.POLICY, f"{what} is of kind {path.kind.value}"))
        elif is_gradient and not precision.is_exact:
            against.append(Reason(ReasonCode.POLICY, f"{what} computes in {precision.value}, and must be exact"))
        elif not any_precision and not request.allows(precision):
            message = f"{what} computes in {precision.value}, asked for {request.precision.value}"
            against.append(Reason(ReasonCode.POLICY, message))
        else:
            allowed.append(path)
    segments, gap = _cover(allowed, request.m) if allowed else ((), None)
    if gap is not None:
        against.append(Reason(ReasonCode.SHAPE, f"{gap} among the input gradients" if is_gradient else gap))
    refusals = results.refused(name, (*forward, *segments), adapted) if segments else ()
    if refusals:
        return Candidate(name, adapted, support, faults=(*refusals, *faults))
    return Candidate(name, adapted, support, segments, tuple(faults), tuple(against))
