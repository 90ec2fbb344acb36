"""Activations lie on the grid of their precision, and on no coarser one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import q4core as q4
from q4_conformance.oracle.grids import draw_free, draw_on_grid
from q4_conformance.oracle.weights import WeightRecipe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
P = q4.Precision


def _int8_per_block(x: np.ndarray, block: int) -> np.ndarray:
    """Quantise to int8 with a scale of max / 127 per block, and back."""
    rows, columns = x.shape
    blocks = x.reshape(rows, columns // block, block)
    scale = np.abs(blocks).max(axis=-1, keepdims=True).astype(np.float32) / np.float32(127)
    rounded: np.ndarray = (np.round(blocks / scale) * scale).reshape(rows, columns)
    return rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [32, 64, 256])
def test_w4a8_draw_survives_int8(dtype: torch.dtype, block: int) -> None:
    """Quantising a w4a8 draw to int8, per block of 32 or of any larger size up to a row, loses nothing."""
    x = draw_on_grid(P.W4A8, 5, 256, dtype=dtype, seed=1).to(torch.float64).numpy()
    assert np.array_equal(_int8_per_block(x, block), x)


def test_w4a8_draw_survives_int8_in_the_weights_own_order() -> None:
    """Where the weight permutes its inputs, blocks in both orders have their peak."""
    weight = WeightRecipe(format="int4", k=256, features={q4.Feature.INPUT_PERMUTATION}).build()
    assert weight.input_permutation is not None
    x = draw_on_grid(P.W4A8, 4, 256, dtype=torch.float32, seed=1, weight=weight)
    for ordered in (x, x[:, weight.input_permutation]):
        values = ordered.to(torch.float64).numpy()
        assert np.array_equal(_int8_per_block(values, 32), values)


def test_w4a8_draw_survives_channel_scales() -> None:
    """Where the weight scales its channels by powers of two, the scaled input lies on the grid."""
    features = {q4.Feature.INPUT_CHANNEL_SCALE}
    weight = WeightRecipe(format="int4", k=256, features=features, has_coarse_channels=True).build()
    assert weight.input_channel_scale is not None
    x = draw_on_grid(P.W4A8, 4, 256, dtype=torch.bfloat16, seed=1, weight=weight)
    scaled = (x.to(torch.float64) * weight.input_channel_scale).numpy()
    assert np.array_equal(_int8_per_block(scaled, 32), scaled)
    general = WeightRecipe(format="int4", k=256, features=features).build()
    with pytest.raises(ArithmeticError):
        draw_on_grid(P.W4A8, 4, 256, dtype=torch.bfloat16, seed=1, weight=general)


@pytest.mark.parametrize("dtype", DTYPES)
def test_w4a16_draw_shows_a_hidden_int8(dtype: torch.dtype) -> None:
    """A w4a16 draw is exact in both 16-bit dtypes, and loses by int8."""
    x = draw_on_grid(P.W4A16, 5, 256, dtype=dtype, seed=1)
    for narrow in (torch.bfloat16, torch.float16):
        assert torch.equal(x.to(narrow).to(torch.float64), x.to(torch.float64))
    values = x.to(torch.float64).numpy()
    assert not np.array_equal(_int8_per_block(values, 32), values)


def test_w4a32_draw_shows_hidden_16_bits() -> None:
    """A w4a32 draw in float32 loses by either 16-bit dtype; in a 16-bit dtype it is a w4a16 draw."""
    x = draw_on_grid(P.W4A32, 5, 256, dtype=torch.float32, seed=1)
    for narrow in (torch.bfloat16, torch.float16):
        assert not torch.equal(x.to(narrow).to(torch.float32), x)
    assert draw_on_grid(P.W4A32, 5, 256, dtype=torch.bfloat16, seed=1).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_w4a4_draw_survives_four_bits(dtype: torch.dtype) -> None:
    """Blocks of 16 or 32 of a w4a4 draw are E2M1 values times a power of two, with a 6 in each."""
    x = draw_on_grid(P.W4A4, 5, 256, dtype=dtype, seed=1).to(torch.float64).abs().numpy()
    for block in (16, 32):
        blocks = x.reshape(5, -1, block)
        unit = blocks.max(axis=-1, keepdims=True) / 6
        assert set(np.unique(blocks / unit)) <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
        assert (np.frexp(unit)[0] == 0.5).all()
        assert np.unique(unit).size == 1  # a per-tensor global leaves every block's scale where it is


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-20, 0.0173, 1.0, 37.5, 2.0**40])
def test_w4a4_draw_lies_on_the_grid_of_a_static_scale(scale: float) -> None:
    """Block scales over the next power of two of the weight's activation scale are normal e4m3 powers of two."""
    weight = WeightRecipe(format="nvfp4", scale_kind=q4.ScaleKind.E4M3_MUL, activation_scale=scale).build()
    x = draw_on_grid(P.W4A4, 5, 256, dtype=torch.float32, seed=1, weight=weight).abs()
    mantissa, exponent = np.frexp(float(x.max()) / 6)
    assert mantissa == 0.5
    block_scale = exponent - 1 - int(np.ceil(np.log2(scale)))
    assert -6 <= block_scale <= 8
    usual = draw_on_grid(P.W4A4, 5, 256, dtype=torch.float32, seed=1).abs()
    assert torch.equal(x, usual) == (2.0**-13 <= scale <= 2.0)
    others = [draw_on_grid(P.W4A8, 5, 256, dtype=torch.float32, seed=1, weight=item) for item in (weight, None)]
    assert torch.equal(*others)


@pytest.mark.parametrize("precision", list(P))
def test_draws_are_seeded(precision: q4.Precision) -> None:
    """Equal seeds give equal draws; other seeds, rows of one draw and signs differ."""
    first, again, other = (draw_on_grid(precision, 3, 64, dtype=torch.float32, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert bool((first < 0).any())
    assert bool((first > 0).any())


def test_a_dtype_that_cannot_hold_a_grid_is_refused() -> None:
    """A draw is exact or an error: float16 can't hold the grid 2^-30 down."""
    with pytest.raises(ArithmeticError):
        draw_on_grid(P.W4A16, 2, 64, dtype=torch.float16, seed=0, shift=-30)


def test_free_draw_has_outliers() -> None:
    """Each row of a free draw has one value several times the others'."""
    x = draw_free(16, 512, dtype=torch.float32, seed=5)
    assert float(x.abs().max()) > 8
    assert torch.equal(x, draw_free(16, 512, dtype=torch.float32, seed=5))
