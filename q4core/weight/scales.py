"""Resolve the scale levels of some rows of a weight without resolving the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core.formats import ScaleKind, resolve_levels

if TYPE_CHECKING:
    from q4core.weight.packed import PackedWeight

__all__ = ["index_rows", "resolved_rows"]


def index_rows(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return ``tensor[rows]``; float8, which not every device can index, as bytes in between."""
    if isinstance(rows, slice):
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype) if tensor.element_size() == 1 else tensor[rows]


def resolved_rows(weight: PackedWeight, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return the float32 scales ``scale[rows]`` stands for: of some rows, or of some blocks of a FLAT weight."""
    global_scale, nested = weight.global_scale, weight.nested_scale
    if global_scale is not None and global_scale.numel() > 1:
        global_scale = global_scale[rows]
    if nested is not None and weight.scale_kind is ScaleKind.DOUBLE_QUANT:
        # Each scale gets its own entry of the second level, which is then a level with blocks of one.
        places = rows
        if isinstance(places, slice):
            places = torch.arange(*places.indices(weight.scale.shape[0]), device=weight.device)
        if weight.scale.dim() > 1:
            width = weight.scale.shape[1]
            places = places[:, None] * width + torch.arange(width, device=weight.device)
        nested = nested[places // weight.nested_block_size].reshape(-1)
    return resolve_levels(
        weight.scale_kind,
        index_rows(weight.scale, rows),
        global_scale=global_scale,
        nested_codebook=weight.nested_codebook,
        nested_scale=nested,
        nested_offset=weight.nested_offset,
        nested_block_size=1,
    )
