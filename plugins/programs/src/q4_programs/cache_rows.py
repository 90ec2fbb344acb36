"""Rows of a cache of keys and values, in float32, in float16, or in int8 with a scale behind each row."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CACHE_DTYPES", "make_rows", "narrowed", "row_columns", "widened"]

CACHE_DTYPES = frozenset({torch.float32, torch.float16, torch.int8})
"""dtypes of a program's caches."""
_MOST = 127
_SCALE_BYTES = 4
_FLOAT32 = torch.finfo(torch.float32)
_LEAST_HUGE = 4 << 20


def make_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return rows of zeros, which take memory as they are written.

    From 4 MiB on they ask for huge pages, where a system has them: attention streams rows faster that way, as one
    translation of an address serves 2 MiB and not 4 KiB.
    """
    count = math.prod(shape)
    if torch.device(device).type == "cpu" and count * dtype.itemsize >= _LEAST_HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them, or too little memory: the error is torch's
            memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype).view(*shape)
    return torch.zeros(*shape, dtype=dtype, device=device)


def row_columns(columns: int, dtype: torch.dtype) -> int:
    """Return how many elements a row of ``columns`` numbers has in a cache."""
    return columns + _SCALE_BYTES * (dtype is torch.int8)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows as a cache holds them.

    Args:
        x: Floating, [..., C].
        dtype: int8 for levels [..., C + 4] of each row: ``round(x · 127 / amax)``, ties to even, and behind them the
            bytes of the float32 scale ``amax / 127``, where ``amax`` is the row's largest magnitude. A row that is not
            finite has levels of 0, and its scale is not finite. Any other dtype is converted to.
    """
    if dtype is not torch.int8:
        return x.to(dtype)
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    levels = (x * (_MOST / amax).clamp(max=_FLOAT32.max)).round().masked_fill(~amax.isfinite(), 0)
    return torch.cat((levels.to(torch.int8), (amax / _MOST).view(torch.int8)), -1)


def widened(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``narrowed`` gave as numbers of a dtype, [..., C]; each is rounded once."""
    if rows.dtype is not torch.int8:
        return rows.to(dtype)
    levels, scale = rows.tensor_split([-_SCALE_BYTES], -1)
    return (levels.float() * scale.contiguous().view(torch.float32)).to(dtype)
