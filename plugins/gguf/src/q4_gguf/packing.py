"""The bytes of ggml's blocks from codes, scales and offsets: the inverse of ``blocks``.

Codes are uint8 [rows, blocks, codes of a block], as their format has them; scales and offsets uint8 or int8 [rows,
blocks, count], or float16 [rows, blocks]. Each function returns some bytes of each block, uint8 [rows, blocks, bytes].

Reference:
    ggml-common.h and ggml-quants.c of ggml; ``gguf.quants`` of the package ``gguf``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core import Packing, pack_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["block_bytes"]

_ZERO_4, _ZERO_5, _ZERO_6 = 8, 16, 32
"""Codes that mean zero: of q4_0, and of ggml's numbers of 5 and 6 bits."""
_TRITS = (81, 27, 9, 3, 1)
_ALL_TRITS = 243


def block_bytes(type_name: str, codes: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the bytes of blocks, uint8 [rows, blocks, bytes of a block].

    Args:
        type_name: ggml's name of the type, one of ``PACKED_TYPES`` other than Q8_1.
        codes: One per byte, uint8 [rows, blocks, codes of a block].
        fields: Field of ``PackedWeight`` → numbers of each block: float16 [rows, blocks], or a byte each
            [rows, blocks, count]. All must fit into the bits that the type has for them.
    """
    numbers = {name: part.view(torch.uint8) for name, part in fields.items() if part.element_size() == 1}
    halves = {name: part[..., None].view(torch.uint8) for name, part in fields.items() if part.element_size() > 1}
    return torch.cat(_PARTS[type_name](codes, numbers, halves), -1)


def _merged(codes: torch.Tensor, width: int, shifts: Sequence[int]) -> torch.Tensor:
    """Return codes of which ``len(shifts)`` share a byte; ``width`` successive codes go to as many bytes."""
    pieces = torch.unflatten(codes, -1, (-1, len(shifts), width))
    result = pieces[..., 0, :] << shifts[0]
    for place, shift in enumerate(shifts[1:], 1):
        result = result | pieces[..., place, :] << shift
    return result.flatten(-2)


def _nibbles(codes: torch.Tensor, group: int) -> torch.Tensor:
    return pack_codes(codes, Packing.half_split(group))


def _fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return the fifth bits of 32 codes in four bytes."""
    bits = torch.unflatten(codes >> 4, -1, (4, 8)) << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return bits.sum(-1, dtype=torch.uint8)


def _six_bits(scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return eight scales and eight minimums of 6 bits in 12 bytes."""
    high_scale, high_offset = scale[..., 4:], offset[..., 4:]
    first = scale[..., :4] | high_scale >> 4 << 6
    second = offset[..., :4] | high_offset >> 4 << 6
    return torch.cat((first, second, high_scale & 15 | (high_offset & 15) << 4), -1)


def _q3_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return sixteen signed scales of 6 bits in 12 bytes."""
    shifted = scale + _ZERO_6  # modulo 256
    low, high = shifted & 15, shifted >> 4
    return torch.cat((low[..., :8] | low[..., 8:] << 4, _merged(high, 4, (0, 2, 4, 6))), -1)


def _nonlinear_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return eight signed scales of 6 bits: their high bits in two bytes, then nibbles in four."""
    shifted = scale + _ZERO_6
    return torch.cat((_merged(shifted >> 4, 1, (0, 2, 4, 6)), _merged(shifted & 15, 1, (0, 4))), -1)


def _ternary(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of −1, 0, 1 as fractions in base 3, five to a byte, the last sixteen four to a byte."""
    trits = (codes - (_ZERO_4 - 1)).to(torch.int32)
    parts = []
    for first, count, width in ((0, 5, 32), (160, 5, 16), (240, 4, 4)):
        pieces = torch.unflatten(trits[..., first : first + count * width], -1, (count, width))
        digits = torch.tensor(_TRITS[:count], dtype=torch.int32, device=codes.device)
        number = (pieces * digits[:, None]).sum(-2, dtype=torch.int32)
        parts.append(((number * 256 + _ALL_TRITS - 1) // _ALL_TRITS).to(torch.uint8))
    return torch.cat(parts, -1)


def _q5_0(codes: torch.Tensor, _: Mapping[str, torch.Tensor], halves: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    own = codes + _ZERO_5
    return [halves["scale"], _fifth_bits(own), _nibbles(own & 15, 32)]


def _q3_k(
    codes: torch.Tensor, numbers: Mapping[str, torch.Tensor], halves: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    own = codes - (_ZERO_4 - 4)
    high, low = _merged(own >> 2, 32, range(8)), _merged(own & 3, 32, (0, 2, 4, 6))
    return [high, low, _q3_scales(numbers["scale"]), halves["nested_scale"]]


def _q6_k(
    codes: torch.Tensor, numbers: Mapping[str, torch.Tensor], halves: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    own = codes + _ZERO_6
    low, high = _merged(own & 15, 64, (0, 4)), _merged(own >> 4, 32, (0, 2, 4, 6))
    return [low, high, numbers["scale"], halves["nested_scale"]]


_PARTS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "Q4_0": lambda codes, _, halves: [halves["scale"], _nibbles(codes, 32)],
    "Q4_1": lambda codes, _, halves: [halves["scale"], halves["offset"], _nibbles(codes, 32)],
    "Q5_0": _q5_0,
    "Q5_1": lambda codes, _, halves: [
        halves["scale"], halves["offset"], _fifth_bits(codes), _nibbles(codes & 15, 32),
    ],
    "Q8_0": lambda codes, _, halves: [halves["scale"], codes],
    "Q2_K": lambda codes, numbers, halves: [
        numbers["scale"] | numbers["offset"] << 4, _merged(codes, 32, (0, 2, 4, 6)), halves["nested_scale"],
        halves["nested_offset"],
    ],
    "Q3_K": _q3_k,
    "Q4_K": lambda codes, numbers, halves: [
        halves["nested_scale"], halves["nested_offset"], _six_bits(numbers["scale"], numbers["offset"]),
        _nibbles(codes, 64),
    ],
    "Q5_K": lambda codes, numbers, halves: [
        halves["nested_scale"], halves["nested_offset"], _six_bits(numbers["scale"], numbers["offset"]),
        _merged(codes >> 4, 32, range(8)), _nibbles(codes & 15, 64),
    ],
    "Q6_K": _q6_k,
    "IQ4_NL": lambda codes, _, halves: [halves["scale"], _nibbles(codes, 32)],
    "IQ4_XS": lambda codes, numbers, halves: [
        halves["nested_scale"], _nonlinear_scales(numbers["scale"]), _nibbles(codes, 32),
    ],
    "MXFP4": lambda codes, numbers, _: [numbers["scale"], _nibbles(codes, 32)],
    "NVFP4": lambda codes, numbers, _: [numbers["scale"], _nibbles(codes, 16)],
    "TQ1_0": lambda codes, _, halves: [_ternary(codes), halves["scale"]],
    "TQ2_0": lambda codes, _, halves: [_merged(codes - (_ZERO_4 - 1), 32, (0, 2, 4, 6)), halves["scale"]],
}  # fmt: skip
"""Type → the parts of its blocks, in order, from codes, numbers of a byte each, and the bytes of float16 numbers."""
