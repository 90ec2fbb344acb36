"""Layout of a prepared weight: tiles of 16 rows, and the metadata to read them."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_cpu_native.tables import Table, table_of, words_of
from q4core import ConfigError, Form, NibbleOrder, PackedWeight, ScaleKind, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_cpu_native._native import Matrix

__all__ = ["CHUNK", "SMALL_BLOCK", "TYPES", "Call", "TileMeta", "matrix_of", "source_arguments"]

TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e8m0fnu: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int32: 7,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
_LAYOUT = 2
"""Number of the tiles' layout, for what another process stored: higher after any change of the prepared bytes."""
SMALL_BLOCK, CHUNK = 16, 32
"""Blocks are of 16 in-features, of whole chunks, or of a whole row."""
_NONE, _OFFSET, _ZERO = 0, 1, 2
_ORDERS = {NibbleOrder.LOW_FIRST: 0, NibbleOrder.HIGH_FIRST: 1, NibbleOrder.HALF_SPLIT: 2, NibbleOrder.BYTES: 3}
_INPUTS = frozenset({"input_permutation", "input_channel_scale"})
_BYTE_MIDDLE = 128
"""The level of an 8-bit zero in two's complement."""
_FEWER_BITS = {4: (2, 3), 8: (5, 6)}
"""Bits of a code → fewer ones, in which tiles may hold it."""
_LOW_HALF, _HIGH_HALF, _MOST_HALF = 8, 9, 15
"""The types of scale and offset that share a byte, and the largest of either."""


@attrs.frozen
class Call:
    """What is the same in every product with a layout."""

    matrix: Matrix
    """The native description."""
    linear: Callable[..., int]
    """Its product."""
    out_features: int
    in_features: int
    place: int | None
    """Of the global scale among the prepared tensors."""
    divides: bool
    order: int | None
    """Of the in-features' permutation among the prepared tensors."""
    factor: int | None
    """Of the in-features' factors among them."""
    has_inputs: bool
    """Whether x is permuted or multiplied first."""

    def inputs_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int, int]:
        """Return where x's permutation and factors lie among what was prepared (or 0), and the factors' type."""
        order = 0 if self.order is None else tensors[self.order].data_ptr()
        if self.factor is None:
            return order, 0, 0
        factor = tensors[self.factor]
        return order, factor.data_ptr(), TYPES[factor.dtype]


