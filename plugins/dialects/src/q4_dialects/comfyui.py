"""ComfyUI NVFP4 (comfy-kitchen): ModelOpt's keys with the high nibble first and swizzled scales.

``<module>.weight`` uint8 [N, K / 2] with N and K padded to multiples of 16; ``weight_scale`` e4m3 in the swizzled
order, of shape [128 * ceil(N / 128), 4 * ceil(K / 64)]; ``weight_scale_2`` float32 [] multiplies; optional
``input_scale``. A layer is marked in the header's metadata (``_quantization_metadata``) or by a tensor
``<module>.comfy_quant`` of JSON.

Reference:
    comfy-kitchen 0.2.40: tensor/nvfp4.py, backends/eager/quantization.py; ComfyUI, QUANTIZATION.md.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.layer_keys import assumed_dtype, layer_keys
from q4_dialects.nvfp4 import (
    BLOCK,
    E4M3,
    LEVEL_NUMBERS,
    codes_problems,
    matrix_shape,
    number_problems,
    weight_of,
    with_multiplied_levels,
)
from q4_dialects.shared_keys import (
    COMFY_KEY,
    COMFY_METADATA,
    comfy_marker,
    fits_tiles,
    has_shared_keys,
    stored_scales,
)
from q4_dialects.swizzle import linear_from_swizzled, swizzled_from_linear, tiles, unpadded
from q4core import (
    Catalogue,
    Dialect,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    ScaleKind,
    WrittenLayer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["ComfyUiNvfp4"]

_SUFFIXES = {
    "qdata": "weight",
    "scale": "weight_scale",
    "global_scale": "weight_scale_2",
    "activation_scale": "input_scale",
    "marker": COMFY_KEY,
}
_REQUIRED = ("qdata", "scale", "global_scale")
_PLAIN_MARKER = {"format": "nvfp4"}


class ComfyUiNvfp4(Dialect):
    """NVFP4 as ComfyUI stores it. The file has padded sizes only: N and K are what it stores."""

    name: ClassVar[str] = "comfyui-nvfp4"
    formats: ClassVar[frozenset[str]] = frozenset({"nvfp4"})
    shares_keys: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, str]] = LEVEL_NUMBERS

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module that is marked, and each unmarked one whose shapes fit."""
        is_modelopt = catalogue.quantization_config.get("quant_method") == "modelopt"
        for module in catalogue.modules_with("weight_scale", "weight_scale_2"):
            if not has_shared_keys(module, catalogue):
                continue
            marker = comfy_marker(module, catalogue)
            if marker is None and not is_modelopt and fits_tiles(module, catalogue):
                yield self._layer(module, catalogue, None)
            elif marker is not None and marker.get("format") == "nvfp4":
                yield self._layer(module, catalogue, marker)

    def _layer(self, module: str, catalogue: Catalogue, marker: dict[str, Any] | None) -> LayerSchema:
        keys = layer_keys(module, _SUFFIXES, _REQUIRED, catalogue)
        problems = list(catalogue.unknown_scales(module, ("bias", *_SUFFIXES.values())))
        if marker is not None and marker.get("convrot"):
            rule = "without the rotation convrot, which is not read"
            problems.append(Problem("unsupported", module, rule, marker["convrot"]))
        dtype, notes = assumed_dtype(catalogue)
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="nvfp4",
            keys=keys,
            shape=matrix_shape(catalogue.get(keys["qdata"])),
            block_size=BLOCK,
            problems=problems,
            notes=(*notes, "N and K are the stored sizes, which may be padded to multiples of 16"),
            extras=(("dtype", dtype), ("marker", None if marker is None else json.dumps(marker))),
            named=marker is not None,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        yield from codes_problems(self, layer, catalogue)
        shape: tuple[int | None, int | None] = (None, None)
        if layer.shape is not None:
            rows, columns = layer.shape
            if rows % BLOCK:
                yield Problem("shape", keys["qdata"], f"[N, K / 2] with N a multiple of {BLOCK}", [rows, columns // 2])
            high, wide = tiles(rows, columns // BLOCK)
            shape = (high * 128, wide * 4)
        yield from self.expect(catalogue, keys["scale"], dtypes={E4M3}, shape=shape)
        yield from self.expect(catalogue, keys.get("marker"), dtypes={torch.uint8}, shape=(None,))
        yield from number_problems(layer, catalogue)

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the numbers of a tensor; the padding of swizzled scales holds none."""
        numbers = super().stored_numbers(layer, role, stored, catalogue)
        if role != "scale" or numbers is None or layer.shape is None:
            return numbers
        return unpadded(numbers, layer.shape[0], layer.shape[1] // BLOCK)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; its scales are put in order, which copies them."""
        keys = layer.keys
        codes = load(keys["qdata"])
        rows, columns = codes.shape[0], codes.shape[1] * 2
        extras = dict(layer.extras)
        notes = list(layer.notes)
        if "marker" in keys:
            notes.append(self.stored_fact("comfy_quant", bytes(load(keys["marker"]).tolist()).decode("latin-1")))
        elif extras["marker"] not in {None, json.dumps(_PLAIN_MARKER)}:
            notes.append(self.stored_fact("comfy marker", json.loads(extras["marker"])))
        return weight_of(
            layer,
            codes,
            linear_from_swizzled(load(keys["scale"]), rows, columns // BLOCK),
            scale_kind=ScaleKind.E4M3_MUL,
            packing=Packing.HIGH_FIRST,
            global_scale=load(keys["global_scale"]),
            activation_scale=load(keys["activation_scale"]) if "activation_scale" in keys else None,
            dtype=extras["dtype"],
            notes=tuple(notes),
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors, marked in the metadata or, where it was read so, by a tensor.

        Raises:
            DialectError: Another format, N not a multiple of 16 (where rows look like padding), scale levels that would
                have to be rounded, or any feature.
        """
        self.check_writable(module, weight, activation_scale=True)
        if weight.out_features % BLOCK:
            raise self.refusal(module, "out_features", f"a multiple of {BLOCK}", weight.out_features)
        scale, numbers = stored_scales(self, module, weight)
        high, wide = tiles(weight.out_features, weight.in_features // BLOCK)
        tensors = {
            "weight": self.row_bytes(weight, Packing.HIGH_FIRST),
            "weight_scale": swizzled_from_linear(scale).view(high * 128, wide * 4),
            **numbers,
        }
        text = self.read_fact(weight, "comfy_quant")
        metadata = {}
        if text is not None:
            tensors[COMFY_KEY] = torch.tensor(list(text.encode("latin-1")), dtype=torch.uint8)
        else:
            metadata[module] = json.dumps(self.read_fact(weight, "comfy marker") or _PLAIN_MARKER)
        return WrittenLayer(
            tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}, metadata=metadata
        )

    def merge_metadata(self, layers: Mapping[str, WrittenLayer], dense: Iterable[str]) -> dict[str, str]:
        """Return the one entry that names the layers and their format."""
        del dense
        marked = {module: json.loads(text) for layer in layers.values() for module, text in layer.metadata.items()}
        return {COMFY_METADATA: json.dumps({"format_version": "1.0", "layers": marked})} if marked else {}

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Round the reciprocal of a global scale that divides."""
        return with_multiplied_levels(weight)
