"""Checks of shapes that nobody chose: sizes drawn from a fixed seed, and parts cut from larger weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from q4_conformance.checks.values import check_awkward, draws, judged_calls, make_bias
from q4_conformance.contract.case import check, within
from q4_conformance.oracle.exact import as_given, judge_by
from q4_conformance.outcome import NotDeclaredError
from q4core import Feature, Form

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.function import Subject

_SHAPES = 12


def _shapes(case: Case) -> Iterator[Case]:
    """Yield the case on weights up to the size of its own, with one number of rows up to its largest."""
    recipe, kind = case.weight_recipe, case.weight_recipe.format
    random = np.random.default_rng([case.seeds[0], *kind.name.encode()])
    for _ in range(_SHAPES):
        rows, n, k = (int(random.integers(1, most + 1)) for most in (max(case.rows), recipe.n, recipe.k))
        is_flat = kind.name in {"nf4", "fp4"} and bool(random.integers(2))
        if is_flat:
            shaped = attrs.evolve(recipe, n=n, k=k, features={Feature.FLAT_BLOCKS})
        elif kind.form is Form.INTEGER:  # whose last block may be short
            shaped = attrs.evolve(recipe, n=n, k=k)
        else:
            shaped = attrs.evolve(recipe, n=n, k=-(-k // recipe.block_size) * recipe.block_size)
        yield attrs.evolve(case, recipe=shaped, rows=(rows,), seeds=case.seeds[:1])


@check("shapes")
def check_shapes(case: Case, subject: Subject) -> str:
    """Random shapes are right in every element, or refused with a reason; each is told by seed and number."""
    told, missing = [], ""
    for index, shaped in enumerate(_shapes(case)):
        recipe = shaped.weight_recipe
        what = f"seed {case.seeds[0]}, shape {index}: M = {shaped.rows[0]}, N = {recipe.n}, K = {recipe.k}"
        try:
            with within(f"{what}{', flat' if recipe.is_flat else ''}"):
                told.append(check_awkward(shaped, subject))
        except NotDeclaredError as error:
            missing = str(error)
    if not told:
        raise NotDeclaredError(missing)
    refused = sum(outcome.startswith("refused") for outcome in told)
    return f"seed {case.seeds[0]}: {len(told) - refused} shapes right, {refused} refused"


@check("cut")
def check_cut(case: Case, subject: Subject) -> str:
    """The latter half of a weight's in-features, a view into the whole as tensor parallelism cuts it, is right."""
    recipe = case.weight_recipe
    whole = attrs.evolve(case, recipe=attrs.evolve(recipe, k=2 * recipe.k)).weight()
    weight = whole.narrow(1, recipe.k, recipe.k)
    judge_by(weight, as_given(whole).narrow(1, recipe.k, recipe.k))
    layer = subject.layer(weight, make_bias(case), dtype=case.dtype, precision=case.precision)
    judged_calls(layer, draws(case, layer))
    strided = [name for name, tensor in weight.tensors() if not tensor.is_contiguous()]
    return f"with gaps between rows: {', '.join(strided)}"
