"""HQQ: groups along rows or columns of the regrouped weight, with a float zero point for each.

A weight of N * K elements is viewed as [R, C]: [N K / G, G] for axis 1, [G, N K / G] for axis 0. ``<module>.W_q`` holds
its rows folded: with 4 bits uint8 [R / 2, C], row r in the high and row r + R / 2 in the low nibble; with 2 bits and 1
bit likewise in quarters and eighths; with 3 bits int32 [ceil(R / 10), C]; with 8, 6 and 5 bits one byte each. ``scale``
and ``zero`` are float [R, 1] or [1, C]; ``(code - zero) * scale``. With ``view_as_float`` the bytes of ``W_q`` are
stored as the compute dtype. ``shape``, ``nbits``, ``group_size``, ``axis``, ``packing`` … are tensors; texts are bytes.

Groups of axis 1 may cross rows: they are read as smaller blocks, or as blocks that run across rows. Axis 0 has a scale
for each of N K / G columns, so that neighbours in a row never share one: the weight is exact, in blocks of one, and
takes more memory than a dense one. SINQ has ``W_q`` too, next to ``meta``, and is refused.

Reference:
    hqq 0.2.8.post1: core/quantize.py (Quantizer.dequantize in float32), core/bitpack.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from q4core import (
    BlockOrder,
    Catalogue,
    Dialect,
    Feature,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    WrittenLayer,
    find_format,
    pack_codes,
    unpack_codes,
)
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["Hqq"]

_TENSORS = ("scale", "zero")
_NUMBERS = ("nbits", "group_size", "axis")
_REQUIRED = ("W_q", *_TENSORS, "shape", *_NUMBERS)
_FLAGS = {
    "view_as_float": 0,
    "quant_scale": 0,
    "quant_zero": 0,
    "offload_meta": 0,
    "encoded_state_dict": 1,
    "stores_quant_config": 1,
    "channel_wise": 1,
    "optimize": 1,
    "round_zero": 1,
}
"""Flags of one byte, with what is written where a weight was not read in this dialect."""
_MOST_FLAGS = 7
"""Early releases stored six flags at most; where there are more, all are to be there, and the texts."""
_TEXTS = ("packing", "unpack_view_dtype", "compute_dtype")
_OWN = (*_REQUIRED, *_TEXTS, *_FLAGS)
_INTEGERS = frozenset({torch.uint8, torch.int32, torch.int64})
_FACT = "hqq flags"
_PART = 1 << 20
"""Codes that are handled at once."""
_LEAST_BLOCK = 32
"""Groups that cross rows become blocks that divide a row if these are not smaller, as smaller ones have many scales."""


@attrs.frozen
class _Fold:
    """How several codes share one integer: from the highest bits on, each of the next part of the rows."""

    parts: int
    bits: int
    dtype: torch.dtype = torch.uint8


_FOLDS = {
    "8bit_u8": _Fold(1, 8),
    "4bit_u8": _Fold(2, 4),
    "3bit_32": _Fold(10, 3, torch.int32),
    "2bit_u8": _Fold(4, 2),
    "1bit_u8": _Fold(8, 1),
}
_PACKINGS = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
_SHAPES = (torch.int64, torch.int32)


@attrs.frozen
class _Facts:
    """What the small tensors of a layer say."""

    shape: tuple[int, int]
    group: int
    axis: int
    packing: str
    is_float: bool
    dtype: torch.dtype | None
    flags: tuple[tuple[str, int | None], ...]

    @property
    def regrouped(self) -> tuple[int, int]:
        """R and C."""
        groups = math.prod(self.shape) // self.group
        return (groups, self.group) if self.axis else (self.group, groups)

    @property
    def block(self) -> int:
        """In-features per scale of the weight as it is read; for blocks across rows, the group."""
        if not self.axis:
            return 1
        common = math.gcd(self.group, self.shape[1])
        return common if common >= min(_LEAST_BLOCK, self.group) else self.group


class Hqq(Dialect):
    """HQQ's layers, as ``HQQLinear.state_dict`` encodes them for safetensors."""

    name: ClassVar[str] = "hqq"
    formats: ClassVar[frozenset[str]] = frozenset({"int4", "int8"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite", "zero": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with ``W_q``, or with a scale and the numbers that only HQQ stores."""
        method = catalogue.quantization_config.get("quant_method")
        for module in catalogue.modules_with("W_q", "nbits"):
            has_meta = any(suffix.partition(".")[0] == "meta" for suffix in catalogue.children(module))
            if has_meta or method == "sinq":
                continue
            if f"{module}.W_q" in catalogue or f"{module}.scale" in catalogue:
                yield self._layer(module, catalogue, named=method == "hqq")

    def _layer(self, module: str, catalogue: Catalogue, *, named: bool) -> LayerSchema:
        stem = f"{module}."
        is_whole = sum(stem + flag in catalogue for flag in _FLAGS) >= _MOST_FLAGS
        keys = {
            "qdata" if suffix == "W_q" else suffix: stem + suffix
            for suffix in _OWN
            if is_whole or suffix in _REQUIRED or stem + suffix in catalogue
        }
        problems = list(catalogue.unknown_scales(module, ("bias", *_OWN)))
        for flag, rule in (
            ("quant_scale", "of scales that are not quantised in turn"),
            ("quant_zero", "of zero points that are not quantised in turn"),
        ):
            if _number(catalogue, stem + flag):
                problems.append(Problem("unsupported", module, rule, f"hqq {flag}"))
        if _number(catalogue, f"{stem}channel_wise") == 0:
            problems.append(Problem("unsupported", module, "of a scale for each group", "hqq without channel_wise"))
        facts = None
        if not problems:
            facts, wrong = _facts(stem, catalogue)
            problems += wrong
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="int8" if facts is not None and facts.packing == "8bit_u8" else "int4",
            keys=keys,
            shape=None if facts is None else facts.shape,
            block_size=None if facts is None else facts.block,
            problems=problems,
            extras=(("facts", facts),),
            named=named,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys, facts = layer.keys, dict(layer.extras)["facts"]
        yield from self.expect(catalogue, keys["shape"], dtypes=_SHAPES, shape=(2,))
        for role in (*_NUMBERS, *_FLAGS):
            yield from self.expect(catalogue, keys.get(role), dtypes=_INTEGERS, shape=())
        for role in _TEXTS:
            yield from self.expect(catalogue, keys.get(role), dtypes={torch.uint8}, shape=(None,))
        rows: int | None = None
        columns: int | None = None
        scales: tuple[int | None, int | None] = (None, None)
        dtypes = {torch.uint8, torch.int32, *FLOATS}
        if facts is not None:
            fold = _FOLDS[facts.packing]
            parts, columns = facts.regrouped
            rows, scales = -(-parts // fold.parts), (parts, 1) if facts.axis else (1, columns)
            dtypes = {fold.dtype}
            codes = catalogue.get(keys["qdata"])
            if facts.is_float:
                dtypes = set(FLOATS) if facts.dtype is None else {facts.dtype}
                size = 1 if codes is None else codes.dtype.itemsize
                columns = columns * fold.dtype.itemsize // size
            if parts % fold.parts and fold.dtype is torch.uint8:
                rule = f"of a packing that divides {parts} rows"
                yield Problem("value", keys.get("packing", keys["nbits"]), rule, facts.packing)
        yield from self.expect(catalogue, keys["qdata"], dtypes=dtypes, shape=(rows, columns))
        for role in _TENSORS:
            yield from self.expect(catalogue, keys[role], dtypes=FLOATS, shape=scales)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; codes of 8 bits along rows are views."""
        facts: _Facts = dict(layer.extras)["facts"]
        fold, (parts, columns), (rows, width) = _FOLDS[facts.packing], facts.regrouped, facts.shape
        words, scale, zero = (load(layer.keys[role]) for role in ("qdata", *_TENSORS))
        words = words.view(fold.dtype) if facts.is_float else words
        block, order, notes = facts.block, BlockOrder.ROW, layer.notes
        if not facts.axis:
            scale, zero = (item.expand(parts, columns).reshape(rows, width) for item in (scale, zero))
            notes = (*notes, "axis 0: a scale and a zero point for each code, which take more than a dense weight")
        elif width % block == 0:
            times = facts.group // block
            scale, zero = (
                (item if times == 1 else item.repeat_interleave(times, 0)).reshape(rows, -1) for item in (scale, zero)
            )
        else:
            order = BlockOrder.FLAT
            scale, zero = scale.reshape(-1), zero.reshape(-1)
        is_byte = layer.format == "int8"
        sizes = (rows, width) if order is BlockOrder.ROW else (1, rows * width)
        codes = words.reshape(sizes) if is_byte else _packed(words.reshape(-1), fold, *sizes)
        if facts.flags:
            notes = (*notes, self.stored_fact(_FACT, dict(facts.flags)))
        return PackedWeight(
            format=find_format(layer.format),
            qdata=codes if order is BlockOrder.ROW else codes.reshape(-1),
            scale=scale,
            zero=zero,
            out_features=rows,
            in_features=width,
            block_size=block,
            blocks=order,
            packing=Packing.BYTES if is_byte else Packing.LOW_FIRST,
            dtype=scale.dtype if facts.dtype is None else facts.dtype,
            name=layer.module,
            dialect=layer.dialect,
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors of ``HQQLinear.state_dict``, with groups along rows.

        Raises:
            DialectError: Another format, a short last block, zero points that the scale's dtype can't hold, an odd
                number of groups of 4-bit codes, or any other feature.
        """
        features = (Feature.ZERO_POINT, Feature.FLOAT_ZERO_POINT, Feature.FLAT_BLOCKS)
        self.check_writable(module, weight, features=features)
        total, group = math.prod(weight.shape), weight.block_size
        is_byte = weight.format.name == "int8"
        if total % group:
            raise self.refusal(module, "block_size", f"a divisor of N * K = {total}", group)
        count = total // group
        if not is_byte and count % 2:
            raise self.refusal(module, "groups", "an even number, as two share a row", count)
        scale = weight.scale.reshape(-1, 1)
        zero = torch.full_like(scale, weight.format.middle)
        if weight.zero is not None:
            zero = weight.zero.reshape(-1, 1).to(scale.dtype)
            if not torch.equal(zero.to(torch.float64), weight.zero.reshape(-1, 1).to(torch.float64)):
                raise self.refusal(module, "zero", f"numbers that {scale.dtype} holds", "others")
        codes = weight.codes() if is_byte else _folded(weight)
        name = "8bit_u8" if is_byte else "4bit_u8"
        numbers = {"nbits": 8 if is_byte else 4, "group_size": group, "axis": 1}
        texts = dict(zip(_TEXTS, (name, "torch.uint8", str(weight.dtype)), strict=True))
        flags = {**_FLAGS, **(self.read_fact(weight, _FACT) or {}), "view_as_float": 0}
        tensors = {
            "W_q": codes.reshape(-1, group),
            "scale": scale,
            "zero": zero,
            "shape": torch.tensor(weight.shape),
            **{suffix: torch.tensor(number, dtype=torch.int32) for suffix, number in numbers.items()},
            **{suffix: torch.tensor(number, dtype=torch.uint8) for suffix, number in flags.items()},
            **{suffix: torch.tensor(list(text.encode()), dtype=torch.uint8) for suffix, text in texts.items()},
        }
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return transformers' ``HqqConfig``: one entry for all, or one for each module."""
        entries = {module: {"weight_quant_params": _entry(spec)} for module, spec in layers.items()}
        first = next(iter(entries.values()))
        is_same = all(entry == first for entry in entries.values())
        return {
            "quant_method": "hqq",
            "quant_config": first if is_same else entries,
            "skip_modules": list(unquantised),
        }


def _entry(spec: WeightSpec) -> dict[str, Any]:
    return {"nbits": spec.format.bits, "group_size": spec.block_size, "axis": 1, "view_as_float": False}


def _number(catalogue: Catalogue, key: str) -> int | None:
    """Return a stored number, or None where it is not at hand."""
    stored = catalogue.load_small(key)
    return int(stored) if stored is not None and stored.dtype in _INTEGERS and stored.numel() == 1 else None


def _text(catalogue: Catalogue, key: str) -> str | None:
    """Return a stored text, or None likewise."""
    stored = catalogue.load_small(key)
    if stored is None or stored.dtype != torch.uint8 or stored.dim() != 1:
        return None
    return bytes(stored.tolist()).decode("ascii", "replace")


def _facts(stem: str, catalogue: Catalogue) -> tuple[_Facts | None, list[Problem]]:
    """Return what the small tensors say, or None where they are not at hand, with what no layer can have."""
    sizes = catalogue.load_small(f"{stem}shape")
    numbers = {name: _number(catalogue, stem + name) for name in _NUMBERS}
    if sizes is None or sizes.dtype not in _SHAPES or sizes.shape != (2,) or None in numbers.values():
        return None, []
    rows, columns = sizes.tolist()
    packing = _text(catalogue, f"{stem}packing") or _PACKINGS.get(numbers["nbits"] or 0, "")
    dtype_name = _text(catalogue, f"{stem}compute_dtype")
    view = _text(catalogue, f"{stem}unpack_view_dtype")
    known = {str(dtype): dtype for dtype in FLOATS}
    group, axis = numbers["group_size"] or 0, numbers["axis"]
    whole = group > 0 and rows > 0 and columns > 0 and rows * columns % group == 0
    # 1.58 bits are stored as 1, and packed as 2.
    packings = {_PACKINGS.get(numbers["nbits"] or 0), "2bit_u8" if numbers["nbits"] == 1 else None}
    problems = [
        Problem("value", stem + name, rule, value)
        for name, rule, value, is_met in (
            ("shape", "two sizes from 1", [rows, columns], rows > 0 and columns > 0),
            ("nbits", f"one of {', '.join(map(str, _PACKINGS))}", numbers["nbits"], numbers["nbits"] in _PACKINGS),
            ("packing", f"that of {numbers['nbits']} bits", packing, packing in packings or packing not in _FOLDS),
            ("packing", f"one of {', '.join(_FOLDS)}", packing, packing in _FOLDS),
            ("group_size", f"a divisor of N * K = {rows * columns}", group, whole),
            ("axis", "0 or 1", axis, axis in {0, 1}),
            ("unpack_view_dtype", "that of the packing", view, view in {None, _view(packing)}),
            ("compute_dtype", f"one of {', '.join(known)}", dtype_name, dtype_name is None or dtype_name in known),
        )
        if not is_met
    ]
    if problems or axis is None:
        return None, problems
    flags = {name: _number(catalogue, stem + name) for name in _FLAGS}
    facts = _Facts(
        shape=(rows, columns),
        group=group,
        axis=axis,
        packing=packing,
        is_float=bool(flags["view_as_float"]),
        dtype=known.get(dtype_name or ""),
        flags=tuple((name, flag) for name, flag in flags.items() if flag not in {None, _FLAGS[name]}),
    )
    return facts, []


def _view(packing: str) -> str | None:
    return str(_FOLDS[packing].dtype) if packing in _FOLDS else None


def _packed(words: torch.Tensor, fold: _Fold, rows: int, columns: int) -> torch.Tensor:
    """Return the first codes of folded words as packed rows of ``columns`` codes."""
    packed = torch.empty((rows, -(-columns // 2)), dtype=torch.uint8)
    if rows > 1 and columns % 2:  # a row ends within a byte
        step = max(1, _PART // columns)
        for row in range(0, rows, step):
            own = packed[row : row + step]
            codes = _between(words, fold, row * columns, (row + len(own)) * columns)
            own.copy_(pack_codes(codes.view(len(own), -1), Packing.LOW_FIRST))
        return packed
    flat, total = packed.view(-1), rows * columns
    for first in range(0, total, _PART):
        codes = pack_codes(_between(words, fold, first, min(first + _PART, total)), Packing.LOW_FIRST)
        flat[first // 2 :][: len(codes)] = codes
    return packed


def _between(words: torch.Tensor, fold: _Fold, first: int, last: int) -> torch.Tensor:
    """Return codes ``first`` … ``last`` of folded words, one per byte."""
    size, parts = len(words), []
    for part in range(first // size, -(-last // size)):
        low = max(first - part * size, 0)
        own = words[low : min(last - part * size, size)] >> (fold.bits * (fold.parts - 1 - part))
        parts.append((own & ((1 << fold.bits) - 1)).to(torch.uint8))
    return torch.cat(parts)


def _folded(weight: PackedWeight) -> torch.Tensor:
    """Return bytes whose high nibbles are the first half of the flattened weight, and whose low ones the second."""
    half = math.prod(weight.shape) // 2
    folded = torch.empty(half, dtype=torch.uint8)
    for first in range(0, half, _PART):
        last = min(first + _PART, half)
        folded[first:last] = (_codes(weight, first, last) << 4) | _codes(weight, half + first, half + last)
    return folded


def _codes(weight: PackedWeight, first: int, last: int) -> torch.Tensor:
    """Return codes ``first`` … ``last`` of the flattened weight, one per byte."""
    if weight.blocks is BlockOrder.FLAT:
        each = weight.packing.codes_per_byte
        codes = unpack_codes(weight.qdata.reshape(-1)[first // each : -(-last // each)], weight.packing)
        return codes[first % each :][: last - first]
    width = weight.in_features
    row = first // width
    codes = weight.narrow(0, row, -(-last // width) - row).codes().reshape(-1)
    return codes[first - row * width : last - row * width]
