"""NVIDIA ModelOpt INT4 (``W4A16_AWQ``, ``W4A8_AWQ``).

``<module>.weight`` uint8 [N / 2, K]: byte (r, k) holds row 2r in its low and row 2r + 1 in its high nibble, both in
two's complement. ``weight_scale`` float [N, K / G] multiplies; optional ``pre_quant_scale`` [K] multiplies the input;
``input_scale`` and ``weight_scale_2`` float32 [] of W4A8 are of its FP8 arithmetic.

Codes are copied into rows of nibbles as they are read: two rows share a byte here, and two columns everywhere else.

Traps: NVFP4 has the same names with float8 scales and [N, K / 2]. ``weight_scale_2`` does not multiply the weight.
``pre_quant_scale: true`` may be in ``config.json`` where no such key exists.

Reference:
    nvidia-modelopt 0.47.0: torch/export/quant_utils.py (pack_int4_in_uint8, to_quantized_weight).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.int_words import row_parts, rows_from_pairs
from q4_dialects.layer_keys import CACHE_SCALES, layer_keys, rank_problems, scalar_problems
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
)
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["ModelOptInt4", "has_row_pairs"]

_SUFFIXES = {
    "qdata": "weight",
    "scale": "weight_scale",
    "fp8_scale": "weight_scale_2",
    "activation_scale": "input_scale",
    "input_channel_scale": "pre_quant_scale",
}
_REQUIRED = ("qdata", "scale")
_ALGORITHMS = ("W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ")
_MATRIX = 2
_SIGNS = 0x88
"""The bits by which codes -8 … 7 differ from codes 0 … 15, in both nibbles."""
_FP8_FACT = "weight_scale_2"


def has_row_pairs(module: str, catalogue: Catalogue) -> bool:
    """Return whether a module has bytes of two rows each, next to float scales of every row."""
    codes, scale = catalogue.get(f"{module}.weight"), catalogue.get(f"{module}.weight_scale")
    if codes is None or scale is None or codes.dtype != torch.uint8 or scale.dtype not in FLOATS:
        return False
    return bool(codes.shape and scale.shape) and codes.shape[0] * 2 == scale.shape[0]


class ModelOptInt4(Dialect):
    """Symmetric INT4 as ModelOpt exports it."""

    name: ClassVar[str] = "modelopt-int4"
    formats: ClassVar[frozenset[str]] = frozenset({"int4"})
    numbers: ClassVar[Mapping[str, str]] = {
        "scale": "finite",
        "activation_scale": "finite and not negative",
        "input_channel_scale": "finite",
    }

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with bytes of two rows, and each with integers or scales where ``config.json`` says so."""
        config = catalogue.quantization_config
        named = config.get("quant_method") == "modelopt"
        is_only = named and str(config.get("quant_algo")).upper() in _ALGORITHMS
        for module in catalogue.modules_with("weight", "weight_scale"):
            codes, scale = catalogue.get(f"{module}.weight"), catalogue.get(f"{module}.weight_scale")
            is_whole = codes is not None and not codes.dtype.is_floating_point
            is_part = is_only and (is_whole or (codes is None and scale is not None))
            if is_part or has_row_pairs(module, catalogue):
                yield self._layer(module, catalogue, named=named)

    def _layer(self, module: str, catalogue: Catalogue, *, named: bool) -> LayerSchema:
        keys = layer_keys(module, _SUFFIXES, _REQUIRED, catalogue)
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        shape = None
        if codes is not None and len(codes.shape) == _MATRIX:
            shape = codes.shape[0] * 2, codes.shape[1]
        block = None
        if shape is not None and scale is not None and len(scale.shape) == _MATRIX and scale.shape[1]:
            block = shape[1] // scale.shape[1] if shape[1] % scale.shape[1] == 0 else None
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="int4",
            keys=keys,
            shape=shape,
            block_size=block,
            problems=(
                *catalogue.unknown_scales(module, ("bias", *_SUFFIXES.values(), *CACHE_SCALES)),
                *rank_problems(module, codes),
            ),
            notes=("weight_scale_2 is of FP8 arithmetic: it does not multiply the weight",)
            if "fp8_scale" in keys
            else (),
            extras=(("dtype", catalogue.dtype),),
            named=named,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        yield from self.expect(catalogue, keys["qdata"], dtypes={torch.uint8}, shape=(None, None))
        rows, columns = layer.shape or (None, None)
        yield from self.expect(catalogue, keys["scale"], dtypes=FLOATS, shape=(rows, None))
        scale = catalogue.get(keys["scale"])
        is_matrix = scale is not None and len(scale.shape) == _MATRIX and 0 not in scale.shape
        if scale is not None and is_matrix and layer.shape is not None and layer.block_size is None:
            yield Problem("shape", keys["scale"], f"[N, G] with G a divisor of K = {columns}", list(scale.shape))
        yield from self.expect(catalogue, keys.get("input_channel_scale"), dtypes=FLOATS, shape=(columns,))
        yield from scalar_problems(catalogue, keys.get("activation_scale"))
        yield from scalar_problems(catalogue, keys.get("fp8_scale"))

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; codes are copied, scales are views."""
        tensors = {role: load(key) for role, key in layer.keys.items()}
        codes, scale = tensors["qdata"], tensors["scale"]
        rows, columns = codes.shape[0] * 2, codes.shape[1]
        notes = layer.notes
        if "fp8_scale" in tensors:
            notes = (*notes, self.stored_fact(_FP8_FACT, float(tensors["fp8_scale"])))
        return PackedWeight(
            format=find_format("int4"),
            qdata=rows_from_pairs(codes).bitwise_xor_(_SIGNS),
            scale=scale,
            out_features=rows,
            in_features=columns,
            block_size=columns // scale.shape[1],
            packing=Packing.LOW_FIRST,
            input_channel_scale=tensors.get("input_channel_scale"),
            activation_scale=tensors.get("activation_scale"),
            dtype=dict(layer.extras)["dtype"] or scale.dtype,
            name=layer.module,
            dialect=self.name,
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors of ModelOpt's export.

        Raises:
            DialectError: Another format, zero points, an odd number of rows, groups that don't divide K, or any other
                feature.
        """
        features = {Feature.INPUT_CHANNEL_SCALE}
        self.check_writable(module, weight, features=features, activation_scale=True)
        if weight.out_features % 2:
            raise self.refusal(module, "out_features", "even, as two rows share a byte", weight.out_features)
        pairs = torch.empty((weight.out_features // 2, weight.in_features), dtype=torch.uint8)
        for first, codes in row_parts(weight, 2):
            pairs[first // 2 : (first + len(codes)) // 2] = (codes[0::2] | (codes[1::2] << 4)) ^ _SIGNS
        tensors = {"weight": pairs, "weight_scale": weight.scale}
        if weight.input_channel_scale is not None:
            tensors["pre_quant_scale"] = weight.input_channel_scale
        if weight.activation_scale is not None:
            tensors["input_scale"] = weight.activation_scale.to(torch.float32)
        second = self.read_fact(weight, _FP8_FACT)
        if second is not None:
            tensors["weight_scale_2"] = torch.tensor(second, dtype=torch.float32)
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return ModelOpt's entry."""
        sizes = {spec.block_size for spec in layers.values()}
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_AWQ",
            "ignore": list(unquantised),
            **({"group_size": sizes.pop()} if len(sizes) == 1 else {}),
        }
