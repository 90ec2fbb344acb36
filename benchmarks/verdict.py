"""``Verdict``: one target, one measured ratio, whether it is met, and the lines that report it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CALL_TARGETS_US", "Verdict", "lines"]

CALL_TARGETS_US = {
    "forward, out=": 1.6,
    "forward": 2.0,
    "forward through the op, out=": 15.0,
    "forward through the op": 15.0,
    "selection, warm": 10.0,
    "request and selection": 10.0,
}
"""What q4core may add to the backend's own call, by name: for ``overhead`` and for the small layers of ``cpu``."""


@attrs.frozen
class Verdict:
    """One target for one subject: a ratio that must be at least a limit (or at most, where less is better)."""

    target: str
    subject: str
    ratio: float | None
    limit: float
    is_most: bool = False
    against: str = ""
    """What it was compared with."""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where it was not measured."""
        if self.ratio is None:
            return None
        return self.ratio <= self.limit if self.is_most else self.ratio >= self.limit

    @property
    def word(self) -> str:
        """``met``, ``MISSED`` or ``not measured``."""
        return {True: "met", False: "MISSED", None: "not measured"}[self.is_met]

    @property
    def margin(self) -> float:
        """How far the target is met: 1 where it just is, less where it is missed."""
        if self.ratio is None:
            return float("inf")
        return self.limit / max(self.ratio, 1e-9) if self.is_most else self.ratio / self.limit

    def to_json(self) -> dict[str, Any]:
        """Return what the result file stores."""
        return {**attrs.asdict(self), "verdict": self.word}


def lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Return one line for each target, with its worst case, and one for each subject that misses it."""
    yield "\ntarget: how many meet it, and the worst"
    for target in dict.fromkeys(verdict.target for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.target == target]
        measured = sorted((one for one in own if one.ratio is not None), key=lambda one: one.margin)
        if not measured:
            yield f"  not measured     {target}"
            continue
        worst = measured[0]
        missed = [one for one in measured if not one.is_met]
        count = f"{len(measured) - len(missed)}/{len(measured)}"
        text = f"worst {worst.ratio:.3g} ({worst.subject}; {worst.against})"
        yield f"  {'MISSED' if missed else 'met':<7} {count:>7}  {target}: {text}"
        for verdict in missed:
            yield f"      MISSED {verdict.ratio:8.3g}  {verdict.subject}  against {verdict.against}"
