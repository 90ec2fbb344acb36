"""Random weights are legal, have the features asked for, and come out the same from the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import q4core as q4
from q4_conformance.oracle.decoding import decode_codes, decode_scales
from q4_conformance.oracle.exact import exact_weight
from q4_conformance.oracle.weights import WeightRecipe

F, S = q4.Feature, q4.ScaleKind
KINDS = [
    (name, kind) for name, item in sorted(q4.BUILTIN_FORMATS.items()) for kind in sorted(item.scale_kinds, key=str)
]


@pytest.mark.parametrize(("format_", "kind"), KINDS)
@pytest.mark.parametrize("has_edges", [False, True])
def test_weight_is_legal_and_finite(format_: str, kind: q4.ScaleKind, has_edges: bool) -> None:
    """Every format with every scale kind gives finite values and scales that a checkpoint may hold."""
    weight = WeightRecipe(format=format_, scale_kind=kind, has_edges=has_edges).build()
    weight.check_values()
    assert np.isfinite(exact_weight(weight)).all()
    assert len(np.unique(decode_codes(weight))) == 2**weight.format.bits


@pytest.mark.parametrize(("format_", "kind"), KINDS)
def test_edges_are_there(format_: str, kind: q4.ScaleKind) -> None:
    """Edge weights have a zero row and a zero block (a tiny one where the kind has no zero), tiny and large scales."""
    recipe = WeightRecipe(format=format_, scale_kind=kind, has_edges=True, k=512)
    scales = np.abs(decode_scales(recipe.build()))
    if kind is S.DOUBLE_QUANT:
        return
    tiny = 2.0**-126 if kind is S.E8M0 else 0.0
    assert (scales[0] <= tiny).all()
    assert (scales[1] <= tiny).sum() == 1
    assert scales[3].max() > 4 * np.median(scales[5:])
    assert 0 < scales[2].max() < np.median(scales[5:]) / 4


def test_equal_seeds_give_equal_bytes() -> None:
    """The same recipe gives the same bytes, another seed others."""
    recipes = [WeightRecipe(format="q4_1", seed=seed) for seed in (4, 4, 5)]
    first, again, other = (recipe.build() for recipe in recipes)
    for (_, a), (_, b), (_, c) in zip(first.tensors(), again.tensors(), other.tensors(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (WeightRecipe(format="nf4", k=100, features={F.FLAT_BLOCKS}), {F.FLAT_BLOCKS}),
        (WeightRecipe(format="nf4", features={F.CUSTOM_CODEBOOK}), {F.CUSTOM_CODEBOOK}),
        (WeightRecipe(format="q4_1"), {F.OFFSET}),
        (WeightRecipe(format="int4", k=200, features={F.ZERO_POINT}), {F.ZERO_POINT, F.TAIL_BLOCK}),
        (WeightRecipe(format="int4", features={F.FLOAT_ZERO_POINT}), {F.FLOAT_ZERO_POINT}),
        (WeightRecipe(format="int4", features={F.INPUT_PERMUTATION}), {F.INPUT_PERMUTATION}),
        (WeightRecipe(format="int4", features={F.INPUT_CHANNEL_SCALE}), {F.INPUT_CHANNEL_SCALE}),
        (
            WeightRecipe(format="nvfp4", scale_kind=S.E4M3_MUL, features={F.ROW_GLOBAL_SCALE}),
            {F.ROW_GLOBAL_SCALE},
        ),
    ],
)
def test_weight_has_the_features_asked_for(recipe: WeightRecipe, expected: set[q4.Feature]) -> None:
    """A recipe's features are the weight's, with those that follow from format and K."""
    assert recipe.build().features == expected


def test_grouped_codes_are_a_strided_view() -> None:
    """Grouped codes lie between other bytes, as in a ggml file, and mean the same as if they stood alone."""
    weight = WeightRecipe(format="q4_0", is_grouped=True).build()
    assert weight.qdata.dim() == 3
    assert not weight.qdata.is_contiguous()
    assert weight.qdata.stride(1) == 18
    assert np.array_equal(exact_weight(weight), exact_weight(weight.contiguous()))


def test_misaligned_codes_start_at_an_odd_address() -> None:
    """A misaligned weight's codes have an odd address."""
    for is_grouped in (False, True):
        weight = WeightRecipe(format="q8_0", is_misaligned=True, is_grouped=is_grouped).build()
        assert weight.qdata.data_ptr() % 2 == 1


def test_padding_nibbles_are_not_zero() -> None:
    """What pads a row is random, so that reading beyond K shows."""
    weight = WeightRecipe(format="int4", n=64, k=33, block_size=16).build()
    assert len(np.unique(weight.qdata[:, -1].numpy() >> 4)) > 4


def test_labels_distinguish_recipes() -> None:
    """Recipes that differ have labels that differ."""
    recipes = [
        WeightRecipe(format="nf4"),
        WeightRecipe(format="nf4", seed=1),
        WeightRecipe(format="nf4", has_edges=True),
        WeightRecipe(format="nf4", is_misaligned=True),
        WeightRecipe(format="nf4", packing=q4.Packing.LOW_FIRST),
        WeightRecipe(format="nf4", scale_kind=S.DOUBLE_QUANT),
        WeightRecipe(format="nf4", block_size=128),
        WeightRecipe(format="nf4", features={F.CUSTOM_CODEBOOK}),
    ]
    assert len({recipe.label for recipe in recipes}) == len(recipes)
