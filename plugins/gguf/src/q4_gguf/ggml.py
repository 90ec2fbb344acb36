"""ggml's tensor types: packed weights, dense tensors, and unsupported ones; the layout of each as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from q4_gguf import blocks
from q4core import Packing, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Part = Callable[[torch.Tensor], torch.Tensor]

__all__ = [
    "ALIKE_TYPES",
    "DENSE_TYPES",
    "FACT",
    "PACKED_TYPES",
    "UNPACKED_TYPES",
    "BlockLayout",
    "GgmlType",
    "find_type",
    "name_of",
    "number_of",
]


@attrs.frozen(kw_only=True)
class BlockLayout:
    """What the bytes of a packed block mean.

    Args:
        format: Name of the format.
        block_size: In-features per scale.
        packing: Order of the codes, as stored or as they are packed again.
        scale_kind: How the scales are stored.
        codes: First and last byte of codes that are used as they are stored; or the function that returns them, one
            per byte, for codes that are packed again.
        parts: Field of ``PackedWeight`` → the function that returns it.
    """

    format: str
    block_size: int
    packing: Packing
    scale_kind: ScaleKind = ScaleKind.PLAIN
    codes: tuple[int, int] | Part
    parts: Mapping[str, Part]


_SPLIT, _BYTES = Packing.half_split(32), Packing.BYTES
_SUPER = ScaleKind.SUPER_BLOCK

PACKED_TYPES = {
    "Q4_0": BlockLayout(
        format="q4_0", block_size=32, packing=_SPLIT, codes=(2, 18), parts={"scale": blocks.half(0)},
    ),
    "Q4_1": BlockLayout(
        format="q4_1", block_size=32, packing=_SPLIT, codes=(4, 20),
        parts={"scale": blocks.half(0), "offset": blocks.half(2)},
    ),
    "Q5_0": BlockLayout(
        format="q8_0", block_size=32, packing=_BYTES, codes=blocks.q5_codes(2, 6, 16), parts={"scale": blocks.half(0)},
    ),
    "Q5_1": BlockLayout(
        format="q8_affine", block_size=32, packing=_BYTES, codes=blocks.q5_codes(4, 8),
        parts={"scale": blocks.half(0), "offset": blocks.half(2)},
    ),
    "Q8_0": BlockLayout(
        format="q8_0", block_size=32, packing=_BYTES, codes=(2, 34), parts={"scale": blocks.half(0)},
    ),
    "Q8_1": BlockLayout(  # bytes 2 and 3 have the sum of the block, which no weight needs
        format="q8_0", block_size=32, packing=_BYTES, codes=(4, 36), parts={"scale": blocks.half(0)},
    ),
    "Q2_K": BlockLayout(
        format="q4_1", block_size=16, packing=_SPLIT, scale_kind=_SUPER, codes=blocks.q2_codes,
        parts={
            "scale": blocks.four_bit_pairs(0, 0), "offset": blocks.four_bit_pairs(0, 1),
            "nested_scale": blocks.half(80), "nested_offset": blocks.minus_half(82),
        },
    ),
    "Q3_K": BlockLayout(
        format="q4_0", block_size=16, packing=_SPLIT, scale_kind=_SUPER, codes=blocks.q3_codes,
        parts={"scale": blocks.q3_scales, "nested_scale": blocks.half(108)},
    ),
    "Q4_K": BlockLayout(
        format="q4_1", block_size=32, packing=Packing.half_split(64), scale_kind=_SUPER, codes=(16, 144),
        parts={
            "scale": blocks.six_bit_numbers(4, 0), "offset": blocks.six_bit_numbers(4, 1),
            "nested_scale": blocks.half(0), "nested_offset": blocks.minus_half(2),
        },
    ),
    "Q5_K": BlockLayout(
        format="q8_affine", block_size=32, packing=_BYTES, scale_kind=_SUPER, codes=blocks.q5_k_codes,
        parts={
            "scale": blocks.six_bit_numbers(4, 0), "offset": blocks.six_bit_numbers(4, 1),
            "nested_scale": blocks.half(0), "nested_offset": blocks.minus_half(2),
        },
    ),
    "Q6_K": BlockLayout(
        format="q8_0", block_size=16, packing=_BYTES, scale_kind=_SUPER, codes=blocks.q6_codes,
        parts={"scale": blocks.byte_scales(192, 16, torch.int8), "nested_scale": blocks.half(208)},
    ),
    "IQ4_NL": BlockLayout(
        format="iq4_nl", block_size=32, packing=_SPLIT, codes=(2, 18), parts={"scale": blocks.half(0)},
    ),
    "IQ4_XS": BlockLayout(
        format="iq4_nl", block_size=32, packing=_SPLIT, scale_kind=_SUPER, codes=(8, 136),
        parts={"scale": blocks.nonlinear_scales, "nested_scale": blocks.half(0)},
    ),
    "MXFP4": BlockLayout(
        format="mxfp4", block_size=32, packing=_SPLIT, scale_kind=ScaleKind.E8M0, codes=(1, 17),
        parts={"scale": blocks.byte_scales(0, 1, torch.float8_e8m0fnu)},
    ),
    "NVFP4": BlockLayout(  # E4M3_MUL where a sidecar tensor has a global scale
        format="nvfp4", block_size=16, packing=Packing.half_split(16), scale_kind=ScaleKind.E4M3, codes=(4, 36),
        parts={"scale": blocks.byte_scales(0, 4, torch.float8_e4m3fn)},
    ),
    "TQ1_0": BlockLayout(
        format="q4_0", block_size=256, packing=_SPLIT, codes=blocks.ternary_codes, parts={"scale": blocks.half(52)},
    ),
    "TQ2_0": BlockLayout(
        format="q4_0", block_size=256, packing=_SPLIT, codes=blocks.two_bit_ternary_codes,
        parts={"scale": blocks.half(64)},
    ),
}  # fmt: skip
"""Types whose tensors are packed weights."""
DENSE_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
ALIKE_TYPES = frozenset({"Q5_0", "Q8_1", "TQ1_0", "TQ2_0"})
"""Packed types whose form is also that of a commoner type."""
FACT = "ggml type"
"""Name of the note with a weight's type, where that is one of ``ALIKE_TYPES``."""
UNPACKED_TYPES = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})
"""Types that no format here expresses; on request they are read as dense float32."""


