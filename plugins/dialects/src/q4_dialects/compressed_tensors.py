"""compressed-tensors NVFP4 (``nvfp4-pack-quantized``).

``<module>.weight_packed`` uint8 [N, K / 2], low nibble first; ``weight_scale`` e4m3 [N, K / 16] by row;
``weight_global_scale`` float32 [1] *divides*; optional ``input_global_scale`` float32 [1], a divisor too. Experts are
modules of their own: the package packs matrices only, and what has 3 dimensions is refused.

Reference:
    compressed-tensors 0.20.0: compressors/nvfp4, quantization/lifecycle/forward_helpers.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from q4_dialects.compressed_tensors_config import config_entry, stated_formats, transform_problems
from q4_dialects.layer_keys import CACHE_SCALES, layer_keys, rank_problems
from q4_dialects.nvfp4 import (
    BLOCK,
    E4M3,
    codes_problems,
    divided_levels,
    matrix_shape,
    number_problems,
    row_scale_problems,
    weight_of,
    with_divided_levels,
)
from q4core import (
    Catalogue,
    Dialect,
    DialectError,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    ScaleKind,
    WrittenLayer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["CompressedTensorsNvfp4"]

_SUFFIXES = {
    "qdata": "weight_packed",
    "scale": "weight_scale",
    "global_scale": "weight_global_scale",
    "activation_scale": "input_global_scale",
}
_REQUIRED = ("qdata", "scale", "global_scale")


class CompressedTensorsNvfp4(Dialect):
    """NVFP4 as compressed-tensors stores it. The package always decompresses to bfloat16."""

    name: ClassVar[str] = "compressed-tensors-nvfp4"
    formats: ClassVar[frozenset[str]] = frozenset({"nvfp4"})
    numbers: ClassVar[Mapping[str, str]] = {
        "scale": "finite and not negative",
        "global_scale": "finite and positive",
        "activation_scale": "finite and positive",
    }

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with a global scale, or with codes as bytes next to e4m3 scales."""
        formats = stated_formats(catalogue)
        is_e5m3 = any("e5m3" in item for item in formats)  # which has no global scale
        is_possible = not formats or any("nvfp4" in item for item in formats)
        named = catalogue.quantization_config.get("quant_method") == "compressed-tensors"
        for module in catalogue.modules_with("weight_packed", "weight_global_scale"):
            codes, scale = catalogue.get(f"{module}.weight_packed"), catalogue.get(f"{module}.weight_scale")
            is_pair = codes is not None and codes.dtype == torch.uint8 and scale is not None and scale.dtype == E4M3
            is_pair &= not is_e5m3
            is_alone = codes is not None and codes.dtype == torch.uint8 and scale is None and is_possible
            if is_pair or is_alone or f"{module}.weight_global_scale" in catalogue:
                yield self._layer(module, catalogue, named=named)

    def _layer(self, module: str, catalogue: Catalogue, *, named: bool) -> LayerSchema:
        keys = layer_keys(module, _SUFFIXES, _REQUIRED, catalogue)
        problems = list(catalogue.unknown_scales(module, ("bias", *_SUFFIXES.values(), *CACHE_SCALES)))
        problems += transform_problems(module, catalogue)
        codes = catalogue.get(keys["qdata"])
        problems += rank_problems(module, codes)
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="nvfp4",
            keys=keys,
            shape=matrix_shape(codes),
            block_size=BLOCK,
            problems=problems,
            named=named,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        yield from codes_problems(self, layer, catalogue)
        yield from row_scale_problems(self, layer, catalogue)
        yield from number_problems(layer, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, all of it as views but the activation scale, which is the stored number's reciprocal.

        Raises:
            DialectError: A divisor is not positive.
        """
        tensors = {role: load(key) for role, key in layer.keys.items()}
        for role in ("global_scale", "activation_scale"):
            divisor = float(tensors[role]) if role in tensors else 1.0
            if not 0 < divisor < math.inf:
                raise DialectError(
                    f"layer {layer.module!r}", name=role, rule="a positive, finite divisor", value=divisor
                )
        inputs = tensors.get("activation_scale")
        notes = layer.notes
        if inputs is not None:
            said = "activation_scale is 1 / input_global_scale, which the checkpoint stores as a divisor"
            notes = (*notes, said, self.stored_fact("input_global_scale", float(inputs)))
        return weight_of(
            layer,
            tensors["qdata"],
            tensors["scale"],
            scale_kind=ScaleKind.E4M3_DIV,
            packing=Packing.LOW_FIRST,
            global_scale=tensors["global_scale"],
            activation_scale=None if inputs is None else 1.0 / inputs,
            dtype=torch.bfloat16,
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors that ``NVFP4PackedCompressor.decompress`` takes; a single level gets the divisor 1.

        Raises:
            DialectError: Another format, scales that would have to be rounded, or any feature.
        """
        self.check_writable(module, weight, activation_scale=True)
        scale, divisor = divided_levels(self, module, weight)
        tensors = {
            "weight_packed": self.row_bytes(weight, Packing.LOW_FIRST),
            "weight_scale": scale,
            "weight_global_scale": divisor if weight.dialect == self.name else divisor.reshape(1),
        }
        if weight.activation_scale is not None:
            tensors["input_global_scale"] = self._input_divisor(module, weight, weight.activation_scale)
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def _input_divisor(self, module: str, weight: PackedWeight, factor: torch.Tensor) -> torch.Tensor:
        """Return the divisor whose reciprocal the activation scale is, exactly."""
        factor = factor.to(torch.float32)
        read = self.read_fact(weight, "input_global_scale")
        for divisor in (None if read is None else torch.full_like(factor, read), 1.0 / factor):
            if divisor is not None and torch.equal(1.0 / divisor, factor):
                return divisor if weight.dialect == self.name else divisor.reshape(1)
        hint = "lossy=True (`q4 convert --requantize`) leaves the activation scale out."
        rule = "the reciprocal of a float32 number, as the dialect stores a divisor"
        raise self.refusal(module, "activation_scale", rule, float(factor), hint)

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Round the reciprocal of a global scale that multiplies, and leave out an activation scale that has none."""
        weight = with_divided_levels(weight)
        factor = weight.activation_scale
        if factor is None or self.read_fact(weight, "input_global_scale") is not None:
            return weight
        factor = factor.to(torch.float32)
        return weight if torch.equal(1.0 / (1.0 / factor), factor) else attrs.evolve(weight, activation_scale=None)

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return the package's ``QuantizationConfig``, with activations where every layer has a static scale."""
        scheme = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": BLOCK,
            "dynamic": False,
        }
        has_inputs = all("activation_scale" in spec.fields for spec in layers.values())
        group = {
            "targets": ["Linear"],
            "weights": scheme,
            "input_activations": {**scheme, "dynamic": "local"} if has_inputs else None,
            "output_activations": None,
            "format": "nvfp4-pack-quantized",
        }
        return config_entry("nvfp4-pack-quantized", {"group_0": group}, unquantised)
