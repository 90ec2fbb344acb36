"""Features that a weight needs of a backend beyond the plain formula."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from q4core.formats import BlockOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core.weight.packed import PackedWeight


class Feature(enum.Enum):
    """What a weight or a request needs beyond ``scale × codebook[q]``; a backend must declare each one it serves."""

    OFFSET = "offset"
    ZERO_POINT = "zero_point"
    FLOAT_ZERO_POINT = "float_zero_point"
    INPUT_CHANNEL_SCALE = "input_channel_scale"
    INPUT_PERMUTATION = "input_permutation"
    FLAT_BLOCKS = "flat_blocks"
    """K is not a multiple of the block size: blocks run across rows."""
    TAIL_BLOCK = "tail_block"
    """K is not a multiple of the block size: the last block of each row is short."""
    CUSTOM_CODEBOOK = "custom_codebook"
    ROW_GLOBAL_SCALE = "row_global_scale"
    """One global scale per out-feature instead of one per tensor."""
    GRADIENTS = "gradients"

    @property
    def words(self) -> str:
        """The feature in words, as messages name it."""
        return _WORDS.get(self, self.value.replace("_", " "))


_WORDS = {
    Feature.FLAT_BLOCKS: "blocks that run across rows",
    Feature.TAIL_BLOCK: "a short last block in each row",
    Feature.ROW_GLOBAL_SCALE: "one global scale per row",
}


def features_of(weight: PackedWeight) -> Iterator[Feature]:
    """Yield the features that a weight needs."""
    if weight.offset is not None:
        yield Feature.OFFSET
    if weight.zero is not None:
        yield Feature.FLOAT_ZERO_POINT if weight.zero.is_floating_point() else Feature.ZERO_POINT
    if weight.input_channel_scale is not None:
        yield Feature.INPUT_CHANNEL_SCALE
    if weight.input_permutation is not None:
        yield Feature.INPUT_PERMUTATION
    if weight.blocks is BlockOrder.FLAT:
        yield Feature.FLAT_BLOCKS
    elif weight.in_features % weight.block_size:
        yield Feature.TAIL_BLOCK
    if weight.codebook is not None:
        yield Feature.CUSTOM_CODEBOOK
    if weight.global_scale is not None and weight.global_scale.numel() > 1:
        yield Feature.ROW_GLOBAL_SCALE
