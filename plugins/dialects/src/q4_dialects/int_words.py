"""Codes that share words across rows or columns, turned into rows of packed codes and back, a part at a time.

Codes never fill a byte each for a whole layer: temporaries take at most a few MB, or what one row needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core import Packing, pack_codes, unpack_codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import PackedWeight

__all__ = [
    "columns_in_order",
    "from_columns",
    "from_words_along_rows",
    "interleaved_from_rows",
    "pack_along_rows",
    "row_parts",
    "rows_from_interleaved",
    "rows_from_pairs",
    "to_columns",
    "unpack_along_rows",
]

_LOW_COLUMNS, _HIGH_COLUMNS = (0, 4, 1, 5), (2, 6, 3, 7)
"""AWQ's order: the columns in the low and in the high nibbles of the four bytes of a word."""
_LOW, _HIGH = 0x0F0F0F0F, -0x0F0F0F10
"""Masks of the low and the high nibbles of an int32."""
_PART = 1 << 20
"""Codes that are handled at once."""


def to_columns(words: torch.Tensor) -> torch.Tensor:
    """Return words [R, N] that hold codes along their first axis as uint8 [N, R * itemsize], first code lowest."""
    return _bytes(words.T)


def from_columns(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the inverse of ``to_columns``: bytes [N, P], filled up by zeros, as words [ceil(P / itemsize), N]."""
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % dtype.itemsize)).contiguous()
    rows = rows.clone() if rows.storage_offset() % dtype.itemsize else rows
    return rows.view(dtype).T.contiguous()


def columns_in_order(rows: torch.Tensor, order: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return packed rows [N, P] whose code j is the code ``order[j]`` of the given ones."""
    count = len(order)
    result = torch.empty((len(rows), -(-count // packing.codes_per_byte)), dtype=torch.uint8, device=rows.device)
    step = max(1, _PART // count)
    for first in range(0, len(rows), step):
        codes = unpack_codes(rows[first : first + step], packing).T.contiguous()  # lines are picked 3 times as fast
        result[first : first + step] = pack_codes(codes.index_select(0, order).T, packing)
    return result


def unpack_along_rows(words: torch.Tensor, count: int, packing: Packing) -> torch.Tensor:
    """Return words [G, W] of codes along their second axis as one code a byte, uint8 [count, G]."""
    codes = unpack_codes(_bytes(words), packing)
    return codes[:, :count].T.contiguous()


def pack_along_rows(codes: torch.Tensor, dtype: torch.dtype, packing: Packing) -> torch.Tensor:
    """Return the inverse of ``unpack_along_rows``: codes [N, G] as words [G, W], the last one filled up by zeros."""
    packed = pack_codes(codes.T.contiguous(), packing)
    whole = torch.nn.functional.pad(packed, (0, -packed.shape[1] % dtype.itemsize))
    return whole.reshape(-1).view(dtype).reshape(len(packed), -1)  # a single row may have any stride


def rows_from_interleaved(words: torch.Tensor) -> torch.Tensor:
    """Return AWQ's int32 words [K, N / 8] as packed rows, uint8 [N, ceil(K / 2)], low nibble first."""
    count, width = words.shape
    half = -(-count // 2)
    rows = torch.empty((width, 8, half), dtype=torch.uint8, device=words.device)
    step = max(1, _PART // (8 * count))
    for start in range(0, width, step):
        part = torch.nn.functional.pad(words[:, start : start + step].T, (0, count % 2)).contiguous()
        even, odd = part[:, 0::2], part[:, 1::2]
        low = (even & _LOW) | ((odd & _LOW) << 4)
        high = ((even >> 4) & _LOW) | (odd & _HIGH)
        for columns, nibbles in ((_LOW_COLUMNS, low), (_HIGH_COLUMNS, high)):
            four = nibbles.contiguous().view(torch.uint8).view(-1, half, 4)
            for byte, column in enumerate(columns):
                rows[start : start + step, column] = four[:, :, byte]
    return rows.view(width * 8, half)


def interleaved_from_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the inverse of ``rows_from_interleaved``: rows of ``count`` codes as int32 words [K, N / 8]."""
    width, half = len(rows) // 8, rows.shape[1]
    eights = rows.reshape(width, 8, half)
    words = torch.empty((half, 2, width), dtype=torch.int32, device=rows.device)
    step = max(1, _PART // (16 * half))
    for start in range(0, width, step):
        part = eights[start : start + step]
        low, high = (
            torch.stack([part[:, column] for column in columns], -1).view(torch.int32).squeeze(-1)
            for columns in (_LOW_COLUMNS, _HIGH_COLUMNS)
        )
        words[:, 0, start : start + step] = ((low & _LOW) | ((high & _LOW) << 4)).T
        words[:, 1, start : start + step] = (((low >> 4) & _LOW) | (high & _HIGH)).T
    return words.view(2 * half, width)[:count].contiguous()


def from_words_along_rows(words: torch.Tensor) -> torch.Tensor:
    """Return AWQ's int32 words [G, N / 8] of interleaved zero points as one a byte, uint8 [N, G]."""
    codes = unpack_codes(rows_from_interleaved(words), Packing.LOW_FIRST)
    return codes[:, : len(words)].contiguous()


def rows_from_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Return bytes [N / 2, K] of two rows each as packed rows [N, ceil(K / 2)]; an odd K ends in a zero.

    Byte (r, k) holds row 2r in its low nibble.
    """
    count, columns = pairs.shape
    rows = torch.empty((count, 2, -(-columns // 2)), dtype=torch.uint8, device=pairs.device)
    step = max(1, _PART // columns)
    for first in range(0, count, step):
        part = torch.nn.functional.pad(pairs[first : first + step], (0, columns % 2))
        even, odd = part[:, 0::2], part[:, 1::2]
        rows[first : first + step, 0] = (even & 15) | (odd << 4)
        rows[first : first + step, 1] = (even >> 4) | (odd & 0xF0)
    return rows.view(2 * count, -1)


def row_parts(weight: PackedWeight, multiple: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row and the codes, one a byte, of some rows of ROW blocks at a time, until all are done.

    Args:
        weight: The weight.
        multiple: What the number of rows at a time is a multiple of, but the last.
    """
    rows, columns = weight.shape
    step = max(1, _PART // (multiple * columns)) * multiple
    for first in range(0, rows, step):
        yield first, weight.narrow(0, first, min(step, rows - first)).codes()


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Return words [R, W] as uint8 [R, W * itemsize]; a size of 1 may have any stride, which a view refuses."""
    flat = words.contiguous().reshape(-1)
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(len(words), -1)
