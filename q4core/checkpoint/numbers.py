"""A quick look at a weight's numbers, in pieces, before ``PackedWeight.check_values`` looks for the one at fault.

The pieces keep temporaries small: whole float32 copies of the scales left 16 MB of fragmented heap behind for each
layer of 8192 × 8192 that was read, 730 MB for a checkpoint of 2 GB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core.formats import ScaleKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4core.weight import PackedWeight

__all__ = ["check_numbers"]

_PIECE = 1 << 15
_NAN = 0x7F
_MINUS_ZERO = 0x80
_E4M3 = frozenset({ScaleKind.E4M3, ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV})
_SIDE = (
    *("offset", "zero", "codebook", "global_scale", "nested_codebook", "nested_scale", "nested_offset"),
    *("input_channel_scale", "activation_scale"),
)
_MAY_BE_NEGATIVE = frozenset({"offset", "zero", "codebook", "nested_codebook", "nested_offset", "input_channel_scale"})


def check_numbers(weight: PackedWeight) -> None:
    """Check that scales and side tensors hold legal numbers, by the rules of ``PackedWeight.check_values``.

    Raises:
        WeightError: One is not legal; the message names the field and the value.
    """
    if not _is_surely_legal(weight):
        weight.check_values()


def _is_surely_legal(weight: PackedWeight) -> bool:
    """Return whether every number is legal; False may also mean that only the slow look can tell."""
    if weight.input_permutation is not None:
        return False
    if weight.scale_kind in _E4M3:
        legal = _all_pieces(weight.scale.view(torch.uint8), _is_e4m3)
    elif weight.scale_kind is ScaleKind.E8M0:
        legal = _all_pieces(weight.scale.view(torch.uint8), _is_e8m0)
    else:
        # Scales of a second level are sums of products of the side tensors, which are looked at below.
        legal = weight.scale_kind is ScaleKind.DOUBLE_QUANT or _all_pieces(weight.scale, _is_finite_positive)
    for name in _SIDE:
        tensor = getattr(weight, name)
        if legal and tensor is not None and tensor.is_floating_point():
            legal = _all_pieces(tensor, _is_finite if name in _MAY_BE_NEGATIVE else _is_finite_positive)
    if weight.scale_kind is ScaleKind.E4M3_DIV and weight.global_scale is not None:
        legal = legal and bool((weight.global_scale > 0).all())
    return legal


def _all_pieces(tensor: torch.Tensor, rule: Callable[[torch.Tensor], bool]) -> bool:
    rows = tensor.reshape(1, 1) if tensor.dim() == 0 else tensor
    step = max(1, _PIECE // max(1, rows.numel() // rows.shape[0]))
    return all(rule(rows[start : start + step]) for start in range(0, rows.shape[0], step))


def _is_e4m3(piece: torch.Tensor) -> bool:
    return not bool(((piece > _MINUS_ZERO) | (piece == _NAN)).any())


def _is_e8m0(piece: torch.Tensor) -> bool:
    return not bool((piece == 255).any())  # noqa: PLR2004  # NaN


def _is_finite(piece: torch.Tensor) -> bool:
    low, high = torch.aminmax(piece)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def _is_finite_positive(piece: torch.Tensor) -> bool:
    low, high = torch.aminmax(piece)
    return bool(low >= 0) and bool(torch.isfinite(high))
