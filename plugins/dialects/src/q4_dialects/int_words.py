"""Codes that share words across rows or columns, turned into rows of packed codes and back, a part at a time.

Codes never fill a byte each for a whole layer: temporaries take at most a few MB, or what one row needs.
"""

from __future__ import annotations

import torch

from q4core import Packing, pack_codes, unpack_codes

__all__ = [
    "columns_in_order",
    "from_columns",
    "from_words_along_rows",
    "interleaved_from_rows",
    "pack_along_rows",
    "rows_from_interleaved",
    "to_columns",
    "unpack_along_rows",
]

_INTERLEAVED = ((0, 2), (4, 6), (1, 3), (5, 7))
"""AWQ's order: byte b of a word has these two of its eight columns, the first in the low nibble."""
_PART = 1 << 22
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
        codes = unpack_codes(rows[first : first + step], packing)
        result[first : first + step] = pack_codes(codes.index_select(1, order), packing)
    return result


def unpack_along_rows(words: torch.Tensor, count: int, packing: Packing) -> torch.Tensor:
    """Return words [G, W] of codes along their second axis as one code a byte, uint8 [count, G]."""
    codes = unpack_codes(_bytes(words), packing)
    return codes[:, :count].T.contiguous()


def pack_along_rows(codes: torch.Tensor, dtype: torch.dtype, packing: Packing) -> torch.Tensor:
    """Return the inverse of ``unpack_along_rows``: codes [N, G] as words [G, W], the last one filled up by zeros."""
    packed = pack_codes(codes.T.contiguous(), packing)
    return torch.nn.functional.pad(packed, (0, -packed.shape[1] % dtype.itemsize)).view(dtype)


def rows_from_interleaved(words: torch.Tensor) -> torch.Tensor:
    """Return AWQ's int32 words [K, N / 8] as packed rows, uint8 [N, ceil(K / 2)], low nibble first."""
    count, width = words.shape
    rows = torch.empty((width, 8, -(-count // 2)), dtype=torch.uint8, device=words.device)
    step = max(2, _PART // (8 * width) * 2)
    for start in range(0, count, step):
        part = words[start : start + step]
        if len(part) % 2:
            part = torch.nn.functional.pad(part, (0, 0, 0, 1))
        nibbles = _bytes(part).view(-1, 2, width, 4)
        target = rows[:, :, start // 2 : start // 2 + len(nibbles)]
        for byte, (low, high) in enumerate(_INTERLEAVED):
            even, odd = nibbles[:, 0, :, byte], nibbles[:, 1, :, byte]
            target[:, low] = ((even & 15) | (odd << 4)).T
            target[:, high] = ((even >> 4) | (odd & 0xF0)).T
    return rows.view(width * 8, -1)


def interleaved_from_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the inverse of ``rows_from_interleaved``: rows of ``count`` codes as int32 words [K, N / 8]."""
    width, half = len(rows) // 8, rows.shape[1]
    eights = rows.reshape(width, 8, half)
    words = torch.empty((half, 2, width, 4), dtype=torch.uint8, device=rows.device)
    step = max(1, _PART // (8 * width))
    for start in range(0, half, step):
        part, target = eights[:, :, start : start + step], words[start : start + step]
        for byte, (low, high) in enumerate(_INTERLEAVED):
            first, second = part[:, low], part[:, high]
            target[:, 0, :, byte] = ((first & 15) | (second << 4)).T
            target[:, 1, :, byte] = ((first >> 4) | (second & 0xF0)).T
    return words.view(torch.int32).view(2 * half, width)[:count].contiguous()


def from_words_along_rows(words: torch.Tensor) -> torch.Tensor:
    """Return AWQ's int32 words [G, N / 8] of interleaved zero points as one a byte, uint8 [N, G]."""
    codes = unpack_codes(rows_from_interleaved(words), Packing.LOW_FIRST)
    return codes[:, : len(words)].contiguous()


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Return words [R, W] as uint8 [R, W * itemsize]; a size of 1 may have any stride, which a view refuses."""
    return words.contiguous().reshape(-1).view(torch.uint8).view(len(words), -1)
