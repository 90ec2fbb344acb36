"""The parts of ggml's blocks: codes, scales and offsets of a tensor's bytes [rows, blocks, bytes of a block].

Each function returns one of these parts, as a view of the bytes where they hold it so.

Reference:
    ggml-common.h and ggml-quants.c of ggml; ``gguf.quants`` of the package ``gguf``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Part = Callable[[torch.Tensor], torch.Tensor]

__all__ = [
    "byte_scales",
    "four_bit_pairs",
    "half",
    "minus_half",
    "nonlinear_scales",
    "q2_codes",
    "q3_codes",
    "q3_scales",
    "q5_codes",
    "q5_k_codes",
    "q6_codes",
    "six_bit_numbers",
    "ternary_codes",
    "two_bit_ternary_codes",
]

_ZERO_4, _ZERO_5, _ZERO_6 = 8, 16, 32
"""Codes that mean zero: of q4_0, and of ggml's numbers of 5 and 6 bits."""
_TRITS = (1, 3, 9, 27, 81)


def half(start: int) -> Part:
    """Return the float16 numbers at a byte of each block: [rows, blocks]."""

    def part(blocks: torch.Tensor) -> torch.Tensor:
        return blocks[..., start : start + 2].view(torch.float16).squeeze(-1)

    return part


def minus_half(start: int) -> Part:
    """Return minus the float16 numbers at a byte of each block: K-quants subtract their minimums."""
    numbers = half(start)
    return lambda blocks: -numbers(blocks)


def byte_scales(start: int, count: int, dtype: torch.dtype) -> Part:
    """Return scales of a byte each: [rows, blocks, count] of a dtype of one byte."""
    return lambda blocks: blocks[..., start : start + count].view(dtype)


def _shifted(values: torch.Tensor, width: int, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """Return [..., bytes × shifts]: of each ``width`` bytes the lowest bits first, then those of the next shift."""
    by = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    parts: torch.Tensor = values.unflatten(-1, (-1, 1, width)) >> by
    return parts.bitwise_and_(mask).flatten(-3)


def six_bit_numbers(start: int, which: int) -> Part:
    """Return the eight scales (``which`` 0) or minimums (1) of Q4_K and Q5_K, 6 bits each in 12 bytes."""

    def part(blocks: torch.Tensor) -> torch.Tensor:
        first, second, mixed = blocks[..., start : start + 12].unflatten(-1, (3, 4)).unbind(-2)
        own = second if which else first
        low = mixed >> 4 if which else mixed & 15
        return torch.cat((own & 63, low | (own >> 2 & 48)), -1)

    return part


def four_bit_pairs(start: int, which: int) -> Part:
    """Return the sixteen scales (``which`` 0: low nibbles) or minimums (1: high ones) of Q2_K."""

    def part(blocks: torch.Tensor) -> torch.Tensor:
        pairs = blocks[..., start : start + 16]
        return torch.bitwise_right_shift(pairs, 4) if which else torch.bitwise_and(pairs, 15)

    return part


def q3_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sixteen signed 6-bit scales of Q3_K, int8."""
    low = _shifted(blocks[..., 96:104], 8, (0, 4), 15)
    high = _shifted(blocks[..., 104:108], 4, (0, 2, 4, 6), 3)
    return (low | high << 4).view(torch.int8) - _ZERO_6


def nonlinear_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return the eight signed 6-bit scales of IQ4_XS, int8: two high bits in two bytes, nibbles in four."""
    high = _shifted(blocks[..., 2:4], 1, (0, 2, 4, 6), 3)
    low = _shifted(blocks[..., 4:8], 1, (0, 4), 15)
    return (low | high << 4).view(torch.int8) - _ZERO_6


def q2_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q2_K: 0 … 3, one per byte."""
    return _shifted(blocks[..., 16:80], 32, (0, 2, 4, 6), 3)


def q3_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q3_K as q4_0's: −4 … 3 plus 8. The third bit is apart."""
    low = _shifted(blocks[..., 32:96], 32, (0, 2, 4, 6), 3)
    high = _shifted(blocks[..., :32], 32, range(8), 1)
    return (low | high << 2) + (_ZERO_4 - 4)


def q5_codes(bits: int, start: int, zero: int = 0) -> Part:
    """Return the codes of Q5_0 (``zero`` 16) or Q5_1: the fifth bits from byte ``bits`` on, nibbles from ``start``."""

    def part(blocks: torch.Tensor) -> torch.Tensor:
        low = _shifted(blocks[..., start : start + 16], 16, (0, 4), 15)
        high = _shifted(blocks[..., bits : bits + 4], 1, range(8), 1)
        return (low | high << 4) - zero

    return part


def q5_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q5_K: 0 … 31."""
    low = _shifted(blocks[..., 48:176], 32, (0, 4), 15)
    high = _shifted(blocks[..., 16:48], 32, range(8), 1)
    return low | high << 4


def q6_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q6_K as q8_0's: −32 … 31 in two's complement."""
    low = _shifted(blocks[..., :128], 64, (0, 4), 15)
    high = _shifted(blocks[..., 128:192], 32, (0, 2, 4, 6), 3)
    return (low | high << 4) - _ZERO_6


def ternary_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of TQ1_0 as q4_0's: −1, 0, 1 plus 8. Five of them share a byte, as a fraction in base 3."""
    factors = torch.tensor(_TRITS, dtype=torch.uint8)[:, None]
    parts = [
        (blocks[..., first:last].unsqueeze(-2) * factors[:count]).flatten(-2)  # modulo 256
        for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    codes = torch.cat(parts, -1).to(torch.int16) * 3 >> 8
    return codes.to(torch.uint8) + (_ZERO_4 - 1)


def two_bit_ternary_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of TQ2_0 as q4_0's: −1 … 2 plus 8."""
    return _shifted(blocks[..., :64], 32, (0, 2, 4, 6), 3) + (_ZERO_4 - 1)
