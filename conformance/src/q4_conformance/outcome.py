"""Outcomes of cases, and the report over all of them."""

from __future__ import annotations

import collections
import enum
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound="Hashable")
_MOST_NAMED = 4


class Outcome(enum.Enum):
    """The six ways in which a case ends; only PASS counts."""

    PASS = "pass"  # noqa: S105  # an outcome, not a password
    FAIL = "fail"
    NOT_DECLARED = "not_declared"
    """The subject does not claim to do this; printed, never counted as a pass."""
    NOT_TESTABLE = "not_testable"
    """The hardware is not here."""
    CRASH = "crash"
    """The process died."""
    TIMEOUT = "timeout"


BAD = (Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT)
"""The outcomes of a case that ended badly."""
BAD_VALUES = frozenset(outcome.value for outcome in BAD)


class FailureError(Exception):
    """Raised by a check where what must hold does not; the message says what was found."""


class NotDeclaredError(Exception):
    """Raised by a check where the subject does not declare what the case needs."""


class NotTestableError(Exception):
    """Raised by a check where this machine lacks what the case needs."""


def as_tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    """Return the items as a field of a record keeps them."""
    return tuple(items)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return key → items, keys and items in the order in which they come."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@attrs.frozen(kw_only=True)
class CaseResult:
    """How one case ended.

    Args:
        case: Its id.
        contract: ``"TC-09"`` and the like.
        outcome: How it ended.
        message: Why, in a sentence; what was measured, where it passed.
        seconds: How long it took.
        is_fallback: It passed, but the reference computed instead of the subject.
        paths: ``name|kind|precision|standing`` of every kernel path that ran, as the core counted it; where the case
            failed, also of those that raised. A process that died has reported none.
        reproducer: What to type to run it again, where it ended badly in a run by name.
    """

    case: str
    contract: str
    outcome: Outcome
    message: str
    seconds: float = 0.0
    is_fallback: bool = False
    paths: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    reproducer: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = attrs.asdict(self, recurse=False)
        return values | {"outcome": self.outcome.value, "paths": [*self.paths]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CaseResult:
        """Return the result that ``to_dict`` wrote."""
        return cls(**values | {"outcome": Outcome(values["outcome"])})

    def __str__(self) -> str:
        """Return one line, and the reproducer below it."""
        lines = [f"{self.outcome.name:<12} {self.case}: {self.message}", *self.reproducer.splitlines()]
        return "\n    ".join(lines)


@attrs.frozen(kw_only=True)
class Report:
    """What a run over a table of cases showed.

    Args:
        subject: Who was judged.
        expected: The ids of all cases of the table that are due, counted apart from the results.
        results: One for each case that ran.
        undeclared: Id → what the manifest does not declare, of all cases that are therefore not due; none of them ran.
    """

    subject: str
    expected: tuple[str, ...] = attrs.field(converter=as_tuple)
    results: tuple[CaseResult, ...] = attrs.field(converter=as_tuple)
    undeclared: Mapping[str, str] = attrs.field(factory=dict, hash=False)

    @property
    def counts(self) -> dict[Outcome, int]:
        """How many cases ended in each way."""
        return {outcome: sum(result.outcome is outcome for result in self.results) for outcome in Outcome}

    @property
    def not_declared(self) -> dict[str, int]:
        """What is not declared → of how many cases that keeps from running, most first."""
        counts = collections.Counter(self.undeclared.values())
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def passed_by_fallback(self) -> int:
        """How many of the passes were the reference's."""
        return sum(result.is_fallback for result in self.results if result.outcome is Outcome.PASS)

    @property
    def missing(self) -> tuple[str, ...]:
        """Cases of the table without a result, and results without a case."""
        ran = collections.Counter(result.case for result in self.results)
        return (*sorted({*self.expected} ^ {*ran}), *(case for case, times in ran.items() if times > 1))

    @property
    def passed(self) -> bool:
        """Whether something ran and passed, nothing ended badly, and the results add up to the table."""
        return self.counts[Outcome.PASS] > 0 and not self.failures() and not self.missing

    def failures(self) -> tuple[CaseResult, ...]:
        """Return the results that ended badly."""
        return tuple(result for result in self.results if result.outcome in BAD)

    def __str__(self) -> str:
        """Return a line for each case that did not pass, and the counts."""
        lines = [str(result) for result in self.results if result.outcome is not Outcome.PASS]
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in self.counts.items() if count)
        verdict = "passed" if self.passed else "NOT PASSED"
        total = f"{self.subject}: {verdict}; {len(self.expected)} cases: {counts or 'none ran'}"
        if self.passed_by_fallback:
            total += f" ({self.passed_by_fallback} passes by fallback)"
        if self.missing:
            shown = ", ".join(self.missing[:_MOST_NAMED])
            more = len(self.missing) - _MOST_NAMED
            total += f"; results do not add up: {shown}" + (f" and {more} more" if more > 0 else "")
        undeclared = [f"not declared: {reason}, {count:,} cases" for reason, count in self.not_declared.items()]
        return "\n".join([*lines, *undeclared, total])
