"""compressed-tensors INT4 (``pack-quantized``).

``<module>.weight_packed`` int32 [N, ceil(K / 8)], lowest nibble first, so that its bytes are codes low nibble first;
code 8 is zero. ``weight_scale`` float [N, G], one column for each of G groups of in-features, or one in all;
``weight_shape`` int64 [2] holds N and K; asymmetric layers have ``weight_zero_point`` int32 [ceil(N / 8), G], packed
along N, where 8 is zero too. ``weight_g_idx`` permutes in-features, and is refused.

Reference:
    compressed-tensors 0.20.0: compressors/pack_quantized, quantization/lifecycle/forward_helpers.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.compressed_tensors import CACHE_SCALES, config_entry, transform_problems
from q4_dialects.nvfp4 import layer_keys, rank_problems
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
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["CompressedTensorsInt4"]

_SUFFIXES = {
    "qdata": "weight_packed",
    "scale": "weight_scale",
    "shape": "weight_shape",
    "zero": "weight_zero_point",
}
_REQUIRED = ("qdata", "scale", "shape")
_ORDER = "weight_g_idx"
_IN_WORD = 8
_MATRIX = 2
_FEATURES = (Feature.ZERO_POINT, Feature.FLOAT_ZERO_POINT, Feature.TAIL_BLOCK)
_SIZES = (torch.int64, torch.int32)
_SIZES_FACT = "weight_shape dtype"


class CompressedTensorsInt4(Dialect):
    """INT4 as compressed-tensors packs it, symmetric or not, in groups or one for each row."""

    name: ClassVar[str] = "compressed-tensors-int4"
    formats: ClassVar[frozenset[str]] = frozenset({"int4"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with codes in int32 words, or with the tensor that holds their shape."""
        named = catalogue.quantization_config.get("quant_method") == "compressed-tensors"
        for module in catalogue.modules_with("weight_packed", "weight_shape"):
            codes = catalogue.get(f"{module}.weight_packed")
            if (codes is not None and codes.dtype == torch.int32) or f"{module}.weight_shape" in catalogue:
                yield self._layer(module, catalogue, named=named)

    def _layer(self, module: str, catalogue: Catalogue, *, named: bool) -> LayerSchema:
        required = (*_REQUIRED, "zero") if _is_asymmetric(catalogue) else _REQUIRED
        keys = layer_keys(module, _SUFFIXES, required, catalogue)
        problems = [
            *catalogue.unknown_scales(module, ("bias", *_SUFFIXES.values(), *CACHE_SCALES, _ORDER)),
            *transform_problems(module, catalogue),
            *rank_problems(module, catalogue.get(keys["qdata"])),
        ]
        if f"{module}.{_ORDER}" in catalogue:
            rule = "without an order of the in-features (actorder), which is not read"
            problems.append(Problem("unsupported", module, rule, _ORDER))
            keys["order"] = f"{module}.{_ORDER}"
        shape = _stored_shape(catalogue.load_small(keys["shape"]))
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        if shape is not None and codes is not None and len(codes.shape) == _MATRIX:
            bits = [bits for bits in range(1, 9) if codes.shape[1] == -(-shape[1] * bits // 32)]
            if bits and 4 not in bits:  # noqa: PLR2004  # the one width that is read
                rule = "of 4-bit codes to be read, int32 [N, ceil(K / 8)]"
                problems.append(Problem("unsupported", module, rule, f"{bits[0]}-bit codes {list(codes.shape)}"))
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="int4",
            keys=keys,
            shape=shape,
            block_size=None if shape is None or scale is None else _block_size(shape[1], scale.shape),
            problems=problems,
            named=named,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys, shape = layer.keys, layer.shape
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        yield from self.expect(catalogue, keys["qdata"], dtypes={torch.int32}, shape=(None, None))
        yield from self.expect(catalogue, keys["shape"], dtypes=_SIZES, shape=(2,))
        stored = catalogue.load_small(keys["shape"])
        if stored is not None and stored.dtype in _SIZES and stored.shape == (2,) and shape is None:
            yield Problem("value", keys["shape"], "two sizes from 1", stored.tolist())
        rows = None
        if codes is not None and len(codes.shape) == _MATRIX:
            rows = codes.shape[0]
            if shape is not None and codes.shape != (shape[0], -(-shape[1] // _IN_WORD)):
                rule = f"[N, ceil(K / 8)] of the stored shape {list(shape)}"
                yield Problem("shape", keys["qdata"], rule, list(codes.shape))
        yield from self.expect(catalogue, keys["scale"], dtypes=FLOATS, shape=(rows, None))
        groups = None
        if scale is not None and len(scale.shape) == _MATRIX:
            groups = scale.shape[1]
            if shape is not None and groups and _block_size(shape[1], scale.shape) is None:
                yield Problem("shape", keys["scale"], f"[N, G] with G a divisor of K = {shape[1]}", list(scale.shape))
        words = None if rows is None else -(-rows // _IN_WORD)
        yield from self.expect(catalogue, keys.get("zero"), dtypes={torch.int32}, shape=(words, groups))

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, codes and scales as views; zero points are unpacked to a byte each."""
        words, scale, sizes = (load(layer.keys[role]) for role in _REQUIRED)
        rows, columns = (int(size) for size in sizes)
        zero = None
        if "zero" in layer.keys:
            packed = load(layer.keys["zero"]).T.contiguous().view(torch.uint8)
            zero = unpack_codes(packed, Packing.LOW_FIRST)[:, :rows].T.contiguous()
        notes = layer.notes
        if sizes.dtype != torch.int64:
            notes = (*notes, self.stored_fact(_SIZES_FACT, str(sizes.dtype).removeprefix("torch.")))
        return PackedWeight(
            format=find_format("int4"),
            qdata=words.view(torch.uint8),
            scale=scale,
            out_features=rows,
            in_features=columns,
            block_size=columns // scale.shape[1],
            packing=Packing.LOW_FIRST,
            zero=zero,
            dtype=scale.dtype,
            name=layer.module,
            dialect=layer.dialect,
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors that ``PackedQuantizationCompressor.decompress`` takes.

        Raises:
            DialectError: Another format, several blocks in a row of which one is short, zero points that are no whole
                numbers 0 … 15, or any other feature.
        """
        self.check_writable(module, weight, features=_FEATURES)
        rows, columns = weight.shape
        if weight.blocks_per_row > 1 and columns % weight.block_size:
            raise self.refusal(module, "block_size", f"a divisor of K = {columns}", weight.block_size)
        width = 4 * -(-columns // _IN_WORD)
        if weight.packing == Packing.LOW_FIRST and weight.qdata.shape == (rows, width):
            codes = weight.qdata  # as stored, with what fills the last word
        else:
            codes = self.row_bytes(weight, Packing.LOW_FIRST)
            codes = torch.nn.functional.pad(codes, (0, width - codes.shape[1]))
        sizes = getattr(torch, self.read_fact(weight, _SIZES_FACT) or "int64")
        tensors = {
            "weight_packed": _words(codes),
            "weight_scale": weight.scale,
            "weight_shape": torch.tensor(weight.shape, dtype=sizes),
        }
        if weight.zero is not None:
            middle = weight.zero.to(torch.uint8)
            if not torch.equal(middle.to(weight.zero.dtype), weight.zero) or bool((middle > 15).any()):  # noqa: PLR2004  # a nibble
                raise self.refusal(module, "zero", "whole numbers 0 … 15", "others")
            padded = torch.nn.functional.pad(middle.T, (0, -rows % _IN_WORD))
            tensors["weight_zero_point"] = _words(pack_codes(padded, Packing.LOW_FIRST)).T.contiguous()
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return the package's ``QuantizationConfig``: a group for each group size, with and without zero points."""
        kinds: dict[tuple[int | None, bool], list[str]] = {}
        for module, spec in layers.items():
            group = spec.block_size if spec.block_size < spec.in_features else None
            kinds.setdefault((group, "zero" not in spec.fields), []).append(module)
        groups: dict[str, Any] = {}
        for (group, symmetric), modules in kinds.items():
            scheme = {
                "num_bits": 4,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if group is None else "group",
                "group_size": group,
                "dynamic": False,
            }
            groups[f"group_{len(groups)}"] = {
                "targets": ["Linear"] if len(kinds) == 1 else modules,
                "weights": scheme,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        return config_entry("pack-quantized", groups, unquantised)


def _is_asymmetric(catalogue: Catalogue) -> bool:
    """Return whether ``config.json`` says that every group of layers has zero points."""
    groups = catalogue.quantization_config.get("config_groups")
    items = groups.values() if isinstance(groups, dict) else ()
    weights = [item.get("weights") if isinstance(item, dict) else None for item in items]
    return bool(weights) and all(isinstance(item, dict) and item.get("symmetric") is False for item in weights)


def _stored_shape(sizes: torch.Tensor | None) -> tuple[int, int] | None:
    """Return (N, K) as stored, or None where it is not at hand or no shape of a matrix."""
    if sizes is None or sizes.dtype not in _SIZES or sizes.shape != (2,) or bool((sizes < 1).any()):
        return None
    rows, columns = sizes.tolist()
    return rows, columns


def _block_size(columns: int, scale: tuple[int, ...]) -> int | None:
    """Return in-features per scale [N, G], or None where K does not hold G whole groups."""
    if len(scale) != _MATRIX or not scale[1] or columns % scale[1]:
        return None
    return columns // scale[1]


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes [R, 4 * W] as int32 [R, W], a view where they lie so."""
    codes = codes.contiguous()
    return (codes.clone() if codes.storage_offset() % 4 else codes).view(torch.int32)
