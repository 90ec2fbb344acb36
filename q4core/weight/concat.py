"""Concatenation of weights along their out-features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.errors import WeightError
from q4core.formats import BlockOrder, ScaleKind, cat_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.weight.packed import PackedWeight


def _are_same(weights: Sequence[PackedWeight], field: str) -> bool:
    values = [getattr(weight, field) for weight in weights]
    if any(value is None for value in values):
        return all(value is None for value in values)
    return all(torch.equal(values[0], value) for value in values[1:])


def _check_joinable(weights: Sequence[PackedWeight]) -> None:
    if not weights:
        raise WeightError("cat", name="weights", rule="at least one weight", value=0)
    is_super = weights[0].scale_kind is ScaleKind.SUPER_BLOCK
    if is_super and len(dtypes := {weight.scale.dtype for weight in weights}) > 1:  # u8 and i8 would be one another
        raise WeightError("cat", name="scale", rule="of one dtype in all weights", value=sorted(map(str, dtypes)))
    fields = ("format", "in_features", "block_size", "scale_kind", "blocks", "dtype", "device")
    for field in (*fields, "nested_block_size") if is_super else fields:
        values = [getattr(weight, field) for weight in weights]
        if any(value != values[0] for value in values):
            raise WeightError("cat", name=field, rule="equal in all weights", value=[str(value) for value in values])
    if weights[0].blocks is BlockOrder.FLAT:
        raise WeightError("cat", name="blocks", rule="ROW", value="FLAT")
    for field in ("codebook", "input_channel_scale", "input_permutation"):
        if not _are_same(weights, field):
            raise WeightError("cat", name=field, rule="equal in all weights", value="different tensors")


def cat(weights: Sequence[PackedWeight], *, name: str | None = None) -> PackedWeight:
    """Join weights along their out-features (fused q/k/v, gate/up); the values stay exactly the same.

    Globals that differ become one global per row; double-quantised scales are resolved to plain float32; static
    activation scales that differ are dropped, with a note.

    Args:
        weights: At least one; the same format, K, block size, scale kind (double-quantised ones count as plain) and
            block order.
        name: The joined layer's name.

    Raises:
        WeightError: The weights differ in something that one weight can't hold twice.
    """
    parts = [weight.with_plain_scale() if weight.scale_kind is ScaleKind.DOUBLE_QUANT else weight for weight in weights]
    _check_joinable(parts)
    head = parts[0]
    parts = [part.repack(head.packing) for part in parts]
    qdata = [part.qdata for part in parts]
    if any(data.shape[1:] != qdata[0].shape[1:] for data in qdata):
        # [N, P] with as few bytes as hold K codes in whole groups.
        unit, per_byte = head.packing.group or head.packing.codes_per_byte, head.packing.codes_per_byte
        width = -(-head.in_features // unit) * unit // per_byte
        qdata = [part.qdata.reshape(part.out_features, -1)[:, :width] for part in parts]
    changes: dict[str, Any] = {"qdata": torch.cat(qdata), "scale": cat_stored([part.scale for part in parts])}
    levels = ("nested_scale", "nested_offset") if head.scale_kind is ScaleKind.SUPER_BLOCK else ()
    for field in ("offset", "zero", *levels):
        tensors = [getattr(part, field) for part in parts if getattr(part, field) is not None]
        if len(tensors) not in {0, len(parts)}:
            raise WeightError("cat", name=field, rule="present in all weights or in none", value="present in some")
        if tensors:
            changes[field] = torch.cat([tensor.reshape(-1) if field in levels else tensor for tensor in tensors])
    if not _are_same(parts, "global_scale"):
        rows = [(part.global_scale, part.out_features) for part in parts]
        changes["global_scale"] = torch.cat([scale.reshape(-1).expand(n) for scale, n in rows if scale is not None])
    notes = tuple(dict.fromkeys(note for weight in weights for note in weight.notes))
    if not _are_same(parts, "activation_scale"):
        changes["activation_scale"] = None
        notes = (*notes, "static activation scales differ and were dropped")
    return attrs.evolve(head, out_features=sum(part.out_features for part in parts), name=name, notes=notes, **changes)