@attrs.frozen(cache_hash=True)
class TileMeta:
    """The layout of one prepared weight: the weight's spec, and the dtypes of its numbers."""

    spec: WeightSpec
    scale_dtype: torch.dtype
    second_dtype: torch.dtype | None
    held_bits: int
    """Of a code in the tiles: its format's, or fewer where all codes lie around zero, or from it on."""
    has_halves: bool = False
    """Whether scale and offset of a block share a byte."""

    @classmethod
    def of(cls, weight: PackedWeight) -> TileMeta:
        """Return the layout of a weight."""
        second = weight.offset if weight.offset is not None else weight.zero
        scale_dtype, second_dtype = weight.scale.dtype, None if second is None else second.dtype
        if weight.scale_kind is ScaleKind.DOUBLE_QUANT:
            scale_dtype = torch.float32
        elif weight.scale_kind is ScaleKind.SUPER_BLOCK and not _has_whole_groups(weight):
            scale_dtype, second_dtype = torch.float32, None if second is None else torch.float32
        spec, has_halves = WeightSpec.of(weight), _are_halves(weight, scale_dtype)
        return cls(spec, scale_dtype, second_dtype, _held_bits(weight), has_halves)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as what JSON holds."""
        names = {dtype: name for name, dtype in _DTYPES.items()}
        return {
            "layout": _LAYOUT,
            "spec": json.loads(self.spec.to_json()),
            "scale_dtype": names[self.scale_dtype],
            "second_dtype": None if self.second_dtype is None else names[self.second_dtype],
            "held_bits": self.held_bits,
            "has_halves": self.has_halves,
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> TileMeta:
        """Return the layout that ``to_dict`` gave.

        Raises:
            ConfigError: The facts are not of this layout.
            WeightError: The spec is none.
        """
        spec = WeightSpec.from_json(json.dumps(facts.get("spec")))
        has_second = any(field in spec.fields for field in ("offset", "zero"))
        dtypes = tuple(_DTYPES)
        scales = {
            ScaleKind.DOUBLE_QUANT: ("float32",),
            ScaleKind.SUPER_BLOCK: ("float32", "uint8", "int8") if _are_whole_groups(spec) else ("float32",),
        }.get(spec.scale_kind, dtypes)
        is_halved = _are_super_offsets(spec) and facts.get("scale_dtype") == facts.get("second_dtype") == "uint8"
        rules = (
            ("layout", (_LAYOUT,)),
            ("held_bits", _bits_of(spec)),
            ("has_halves", (False, True) if is_halved else (False,)),
            ("scale_dtype", scales),
            ("second_dtype", dtypes if has_second else (None,)),
        )
        for name, known in rules:
            if (value := facts.get(name)) not in known:
                rule = f"one of {', '.join(map(str, known))}"
                hint = "Prepare the weight again with this version of q4-cpu-native."
                raise ConfigError("cpu-native's prepared weight", name=name, rule=rule, value=value, hint=hint)
        scale_dtype, second_dtype = _DTYPES[facts["scale_dtype"]], _DTYPES.get(facts["second_dtype"])
        return cls(spec, scale_dtype, second_dtype, int(facts["held_bits"]), bool(facts["has_halves"]))

    @property
    def is_resolved(self) -> bool:
        """Whether tiles hold float32 in place of two levels."""
        return "nested_scale" in self.spec.fields and self.scale_dtype is torch.float32

    @property
    def super_blocks(self) -> int:
        """Blocks of a super-block whose numbers the tiles hold; 0 without."""
        is_super = self.spec.scale_kind is ScaleKind.SUPER_BLOCK and not self.is_resolved
        return self.spec.nested_block_size if is_super else 0

    @property
    def sides(self) -> tuple[str, ...]:
        """The fields that are stored unchanged, next to the tiles."""
        # Tiles with resolved scales don't give back two levels; these are stored for export, a byte for each block.
        tiled = {"qdata", "zero"} if self.is_resolved else {"qdata", "zero", "scale", "offset"}
        return tuple(name for name in self.spec.fields if name not in tiled)

    @property
    def block(self) -> int:
        """In-features per scale of the tiles: a block that is a whole row is filled up to whole chunks."""
        spec = self.spec
        is_whole_row = spec.block_size >= spec.in_features and spec.block_size != SMALL_BLOCK
        return -(-spec.in_features // CHUNK) * CHUNK if is_whole_row else spec.block_size

    @property
    def second_field(self) -> str | None:
        """``offset``, ``zero`` or None: the second number of a block."""
        return next((field for field in ("offset", "zero") if field in self.spec.fields), None)

    @functools.cached_property  # no part of what is compared, hashed or pickled
    def call(self) -> Call:
        """What is the same in every product; asking for it must cost nothing."""
        spec = self.spec
        places = {name: place for place, name in enumerate(self.sides, 1)}
        matrix = matrix_of(self)
        return Call(
            matrix,
            matrix.linear,
            spec.out_features,
            spec.in_features,
            place=places.get("global_scale"),
            divides=spec.scale_kind is ScaleKind.E4M3_DIV,
            order=places.get("input_permutation"),
            factor=places.get("input_channel_scale"),
            has_inputs=not _INPUTS.isdisjoint(spec.fields),
        )

    @property
    def values(self) -> tuple[float, ...]:
        """The value of each 4-bit code, before scale and second number."""
        return _values_of(self.spec)


def _values_of(spec: WeightSpec) -> tuple[float, ...]:
    if spec.format.form is Form.INTEGER:
        base = 0.0 if {"offset", "zero"} & set(spec.fields) else float(spec.format.middle)
        return tuple(code - base for code in range(16))
    return spec.format.codebook


def _has_whole_groups(weight: PackedWeight) -> bool:
    """Return whether tiles can hold a weight's super-blocks: of float16 numbers, none ending within a chunk."""
    levels = [level for level in (weight.nested_scale, weight.nested_offset) if level is not None]
    return _are_whole_groups(weight) and all(level.dtype is torch.float16 for level in levels)


def _are_whole_groups(of: PackedWeight | WeightSpec) -> bool:
    return of.block_size != SMALL_BLOCK or of.nested_block_size % 2 == 0


def _is_signed(spec: WeightSpec) -> bool:
    """Return whether 8-bit codes are in two's complement."""
    return spec.format.form is Form.CODEBOOK and spec.format.codebook[-1] < 0


def _bits_of(spec: WeightSpec) -> tuple[int, ...]:
    """Return in how many bits tiles may hold a weight's codes."""
    bits = spec.format.bits
    is_even = bits == 8 or _middle_of(spec) is not None  # noqa: PLR2004  # or 4
    return (*_FEWER_BITS[bits], bits) if is_even and "zero" not in spec.fields else (bits,)


def _middle_of(spec: WeightSpec) -> int | None:
    """Return the 4-bit code of zero, the first or the middle one, where each next one stands for 1 more, or None."""
    values = _values_of(spec)
    return next((zero for zero in (0, 8) if values == tuple(code - zero for code in range(16))), None)


def _first_level(spec: WeightSpec, bits: int) -> int:
    """Return the least level of codes of fewer bits: those with a sign lie around zero's, all others start with it."""
    if bits == spec.format.bits:
        return 0
    middle = _byte_middle_of(spec) if spec.format.bits == 8 else _middle_of(spec)  # noqa: PLR2004  # or 4
    return middle - (1 << bits - 1) if middle else 0


def _held_bits(weight: PackedWeight) -> int:
    """Return the fewest bits that tiles hold all codes in."""
    spec = WeightSpec.of(weight)
    held = whole = spec.format.bits
    if len(_bits_of(spec)) == 1:
        return whole
    for rows in (CHUNK, None):  # most that need all bits say so at once
        least, most = _range_of(weight.qdata[:rows], spec)
        firsts = {bits: _first_level(spec, bits) for bits in _bits_of(spec)}
        held = next(bits for bits, first in firsts.items() if first <= least and most < first + (1 << bits))
        if held == whole:
            break
    return held


