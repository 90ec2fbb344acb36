"""ggml's tensor types: packed weights, dense tensors, and unsupported ones.

Names and block sizes come from the package ``gguf``; this module adds what each part of a block means.
"""

from __future__ import annotations

import functools

import attrs
import torch

from q4core import Packing

__all__ = ["DENSE_TYPES", "PACKED_TYPES", "BlockLayout", "GgmlType", "find_type"]


@attrs.frozen
class BlockLayout:
    """Where the parts of a packed block lie.

    Args:
        format: Name of the format.
        packing: Order of the codes.
        codes: Byte at which the codes start; they run to the block's end.
        offset: Byte at which the float16 offset starts, or None. The float16 scale always starts at byte 0.
    """

    format: str
    packing: Packing
    codes: int
    offset: int | None = None


PACKED_TYPES = {
    "Q4_0": BlockLayout("q4_0", Packing.half_split(32), codes=2),
    "Q4_1": BlockLayout("q4_1", Packing.half_split(32), codes=4, offset=2),
    "Q8_0": BlockLayout("q8_0", Packing.BYTES, codes=2),
}
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


@functools.cache
def _types() -> dict[int, GgmlType]:
    # Imported late: finding plugins must stay cheap, and this package takes a third of a second to import.
    from gguf.constants import GGML_QUANT_SIZES  # noqa: PLC0415

    return {int(kind): GgmlType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def find_type(number: int) -> GgmlType | None:
    """Return the type with that number, or None where the installed package ``gguf`` does not know it."""
    return _types().get(number)
