"""Selection of a backend for a request: one winner, and a reason for every other backend.

Paths are compared where they would run: at the lowest M asked for first, then at each higher M at which any candidate
changes path. The higher tier wins, ties go by name.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from q4core.backend import PathKind, Precision, Reason, ReasonCode, Request
from q4core.errors import BackendUnavailableError, PolicyConflictError, Q4Error, UnknownBackendError, closest_name
from q4core.policy.config import ActivationPrecision, ComputePath
from q4core.selection.candidates import Candidate, assess
from q4core.selection.probe_results import ProbeResults
from q4core.selection.result import Rejection, Selection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from q4core.backend import Backend, KernelPath
    from q4core.plugins.registry import InvalidItem

_KINDS = {
    ComputePath.AUTO: frozenset(PathKind),
    ComputePath.KERNEL_ONLY: frozenset({PathKind.KERNEL}),
    ComputePath.KERNEL_OR_FALLBACK: frozenset({PathKind.KERNEL}),
    ComputePath.DEQUANT_MATMUL_ONLY: frozenset({PathKind.REFERENCE}),
}
_LIKENESS = 0.4
"""From which likeness on a name is worth suggesting; "dequnt" and "dequant-fallback" have 0.55."""


def select_backend(  # noqa: PLR0913  # a pure function takes all that it depends on
    request: Request,
    backends: Mapping[str, Backend],
    *,
    compute_path: ComputePath = ComputePath.AUTO,
    override: str | None = None,
    invalid: Sequence[InvalidItem] = (),
    results: ProbeResults | None = None,
    failures: Mapping[str, tuple[Reason, ...]] = MappingProxyType({}),
) -> Selection:
    """Choose the backend and its paths for a request; a pure function of its arguments, in any order of them.

    An ``override`` is obeyed or refused, never replaced. ``invalid`` backends may not serve at all, and are recorded;
    ``failures`` could not prepare the weight at hand, for these reasons.

    Raises:
        UnknownBackendError: No backend has the override's name.
        PolicyConflictError: The compute path and precision rule out every path that the override offers.
        BackendUnavailableError: Nothing may serve; ``rejections`` holds every reason.
    """
    shown = results or ProbeResults()
    unregistered = [Rejection(item.name, (item.reason,), "refused at registration") for item in invalid]
    if override is not None and override not in {*backends, *(item.backend for item in unregistered)}:
        raise _unknown(override, backends, unregistered)

    def ask(kinds: frozenset[PathKind]) -> dict[str, Candidate]:
        return {
            name: assess(backends[name], request, kinds, shown, failures.get(name, ())) for name in sorted(backends)
        }

    asked = ask(_KINDS[compute_path])
    able = {name: item for name, item in asked.items() if item.segments and override in {None, name}}
    rounds, fallback_reason = [asked], None
    if not able and compute_path is ComputePath.KERNEL_OR_FALLBACK:
        rounds.append(ask(_KINDS[ComputePath.DEQUANT_MATMUL_ONLY]))
        able = {name: item for name, item in rounds[-1].items() if item.segments}
        if override in able:  # obeyed, not replaced by another reference
            able = {override: able[override]}
        fallback_reason = _why_fallback(asked.values(), unregistered, able, override)
    if not able:
        is_conflict = override in asked and all(item[override].is_ruled_out for item in rounds)
        rejections = [*(item.rejection() for item in asked.values() if not item.segments), *unregistered]
        raise _unable(request, compute_path, override, rejections, is_conflict=is_conflict)
    cuts = _cuts(able.values())
    winner = min(able.values(), key=lambda item: ([-item.path_at(rows).tier for rows in cuts], item.name))
    losers = [
        item.rejection(*_why_not(item, winner, override, is_able=name in able))
        for name, item in {**asked, **able}.items()
        if name != winner.name
    ]
    gradient = Candidate(winner.name, attrs.evolve(winner.request, op="input_gradient"), winner.support)
    if request.gradients and "input_gradient" in backends[winner.name].capabilities.ops:
        kinds = _KINDS[compute_path]
        gradient = assess(backends[winner.name], gradient.request, kinds, shown, forward=winner.segments)
    return Selection(
        request=request,
        backend_request=winner.request,
        backend=winner.name,
        segments=winner.segments,
        native_state=winner.support.native_state,
        compute_path=compute_path,
        override=override,
        fallback_reason=fallback_reason,
        rejections=tuple(sorted([*losers, *unregistered], key=lambda item: item.backend)),
        disqualified=winner.faults,
        gradients=gradient.segments,
        gradients_refused=(*gradient.faults, *gradient.against),
        proven=all(
            shown.proven(item.name, part, item.request) for item in (winner, gradient) for part in item.segments
        ),
    )


def _cuts(candidates: Iterable[Candidate]) -> list[int]:
    """Return each M at which a candidate changes path, the lowest M asked for first."""
    return sorted({segment.low for candidate in candidates for segment in candidate.segments})


def _why_not(loser: Candidate, winner: Candidate, override: str | None, *, is_able: bool) -> list[Reason]:
    """Return why a backend that could serve does not; nothing for one that can't."""
    if not loser.segments:
        return []
    if not is_able:
        return [Reason(ReasonCode.POLICY, f"the override names {override!r}")]
    for rows in _cuts((loser, winner)):
        own, better = loser.path_at(rows), winner.path_at(rows)
        if own.tier != better.tier:
            message = f"offers {_ranked(own)} at M = {rows}, outranked by {winner.name}'s {_ranked(better)}"
            return [Reason(ReasonCode.OUTRANKED, message)]
    message = f"offers {_ranked(loser.segments[0].path)}; {winner.name} has the same tiers and comes first by name"
    return [Reason(ReasonCode.OUTRANKED, message)]


