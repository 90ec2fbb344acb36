"""What the NVFP4 dialects share: the two scale levels, and their shapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import torch

from q4core import PackedWeight, Problem, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import Catalogue, Dialect, TensorInfo

__all__ = [
    "BLOCK",
    "E4M3",
    "as_float8",
    "assumed_dtype",
    "divided_levels",
    "matrix_shape",
    "multiplied_levels",
    "scalar_problems",
    "with_divided_levels",
    "with_multiplied_levels",
]

BLOCK = 16
E4M3 = torch.float8_e4m3fn


def matrix_shape(codes: TensorInfo | None) -> tuple[int, int] | None:
    """Return (N, K) of codes [N, K / 2] where K holds whole blocks, or None."""
    if codes is None or len(codes.shape) != 2 or codes.shape[1] * 2 % BLOCK:  # noqa: PLR2004  # rows and bytes
        return None
    return codes.shape[0], codes.shape[1] * 2


def assumed_dtype(catalogue: Catalogue) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the model's dtype by ``config.json``, or float32 and a note that it is assumed."""
    if catalogue.dtype is not None:
        return catalogue.dtype, ()
    return torch.float32, ("dtype float32 assumed: neither the dialect nor config.json says it",)


def scalar_problems(
    catalogue: Catalogue, key: str | None, *, experts: tuple[int, ...] | None = None
) -> Iterator[Problem]:
    """Yield what is wrong with a tensor that must be one float32 number, of shape [] or [1].

    Args:
        catalogue: Where to look.
        key: The tensor's name.
        experts: The shape of one number for each expert, where that is legal too.
    """
    info = None if key is None else catalogue.get(key)
    if key is None or info is None:
        return
    if info.dtype != torch.float32:
        yield Problem("dtype", key, "of dtype float32", str(info.dtype).removeprefix("torch."))
    legal = {(), (1,), *(() if experts is None else (experts,))}
    if info.shape not in legal:
        also = "" if experts is None else f" or {list(experts)}"
        yield Problem("shape", key, f"of shape [] or [1]{also}", list(info.shape))


def as_float8(scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3 bytes as float8_e4m3fn."""
    return scale.view(E4M3)


def _reciprocal(value: torch.Tensor) -> torch.Tensor | None:
    """Return 1 / value where that is exact (a power of two within range), else None."""
    number = float(value)
    inverse = 1.0 / value.to(torch.float32) if number > 0 else value
    is_power = number > 0 and math.frexp(number)[0] == 0.5  # noqa: PLR2004  # the mantissa of a power of two
    return inverse if is_power and math.isfinite(float(inverse)) and float(inverse) > 0 else None


_LOSSY = "With lossy=True the global scale's reciprocal is rounded to float32."


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
        return as_float8(weight.scale), torch.ones(1)
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
