"""torchao's int4 weights: ``Int4Tensor`` (plain) and ``Int4TilePackedTo4dTensor``, for tensor cores.

Plain: ``<module>._weight_qdata`` int8 [N, K / 2], low nibble first, two's complement; ``_weight_scale`` and
``_weight_zero_point`` [K / G, N]; ``code * scale + zero_point``. Experts have one more dimension in front. Where the
entry's ``activation_dtype`` is a float8, torchao rounds activations to it, and codes are symmetric.

Tile-packed: ``_weight_qdata`` int32 [N' / 8, K' / 128, 32, 4] and ``_weight_scale_and_zero`` bfloat16 [K' / G, N', 2],
N and K padded to multiples of 8 and 1024; ``(code - 8) * scale + zero``. Element (n, k) is in word [n // 8, k // 128,
n % 8 * 4 + k % 8 // 2, k % 128 // 32], at nibble ``4 * (k % 2) + 2 * (k % 32 // 16) + k % 16 // 8``: CUDA's order.
ROCm's is another, and no tensor says which.

Both may have ``_weight_act_pre_scale`` [K], which multiplies the input. Zeros of the second form would need a code book
of their own; ``zero - 8 * scale`` is an offset of codes 0 … 15, and gives the same bits where it is exact in float32.

Reference:
    torchao 0.18.0: quantization/quantize_/workflows/int4, quant_primitives.py (_dequantize_affine_tinygemm); torch
    2.13.0: aten/src/ATen/native/cuda/int4mm.cu. No decoder of them runs on CPUs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.experts import expert_layers, expert_of, has_experts
from q4_dialects.int_words import row_parts
from q4_dialects.torchao_entries import entry_of, is_read, merged_entries, prefix_of
from q4core import (
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
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["TorchaoInt4", "TorchaoInt4TilePacked"]

_SIGN = 0x88
"""The bits by which codes -8 … 7 differ from codes 0 … 15."""
_MIDDLE, _MATRIX = 8, 2
_HALVES = frozenset({torch.bfloat16, torch.float16})
_SIGNED = tuple(map(float, range(-8, 8)))
_ENTRY = "torchao entry"
_PRE_SCALE = "act_pre_scale"
_ROWS, _COLUMNS, _TILE = 8, 1024, 128
_TILE_GROUPS = (32, 64, 128, 256)
_PART = 1 << 20
"""Codes that are handled at once."""


class _Int4(Dialect):
    """What the two dialects share."""

    metadata_spans_shards: ClassVar[bool] = True
    formats: ClassVar[frozenset[str]] = frozenset({"q4_1"})
    tensor_type: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """Names of the tensors that are always there."""
    packing_format: ClassVar[str]
    features: ClassVar[frozenset[Feature]] = frozenset(
        {Feature.OFFSET, Feature.INPUT_CHANNEL_SCALE, Feature.CUSTOM_CODEBOOK}
    )

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each layer that the metadata names, and each that names, dtypes and ranks alone identify."""
        seen = set()
        for name, text in catalogue.metadata.items():
            entry = entry_of(text) if self.tensor_type in text else None
            if entry is not None and entry["_type"] == self.tensor_type and is_read(name, catalogue):
                seen.add(name)
                yield from self._layers(name, catalogue, entry)
        for module in catalogue.modules_with(*(f"_weight_{part}" for part in self.parts)):
            name = f"{module}.weight"
            if (
                name not in seen
                and entry_of(catalogue.metadata.get(name, "")) is None
                and self._fits(module, catalogue)
            ):
                yield from self._layers(name, catalogue, None)

    def _fits(self, module: str, catalogue: Catalogue) -> bool:
        """Return whether the tensors of a module alone are this dialect's."""
        raise NotImplementedError

    def _layers(self, name: str, catalogue: Catalogue, entry: dict[str, Any] | None) -> Iterator[LayerSchema]:
        prefix, module = prefix_of(name), name.rpartition(".")[0]
        named = entry.get("_tensor_data_names") if entry is not None else None
        listed = isinstance(named, list) and _PRE_SCALE in named
        keys = {part: f"{prefix}{part}" for part in self.parts}
        if listed or f"{prefix}{_PRE_SCALE}" in catalogue:
            keys[_PRE_SCALE] = f"{prefix}{_PRE_SCALE}"
        problems: list[Problem] = []
        if name.endswith(".weight"):
            known = ("bias", *(f"_weight_{part}" for part in (*self.parts, _PRE_SCALE)))
            problems += catalogue.unknown_scales(module, known)
        if entry is not None and (
            not isinstance(named, list) or not set(self.parts) <= set(map(str, named)) <= {*self.parts, _PRE_SCALE}
        ):
            rule = f"{', '.join(self.parts)}, and {_PRE_SCALE} or not"
            problems.append(Problem("value", f"metadata {name}._tensor_data_names", rule, named))
        data = entry.get("_data") if entry is not None else None
        facts: dict[str, Any] = data if isinstance(data, dict) else {}
        shape, group, wrong = self._sizes(name, keys, catalogue, facts if entry is not None else None)
        layer = LayerSchema(
            module=name.removesuffix(".weight"),
            dialect=self.name,
            format="q4_1",
            keys=keys,
            shape=shape,
            block_size=group,
            problems=(*problems, *wrong),
            notes=self._notes(facts),
            extras=(("entry", None if entry is None else catalogue.metadata[name]),),
            named=entry is not None,
        )
        codes = catalogue.get(keys["qdata"])
        if codes is not None and has_experts(catalogue, keys["qdata"]) and self.tensor_type == "Int4Tensor":
            yield from expert_layers(layer, codes.shape[0], catalogue)
        else:
            yield layer

    def _sizes(
        self, name: str, keys: Mapping[str, str], catalogue: Catalogue, facts: dict[str, Any] | None
    ) -> tuple[tuple[int, int] | None, int | None, list[Problem]]:
        """Return (N, K) and G, as far as the tensors and the entry say them, and what contradicts."""
        raise NotImplementedError

    def _notes(self, facts: Mapping[str, Any]) -> tuple[str, ...]:
        found = facts.get("activation_dtype")
        stated = found.get("_data") if isinstance(found, dict) else None
        if isinstance(stated, str) and stated.startswith("float8"):
            return (f"torchao rounds this layer's activations to {stated}; here they are as given",)
        return ()

    def _weight(
        self, layer: LayerSchema, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, **facts: Any
    ) -> PackedWeight:
        """Return the weight of codes 0 … 15 in bytes [N, K / 2], which mean -8 … 7, with scale and zero [N, K / G]."""
        offset = zero.to(torch.float64) - _MIDDLE * scale.to(torch.float64)
        is_exact = scale.dtype in _HALVES and torch.equal(offset.to(torch.float32).to(torch.float64), offset)
        fields: dict[str, Any] = {"offset": zero, "codebook": torch.tensor(_SIGNED)}
        if is_exact:
            is_narrow = torch.equal(offset.to(scale.dtype).to(torch.float64), offset)
            fields = {"offset": offset.to(scale.dtype if is_narrow else torch.float32)}
        entry = dict(layer.extras)["entry"]
        notes = layer.notes if entry is None else (*layer.notes, self.stored_fact(_ENTRY, entry))
        return PackedWeight(
            format=find_format("q4_1"),
            qdata=codes,
            scale=scale,
            packing=Packing.LOW_FIRST,
            dtype=scale.dtype,
            name=layer.module,
            dialect=layer.dialect,
            notes=notes,
            **{**fields, **facts},
        )

    def _levels(self, module: str, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero [N, K / G] of a weight, as torchao adds them.

        Raises:
            DialectError: No zero point gives the same bits.
        """
        self.check_writable(module, weight, features=self.features)
        plain = weight.with_plain_scale()
        scale, offset = plain.scale, plain.offset
        if offset is None:
            raise self.refusal(module, "offset", "there", None)
        if weight.codebook is not None:
            if weight.codebook.tolist() != list(_SIGNED):
                raise self.refusal(module, "codebook", "-8 … 7", weight.codebook.tolist())
            return scale, offset.to(scale.dtype)
        zero = offset.to(torch.float64) + _MIDDLE * scale.to(torch.float64)
        stored = zero.to(scale.dtype)
        if scale.dtype not in _HALVES or not torch.equal(stored.to(torch.float64), zero):
            rule = f"such that offset + 8 * scale is a number of a 16-bit dtype, that of the scales ({scale.dtype})"
            raise self.refusal(module, "offset", rule, "others")
        return scale, stored

    def _written(self, module: str, weight: PackedWeight, tensors: dict[str, torch.Tensor], group: int) -> WrittenLayer:
        """Return the tensors with their entry; the facts of the entry that was read are preserved."""
        if weight.input_channel_scale is not None:
            tensors[_PRE_SCALE] = weight.input_channel_scale
        found = entry_of(self.read_fact(weight, _ENTRY) or "")
        is_own = found is not None and found["_type"] == self.tensor_type and isinstance(found.get("_data"), dict)
        data = {**(found["_data"] if found is not None and is_own else self._defaults(weight))}
        entry = {
            "_type": self.tensor_type,
            "_data": {**data, "block_size": [1, group], "shape": list(weight.shape)},
            "_tensor_data_names": [*tensors],
        }
        return WrittenLayer(
            tensors={f"{module}._weight_{part}": tensor for part, tensor in tensors.items()},
            metadata={f"{module}.weight": json.dumps(entry)},
        )

    def _defaults(self, weight: PackedWeight) -> dict[str, Any]:
        del weight
        return {}

    def merge_metadata(self, layers: Mapping[str, WrittenLayer], dense: Iterable[str]) -> dict[str, str]:
        """Return the entries of layers and of plain tensors, and the list of their names."""
        return merged_entries(super().merge_metadata(layers, ()), dense)

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return transformers' ``TorchAoConfig``."""
        groups = {spec.block_size for spec in layers.values()}
        data = {
            "group_size": max(groups),
            "int4_packing_format": {"_type": "Int4PackingFormat", "_data": self.packing_format},
        }
        return {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}},
            "modules_to_not_convert": list(unquantised) or None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }

    def _pre_scale_problems(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        columns = None if layer.shape is None else layer.shape[1]
        yield from self.expect(catalogue, layer.keys.get(_PRE_SCALE), dtypes=FLOATS, shape=(columns,))


def _entry_problems(
    name: str, facts: Mapping[str, Any], shape: tuple[int, ...] | None, group: int | None
) -> Iterator[Problem]:
    """Yield where an entry contradicts the tensors."""
    for fact, found in (("shape", shape), ("block_size", None if shape is None else (*[1] * (len(shape) - 1), group))):
        stated = facts.get(fact)
        if not isinstance(stated, list) or not all(type(size) is int and size > 0 for size in stated):
            yield Problem("value", f"metadata {name}.{fact}", "a list of sizes", stated)
        elif found is not None and None not in found and stated != list(found):
            yield Problem("value", f"metadata {name}.{fact}", f"{list(found)}, as the tensors have it", stated)


class TorchaoInt4(_Int4):
    """``Int4Tensor``."""

    name: ClassVar[str] = "torchao-int4"
    numbers: ClassVar[Mapping[str, str]] = dict.fromkeys(("scale", "zero_point", _PRE_SCALE), "finite")
    tensor_type: ClassVar[str] = "Int4Tensor"
    parts: ClassVar[tuple[str, ...]] = ("qdata", "scale", "zero_point")
    packing_format: ClassVar[str] = "PLAIN"

    def _fits(self, module: str, catalogue: Catalogue) -> bool:
        codes = catalogue.get(f"{module}._weight_qdata")
        scale, zero = (catalogue.get(f"{module}._weight_{part}") for part in ("scale", "zero_point"))
        floats = [info for info in (scale, zero) if info is not None and info.dtype in FLOATS]
        if codes is None or len(codes.shape) not in {2, 3}:
            return len(floats) == len(self.parts) - 1
        return codes.dtype is torch.int8 and bool(floats)

    def _sizes(
        self, name: str, keys: Mapping[str, str], catalogue: Catalogue, facts: dict[str, Any] | None
    ) -> tuple[tuple[int, int] | None, int | None, list[Problem]]:
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        if codes is None or len(codes.shape) not in {2, 3}:
            return None, None, [] if facts is None else [*_entry_problems(name, facts, None, None)]
        *experts, rows, width = codes.shape
        groups = scale.shape[-2] if scale is not None and len(scale.shape) == len(codes.shape) else 0
        group = 2 * width // groups if groups and width and 2 * width % groups == 0 else None
        wrong = [] if facts is None else [*_entry_problems(name, facts, (*experts, rows, 2 * width), group)]
        return (rows, 2 * width), group, wrong

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        experts = (codes.shape[0],) if codes is not None and has_experts(catalogue, keys["qdata"]) else ()
        yield from self.expect(catalogue, keys["qdata"], dtypes={torch.int8, torch.uint8}, shape=(*experts, None, None))
        rows, columns = layer.shape or (None, None)
        groups = None if columns is None or layer.block_size is None else columns // layer.block_size
        if columns is not None and layer.block_size is None and scale is not None:
            yield Problem("shape", keys["scale"], f"[K / G, N] with K = {columns}", list(scale.shape))
        for part in ("scale", "zero_point"):
            yield from self.expect(catalogue, keys[part], dtypes=FLOATS, shape=(*experts, groups, rows))
        yield from self._pre_scale_problems(layer, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; codes become 0 … 15, and scales lie by rows, which copies both."""
        expert = expert_of(layer)
        parts = {part: load(key) for part, key in layer.keys.items()}
        codes, scale, zero = (parts[part] if expert is None else parts[part][expert] for part in self.parts)
        return self._weight(
            layer,
            codes.view(torch.uint8) ^ _SIGN,
            scale.T.contiguous(),
            zero.T.contiguous(),
            out_features=codes.shape[0],
            in_features=2 * codes.shape[1],
            block_size=2 * codes.shape[1] // scale.shape[0],
            input_channel_scale=parts.get(_PRE_SCALE),
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors and the metadata entry that ``unflatten_tensor_state_dict`` takes.

        Raises:
            DialectError: Another format, a short last group, an odd K, offsets that no zero point stands for, or any
                other feature.
        """
        scale, zero = self._levels(module, weight)
        if weight.in_features % 2:
            raise self.refusal(module, "in_features", "even", weight.in_features)
        codes = self.row_bytes(weight, Packing.LOW_FIRST).reshape(weight.out_features, -1) ^ _SIGN
        tensors = {
            "qdata": codes.view(torch.int8),
            "scale": scale.T.contiguous(),
            "zero_point": zero.T.contiguous(),
        }
        return self._written(module, weight, tensors, weight.block_size)

    def _defaults(self, weight: PackedWeight) -> dict[str, Any]:
        return {"activation_dtype": {"_type": "torch.dtype", "_data": str(weight.dtype).removeprefix("torch.")}}


class TorchaoInt4TilePacked(_Int4):
    """``Int4TilePackedTo4dTensor``, in CUDA's order."""

    name: ClassVar[str] = "torchao-int4-tile-packed"
    numbers: ClassVar[Mapping[str, str]] = dict.fromkeys(("scale_and_zero", _PRE_SCALE), "finite")
    tensor_type: ClassVar[str] = "Int4TilePackedTo4dTensor"
    parts: ClassVar[tuple[str, ...]] = ("qdata", "scale_and_zero")
    packing_format: ClassVar[str] = "TILE_PACKED_TO_4D"
    features: ClassVar[frozenset[Feature]] = _Int4.features | {Feature.TAIL_BLOCK}

    def _fits(self, module: str, catalogue: Catalogue) -> bool:
        return f"{module}._weight_scale_and_zero" in catalogue

    def _notes(self, facts: Mapping[str, Any]) -> tuple[str, ...]:
        return (*super()._notes(facts), "in CUDA's order of tiles, as no tensor says")

    def _sizes(
        self, name: str, keys: Mapping[str, str], catalogue: Catalogue, facts: dict[str, Any] | None
    ) -> tuple[tuple[int, int] | None, int | None, list[Problem]]:
        del keys, catalogue
        if facts is None:
            rule = "there, as nothing else holds N, K and the group size"
            return None, None, [Problem("missing_key", f"metadata {name}", rule)]
        wrong = list(_entry_problems(name, facts, None, None))
        if wrong:
            return None, None, wrong
        shape, block = facts["shape"], facts["block_size"]
        if len(shape) != _MATRIX:
            return None, None, [Problem("unsupported", name, "of 2 dimensions to be read", shape)]
        if len(block) != _MATRIX or block[0] != 1 or block[1] not in _TILE_GROUPS:
            rule = f"[1, G] with G one of {', '.join(map(str, _TILE_GROUPS))}"
            wrong = [Problem("value", f"metadata {name}.block_size", rule, block)]
        return (shape[0], shape[1]), None if wrong else block[1], wrong

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        tiles: tuple[int | None, ...] = (None, None, None, None)
        scales: tuple[int | None, ...] = (None, None, 2)
        if layer.shape is not None:
            rows, columns = _padded(layer.shape)
            tiles = (rows // _ROWS, columns // _TILE, 32, 4)
            scales = (None if layer.block_size is None else columns // layer.block_size, rows, 2)
        yield from self.expect(catalogue, layer.keys["qdata"], dtypes={torch.int32}, shape=tiles)
        yield from self.expect(catalogue, layer.keys["scale_and_zero"], dtypes={torch.bfloat16}, shape=scales)
        yield from self._pre_scale_problems(layer, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, with its codes in order and without the padding."""
        parts = {part: load(key) for part, key in layer.keys.items()}
        (rows, columns), group = layer.shape or (0, 0), layer.block_size or 1
        codes = torch.empty((rows, -(-columns // 2)), dtype=torch.uint8)
        step = max(1, _PART // (_ROWS * columns))
        for first, words in enumerate(parts["qdata"].split(step)):
            nibbles = unpack_codes(words.contiguous().view(torch.uint8), Packing.LOW_FIRST)
            some = nibbles.reshape(*words.shape[:2], *_SPLIT).permute(_ORDER).reshape(_ROWS * len(words), -1)
            own = codes[first * step * _ROWS :][: len(some)]
            own.copy_(pack_codes(some[: len(own), :columns], Packing.LOW_FIRST))
        scale, zero = (parts["scale_and_zero"][: -(-columns // group), :rows, place].T.contiguous() for place in (0, 1))
        return self._weight(
            layer,
            codes,
            scale,
            zero,
            out_features=rows,
            in_features=columns,
            block_size=group,
            input_channel_scale=parts.get(_PRE_SCALE),
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors and the metadata entry that ``unflatten_tensor_state_dict`` takes.

        Raises:
            DialectError: Another format, a group size that the kernel lacks, scales that are no bfloat16, offsets that
                no zero point stands for, or any other feature.
        """
        scale, zero = self._levels(module, weight)
        if weight.block_size not in _TILE_GROUPS:
            rule = f"one of {', '.join(map(str, _TILE_GROUPS))}"
            raise self.refusal(module, "block_size", rule, weight.block_size)
        if scale.dtype is not torch.bfloat16:
            raise self.refusal(module, "scale", "bfloat16", scale.dtype)
        rows, columns = _padded(weight.shape)
        more = (0, columns - weight.in_features, 0, rows - weight.out_features)
        words = torch.empty((rows // _ROWS, columns // _TILE, 32, 4), dtype=torch.int32)
        for first, codes in row_parts(weight, _ROWS):
            own = words[first // _ROWS :][: -(-len(codes) // _ROWS)]
            filled = torch.nn.functional.pad(codes, (*more[:3], -len(codes) % _ROWS), value=_MIDDLE)
            sizes = (*own.shape[:2], *_SPLIT)
            tiled = filled.reshape([sizes[place] for place in _ORDER]).permute(_BACK).reshape(*own.shape[:3], 32)
            own.copy_(pack_codes(tiled, Packing.LOW_FIRST).view(torch.int32))
        both = torch.stack((scale.T, zero.T), -1)
        both = torch.nn.functional.pad(both, (0, 0, 0, more[3], 0, columns // weight.block_size - both.shape[0]))
        return self._written(module, weight, {"qdata": words, "scale_and_zero": both}, weight.block_size)


_SPLIT = (8, 4, 4, 2, 2, 2)
"""Of a tile's words: row, pair of columns, word; of a word's nibbles: column of the pair, half of 32, half of 16."""
_ORDER = (0, 2, 1, 4, 6, 7, 3, 5)
"""Axes of tiles, split so, in the order of rows and columns."""
_BACK = tuple(_ORDER.index(axis) for axis in range(len(_ORDER)))


def _padded(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // _ROWS) * _ROWS, -(-shape[1] // _COLUMNS) * _COLUMNS
