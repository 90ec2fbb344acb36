"""What an author declares against the kit's own rules: a wider bound, or a failure that is known. Each with a reason.

A backend, provider or dialect may have an attribute ``conformance_overrides``, a list of ``Override``, or of mappings
with the same fields, so that a plugin need not import the kit. All of them stand in the certificate. A wider bound
changes the judgement of the cases it names; a known failure changes nothing but what is printed beside it.

Only a backend computes with rounding. The cases of dialects and providers compare bytes, or numbers that must be the
same, so that a wider bound of theirs would stand in the certificate and mean nothing: it is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_JUDGED = ("backend", "provider", "dialect", "layer_type")
"""What a subject calls whom it stands for."""
MOST_BOUND = 8.0
"""A bound wider than this would let a zeroed element pass."""
_factor: contextvars.ContextVar[float] = contextvars.ContextVar("q4_conformance_bound_factor", default=1.0)


def _require(condition: object, name: str, rule: str, value: object) -> None:
    if not condition:
        hint = "See q4_conformance.overrides."
        raise ConfigError("conformance_overrides", name=name, rule=rule, value=value, hint=hint)


@attrs.frozen(kw_only=True)
class Override:
    """One of them.

    Args:
        case: Ids of the cases that it concerns begin so.
        reason: Why, in a sentence.
        bound: By how much the float32 bound is widened, from 1 to ``MOST_BOUND``.
        is_known_failure: Whether the cases are expected to fail.
    """

    case: str
    reason: str
    bound: float = 1.0
    is_known_failure: bool = False

    def __attrs_post_init__(self) -> None:
        """Check the types, because a plugin makes this."""
        _require(isinstance(self.case, str) and self.case, "case", "the beginning of a case's id", self.case)
        _require(isinstance(self.reason, str) and self.reason.strip(), "reason", "a sentence", self.reason)
        wide = isinstance(self.bound, (int, float)) and 1.0 <= self.bound <= MOST_BOUND
        _require(wide, "bound", f"from 1 to {MOST_BOUND:g}", self.bound)
        _require(isinstance(self.is_known_failure, bool), "is_known_failure", "True or False", self.is_known_failure)
        does = self.bound > 1.0 or self.is_known_failure
        _require(does, "override", "a wider bound or a known failure", self.case)


def overrides_of(subject: object) -> tuple[Override, ...]:
    """Return what a backend, provider or dialect declares; ``ConfigError`` where it is nothing of that kind."""
    declared = getattr(subject, "conformance_overrides", ())
    _require(isinstance(declared, (list, tuple)), "conformance_overrides", "a list", declared)
    return tuple(_one(item) for item in declared)


def judged_in(subject: object) -> object:
    """Return the backend, provider or dialect that a subject stands for; itself where it is none of these."""
    return next((getattr(subject, name) for name in _JUDGED if hasattr(subject, name)), subject)


def declared_by(subject: object) -> tuple[Override, ...]:
    """Return what whom a subject stands for declares; ``ConfigError`` also for a wider bound where no case has one."""
    overrides = overrides_of(judged_in(subject))
    if not hasattr(subject, "backend"):
        for item in overrides:
            rule = "1 for a provider or a dialect, whose cases compare bytes"
            _require(item.bound == 1.0, f"bound of {item.case!r}", rule, item.bound)
    return overrides


def _one(item: object) -> Override:
    if isinstance(item, Override):
        return item
    _require(isinstance(item, Mapping), "each item", "an Override or a mapping", item)
    fields = dict(item)  # type: ignore[call-overload]  # a mapping, as checked
    names = {field.name for field in attrs.fields(Override)}
    _require({"case", "reason"} <= set(fields) <= names, "each item", f"of {', '.join(sorted(names))}", fields)
    return Override(**fields)


def bound_factor() -> float:
    """Return by how much the float32 bound is widened for the case that is being judged."""
    return _factor.get()


@contextlib.contextmanager
def overriding(overrides: tuple[Override, ...], case: str) -> Iterator[tuple[Override, ...]]:
    """Apply the overrides that concern a case inside the ``with`` block, and give them."""
    mine = tuple(item for item in overrides if case.startswith(item.case))
    token = _factor.set(max((item.bound for item in mine), default=1.0))
    try:
        yield mine
    finally:
        _factor.reset(token)
