"""Turns a request into a ``Selection``: one winner, and a reason for every loser.

Selection is a pure function of (request, backends, wishes, what probes have shown): no globals, no effect of the order
of registration. Paths are compared where they would run: at the lowest M asked for first, then at each higher M at
which any candidate changes path; the higher tier wins, ties go by name.
"""

from __future__ import annotations

import difflib
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import attrs

from q4core.backend import PathKind, Precision, Reason, ReasonCode, Request
from q4core.errors import BackendUnavailableError, PolicyConflictError, UnknownBackendError
from q4core.policy import ActivationPrecision, ComputePath
from q4core.selection.candidates import KINDS, Candidate, Offer, assess, assess_gradient, contradicts
from q4core.selection.probe_results import ProbeResults
from q4core.selection.result import Rejection, Selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4core.backend import Backend, KernelPath, Verdict
    from q4core.plugins.registry import RefusedBackend

__all__ = ["select_backend"]

_LIKENESS = 0.4
"""From which likeness on a name is worth suggesting; "dequnt" and "dequant-fallback" have 0.55."""


def _path_at(candidate: Candidate, rows: int) -> KernelPath:
    return next(s.path for s in candidate.segments if s.low <= rows and (s.high is None or rows <= s.high))


def _cuts(candidates: Sequence[Candidate]) -> list[int]:
    """Return each M at which a candidate changes path, the lowest M asked for first."""
    return sorted({segment.low for candidate in candidates for segment in candidate.segments})


def _best(candidates: Sequence[Candidate]) -> Candidate:
    cuts = _cuts(candidates)
    return min(candidates, key=lambda item: ([-_path_at(item, rows).tier for rows in cuts], item.name))


def _outranked(loser: Candidate, winner: Candidate, override: str | None) -> Rejection:
    if override is not None:
        reason = Reason(ReasonCode.POLICY, f"the override names {override!r}")
    else:
        reason = Reason(ReasonCode.OUTRANKED, _why_outranked(loser, winner))
    return Rejection(loser.name, (*loser.disqualified, reason), loser.verdict.native_state)


def _why_outranked(loser: Candidate, winner: Candidate) -> str:
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
    results: ProbeResults | None = None,
    failures: Mapping[str, tuple[Reason, ...]] = MappingProxyType({}),
) -> Selection:
    """Choose the backend and its paths for a request.

    Args:
        request: What is asked.
        backends: The backends that may serve, by name.
        compute_path: Which kinds of path may serve.
        override: A backend asked for by name: obeyed or refused, never replaced.
        refused: Backends that may not serve at all, for the record.
        results: What self-probes have shown; nothing unless told.
        failures: Backends to pass over, with the reasons: they could not prepare the weight at hand.

    Raises:
        UnknownBackendError: No backend has the override's name.
        PolicyConflictError: The override could serve, but not with a path that the compute path or precision allows.
        BackendUnavailableError: Nothing may serve; ``rejections`` holds every reason.
    """
    results = results or ProbeResults()
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
    kinds = KINDS[compute_path]
    reference_asked = compute_path is ComputePath.DEQUANT_MATMUL_ONLY
    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    offers: dict[str, Offer] = {}
    for name in sorted(backends):
        candidate, rejection, offers[name] = assess(
            backends[name], request, kinds, results, failures.get(name, ()), any_precision=reference_asked
        )
        if candidate is not None:
            candidates.append(candidate)
        elif rejection is not None:
            rejections.append(rejection)
    eligible = [item for item in candidates if override is None or item.name == override]
    fallback_reason = None
    if not eligible and compute_path is ComputePath.KERNEL_OR_FALLBACK:
        eligible, fallback_reason = _fall_back(request, backends, [*rejections, *standing], override, results, failures)
    if not eligible:
        is_conflict = override in offers and contradicts(offers[override], request, compute_path)
        _refuse(request, compute_path, override, [*rejections, *standing], is_conflict=is_conflict)
    winner = _best(eligible)
    could = {item.name: item for item in (*candidates, *eligible)}
    asked_for = {item.name for item in eligible}
    losers = [
        _outranked(item, winner, None if item.name in asked_for else override)
        for item in could.values()
        if item.name != winner.name
    ]
    others = [rejection for rejection in (*rejections, *standing) if rejection.backend not in could]
    selection = Selection(
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
        proven=all(results.proven(winner.name, segment, winner.request) for segment in winner.segments),
    )
    if not request.gradients or "input_gradient" not in backends[winner.name].capabilities.ops:
        return selection
    gradients, reasons = assess_gradient(backends[winner.name], winner, kinds, results)
    are_proven = all(results.proven(winner.name, item, selection.gradient_request) for item in gradients)
    return attrs.evolve(
        selection, gradients=gradients, gradients_refused=reasons, proven=selection.proven and are_proven
    )


def _fall_back(  # noqa: PLR0913  # one argument per fact
    request: Request,
    backends: Mapping[str, Backend],
    rejections: Sequence[Rejection],
    override: str | None,
    results: ProbeResults,
    failures: Mapping[str, tuple[Reason, ...]],
) -> tuple[list[Candidate], str]:
    kinds = frozenset({PathKind.REFERENCE})
    found = [
        assess(backends[name], request, kinds, results, failures.get(name, ()), any_precision=True)[0]
        for name in sorted(backends)
    ]
    references = {candidate.name for candidate in found if candidate is not None}
    if override in references:  # obeyed, not replaced by another reference
        found = [candidate for candidate in found if candidate is not None and candidate.name == override]
    mere = {candidate.name for candidate in found if candidate is not None and _is_mere_reference(candidate.verdict)}
    concerned = [
        item for item in rejections if (item.backend not in mere if override is None else item.backend == override)
    ]
    why = " | ".join(str(item) for item in concerned) or "no kernel backend is installed"
    return [candidate for candidate in found if candidate is not None], f"no kernel path may serve: {why}"


def _is_mere_reference(verdict: Verdict) -> bool:
    return all(path.kind is PathKind.REFERENCE for path in verdict.paths)


def _refuse(
    request: Request,
    compute_path: ComputePath,
    override: str | None,
    rejections: Sequence[Rejection],
    *,
    is_conflict: bool,
) -> NoReturn:
    what = f"{request.op} {request.format.name} {request.out_features}×{request.in_features} on {request.device}"
    if override is not None:
        own = [item for item in rejections if item.backend == override]
        if is_conflict:
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
    wanted = "" if request.precision is ActivationPrecision.AUTO else f" and precision={request.precision.value!r}"
    raise BackendUnavailableError(
        f"no backend can run {what} with compute_path={compute_path.value!r}{wanted}",
        rejections=rejections or [Rejection("(none)", (Reason(ReasonCode.NOT_BUILT, "no backend is installed"),))],
        hint=_way_out(request, compute_path, rejections),
    )


def _way_out(request: Request, compute_path: ComputePath, rejections: Sequence[Rejection]) -> str:
    """Say what helps: another request where the request rules paths out, the reference where it could serve."""
    if any(reason.code is ReasonCode.POLICY for item in rejections for reason in item.reasons):
        return "Reasons with the code 'policy' lie in the request: 'auto' for both allows the most."
    is_there = any(item.backend == "dequant-fallback" for item in rejections)
    allows = request.op == "linear" and compute_path is not ComputePath.KERNEL_ONLY and request.allows(Precision.W4A32)
    if allows and not is_there:
        return "The reference path serves every format: python3 -m pip install q4-dequant-fallback"
    return "`q4 doctor` shows what each backend lacks."