def _range_of(qdata: torch.Tensor, spec: WeightSpec) -> tuple[int, int]:
    """Return the least and the largest level of some codes; padding among 4-bit ones counts."""
    if spec.format.bits == 8:  # noqa: PLR2004  # or 4
        low, high = qdata.view(torch.int8).aminmax() if _is_signed(spec) else qdata.aminmax()
        shift = _BYTE_MIDDLE if _is_signed(spec) else 0
        return int(low) + shift, int(high) + shift
    parts = [part.aminmax() for part in (qdata & 15, qdata >> 4)]
    return min(int(low) for low, _ in parts), max(int(high) for _, high in parts)


def _are_super_offsets(spec: WeightSpec) -> bool:
    """Return whether blocks have scales and offsets, both in super-blocks."""
    return spec.scale_kind is ScaleKind.SUPER_BLOCK and "offset" in spec.fields


def _are_halves(weight: PackedWeight, scale_dtype: torch.dtype) -> bool:
    """Return whether scale and offset of each block fit one byte."""
    if not _are_super_offsets(WeightSpec.of(weight)) or scale_dtype is not torch.uint8:
        return False
    numbers = (weight.scale, weight.offset)
    return all(item is not None and item.dtype is torch.uint8 and int(item.max()) <= _MOST_HALF for item in numbers)


def _byte_middle_of(spec: WeightSpec) -> int:
    """Return the level of zero of 8-bit codes, or of the first one where a second number says what it stands for."""
    is_plain = spec.format.form is Form.INTEGER and not {"offset", "zero"} & set(spec.fields)
    return _BYTE_MIDDLE if is_plain or _is_signed(spec) else 0


def _bytes_table(spec: WeightSpec) -> Table:
    return Table((0,) * 16, float(_byte_middle_of(spec)), 1.0, None)


@functools.lru_cache(maxsize=1024)
def matrix_of(meta: TileMeta) -> Matrix:
    """Return the native description of a layout."""
    from q4_cpu_native import _native  # noqa: PLC0415  # missing where it was not built

    spec = meta.spec
    is_nibble = spec.format.bits == 4  # noqa: PLR2004  # or 8
    values = meta.values if is_nibble else tuple([0.0] * 16)
    table, words = (table_of(values), words_of(values)) if is_nibble else (_bytes_table(spec), None)
    kind = spec.scale_kind
    if kind is ScaleKind.E8M0:
        scale_type = 4
    elif kind in {ScaleKind.PLAIN, ScaleKind.DOUBLE_QUANT, ScaleKind.SUPER_BLOCK}:
        scale_type = TYPES[meta.scale_dtype]
    else:
        scale_type = 3
    second = {"offset": _OFFSET, "zero": _ZERO, None: _NONE}[meta.second_field]
    second_type = 0 if meta.second_dtype is None else TYPES[meta.second_dtype]
    if meta.has_halves:
        scale_type, second_type = _LOW_HALF, _HIGH_HALF
    return _native.Matrix(
        spec.out_features,
        spec.in_features,
        meta.block,
        meta.super_blocks,
        spec.format.bits,
        meta.held_bits,
        _first_level(spec, meta.held_bits),
        scale_type,
        second,
        second_type,
        not is_nibble and not _is_signed(spec),
        list(values),
        list(table.level),
        table.center,
        table.step,
        list(words.word) if words else [0] * 16,
        words.step if words else 1.0,
    )


def source_arguments(weight: PackedWeight, meta: TileMeta) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:
    """Return addresses and strides of a weight as ``Matrix.pack`` takes them, and the tensors that must stay alive."""
    qdata = weight.qdata
    if qdata.dim() == 3:  # noqa: PLR2004  # [N, groups, bytes]
        row, group, byte = qdata.stride()
        group_bytes = qdata.shape[2]
    else:
        (row, byte), group_bytes = qdata.stride(), max(1, qdata.shape[1])
        group = group_bytes * byte
    scale = weight.scale
    second = None if meta.second_field is None else getattr(weight, meta.second_field)
    size = scale.element_size()
    numbers = [scale.data_ptr(), scale.stride(0) * size, scale.stride(1) * size]
    if second is None:
        numbers += [0, 0, 0]
    else:
        size = second.element_size()
        numbers += [second.data_ptr(), second.stride(0) * size, second.stride(1) * size]
    levels = [weight.nested_scale, weight.nested_offset] if meta.super_blocks else [None, None]
    for level in levels:
        step = 0 if level is None or level.dim() == 0 else level.stride(0) * level.element_size()
        numbers += [0 if level is None else level.data_ptr(), step]
    packing = weight.packing
    order, half = _ORDERS[packing.order], packing.group // 2
    sources = tuple(item for item in (qdata, scale, second, *levels) if item is not None)
    return (qdata.data_ptr(), row, group, byte, group_bytes, order, half, *numbers), sources
