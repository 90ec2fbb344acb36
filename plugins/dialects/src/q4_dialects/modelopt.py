"""NVIDIA ModelOpt NVFP4 (Hugging Face export).

``<module>.weight`` uint8 [N, K / 2], low nibble first; ``weight_scale`` e4m3 [N, K / 16] by row; ``weight_scale_2``
float32 [] multiplies; optional ``input_scale`` (static activation scale) and ``pre_quant_scale`` [K] (multiplies the
input). ComfyUI has the same keys with the other nibble order: see comfyui.py. Experts: see modelopt_experts.py.

Reference:
    nvidia-modelopt 0.47.0: torch/quantization/qtensor/nvfp4_tensor.py, torch/export/unified_export_hf.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from q4_dialects.experts import expert_layers, expert_of, own_number
from q4_dialects.layer_keys import assumed_dtype, layer_keys, rank_problems
from q4_dialects.modelopt_experts import expert_keys, expert_problems, key_problems, nvfp4_experts, one_expert
from q4_dialects.nvfp4 import (
    BLOCK,
    LEVEL_NUMBERS,
    codes_problems,
    matrix_shape,
    number_problems,
    row_scale_problems,
    weight_of,
    with_multiplied_levels,
)
from q4_dialects.shared_keys import comfy_marker, fits_rows, fits_tiles, has_shared_keys, stored_scales
from q4core import (
    Catalogue,
    Dialect,
    Feature,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    ScaleKind,
    WrittenLayer,
)
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from q4core import WeightSpec

__all__ = ["ModelOptNvfp4"]

_SUFFIXES = {
    "qdata": "weight",
    "scale": "weight_scale",
    "global_scale": "weight_scale_2",
    "activation_scale": "input_scale",
    "input_channel_scale": "pre_quant_scale",
}
_REQUIRED = ("qdata", "scale", "global_scale")
_CACHE_SCALES = ("k_scale", "v_scale")  # of the key and value cache, not of the weight
_LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")


class ModelOptNvfp4(Dialect):
    """NVFP4 as ModelOpt exports it."""

    name: ClassVar[str] = "modelopt-nvfp4"
    formats: ClassVar[frozenset[str]] = frozenset({"nvfp4"})
    shares_keys: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, str]] = {**LEVEL_NUMBERS, "input_channel_scale": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with these keys, but for those that ComfyUI marked or whose shapes are ComfyUI's."""
        named = catalogue.quantization_config.get("quant_method") == "modelopt"
        for module in catalogue.modules_with("weight_scale", "weight_scale_2"):
            if not has_shared_keys(module, catalogue) or comfy_marker(module, catalogue) is not None:
                continue
            if named or fits_rows(module, catalogue) or not fits_tiles(module, catalogue):
                yield self._layer(module, catalogue, named=named)
        for name in nvfp4_experts(catalogue):
            yield from self._experts(name, catalogue, named=named)

    def _experts(self, name: str, catalogue: Catalogue, *, named: bool) -> Iterator[LayerSchema]:
        """Yield a layer for each expert of a parameter."""
        codes = catalogue.get(name)
        experts, half, rows = (0, 0, 0) if codes is None else codes.shape
        dtype, notes = assumed_dtype(catalogue)
        layer = LayerSchema(
            module=name,
            dialect=self.name,
            format="nvfp4",
            keys=expert_keys(name, catalogue),
            shape=None if codes is None else (rows, half * 2),
            block_size=BLOCK,
            problems=key_problems(name, catalogue),
            notes=notes,
            extras=(("dtype", dtype), ("are_experts", True)),
            named=named,
        )
        yield from expert_layers(layer, experts, catalogue)

    def _layer(self, module: str, catalogue: Catalogue, *, named: bool) -> LayerSchema:
        keys = layer_keys(module, _SUFFIXES, _REQUIRED, catalogue)
        known = ("bias", *_SUFFIXES.values(), *_CACHE_SCALES, *_LOW_RANK)
        problems = list(catalogue.unknown_scales(module, known))
        low_rank = [suffix for suffix in _LOW_RANK if f"{module}.{suffix}" in catalogue]
        if low_rank:
            rule = "without a low-rank part, which is not read"
            problems.append(Problem("unsupported", module, rule, " and ".join(low_rank)))
            keys |= {suffix: f"{module}.{suffix}" for suffix in low_rank}
        codes = catalogue.get(keys["qdata"])
        problems += rank_problems(module, codes)
        dtype, notes = assumed_dtype(catalogue)
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="nvfp4",
            keys=keys,
            shape=matrix_shape(codes),
            block_size=BLOCK,
            problems=problems,
            notes=notes,
            extras=(("dtype", dtype),),
            named=named,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        if dict(layer.extras).get("are_experts"):
            yield from expert_problems(self, layer, catalogue)
            return
        yield from codes_problems(self, layer, catalogue)
        yield from row_scale_problems(self, layer, catalogue)
        columns = None if layer.shape is None else layer.shape[1]
        yield from self.expect(catalogue, keys.get("input_channel_scale"), dtypes=FLOATS, shape=(columns,))
        yield from number_problems(layer, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, all of it as views."""
        tensors = {role: load(key) for role, key in layer.keys.items()}
        codes, scale = tensors["qdata"], tensors["scale"]
        expert = expert_of(layer)
        if expert is not None:
            codes, scale = one_expert(codes, expert), one_expert(scale, expert)
        return weight_of(
            layer,
            codes,
            scale,
            scale_kind=ScaleKind.E4M3_MUL,
            packing=Packing.LOW_FIRST,
            global_scale=own_number(tensors["global_scale"], expert),
            activation_scale=own_number(tensors.get("activation_scale"), expert),
            input_channel_scale=tensors.get("input_channel_scale"),
            dtype=dict(layer.extras)["dtype"],
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors of ModelOpt's export; a single scale level gets the global scale 1.

        An expert becomes a matrix of its own, ``<name>.<expert>.weight``, which reads as the same weight under the same
        name: one weight does not say what the others are, and layers are written one at a time.

        Raises:
            DialectError: Another format, scale levels that would have to be rounded, or features beyond a scale of
                input channels.
        """
        self.check_writable(module, weight, features={Feature.INPUT_CHANNEL_SCALE}, activation_scale=True)
        scale, numbers = stored_scales(self, module, weight)
        tensors = {"weight": self.row_bytes(weight, Packing.LOW_FIRST), "weight_scale": scale, **numbers}
        if weight.input_channel_scale is not None:
            tensors["pre_quant_scale"] = weight.input_channel_scale
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Round the reciprocal of a global scale that divides."""
        return with_multiplied_levels(weight)

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return ModelOpt's entry, with activations where every layer has a static scale for them."""
        scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
        group: dict[str, Any] = {"weights": scheme, "targets": ["Linear"]}
        has_inputs = all("activation_scale" in spec.fields for spec in layers.values())
        if has_inputs:
            group["input_activations"] = dict(scheme)
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if has_inputs else "W4A16_NVFP4",
            "config_groups": {"group_0": group},
            "ignore": list(unquantised),
        }
