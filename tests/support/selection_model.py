"""What the right selection is, by brute force: every M is looked at by itself, every policy is tried.

Written from the words of the design (the policies, the three errors of an override, what a record must hold), and not
from the dispatcher. It knows nothing of verdicts, segments or requests: a backend is a list of paths with what probes
have shown of each, or the reasons for which it offers none.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "HORIZON",
    "Answer",
    "Fact",
    "Offer",
    "State",
    "Told",
    "Wish",
    "answer",
    "kernel_reasons",
    "reasons_against",
    "unmatched",
]

HORIZON = 12
"""Stands for every larger M: no path drawn here begins or ends beyond it."""

AUTO, EXACT, INT16, INT8, FP4 = q4.ActivationPrecision
KERNEL, DEQUANT, REFERENCE = q4.PathKind.KERNEL, q4.PathKind.DEQUANT, q4.PathKind.REFERENCE
W4A32, W4A16, W4A8, W4A4, W4I16 = q4.Precision

_KINDS = {
    q4.ComputePath.AUTO: {KERNEL, DEQUANT, REFERENCE},
    q4.ComputePath.KERNEL_ONLY: {KERNEL},
    q4.ComputePath.KERNEL_OR_FALLBACK: {KERNEL},
    q4.ComputePath.DEQUANT_MATMUL_ONLY: {REFERENCE},
}

Lane = "tuple[q4.KernelPath, ...]"
"""The path that serves each M that was asked for."""


class State(enum.Enum):
    """What probes have shown of a path."""

    UNKNOWN = "unknown"
    PROVEN = "proven"
    FAILED = "failed"


@attrs.frozen
class Offer:
    """A path, and what probes have shown of it."""

    path: q4.KernelPath
    state: State = State.UNKNOWN


@attrs.frozen
class Told:
    """A reason that a record must give: its code, and words that stand in its message."""

    code: q4.ReasonCode
    words: tuple[str, ...]

    def fits(self, reason: q4.Reason) -> bool:
        """Return whether a reason is this one."""
        return reason.code is self.code and all(word in reason.message for word in self.words)


@attrs.frozen
class Fact:
    """A backend: the paths that it offers, or every reason why it offers none, whatever the policy."""

    name: str
    native_state: str
    offers: tuple[Offer, ...] = ()
    refusals: tuple[Told, ...] = ()


@attrs.frozen(kw_only=True)
class Wish:
    """What is asked for."""

    compute_path: q4.ComputePath = q4.ComputePath.AUTO
    precision: q4.ActivationPrecision = AUTO
    gradients: bool = False
    override: str | None = None
    low: int = 1
    high: int | None = None

    @property
    def rows(self) -> range:
        """Every M that must be served."""
        return range(self.low, (HORIZON if self.high is None else self.high) + 1)

    def allows(self, path: q4.KernelPath) -> bool:
        """Return whether the activations may be rounded as the path rounds them; the reference is asked for as such."""
        return self.compute_path is q4.ComputePath.DEQUANT_MATMUL_ONLY or self.allows_precision(path.precision)

    def allows_precision(self, precision: q4.Precision) -> bool:
        """Return whether the activations may be rounded so."""
        own = {INT16: {W4I16}, INT8: {W4A8}, FP4: {W4A4}}
        rounded = own | {AUTO: set() if self.gradients else {W4I16}, EXACT: set()}
        exact = {W4A32, W4A16} if self.precision in {AUTO, EXACT} else set()
        return precision in exact | rounded[self.precision]


@attrs.frozen(kw_only=True)
class Answer:
    """The answer that a request must get.

    Args:
        error: The error that must be raised; None where somebody serves.
        winner: Who serves.
        lane: The path for each M that was asked for.
        is_fallback: Whether the reference serves although a kernel was wanted.
        rivals: The lane of each backend that could have served in the winner's place.
    """

    error: type[q4.Q4Error] | None = None
    winner: str | None = None
    lane: tuple[q4.KernelPath, ...] = ()
    is_fallback: bool = False
    rivals: dict[str, tuple[q4.KernelPath, ...]] = attrs.field(factory=dict)


def _best_each(paths: Sequence[q4.KernelPath], rows: Iterable[int]) -> list[q4.KernelPath | None]:
    """Return the best path for each M: the highest tier, then the first name."""
    ranked = sorted(paths, key=lambda path: (-path.tier, path.name))
    return [next((path for path in ranked if path.covers(m)), None) for m in rows]


def _usable(fact: Fact, wish: Wish) -> list[q4.KernelPath]:
    sound = [offer.path for offer in fact.offers if offer.state is not State.FAILED]
    return [path for path in sound if path.kind in _KINDS[wish.compute_path] and wish.allows(path)]


def _lane(fact: Fact, wish: Wish) -> tuple[q4.KernelPath, ...]:
    """Return the path for each M, or () where one has none."""
    found = _best_each(_usable(fact, wish), wish.rows)
    return tuple(path for path in found if path is not None) if None not in found else ()


def _as_reference(wish: Wish) -> Wish:
    return attrs.evolve(wish, compute_path=q4.ComputePath.DEQUANT_MATMUL_ONLY)


def _best(lanes: dict[str, tuple[q4.KernelPath, ...]]) -> str:
    """Return the highest tier at the lowest M, then at the next, and so on; then the first name."""
    return min(lanes, key=lambda name: ([-path.tier for path in lanes[name]], name))


def _contradicts(fact: Fact, wish: Wish) -> bool:
    """Return whether the policy rules out paths that work, and only gaps are reported of the others."""
    asked = [wish]
    if wish.compute_path is q4.ComputePath.KERNEL_OR_FALLBACK:
        asked.append(_as_reference(wish))
    return not fact.refusals and not _failed(fact) and all(_ruled_out(fact, item) for item in asked)


def answer(facts: Sequence[Fact], wish: Wish) -> Answer:
    """Return the answer that a request must get."""
    known = {fact.name: fact for fact in facts}
    if wish.override is not None and wish.override not in known:
        return Answer(error=q4.UnknownBackendError)
    asked = [fact for fact in facts if wish.override in {None, fact.name}]
    lanes = {fact.name: lane for fact in asked if (lane := _lane(fact, wish))}
    is_fallback = False
    if not lanes and wish.compute_path is q4.ComputePath.KERNEL_OR_FALLBACK:
        is_fallback = True
        lanes = {fact.name: lane for fact in facts if (lane := _lane(fact, _as_reference(wish)))}
        if wish.override in lanes:
            lanes = {wish.override: lanes[wish.override]}
    if lanes:
        winner = _best(lanes)
        return Answer(winner=winner, lane=lanes.pop(winner), is_fallback=is_fallback, rivals=lanes)
    if wish.override is not None and _contradicts(known[wish.override], wish):
        return Answer(error=q4.PolicyConflictError)
    return Answer(error=q4.BackendUnavailableError)


def _failed(fact: Fact) -> list[Told]:
    return [
        Told(q4.ReasonCode.PROBE_FAILED, (f"path {offer.path.name} ",))
        for offer in fact.offers
        if offer.state is State.FAILED
    ]


def _gap(fact: Fact, wish: Wish) -> list[Told]:
    """Return the first stretch of M that no usable path serves."""
    holes = [m for m, path in zip(wish.rows, _best_each(_usable(fact, wish), wish.rows), strict=True) if path is None]
    if not holes or not _usable(fact, wish):
        return []
    last = next(m for m in holes if m + 1 not in holes)
    end = "∞" if wish.high is None and last == HORIZON else str(last)
    return [Told(q4.ReasonCode.SHAPE, (f"M in {holes[0]}…{end}",))]


def _ruled_out(fact: Fact, wish: Wish) -> list[Told]:
    """Return which sound paths the policy does not let serve."""
    told: list[Told] = []
    for offer in fact.offers:
        path = offer.path
        if offer.state is State.FAILED:
            continue
        if path.kind not in _KINDS[wish.compute_path]:
            told.append(Told(q4.ReasonCode.POLICY, (f"path {path.name} ", path.kind.value)))
        elif not wish.allows(path):
            words = (f"path {path.name} ", path.precision.value, wish.precision.value)
            told.append(Told(q4.ReasonCode.POLICY, words))
    return told


def _outranked(fact: Fact, result: Answer, wish: Wish) -> Told:
    """Return the M at which tiers decide, with both paths; or that names do."""
    own, better = result.rivals[fact.name], result.lane
    for m, mine, theirs in zip(wish.rows, own, better, strict=True):
        if mine.tier != theirs.tier:
            both = (f"{mine.name} (tier {int(mine.tier)})", f"{theirs.name} (tier {int(theirs.tier)})")
            return Told(q4.ReasonCode.OUTRANKED, (*both, f"M = {m}", str(result.winner)))
    return Told(q4.ReasonCode.OUTRANKED, (own[0].name, str(result.winner), "same tiers", "by name"))


def reasons_against(fact: Fact, result: Answer, wish: Wish) -> list[Told]:
    """Return every reason, and no other, that the record must give for a backend that does not serve.

    For the winner: for its own paths that may not run.
    """
    if fact.name == result.winner:
        return _failed(fact)
    if fact.refusals:
        return list(fact.refusals)
    if fact.name in result.rivals:
        return [*_failed(fact), _outranked(fact, result, wish)]
    if _lane(fact, wish) and wish.override not in {None, fact.name}:
        override = Told(q4.ReasonCode.POLICY, ("override", repr(wish.override)))
        return [*_failed(fact), override]
    return kernel_reasons(fact, wish)


def kernel_reasons(fact: Fact, wish: Wish) -> list[Told]:
    """Return every reason why a backend's kernels do not serve."""
    return [*_failed(fact), *_ruled_out(fact, wish), *_gap(fact, wish)]


def unmatched(told: Sequence[Told], reasons: Sequence[q4.Reason]) -> tuple[list[Told], list[q4.Reason]]:
    """Return which of the reasons that must be given are not, and which are given though they must not be."""
    left = list(reasons)
    missing = []
    for item in told:
        found = next((reason for reason in left if item.fits(reason)), None)
        if found is None:
            missing.append(item)
        else:
            left.remove(found)
    return missing, left
