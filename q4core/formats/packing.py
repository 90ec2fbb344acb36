"""Nibble orders: how codes share bytes, and the reference functions that pack and unpack them.

This module is the one place in the repository that defines nibble order.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch

from q4core.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence


class NibbleOrder(enum.Enum):
    """How two codes share one byte."""

    LOW_FIRST = "low_first"
    """Byte j holds code 2j in its low and code 2j + 1 in its high nibble (torchao, ModelOpt, GPTQ)."""
    HIGH_FIRST = "high_first"
    """Byte j holds code 2j in its high and code 2j + 1 in its low nibble (bitsandbytes, ComfyUI)."""
    HALF_SPLIT = "half_split"
    """In each group of g codes, byte j holds code j in its low and code j + g/2 in its high nibble (ggml)."""
    BYTES = "bytes"
    """One code fills one byte (8-bit formats)."""


@attrs.frozen
class Packing:
    """A nibble order, with the group size that HALF_SPLIT needs.

    Args:
        order: The nibble order.
        group: Codes per group for HALF_SPLIT; 0 for the other orders.

    Raises:
        FormatError: HALF_SPLIT without an even positive group, or a group with another order.
    """

    order: NibbleOrder
    group: int = 0

    LOW_FIRST: ClassVar[Packing]
    HIGH_FIRST: ClassVar[Packing]
    BYTES: ClassVar[Packing]

    def __attrs_post_init__(self) -> None:
        """Check that the group fits the order."""
        if self.order is NibbleOrder.HALF_SPLIT:
            if self.group < 2 or self.group % 2:  # noqa: PLR2004  # the smallest pair
                raise FormatError("packing", name="group", rule="even and positive for HALF_SPLIT", value=self.group)
        elif self.group:
            raise FormatError("packing", name="group", rule=f"0 for {self.order.name}", value=self.group)

    @classmethod
    def half_split(cls, group: int) -> Packing:
        """Return ggml's order, in which low nibbles are the first half of each group of ``group`` codes."""
        return cls(NibbleOrder.HALF_SPLIT, group)

    @property
    def codes_per_byte(self) -> int:
        """2 for nibbles, 1 for bytes."""
        return 1 if self.order is NibbleOrder.BYTES else 2

    def __str__(self) -> str:
        """Return ``low_first``, ``high_first``, ``half_split:<group>`` or ``bytes``."""
        return f"{self.order.value}:{self.group}" if self.group else self.order.value


Packing.LOW_FIRST = Packing(NibbleOrder.LOW_FIRST)
Packing.HIGH_FIRST = Packing(NibbleOrder.HIGH_FIRST)
Packing.BYTES = Packing(NibbleOrder.BYTES)


def unpack_codes(qdata: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return one code per byte, uint8 [..., P * codes_per_byte], contiguous unless the packing is BYTES.

    Args:
        qdata: uint8 [..., P], any strides; P is the packed bytes of one row (or of one group of codes).
        packing: How the codes share bytes.

    Raises:
        FormatError: P does not hold whole groups of a HALF_SPLIT packing.
    """
    if packing.order is NibbleOrder.BYTES:
        return qdata
    qdata = qdata.contiguous()  # the copy costs a quarter of what strided bit operations would
    low, high = qdata & 15, qdata >> 4
    if packing.order is not NibbleOrder.HALF_SPLIT:
        pair = (low, high) if packing.order is NibbleOrder.LOW_FIRST else (high, low)
        return torch.stack(pair, dim=-1).flatten(-2)
    half, size = packing.group // 2, qdata.shape[-1]
    if size % half:
        raise FormatError("unpack_codes", name="packed bytes", rule=f"a multiple of {half} for {packing}", value=size)
    return torch.cat([torch.unflatten(nibble, -1, (-1, half)) for nibble in (low, high)], dim=-1).flatten(-2)


def pack_codes(codes: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return packed bytes, uint8 [..., ceil(C / codes_per_byte)], contiguous; the inverse of ``unpack_codes``.

    Args:
        codes: uint8 [..., C] with values below 16 (below 256 for BYTES). An odd C is padded with one zero code for
            LOW_FIRST and HIGH_FIRST.
        packing: How the codes share bytes.

    Raises:
        FormatError: C does not hold whole groups of a HALF_SPLIT packing.
    """
    if packing.order is NibbleOrder.BYTES:
        return codes.contiguous()
    if packing.order is NibbleOrder.HALF_SPLIT:
        size = codes.shape[-1]
        if size % packing.group:
            rule = f"a multiple of {packing.group} for {packing}"
            raise FormatError("pack_codes", name="codes", rule=rule, value=size)
        low, high = torch.unflatten(codes, -1, (-1, 2, packing.group // 2)).unbind(-2)
        return (low | (high << 4)).flatten(-2)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    first, second = torch.unflatten(codes, -1, (-1, 2)).unbind(-1)
    return first | (second << 4) if packing.order is NibbleOrder.LOW_FIRST else second | (first << 4)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a uint8 view of any tensor: the same shape for one-byte dtypes, else one more axis of itemsize bytes."""
    if tensor.dtype == torch.uint8:
        return tensor
    return (tensor if tensor.dtype.itemsize == 1 else tensor.unsqueeze(-1)).view(torch.uint8)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bytes; a NaN equals itself."""
    return torch.equal(as_bytes(one), as_bytes(other))


def cat_stored(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return tensors as stored, joined: float8 as its bytes, because not every device can join it."""
    dtype = tensors[0].dtype
    if dtype.itemsize == 1:
        tensors = [tensor.view(torch.uint8) for tensor in tensors]
    return torch.cat(list(tensors), dim).view(dtype)
