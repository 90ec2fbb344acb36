"""Weights of random shapes, layouts and features: whatever the recipe, the numbers are right."""

from __future__ import annotations

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q4_conformance import Case, Outcome, WeightRecipe, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.reference import REFERENCE
from q4_conformance_faults import ToyKernel
from q4core import BUILTIN_FORMATS, Feature, Form, Packing

EXAMPLES = 60


@functools.cache
def _subject(name: str) -> BackendSubject:
    return BackendSubject(REFERENCE if name == REFERENCE else ToyKernel(name))


@st.composite
def recipes(draw: st.DrawFn) -> WeightRecipe:
    """Draw any weight that a checkpoint may hold, small enough to be quick."""
    kind = draw(st.sampled_from(sorted(BUILTIN_FORMATS.values(), key=lambda item: item.name)))
    is_flat = kind.name in {"nf4", "fp4"} and draw(st.booleans())
    free = kind.form is Form.INTEGER or is_flat
    block = draw(st.sampled_from([8, 32, 96, 128])) if not kind.block_sizes else kind.block_size
    k = draw(st.integers(1, 400)) if free else draw(st.integers(1, 6)) * block
    features = {Feature.FLAT_BLOCKS} if is_flat and k % block else set()
    orders = [Packing.BYTES] if kind.bits == 8 else [Packing.LOW_FIRST, Packing.HIGH_FIRST]
    if kind.bits == 4 and not features:
        orders.append(Packing.half_split(draw(st.sampled_from([2, 8, 16, 32]))))
    if kind.form is Form.INTEGER:
        features |= draw(st.sets(st.sampled_from([Feature.INPUT_PERMUTATION, Feature.INPUT_CHANNEL_SCALE])))
        features |= draw(st.sampled_from([set(), {Feature.ZERO_POINT}, {Feature.FLOAT_ZERO_POINT}]))
    return WeightRecipe(
        format=kind,
        n=draw(st.integers(1, 40)),
        k=k,
        seed=draw(st.integers(0, 999)),
        scale_kind=draw(st.sampled_from(sorted(kind.scale_kinds, key=lambda item: item.value))),
        packing=draw(st.sampled_from(orders)),
        block_size=block,
        features=features,
        is_misaligned=draw(st.booleans()),
    )


@settings(max_examples=EXAMPLES)
@given(
    recipe=recipes(),
    name=st.sampled_from([REFERENCE, "toy-of-any-shape"]),
    rows=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_shape_is_right(recipe: WeightRecipe, name: str, rows: int, dtype: torch.dtype) -> None:
    """A random weight in a random layout gives the oracle's numbers for a random number of rows."""
    case = Case(
        contract="EX-01", part="shapes", text="right for any shape", check="values", recipe=recipe, rows=(rows,),
        dtype=dtype, seeds=(recipe.seed,),
    )  # fmt: skip
    result = run_case(case, _subject(name))
    assert result.outcome is Outcome.PASS, result
