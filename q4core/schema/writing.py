"""Bytes of codes in the order that a dialect writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core.errors import WeightError
from q4core.formats import BlockOrder, Packing, pack_codes

if TYPE_CHECKING:
    import torch

    from q4core.weight import PackedWeight

__all__ = ["flat_bytes", "row_bytes"]

_PLAIN_ORDERS = (Packing.LOW_FIRST, Packing.HIGH_FIRST)


def row_bytes(weight: PackedWeight, packing: Packing) -> torch.Tensor:
    """Return the codes as uint8 [N, ceil(K / 2)] in a packing; the weight's own bytes where they are that already.

    Raises:
        WeightError: Blocks are FLAT.
        FormatError: K does not hold whole groups of the packing.
    """
    if weight.blocks is BlockOrder.FLAT:
        raise WeightError("row_bytes", name="blocks", rule="ROW", value="FLAT")
    width = -(-weight.in_features // packing.codes_per_byte)
    qdata = weight.qdata
    if qdata.dim() == 2 and qdata.shape[1] == width:  # noqa: PLR2004  # [N, bytes]
        if packing == weight.packing:
            return qdata
        if {packing, weight.packing} == set(_PLAIN_ORDERS) and not weight.in_features % 2:
            return (qdata >> 4) | (qdata << 4)
    return pack_codes(weight.codes(), packing)


def flat_bytes(weight: PackedWeight, packing: Packing) -> torch.Tensor:
    """Return the codes of the flattened weight as uint8 [ceil(N * K / 2)] in a packing, ROW blocks or FLAT."""
    if weight.blocks is BlockOrder.FLAT:
        if packing == weight.packing:
            return weight.qdata
        return pack_codes(weight.codes(), packing)
    if weight.in_features % 2:
        return pack_codes(weight.codes().reshape(-1), packing)
    return row_bytes(weight, packing).reshape(-1)
