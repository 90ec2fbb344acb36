"""Shared code of the NVFP4 dialects: codes, the two scale levels, and their shapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_dialects.layer_keys import scalar_problems
from q4core import PackedWeight, Problem, ScaleKind, find_format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import Catalogue, Dialect, LayerSchema, TensorInfo

__all__ = [
    "BLOCK",
    "E4M3",
    "LEVEL_NUMBERS",
    "as_float8",
    "codes_problems",
    "divided_levels",
    "matrix_shape",
    "multiplied_levels",
    "number_problems",
    "row_scale_problems",
    "weight_of",
    "with_divided_levels",
    "with_multiplied_levels",
]

BLOCK = 16
E4M3 = torch.float8_e4m3fn
LEVEL_NUMBERS = dict.fromkeys(("scale", "global_scale", "activation_scale"), "finite and not negative")
"""What the numbers of scales that multiply must be."""


def matrix_shape(codes: TensorInfo | None) -> tuple[int, int] | None:
    """Return (N, K) of codes [N, K / 2] where K holds whole blocks, or None."""
    if codes is None or len(codes.shape) != 2 or codes.shape[1] * 2 % BLOCK:  # noqa: PLR2004  # rows and bytes
        return None
    return codes.shape[0], codes.shape[1] * 2


def codes_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield what is wrong with codes [N, K / 2] whose K must hold whole blocks."""
    key = layer.keys["qdata"]
    yield from dialect.expect(catalogue, key, dtypes={torch.uint8}, shape=(None, None))
    codes = catalogue.get(key)
    if codes is not None and len(codes.shape) == 2 and matrix_shape(codes) is None:  # noqa: PLR2004  # rows and bytes
        yield Problem("shape", key, f"[N, K / 2] with K a multiple of {BLOCK}", list(codes.shape))


def row_scale_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield what is wrong with block scales [N, K / 16] in e4m3."""
    rows, columns = layer.shape or (None, None)
    shape = rows, None if columns is None else columns // BLOCK
    yield from dialect.expect(catalogue, layer.keys["scale"], dtypes={E4M3}, shape=shape)


def number_problems(
    layer: LayerSchema, catalogue: Catalogue, *, experts: tuple[int, ...] | None = None
) -> Iterator[Problem]:
    """Yield what is wrong with the global scale and the activation scale.

    Args:
        layer: The layer.
        catalogue: Where to look.
        experts: The shape of one global scale for each expert, where that is legal too.
    """
    yield from scalar_problems(catalogue, layer.keys.get("global_scale"), experts=experts)
    yield from scalar_problems(catalogue, layer.keys.get("activation_scale"))


def weight_of(layer: LayerSchema, qdata: torch.Tensor, scale: torch.Tensor, **facts: Any) -> PackedWeight:
    """Return the weight of a layer.

    Args:
        layer: How it is stored: says format, block size, name, dialect, and the notes by default.
        qdata: uint8 [N, K / 2].
        scale: Block scales [N, K / block].
        facts: Further fields of the weight.
    """
    kind = find_format(layer.format)
    fields = {"notes": layer.notes, **facts}
    return PackedWeight(
        format=kind,
        qdata=qdata,
        scale=scale,
        out_features=qdata.shape[0],
        in_features=qdata.shape[1] * 2,
        block_size=kind.block_size,
        name=layer.module,
        dialect=layer.dialect,
        **fields,
    )


def as_float8(scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3 bytes as float8_e4m3fn."""
    return scale.view(E4M3)


def _reciprocal(value: torch.Tensor) -> torch.Tensor | None:
    """Return 1 / value where that is exact (a power of two within range), else None."""
    number = float(value)
    inverse = 1.0 / value.to(torch.float32) if number > 0 else value
    is_power = number > 0 and math.frexp(number)[0] == 0.5  # noqa: PLR2004  # the mantissa of a power of two
    return inverse if is_power and math.isfinite(float(inverse)) and float(inverse) > 0 else None


_LOSSY = "lossy=True (`q4 convert --requantize`) rounds the global scale's reciprocal to float32."


def multiplied_levels(dialect: Dialect, module: str, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return block scales (float8) and the factor that multiplies them, or None for a single level.

    Raises:
        DialectError: The weight's levels are not of that kind, and can't be turned into it without rounding.
    """
    if weight.scale_kind is ScaleKind.E4M3:
        return as_float8(weight.scale), None
    if weight.scale_kind is ScaleKind.E4M3_MUL and weight.global_scale is not None:
        return as_float8(weight.scale), weight.global_scale.to(torch.float32)
    if weight.scale_kind is ScaleKind.E4M3_DIV and weight.global_scale is not None:
        inverse = _reciprocal(weight.global_scale)
        if inverse is not None:
            return as_float8(weight.scale), inverse
        raise dialect.refusal(
            module, "scale levels", "e4m3 × global, or a global that is a power of two", "e4m3 ÷ global", _LOSSY
        )
    raise dialect.refusal(module, "scale levels", "e4m3, with a global scale or without", weight.scale_kind.value)


def divided_levels(dialect: Dialect, module: str, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block scales (float8) and the divisor of them; 1 for a single level.

    Raises:
        DialectError: The weight's levels are not of that kind, and can't be turned into it without rounding.
    """
    if weight.scale_kind is ScaleKind.E4M3:
        return as_float8(weight.scale), torch.ones(1, dtype=torch.float32)
    if weight.scale_kind is ScaleKind.E4M3_DIV and weight.global_scale is not None:
        return as_float8(weight.scale), weight.global_scale.to(torch.float32)
    if weight.scale_kind is ScaleKind.E4M3_MUL and weight.global_scale is not None:
        inverse = _reciprocal(weight.global_scale)
        if inverse is not None:
            return as_float8(weight.scale), inverse
        raise dialect.refusal(
            module, "scale levels", "e4m3 ÷ global, or a global that is a power of two", "e4m3 × global", _LOSSY
        )
    raise dialect.refusal(module, "scale levels", "e4m3, with a global scale or without", weight.scale_kind.value)


def with_multiplied_levels(weight: PackedWeight) -> PackedWeight:
    """Return the weight with a global scale that multiplies, its reciprocal rounded where it divided."""
    if weight.scale_kind is not ScaleKind.E4M3_DIV or weight.global_scale is None:
        return weight
    return attrs.evolve(weight, scale_kind=ScaleKind.E4M3_MUL, global_scale=1.0 / weight.global_scale.to(torch.float32))


def with_divided_levels(weight: PackedWeight) -> PackedWeight:
    """Return the weight with a global scale that divides, its reciprocal rounded where it multiplied."""
    if weight.scale_kind is not ScaleKind.E4M3_MUL or weight.global_scale is None:
        return weight
    return attrs.evolve(weight, scale_kind=ScaleKind.E4M3_DIV, global_scale=1.0 / weight.global_scale.to(torch.float32))
