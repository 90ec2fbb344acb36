"""Reasons why a linear layer of a dense checkpoint stays dense though a format was asked for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4core import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_nn.convert.reads import Read
    from q4_transformers.config import Q4Config

__all__ = ["ABSENT", "Reasons", "block_size_for"]

_INT4 = "int4"
_BLOCK, _LEAST = 128, 32

ABSENT = "the checkpoint has no such weight as it is: merged, split or missing"


@attrs.frozen
class Reasons:
    """The layers of one model that a format can't have.

    Args:
        model: The model, on the meta device.
        config: What was asked for.
        stored: Names in the model of the checkpoint's weights that can be quantised.
        others: Names of its other tensors, and why each can't.
        reads: Layers whose weight the model's own code reads.
    """

    model: Any
    config: Q4Config
    stored: Mapping[str, str]
    others: Mapping[str, str]
    reads: Mapping[str, Read]

    def of_linear(self, name: str, module: Any, shape: tuple[int, int] | None) -> str | None:
        """Return why a linear layer is not quantised, or None; ``shape`` is what a packed layer in its place has."""
        key, tied = f"{name}.weight", self.model.all_tied_weights_keys
        if shape is None:
            return f"{type(module).__name__} is no plain linear layer"
        if key in tied:
            return f"its weight is tied to {tied[key]}"
        if key in tied.values():
            return "another weight is tied to its"
        if key not in self.stored:
            return self.others.get(key, ABSENT)
        if module.bias is not None and f"{name}.bias" not in self.stored:
            return "the checkpoint has no bias for it"
        read = self.reads.get(name)
        return (read and read.reason) or self._of_columns(shape[1])

    def of_experts(self, module: Any) -> str | None:
        """Return why a module of experts is not quantised, or None: each expert has products over both extents."""
        return next((found for size in module.down_proj.shape[1:] if (found := self._of_columns(size))), None)

    def _of_columns(self, columns: int) -> str | None:
        config = self.config
        block = block_size_for(config, columns)
        if config.format == _INT4 and block is not None and columns > block and columns % block:
            return f"for {_INT4}, K must be a multiple of block_size={block} to be saved, got {columns}"
        return _unquantisable(str(config.format), block, columns)


def block_size_for(config: Q4Config, columns: int) -> int | None:
    """Return in how many in-features per scale a layer is quantised; None for the format's default.

    No dialect has a short last block of INT4. Where 128 does not divide K, 64 or 32 is used, else the largest divisor
    from 32, else a row is one block.
    """
    asked: int | None = config.block_size
    if config.format != _INT4 or asked is not None or columns <= _BLOCK or not columns % _BLOCK:
        return asked
    sizes: tuple[int, ...] = (64, 32, *range(_BLOCK, _LEAST, -1), columns)
    return next(size for size in sizes if not columns % size)


@functools.cache
def _unquantisable(format_: str, block_size: int | None, columns: int) -> str | None:
    """Return why a row of some length has no form in a format, by the codec's message, or None."""
    try:
        with torch.device("cpu"):  # models are built under the meta device
            q4.quantize(torch.zeros(1, columns), format_, block_size=block_size)
    except FormatError as error:
        return f"for {format_}, {error.name} must be {error.rule}, got {error.value}"
    return None
