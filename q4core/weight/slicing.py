"""Slices of a weight by rows or in-features, without touching a code, and the scales of some rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from q4core.errors import WeightError
from q4core.formats import BlockOrder, ScaleKind, pack_codes, resolve_levels

if TYPE_CHECKING:
    from q4core.weight.packed import PackedWeight

_ROW_FIELDS = ("qdata", "scale", "offset", "zero")


@attrs.frozen(eq=False)
class Cover:
    """Whole blocks of a weight that hold a range of its rows and in-features, as ``PackedWeight.cover`` returns them.

    ``linear(torch.nn.functional.pad(x, cover.pad), cover.weight)[..., cover.cut]`` is the range's product with x.

    Args:
        weight: The blocks, [N', K'].
        pad: Zeros that x needs before its first in-feature and after its last one.
        cut: Which of the N' out-features are the range's.
    """

    weight: PackedWeight
    pad: tuple[int, int]
    cut: slice


def _index_rows(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return ``tensor[rows]``; float8, which not every device can index, as bytes in between."""
    if isinstance(rows, slice):
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype) if tensor.element_size() == 1 else tensor[rows]


def resolved_rows(weight: PackedWeight, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return the float32 scales ``scale[rows]`` stands for: of some rows, or of some blocks of a FLAT weight."""
    global_scale, nested = weight.global_scale, weight.nested_scale
    if global_scale is not None and global_scale.numel() > 1:
        global_scale = global_scale[rows]
    return resolve_levels(
        weight.scale_kind,
        _index_rows(weight.scale, rows),
        global_scale=global_scale,
        nested_codebook=weight.nested_codebook,
        nested_scale=None if nested is None else _spread(weight, nested, rows),
        nested_offset=weight.nested_offset,
        nested_block_size=1,
    )


def resolved_offset(weight: PackedWeight, rows: slice | torch.Tensor) -> torch.Tensor | None:
    """Return the float offsets of some rows, or of some blocks of a FLAT weight; None where there are none."""
    offset, nested = weight.offset, weight.nested_offset
    if offset is None or weight.scale_kind is not ScaleKind.SUPER_BLOCK or nested is None:
        return None if offset is None else offset[rows]
    stored = offset[rows]
    return stored.to(torch.float32) * _spread(weight, nested, rows).to(torch.float32).view(stored.shape)


def _spread(weight: PackedWeight, level: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return a second level's entry for each scale of some rows, flat: a level with blocks of one."""
    if weight.scale_kind is ScaleKind.SUPER_BLOCK:  # which end with the row
        by_row = level.view(weight.out_features, -1)[rows]
        return by_row.repeat_interleave(weight.nested_block_size, 1).reshape(-1)
    places = rows
    if isinstance(places, slice):
        places = torch.arange(*places.indices(weight.scale.shape[0]), device=weight.device)
    if weight.scale.dim() > 1:
        width = weight.scale.shape[1]
        places = places[:, None] * width + torch.arange(width, device=weight.device)
    return level.reshape(-1)[places // weight.nested_block_size].reshape(-1)


def _fail(weight: PackedWeight, what: str, **facts: Any) -> NoReturn:
    raise WeightError(weight.label(what), **facts)


def _require_row_blocks(weight: PackedWeight, what: str) -> None:
    if weight.blocks is BlockOrder.FLAT:
        hint = "Flat blocks straddle rows; dequantise and quantise again to cut such a weight."
        _fail(weight, what, name="blocks", rule="ROW", value=weight.blocks.name, hint=hint)


def narrow(weight: PackedWeight, dim: int, start: int, length: int) -> PackedWeight:
    """Return rows (``dim=0``) or in-features (``dim=1``) ``start … start + length``; see ``PackedWeight.narrow``."""
    total = weight.shape[dim] if dim in {0, 1} else 0
    if start < 0 or length < 1 or start + length > total:
        rule = f"a range inside {weight.shape}"
        _fail(weight, "narrow", name="dim, start, length", rule=rule, value=(dim, start, length))
    _require_row_blocks(weight, "narrow")
    return _pick(weight, slice(start, start + length), length) if dim == 0 else _narrow_columns(weight, start, length)


def take_rows(weight: PackedWeight, rows: torch.Tensor) -> PackedWeight:
    """Return copies of some rows; see ``PackedWeight.take_rows``."""
    _require_row_blocks(weight, "take_rows")
    if rows.dtype != torch.int64 or rows.dim() != 1 or not rows.numel():
        rule, value = "an int64 vector of at least one row", f"{rows.dtype} {list(rows.shape)}"
        _fail(weight, "take_rows", name="rows", rule=rule, value=value)
    outside = (rows < 0) | (rows >= weight.out_features)
    if bool(outside.any()):
        rule, row = f"in 0 … {weight.out_features - 1}", int(rows[outside][0])
        _fail(weight, "take_rows", name="rows", rule=rule, value=row)
    return _pick(weight, rows.to(weight.device), rows.numel())


def _pick(weight: PackedWeight, rows: slice | torch.Tensor, count: int) -> PackedWeight:
    """Return the ``count`` rows chosen; their double quantisation is resolved where its blocks are cut."""
    changes: dict[str, Any] = {
        name: _index_rows(getattr(weight, name), rows) for name in _ROW_FIELDS if getattr(weight, name) is not None
    }
    if weight.global_scale is not None and weight.global_scale.numel() > 1:
        changes["global_scale"] = weight.global_scale[rows]
    if weight.scale_kind is ScaleKind.SUPER_BLOCK:  # whose super-blocks end with the row
        for name in ("nested_scale", "nested_offset"):
            level = getattr(weight, name)
            if level is not None:
                changes[name] = level.reshape(weight.out_features, -1)[rows].reshape(-1)
    elif weight.nested_scale is not None:
        per_row, nested = weight.blocks_per_row, weight.nested_block_size
        first, is_cut = divmod(rows.start * per_row, nested) if isinstance(rows, slice) else (0, 1)
        if is_cut:
            changes.update(scale=weight.resolved_scale(rows), scale_kind=ScaleKind.PLAIN)
            changes.update(dict.fromkeys(("nested_codebook", "nested_scale", "nested_offset")))
        else:
            changes["nested_scale"] = weight.nested_scale[first:][: -(-count * per_row // nested)]
    return attrs.evolve(weight, out_features=count, **changes)


def cover(weight: PackedWeight, rows: range | None, columns: range | None) -> Cover:
    """Return the whole blocks that hold a range; see ``PackedWeight.cover``."""
    n, k = weight.shape
    rows, columns = range(n) if rows is None else rows, range(k) if columns is None else columns
    for name, asked, total in (("rows", rows, n), ("columns", columns, k)):
        if not isinstance(asked, range) or asked.step != 1 or not 0 <= asked.start < asked.stop <= total:
            _fail(weight, "cover", name=name, rule=f"a range of step 1 in 0 … {total}", value=asked)
    first, last, cut = columns.start, columns.stop, slice(0, len(rows))
    if len(columns) == k or weight.input_permutation is not None:  # whose in-features are spread over the blocks
        first, last = 0, k
    else:
        weight = weight if weight.blocks is BlockOrder.ROW else _by_row(weight)
        step = math.lcm(_column_step(weight), _super_block(weight) or 1)
        first, last = first // step * step, min(-(-last // step) * step, k)
        weight = weight if last - first == k else _narrow_columns(weight, first, last - first)
    if len(rows) < n and weight.blocks is BlockOrder.FLAT:
        weight, before = _flat_rows(weight, rows)
        cut = slice(before, before + len(rows))
    elif len(rows) < n:
        weight = _pick(weight, slice(rows.start, rows.stop), len(rows))
    return Cover(weight, (columns.start - first, last - columns.stop), cut)


def _flat_rows(weight: PackedWeight, rows: range) -> tuple[PackedWeight, int]:
    """Return rows of a FLAT weight from one at which a block starts, and how many of them come before those asked."""
    plain = weight.with_plain_scale() if weight.nested_scale is not None else weight
    k, block, per_byte = weight.in_features, weight.block_size, weight.packing.codes_per_byte
    unit = math.lcm(block, per_byte)
    first = rows.start - rows.start % (unit // math.gcd(unit, k))
    ends = first * k, rows.stop * k
    changes: dict[str, Any] = {"qdata": plain.qdata[ends[0] // per_byte : -(-ends[1] // per_byte)]}
    for name in ("scale", "offset", "zero"):
        if getattr(plain, name) is not None:
            changes[name] = getattr(plain, name)[ends[0] // block : -(-ends[1] // block)]
    return attrs.evolve(plain, out_features=rows.stop - first, **changes), rows.start - first


def _by_row(weight: PackedWeight) -> PackedWeight:
    """Return a FLAT weight with ROW blocks: of the largest size by which no block straddles rows, with its values."""
    n, k = weight.shape
    block = math.gcd(k, weight.block_size)
    legal, plain = weight.format.block_sizes, weight.with_plain_scale() if weight.nested_scale is not None else weight
    if legal and block not in legal:
        _require_row_blocks(weight, "cover of some in-features")
    changes: dict[str, Any] = {"qdata": pack_codes(weight.codes().reshape(n, k), weight.packing)}
    for name in ("scale", "offset", "zero"):
        if getattr(plain, name) is not None:
            repeated = getattr(plain, name).repeat_interleave(weight.block_size // block)
            changes[name] = repeated[: n * k // block].reshape(n, -1)
    return attrs.evolve(plain, blocks=BlockOrder.ROW, block_size=block, **changes)


def _column_step(weight: PackedWeight) -> int:
    """Return how many in-features lie between two places at which both a block and a packed group end."""
    return math.lcm(weight.block_size, _unit(weight))


def _super_block(weight: PackedWeight) -> int:
    """Return how many in-features share an entry of the second level of SUPER_BLOCK scales; 0 without one."""
    return weight.block_size * weight.nested_block_size if weight.scale_kind is ScaleKind.SUPER_BLOCK else 0


def _unit(weight: PackedWeight) -> int:
    """Return how many codes of a row are stored together."""
    per_byte = weight.packing.codes_per_byte
    is_grouped = weight.qdata.dim() == 3  # noqa: PLR2004  # [N, G, P]
    return weight.qdata.shape[2] * per_byte if is_grouped else max(weight.packing.group, per_byte)


def _narrow_columns(weight: PackedWeight, start: int, length: int) -> PackedWeight:
    unit, step, stop = _unit(weight), _column_step(weight), start + length
    if start % step or (stop % step and stop != weight.in_features) or weight.input_permutation is not None:
        rule = f"multiples of {step} in a weight without input_permutation"
        _fail(weight, "narrow", name="start and length", rule=rule, value=(start, length))
    whole = _super_block(weight)
    keeps_levels = whole > 0 and start % whole == 0 and (stop % whole == 0 or stop == weight.in_features)
    plain = weight if weight.nested_scale is None or keeps_levels else weight.with_plain_scale()
    per_unit = 1 if weight.qdata.dim() == 3 else unit // weight.packing.codes_per_byte  # noqa: PLR2004  # [N, G, P]
    changes: dict[str, Any] = {"qdata": plain.qdata[:, start // unit * per_unit : -(-stop // unit) * per_unit]}
    for name in ("nested_scale", "nested_offset") if keeps_levels else ():
        if (level := getattr(plain, name)) is not None:
            by_row = level.reshape(weight.out_features, -1)
            changes[name] = by_row[:, start // whole : -(-stop // whole)].reshape(-1)
    blocks = slice(start // weight.block_size, -(-stop // weight.block_size))
    for name in ("scale", "offset", "zero"):
        if getattr(plain, name) is not None:
            changes[name] = getattr(plain, name)[:, blocks]
    if plain.input_channel_scale is not None:
        changes["input_channel_scale"] = plain.input_channel_scale[start:stop]
    return attrs.evolve(plain, in_features=length, **changes)
