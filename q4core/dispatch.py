"""Turns a request into a ``Selection``: one winner, and a reason for every loser.

Selection is a pure function of (request, backends, wishes, what probes have shown): no globals, no effect of the order
of registration. Paths are compared where they would run: at the lowest M asked for first, then at each higher M at
which any candidate changes path; the higher tier wins, ties go by name.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, NoReturn

import attrs
import torch

from q4core.backend import KernelPath, PathKind, Precision, Reason, ReasonCode, Request, Verdict
from q4core.errors import PLUGIN_FAULTS, BackendUnavailableError, PolicyConflictError, UnknownBackendError
from q4core.formats import ScaleKind
from q4core.packing import NibbleOrder
from q4core.policy import ActivationPrecision, ComputePath
from q4core.selection import NO_HISTORY, ProbeHistory, Rejection, Segment, Selection
from q4core.weight import Feature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4core.backend import Backend, Capabilities
    from q4core.packing import Packing
    from q4core.registry import RefusedBackend

__all__ = ["adapt_request", "select_backend"]

_KINDS = {
    ComputePath.AUTO: frozenset(PathKind),
    ComputePath.KERNEL_ONLY: frozenset({PathKind.KERNEL}),
    ComputePath.KERNEL_OR_FALLBACK: frozenset({PathKind.KERNEL}),
    ComputePath.DEQUANT_MATMUL_ONLY: frozenset({PathKind.REFERENCE}),
}
_EXACT = frozenset({Precision.W4A32, Precision.W4A16})
_INFINITY = 1 << 62
_LIKENESS = 0.4
"""From which likeness on a name is worth suggesting; "dequnt" and "dequant-fallback" have 0.55."""


@attrs.frozen
class _Candidate:
    name: str
    request: Request
    verdict: Verdict
    segments: tuple[Segment, ...]
    disqualified: tuple[Reason, ...]


def adapt_request(request: Request, capabilities: Capabilities) -> Request:
    """Return the request as a backend would see it once the core has resolved what the backend does not read.

    A scale kind that is not declared becomes PLAIN float32, if that is; a packing that is not declared becomes the
    first declared one (by name) that the row length allows.
    """
    if request.scale_kind not in capabilities.scale_kinds and ScaleKind.PLAIN in capabilities.scale_kinds:
        features = request.features - {Feature.ROW_GLOBAL_SCALE}
        request = attrs.evolve(request, scale_kind=ScaleKind.PLAIN, scale_dtype=torch.float32, features=features)
    if capabilities.packings and request.packing not in capabilities.packings:
        for packing in sorted(capabilities.packings, key=str):
            if _fits(packing, request):
                return attrs.evolve(request, packing=packing)
    return request


def _fits(packing: Packing, request: Request) -> bool:
    if packing.codes_per_byte != request.packing.codes_per_byte:
        return False
    if packing.order is NibbleOrder.HALF_SPLIT:
        return request.in_features % packing.group == 0 and Feature.FLAT_BLOCKS not in request.features
    return True


def _precision_allows(request: Request, path: KernelPath) -> bool:
    wish = request.precision
    if wish is ActivationPrecision.AUTO:
        exact_only = request.gradients or request.device.type != "cpu"
        return path.precision in _EXACT or (path.precision is Precision.W4A8 and not exact_only)
    if wish is ActivationPrecision.EXACT:
        return path.precision in _EXACT
    return path.precision is (Precision.W4A8 if wish is ActivationPrecision.INT8 else Precision.W4A4)


def _ask(backend: Backend, request: Request) -> tuple[Request, Verdict]:
    """Ask the manifest, then the backend itself; a backend that raises has refused."""
    adapted = request
    try:
        capabilities = backend.capabilities
        adapted = adapt_request(request, capabilities)
        refusals = capabilities.refusals(adapted)
        if refusals:
            return adapted, Verdict.refuse(refusals, native_state="not asked")
        verdict: object = backend.check(adapted)
    except PLUGIN_FAULTS as error:
        return adapted, _at_fault(f"check raised {type(error).__name__}: {error}", "failed")
    if not isinstance(verdict, Verdict):
        return adapted, _at_fault(f"check must return a Verdict, got {type(verdict).__name__}", "failed")
    undeclared = {path.precision for path in verdict.paths} - capabilities.precisions
    if undeclared:
        names = ", ".join(sorted(precision.value for precision in undeclared))
        return adapted, _at_fault(f"offers paths of precision {names}, which it did not declare", verdict.native_state)
    if len({path.name for path in verdict.paths}) != len(verdict.paths):
        return adapted, _at_fault("offers two paths of one name", verdict.native_state)
    return adapted, verdict


def _at_fault(message: str, native_state: str) -> Verdict:
    return Verdict.refuse([Reason(ReasonCode.PLUGIN_ERROR, message)], native_state=native_state)


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


def _assess(
    backend: Backend, request: Request, kinds: frozenset[PathKind], history: ProbeHistory, *, any_precision: bool
) -> tuple[_Candidate | None, Rejection | None, bool]:
    """Return a candidate or a rejection, and whether the backend could serve if only the policy let it."""
    adapted, verdict = _ask(backend, request)
    if verdict.reasons:
        return None, Rejection(backend.name, verdict.reasons, verdict.native_state), False
    sound: list[KernelPath] = []
    faults: list[Reason] = []
    for path in verdict.paths:
        fault = history.disqualified(backend.name, path, adapted)
        if fault is None:
            sound.append(path)
        elif fault not in faults:
            faults.append(fault)
    reasons = list(faults)
    allowed = [path for path in sound if path.kind in kinds and (any_precision or _precision_allows(request, path))]
    for path in sound:
        if path.kind not in kinds:
            reasons.append(Reason(ReasonCode.POLICY, f"path {path.name} is of kind {path.kind.value}"))
        elif path not in allowed:
            message = f"path {path.name} computes in {path.precision.value}, asked for {request.precision.value}"
            reasons.append(Reason(ReasonCode.POLICY, message))
    segments, gap = _cover(allowed, request.m) if allowed else ((), None)
    if gap is not None:
        reasons.append(Reason(ReasonCode.SHAPE, gap))
    if not segments:
        return None, Rejection(backend.name, tuple(reasons), verdict.native_state), bool(sound)
    return _Candidate(backend.name, adapted, verdict, segments, tuple(faults)), None, True


def _path_at(candidate: _Candidate, rows: int) -> KernelPath:
    return next(s.path for s in candidate.segments if s.low <= rows and (s.high is None or rows <= s.high))


def _cuts(candidates: Sequence[_Candidate]) -> list[int]:
    """Return each M at which a candidate changes path, the lowest M asked for first."""
    return sorted({segment.low for candidate in candidates for segment in candidate.segments})


def _best(candidates: Sequence[_Candidate]) -> _Candidate:
    cuts = _cuts(candidates)
    return min(candidates, key=lambda item: ([-_path_at(item, rows).tier for rows in cuts], item.name))


def _outranked(loser: _Candidate, winner: _Candidate, override: str | None) -> Rejection:
    if override is not None:
        reason = Reason(ReasonCode.POLICY, f"the override names {override!r}")
    else:
        reason = Reason(ReasonCode.OUTRANKED, _why_outranked(loser, winner))
    return Rejection(loser.name, (*loser.disqualified, reason), loser.verdict.native_state)


def _why_outranked(loser: _Candidate, winner: _Candidate) -> str:
    """Name the M at which the tiers first differ, or say that names decided."""
    for rows in _cuts((loser, winner)):
        own, better = _path_at(loser, rows), _path_at(winner, rows)
        if own.tier != better.tier:
            message = f"offers {own.name} (tier {int(own.tier)}) at M = {rows}"
            return f"{message}, outranked by {winner.name}'s {better.name} (tier {int(better.tier)})"
    first = loser.segments[0].path
    return f"offers {first.name} (tier {int(first.tier)}); {winner.name} has the same tiers and comes first by name"


def select_backend(  # noqa: PLR0913  # a pure function takes all that it depends on
    request: Request,
    backends: Mapping[str, Backend],
    *,
    compute_path: ComputePath = ComputePath.AUTO,
    override: str | None = None,
    refused: Sequence[RefusedBackend] = (),
    history: ProbeHistory = NO_HISTORY,
) -> Selection:
    """Choose the backend and its paths for a request.

    Args:
        request: What is asked.
        backends: The backends that may serve, by name.
        compute_path: Which kinds of path may serve.
        override: A backend asked for by name: obeyed or refused, never replaced.
        refused: Backends that may not serve at all, for the record.
        history: What self-probes have shown.

    Raises:
        UnknownBackendError: No backend has the override's name.
        PolicyConflictError: The override could serve, but not with a path that the compute path or precision allows.
        BackendUnavailableError: Nothing may serve; ``rejections`` holds every reason.
    """
    standing = [Rejection(item.name, (item.reason,), "refused at registration") for item in refused]
    known = {*backends, *(item.name for item in refused)}
    if override is not None and override not in known:
        close = difflib.get_close_matches(override, sorted(known), n=1, cutoff=_LIKENESS)
        raise UnknownBackendError(
            "select",
            name="backend",
            rule=f"one of {', '.join(sorted(backends)) or '(none is installed)'}",
            value=override,
            available=sorted(backends),
            closest=close[0] if close else None,
            hint=f"Did you mean {close[0]!r}?" if close else "Install the plugin that brings it; see `q4 doctor`.",
        )
    kinds = _KINDS[compute_path]
    reference_asked = compute_path is ComputePath.DEQUANT_MATMUL_ONLY
    candidates: list[_Candidate] = []
    rejections: list[Rejection] = []
    able: set[str] = set()
    for name in sorted(backends):
        candidate, rejection, has_sound = _assess(
            backends[name], request, kinds, history, any_precision=reference_asked
        )
        if has_sound:
            able.add(name)
        if candidate is not None:
            candidates.append(candidate)
        elif rejection is not None:
            rejections.append(rejection)
    eligible = [item for item in candidates if override is None or item.name == override]
    fallback_reason = None
    if not eligible and compute_path is ComputePath.KERNEL_OR_FALLBACK:
        eligible, fallback_reason = _fall_back(request, backends, rejections, override, history)
    if not eligible:
        _refuse(request, compute_path, override, able, [*rejections, *standing])
    winner = _best(eligible)
    could = {item.name: item for item in (*candidates, *eligible)}
    asked_for = {item.name for item in eligible}
    losers = [
        _outranked(item, winner, None if item.name in asked_for else override)
        for item in could.values()
        if item.name != winner.name
    ]
    others = [rejection for rejection in (*rejections, *standing) if rejection.backend not in could]
    return Selection(
        request=request,
        backend_request=winner.request,
        backend=winner.name,
        segments=winner.segments,
        native_state=winner.verdict.native_state,
        compute_path=compute_path,
        override=override,
        fallback_reason=fallback_reason,
        rejections=tuple(sorted([*losers, *others], key=lambda item: item.backend)),
        disqualified=winner.disqualified,
        proven=all(history.proven(winner.name, segment.path, winner.request) for segment in winner.segments),
    )


def _fall_back(
    request: Request,
    backends: Mapping[str, Backend],
    rejections: Sequence[Rejection],
    override: str | None,
    history: ProbeHistory,
) -> tuple[list[_Candidate], str]:
    kinds = frozenset({PathKind.REFERENCE})
    found = [_assess(backends[name], request, kinds, history, any_precision=True)[0] for name in sorted(backends)]
    references = {candidate.name for candidate in found if candidate is not None}
    if override in references:  # obeyed, not replaced by another reference
        found = [candidate for candidate in found if candidate is not None and candidate.name == override]
    concerned = [
        item
        for item in rejections
        if (item.backend not in references if override is None else item.backend == override)
    ]
    if concerned:
        why = " | ".join(str(item) for item in concerned)
    else:
        why = f"{override!r} may not serve" if override else "no kernel backend is installed"
    return [candidate for candidate in found if candidate is not None], f"no kernel path may serve: {why}"


def _refuse(
    request: Request,
    compute_path: ComputePath,
    override: str | None,
    able: set[str],
    rejections: Sequence[Rejection],
) -> NoReturn:
    what = f"linear {request.format.name} {request.out_features}×{request.in_features} on {request.device}"
    if override is not None:
        own = [item for item in rejections if item.backend == override]
        if override in able and all(reason.code is ReasonCode.POLICY for item in own for reason in item.reasons):
            raise PolicyConflictError(
                what,
                name="backend",
                rule=f"one with a path that compute_path {compute_path.value!r} and precision "
                f"{request.precision.value!r} allow",
                value=override,
                hint=f"{'; '.join(str(item) for item in own)}. Drop the override or change the policy.",
            )
        raise BackendUnavailableError(
            what,
            name="backend",
            rule="able to serve the request, because it was asked for by name",
            value=override,
            rejections=own,
            hint="Nothing else was tried: a request is obeyed or refused, never replaced.",
        )
    raise BackendUnavailableError(
        what,
        name="compute_path",
        rule="one under which a backend may serve",
        value=compute_path.value,
        rejections=rejections or [Rejection("(none)", (Reason(ReasonCode.NOT_BUILT, "no backend is installed"),))],
        hint="Install q4-dequant-fallback for the reference path; `q4 doctor` shows what each backend lacks.",
    )
