"""The 128 × 4 blocked order of block scales that tensor cores read (SWIZZLE_32_4_4).

Scales [R, C] are padded with zeros to whole tiles of 128 rows and 4 columns; the byte of (r, c) lies at
``((r // 128) * (C' / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4``.

Reference:
    cuBLAS, "1D block scaling factors layout".
"""

from __future__ import annotations

import torch

__all__ = ["linear_from_swizzled", "swizzled_from_linear", "tiles", "unpadded"]


_TILE = 128 * 4


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return how many tiles of 128 × 4 scales [rows, columns] fill."""
    return -(-rows // 128), -(-columns // 4)


def linear_from_swizzled(stored: torch.Tensor, rows: int, columns: int, start: int = 0) -> torch.Tensor:
    """Return rows ``start … start + rows`` of scales [R, columns] from the bytes of whole tiles.

    Args:
        stored: The bytes, in whatever shape they are stored.
        rows: How many rows.
        columns: Scales per row.
        start: The first row; only the tiles that hold the rows are looked at.
    """
    _, wide = tiles(rows, columns)
    first, last = start // 128, -(-(start + rows) // 128)
    blocks = stored.reshape(-1).view(torch.uint8).view(-1, wide, 32, 4, 4)[first:last]
    linear = blocks.permute(0, 3, 2, 1, 4).reshape((last - first) * 128, wide * 4)
    skipped = start - first * 128
    return linear[skipped : skipped + rows, :columns].contiguous().view(stored.dtype)


def unpadded(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales [rows, columns] of one byte each in order, or all as stored where they don't fill the tiles."""
    high, wide = tiles(rows, columns)
    fits = stored.element_size() == 1 and rows and columns and stored.numel() == high * wide * _TILE
    return linear_from_swizzled(stored, rows, columns) if fits else stored


def swizzled_from_linear(scale: torch.Tensor) -> torch.Tensor:
    """Return the bytes of whole tiles, flat, from scales [R, C] of one byte each; the padding is zero."""
    rows, columns = scale.shape
    high, wide = tiles(rows, columns)
    padded = torch.zeros(high * 128, wide * 4, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = scale.contiguous().view(torch.uint8)
    blocks = padded.view(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(-1).view(scale.dtype)
