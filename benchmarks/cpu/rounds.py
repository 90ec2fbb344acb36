"""Ratios of two candidates within rounds in which both ran, instead of ratios of medians over a whole run."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["is_due", "ratio"]


def is_due(index: int, samples: int, rounds: int) -> bool:
    """Say whether a round is one of those in which a candidate of some samples takes one; they lie evenly among all."""
    return (index + 1) * samples // rounds > index * samples // rounds


def _by_round(samples: Sequence[float], rounds: int) -> dict[int, float]:
    due = [index for index in range(rounds) if is_due(index, len(samples), rounds)]
    return dict(zip(due, samples, strict=True))


def ratio(over: Mapping[str, Any], under: Mapping[str, Any]) -> float:
    """Return how many times as long one call takes as another: the median over the rounds in which both were sampled.

    A machine that goes faster for half of a run does so for both, so that this ratio stays; a ratio of medians can take
    one from either half.

    Args:
        over: A call of a stage's results.
        under: Another one of the same stage.
    """
    if not (over.get("samples") and under.get("samples")):
        return float(over["median"] / under["median"])
    rounds = max(len(over["samples"]), len(under["samples"]))
    first, second = _by_round(over["samples"], rounds), _by_round(under["samples"], rounds)
    return statistics.median(first[index] / second[index] for index in sorted(first.keys() & second.keys()))