def _ranked(path: KernelPath) -> str:
    return f"{path.name} (tier {int(path.tier)})"


def _why_fallback(
    asked: Iterable[Candidate], invalid: Sequence[Rejection], able: Mapping[str, Candidate], override: str | None
) -> str:
    """Return why no kernel serves; a backend that offers nothing but its reference is not to blame."""
    refused = [item.rejection() for item in asked if not item.segments]
    mere = {name for name, item in able.items() if all(path.kind is PathKind.REFERENCE for path in item.support.paths)}
    concerned = [
        item
        for item in (*refused, *invalid)
        if (item.backend not in mere if override is None else item.backend == override)
    ]
    return f"no kernel path may serve: {' | '.join(map(str, concerned)) or 'no kernel backend is installed'}"


def _unknown(override: str, backends: Iterable[str], invalid: Iterable[Rejection]) -> UnknownBackendError:
    available = sorted(backends)
    close = closest_name(override, {*available, *(item.backend for item in invalid)}, cutoff=_LIKENESS)
    hint = f"Did you mean {close!r}?" if close else "Install the plugin that brings it; see `q4 doctor`."
    rule = f"one of {', '.join(available) or '(none is installed)'}"
    return UnknownBackendError(
        "select", name="backend", rule=rule, value=override, available=available, closest=close, hint=hint
    )


def _unable(
    request: Request, path: ComputePath, override: str | None, rejections: Sequence[Rejection], *, is_conflict: bool
) -> Q4Error:
    what = f"{request.op} {request.format.name} {request.out_features}×{request.in_features} on {request.device}"
    wanted = "" if request.precision is ActivationPrecision.AUTO else f" and precision={request.precision.value!r}"
    policy = f"compute_path={path.value!r}{wanted}"
    if override is None:
        nobody = Rejection("(none)", (Reason(ReasonCode.NOT_BUILT, "no backend is installed"),))
        text, hint = f"no backend can run {what} with {policy}", _way_out(request, path, rejections)
        return BackendUnavailableError(text, rejections=rejections or [nobody], hint=hint)
    own = [item for item in rejections if item.backend == override]
    if is_conflict:
        text = f"{policy} rules out backend {override!r} for {what}: {'; '.join(map(str, own))}"
        return PolicyConflictError(text, value=override, hint="Name no backend, or ask for what this one offers.")
    text = f"backend {override!r} can't run {what} with {policy}"
    hint = "Name no backend to try the others; this one was asked for by name."
    return BackendUnavailableError(text, value=override, rejections=own, hint=hint)


def _way_out(request: Request, compute_path: ComputePath, rejections: Sequence[Rejection]) -> str:
    """Say what helps: another request where the request rules paths out, the reference where it could serve."""
    if any(reason.code is ReasonCode.POLICY for item in rejections for reason in item.reasons):
        return "Ask for 'auto' of both, which allows the most: reasons with the code 'policy' lie in the request."
    is_there = any(item.backend == "dequant-fallback" for item in rejections)
    allows = request.op == "linear" and compute_path is not ComputePath.KERNEL_ONLY and request.allows(Precision.W4A32)
    if allows and not is_there:
        return "The reference path serves every format: install the package q4-dequant-fallback."
    return "`q4 doctor` shows what each backend lacks."