@attrs.frozen
class GgmlType:
    """A tensor type.

    Args:
        name: ggml's name, such as ``"Q4_1"``.
        block_size: Elements per block.
        block_bytes: Bytes per block.
    """

    name: str
    block_size: int
    block_bytes: int

    @property
    def served(self) -> bool:
        """Whether q4core reads tensors of this type."""
        return self.name in PACKED_TYPES or self.name in DENSE_TYPES


_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),  # 40 in the package gguf, as it was until 2024
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
    42: GgmlType("Q2_0", 64, 18),
}
_NUMBERS = {kind.name: (number, kind) for number, kind in _TYPES.items()}
_REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_IK = {
    97: "Q8_0_X4",
    98: "Q8_1_X4",
    99: "Q8_2_X4",
    133: "Q6_0",
    134: "IQ1_BN",
    135: "IQ2_BN",
    136: "Q8_K64",
    137: "IQ2_K",
    138: "IQ3_K",
    139: "IQ4_K",
    140: "IQ5_K",
    141: "IQ6_K",
    144: "IQ4_KS",
    145: "IQ2_KS",
    146: "IQ4_KSS",
    147: "Q8_K16",
    148: "Q8_K32",
    149: "Q8_KR8",
    150: "Q8_K128",
    151: "Q8_KV",
    152: "IQ5_KS",
    153: "IQ2_KT",
    154: "IQ3_KT",
    155: "IQ4_KT",
    156: "IQ3_KS",
    157: "IQ2_KL",
    158: "IQ1_KT",
}
_IK_ROWS = range(200, 400)
"""Numbers of the types whose rows ik_llama.cpp interleaves."""


def find_type(number: int) -> GgmlType | None:
    """Return the type with that number, or None where its size is not known here."""
    return _TYPES.get(number)


def number_of(name: str) -> tuple[int, GgmlType]:
    """Return the number of a type, and the type, by its name."""
    return _NUMBERS[name]


def name_of(number: int) -> str:
    """Return a name for any type number, such as ``"Q4_K"``, ``"Q6_0 of ik_llama.cpp"`` or ``"type 1000"``."""
    if number in _TYPES:
        return _TYPES[number].name
    if number in _REMOVED:
        return f"{_REMOVED[number]}, which ggml removed"
    if number in _IK:
        return f"{_IK[number]} of ik_llama.cpp"
    return f"type {number} of ik_llama.cpp" if number in _IK_ROWS else f"type {number}"
