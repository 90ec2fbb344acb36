"""The parts of ggml's blocks: codes, scales and offsets of a tensor's bytes [rows, blocks, bytes of a block].

Each function returns one of these parts, as a view of the bytes where they hold it so. Codes are one per byte, uint8
[rows, codes of a row].

Reference:
    ggml-common.h and ggml-quants.c of ggml; ``gguf.quants`` of the package ``gguf``.
"""

from __future__ import annotations

import functools
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


def _mask(byte: int) -> int:
    """Return a byte eight times: bytes are shifted and masked eight at a time, as one int64."""
    return int.from_bytes(bytes([byte] * 8), "little", signed=True)


def _words(blocks: torch.Tensor, first: int, last: int, width: int) -> torch.Tensor:
    """Return bytes ``first`` … ``last`` of each block, copied, as int64 words [rows, blocks, pieces, width / 8]."""
    copied = blocks[..., first:last].clone(memory_format=torch.contiguous_format)
    return copied.view(torch.int64).view(*copied.shape[:-1], -1, width // 8)


def _shifted(words: torch.Tensor, shifts: Sequence[int], byte: int, up: int = 0) -> torch.Tensor:
    """Return words [..., shifts, width / 8]: each byte shifted down, masked and shifted ``up``, for each shift."""
    result = words.new_empty((*words.shape[:-1], len(shifts), words.shape[-1]))
    mask = _mask(byte)
    for place, shift in enumerate(shifts):
        part = torch.bitwise_and(words >> shift if shift else words, mask)
        result[..., place, :] = part << up if up else part
    return result


def _joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the bytes of two results of ``_shifted``, each code's bits in one byte: uint8 [rows, codes of a row]."""
    return low.flatten(1).bitwise_or_(high.flatten(1)).view(torch.uint8)


def _columns(blocks: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return bytes ``first`` … ``last`` of each block, a row for each byte: [last - first, rows × blocks]."""
    return blocks[..., first:last].reshape(-1, last - first).t().contiguous()


def _by_block(numbers: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return numbers [count, rows × blocks] as [rows, blocks × count]."""
    return numbers.t().reshape(blocks.shape[0], -1)


def six_bit_numbers(start: int, which: int) -> Part:
    """Return the eight scales (``which`` 0) or minimums (1) of Q4_K and Q5_K, 6 bits each in 12 bytes."""

    def part(blocks: torch.Tensor) -> torch.Tensor:
        parts = _columns(blocks, start, start + 12)
        own, mixed = parts[4:8] if which else parts[:4], parts[8:]
        low = mixed >> 4 if which else mixed & 15
        return _by_block(torch.cat((own & 63, low | (own >> 2 & 48))), blocks)

    return part


def four_bit_pairs(start: int, which: int) -> Part:
    """Return the sixteen scales (``which`` 0: low nibbles) or minimums (1: high ones) of Q2_K."""

    def part(blocks: torch.Tensor) -> torch.Tensor:
        return _shifted(_words(blocks, start, start + 16, 16), (4 * which,), 15).flatten(1).view(torch.uint8)

    return part


def q3_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sixteen signed 6-bit scales of Q3_K, int8."""
    parts = _columns(blocks, 96, 108)
    low = torch.cat((parts[:8] & 15, parts[:8] >> 4))
    high = torch.cat([parts[8:] >> shift & 3 for shift in (0, 2, 4, 6)])
    return _by_block((low | high << 4).view(torch.int8) - _ZERO_6, blocks)


def nonlinear_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return the eight signed 6-bit scales of IQ4_XS, int8: two high bits in two bytes, nibbles in four."""
    parts = _columns(blocks, 2, 8)
    scales = [
        parts[2 + place // 2] >> 4 * (place % 2) & 15 | (parts[place // 4] >> 2 * (place % 4) & 3) << 4
        for place in range(8)
    ]
    return _by_block(torch.stack(scales).view(torch.int8) - _ZERO_6, blocks)


def q2_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q2_K: 0 … 3."""
    return _shifted(_words(blocks, 16, 80, 32), (0, 2, 4, 6), 3).flatten(1).view(torch.uint8)


def q3_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q3_K as q4_0's: −4 … 3 plus 8. The third bit is apart."""
    low = _shifted(_words(blocks, 32, 96, 32), (0, 2, 4, 6), 3)
    return _joined(low, _shifted(_words(blocks, 0, 32, 32), range(8), 1, up=2)).add_(_ZERO_4 - 4)


def q5_codes(bits: int, start: int, zero: int = 0) -> Part:
    """Return the codes of Q5_0 (``zero`` 16) or Q5_1: the fifth bits from byte ``bits`` on, nibbles from ``start``."""

    def part(blocks: torch.Tensor) -> torch.Tensor:
        low = _shifted(_words(blocks, start, start + 16, 16), (0, 4), 15)
        high = _fifth_bits()[blocks[..., bits : bits + 4].to(torch.int64)]
        return _joined(low, high).sub_(zero)

    return part


@functools.cache
def _fifth_bits() -> torch.Tensor:
    """Return, for each byte, its bits as eight bytes of 0 or 16: int64 [256]."""
    bits = torch.arange(256, dtype=torch.int64)[:, None] >> torch.arange(8) & 1
    return (bits << 4).to(torch.uint8).contiguous().view(torch.int64).flatten()


def q5_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q5_K: 0 … 31."""
    low = _shifted(_words(blocks, 48, 176, 32), (0, 4), 15)
    return _joined(low, _shifted(_words(blocks, 16, 48, 32), range(8), 1, up=4))


def q6_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q6_K as q8_0's: −32 … 31 in two's complement."""
    low = _shifted(_words(blocks, 0, 128, 64), (0, 4), 15)
    return _joined(low, _shifted(_words(blocks, 128, 192, 32), (0, 2, 4, 6), 3, up=4)).sub_(_ZERO_6)


def ternary_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of TQ1_0 as q4_0's: −1, 0, 1 plus 8. Five of them share a byte, as a fraction in base 3."""
    parts = [
        blocks[..., first:last].contiguous() * factor  # modulo 256
        for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
        for factor in _TRITS[:count]
    ]
    codes = torch.cat(parts, -1).to(torch.int16).mul_(3) >> 8
    return codes.to(torch.uint8).add_(_ZERO_4 - 1).flatten(1)


def two_bit_ternary_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of TQ2_0 as q4_0's: −1 … 2 plus 8."""
    return _shifted(_words(blocks, 0, 64, 32), (0, 2, 4, 6), 3).flatten(1).view(torch.uint8).add_(_ZERO_4 - 1)
