"""The pairwise choice of cases: few of the product, with the pairs of values that ``pairs_of`` names."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import attrs

from q4_conformance.contract.cases import base_recipe
from q4_conformance.outcome import grouped

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from q4_conformance.contract.case import Case


_NAMED = {"scale_kind", "packing"}
"""Fields of a weight's recipe that are axes of their own."""
_OF_VALUES = "TC-09", "values"


def axes_of(case: Case) -> tuple[Hashable, ...]:
    """Return the values of a case by which the cases of its part differ; the last is how its weight is unusual."""
    recipe = case.recipe
    if recipe is None:
        return (case.format, case.dtype, case.precision)
    base, facts = attrs.asdict(base_recipe(recipe.format), recurse=False), attrs.asdict(recipe, recurse=False)
    unusual = {name: value for name, value in facts.items() if value != base[name] and name not in _NAMED}
    if "k" in unusual:
        unusual["k"] = -(-recipe.k // recipe.block_size)  # in blocks, as the formats have them in common
    return (
        recipe.format.name,
        case.dtype,
        case.precision,
        recipe.scale_kind,
        str(recipe.packing),
        tuple(unusual.items()),
    )


def pairs_of(case: Case) -> frozenset[Hashable]:
    """Return each pair of a case's values, with the axes that they are of, and its format.

    Every pair counts where values are compared (TC-09/values). In the other parts, formats meet dtypes and precisions
    by scale kind and packing alone.
    """
    values = axes_of(case)
    pairs = itertools.combinations(enumerate(values), 2)
    passed_over = () if (case.contract, case.part) == _OF_VALUES else ({0, 1}, {0, 2})
    return frozenset([values[0], *(pair for pair in pairs if {axis for axis, _ in pair} not in passed_over)])


def pairwise(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return cases, in their order, that have every pair of ``pairs_of`` that the cases of their part have.

    The choice is greedy and deterministic: the first case that has most of the pairs that are left comes next.
    """
    chosen: set[str] = set()
    every = tuple(cases)
    for part in grouped(every, lambda case: (case.contract, case.part)).values():
        pairs = {case.id: pairs_of(case) for case in part}
        left = set().union(*pairs.values())
        while left:
            best = max(pairs, key=lambda name: len(pairs[name] & left))
            left -= pairs[best]
            chosen.add(best)
    return tuple(case for case in every if case.id in chosen)
