"""Random scales of every kind, with the levels that belong to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4core import Feature, ScaleKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4_conformance.oracle.weights import WeightRecipe

_SIGNED = frozenset({"q4_0", "q4_1", "q8_0"})
"""ggml's formats, whose block scales may be negative."""
_LARGE = 2.0**10
"""The largest edge scale: sums of a few thousand such terms are far from overflow in float32."""


def _edges(values: NDArray[Any], zero: Any, tiny: Any, large: Any) -> None:
    """Write the rows that a kernel may get wrong: all blocks zero, one block zero, tiny, large."""
    if values.ndim == 1:  # flat blocks: spread over the weight
        for place, value in enumerate((zero, tiny, large)):
            values[place % values.shape[0]] = value
        return
    rows = values.shape[0]
    values[0] = zero
    values[1 % rows, values.shape[1] // 2] = zero
    values[2 % rows] = tiny
    values[3 % rows] = large


def _plain(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    values = np.exp(random.uniform(np.log(0.004), np.log(0.25), size=shape))
    if recipe.format.name in _SIGNED:
        values *= random.choice([-1.0, 1.0], size=shape)
    if recipe.has_edges:
        smallest = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-135}
        _edges(values, 0.0, smallest[recipe.scale_dtype], _LARGE)
    fields = {"scale": torch.from_numpy(values).to(recipe.scale_dtype)}
    if recipe.format.has_offset:
        # About minus the middle of the codes, as a quantiser would have it, so that the two terms nearly cancel.
        offset = -values * random.uniform(2.0, 13.0, size=shape)
        fields["offset"] = torch.from_numpy(offset).to(recipe.scale_dtype)
    return fields


def _e8m0(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    values = random.integers(127 - 9, 127 - 1, size=shape, dtype=np.uint8)
    if recipe.has_edges:
        _edges(values, 0, 1, 127 + 10)  # the smallest is 2^-127, a float32 subnormal; there is no zero
    return {"scale": torch.from_numpy(values)}


def _e4m3_bytes(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.uint8]:
    # Six or seven exponents with every mantissa: wide enough to show, not so wide that few blocks drown the others.
    low, high = (0x08, 0x40) if recipe.scale_kind is ScaleKind.E4M3 else (0x40, 0x78)
    values = random.integers(low, high, size=shape, dtype=np.uint8)
    if recipe.has_edges:
        _edges(values, 0, 1, 0x7E)
    return values


def _e4m3(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    scale = torch.from_numpy(_e4m3_bytes(recipe, shape, random)).view(torch.float8_e4m3fn)
    if recipe.scale_kind is ScaleKind.E4M3:
        return {"scale": scale}
    size = recipe.n if Feature.ROW_GLOBAL_SCALE in recipe.features else ()
    factor = random.uniform(0.7, 1.4, size=size) * 2.0**-9
    total = factor if recipe.scale_kind is ScaleKind.E4M3_MUL else 1.0 / factor
    return {"scale": scale, "global_scale": torch.from_numpy(np.asarray(total)).to(torch.float32)}


def _double_quant(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    values = random.integers(0, 256, size=shape, dtype=np.uint8)
    nested = 256
    blocks = -(-values.size // nested)
    mean = 0.11
    table = np.sort(np.append(random.uniform(-1.0, 1.0, size=254), [-1.0, 1.0]))
    # The second absmax stays below the mean, so that no resolved scale is negative.
    second = random.uniform(0.5, 0.99, size=blocks) * mean
    if recipe.has_edges:
        second[:] = mean
        _edges(values, 0, 1, 255)  # -1 x the mean + the mean is 0; the next is next to it, the last twice the mean
    return {
        "scale": torch.from_numpy(values),
        "nested_codebook": torch.from_numpy(table).to(torch.float32),
        "nested_scale": torch.from_numpy(second).to(torch.float32),
        "nested_offset": torch.tensor(mean, dtype=torch.float32),
    }


_DRAWS = {
    ScaleKind.PLAIN: _plain,
    ScaleKind.E8M0: _e8m0,
    ScaleKind.E4M3: _e4m3,
    ScaleKind.E4M3_MUL: _e4m3,
    ScaleKind.E4M3_DIV: _e4m3,
    ScaleKind.DOUBLE_QUANT: _double_quant,
}


def draw_scales(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return the scale fields of a ``PackedWeight``: ``scale`` of that shape, its levels, and ``offset`` where due."""
    return _DRAWS[recipe.scale_kind](recipe, shape, random)
