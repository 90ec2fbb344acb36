"""Gemma's own INT4, as transformers reads it (``quant_method: gemma``).

``<module>.weight`` uint8 [N, ceil(K / 2)], low nibble first, of codes whose middle, 8, is zero; or int8 [N, K];
``weight_scale`` float32 [N, 1]. ``input_activation_scale`` and ``output_activation_scale`` float32 [] round activations
to 8 bits; 0 says that they do not. An embedding has ``embedding_quantized`` and ``embedding_scale`` [V, K / B] instead.

Traps: two bits pack four codes into a byte under the same keys, dtypes and shapes, so that ``config.json`` must say
that every byte holds two (``num_bits``, ``module_quant_configs``). An odd K is not stored: the last nibble is read as a
column. The owner also rounds the output of a layer, which nothing here does: it is noted.

Reference:
    transformers 5.23.0: integrations/gemma_quant.py (QuantizedLinear, QuantizedEmbedding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from q4_dialects.layer_keys import assumed_dtype, layer_keys, rank_problems, scalar_problems
from q4core import Catalogue, Dialect, LayerSchema, PackedWeight, Packing, Problem, find_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Gemma"]

_LINEAR = {
    "qdata": "weight",
    "scale": "weight_scale",
    "activation_scale": "input_activation_scale",
    "output_scale": "output_activation_scale",
}
_EMBEDDING = {"qdata": "embedding_quantized", "scale": "embedding_scale"}
_REQUIRED = ("qdata", "scale")
_CACHE = ("k_cache_scale", "v_cache_scale")
_FORMATS = {torch.uint8: "int4", torch.int8: "q8_0"}
_MATRIX = 2


class Gemma(Dialect):
    """INT4 and INT8 with a scale for each row, or for blocks of an embedding's. Written by none."""

    name: ClassVar[str] = "gemma"
    formats: ClassVar[frozenset[str]] = frozenset(_FORMATS.values())
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite", "activation_scale": "finite and not negative"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with these keys where ``config.json`` names the method."""
        if catalogue.quantization_config.get("quant_method") != "gemma":
            return
        for module in catalogue.modules_with("weight_scale", "embedding_quantized", "embedding_scale"):
            below = catalogue.children(module)
            suffixes = _EMBEDDING if below.keys() & set(_EMBEDDING.values()) else _LINEAR
            codes = catalogue.get(f"{module}.{suffixes['qdata']}")
            if codes is None or codes.dtype in _FORMATS:
                yield self._layer(module, suffixes, catalogue)

    def _layer(self, module: str, suffixes: Mapping[str, str], catalogue: Catalogue) -> LayerSchema:
        keys = layer_keys(module, suffixes, _REQUIRED, catalogue)
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        kind = "int4" if codes is None else _FORMATS[codes.dtype]
        problems = [
            *catalogue.unknown_scales(module, ("bias", *suffixes.values(), *_CACHE)),
            *rank_problems(module, codes),
        ]
        widths = _stated_widths(catalogue)
        if kind == "int4" and widths != {4}:
            rule = "of 4 bits by num_bits and module_quant_configs of config.json, as 2 bits have the same shapes"
            problems.append(Problem("unsupported", module, rule, sorted(widths)))
        shape = block = None
        if codes is not None and len(codes.shape) == _MATRIX:
            shape = codes.shape[0], codes.shape[1] * (2 if kind == "int4" else 1)
            if scale is not None and len(scale.shape) == _MATRIX and scale.shape[1]:
                block = shape[1] // scale.shape[1] if shape[1] % scale.shape[1] == 0 else None
        dtype, assumed = assumed_dtype(catalogue, torch.bfloat16)
        return LayerSchema(
            module=module,
            dialect=self.name,
            format=kind,
            keys=keys,
            shape=shape,
            block_size=block,
            problems=problems,
            notes=assumed,
            extras=(("dtype", dtype),),
            named=True,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        yield from self.expect(catalogue, keys["qdata"], dtypes=_FORMATS, shape=(None, None))
        rows, columns = layer.shape or (None, None)
        yield from self.expect(catalogue, keys["scale"], dtypes={torch.float32}, shape=(rows, None))
        scale = catalogue.get(keys["scale"])
        if scale is not None and layer.shape is not None and layer.block_size is None and scale.numel:
            yield Problem("shape", keys["scale"], f"[N, G] with G a divisor of K = {columns}", list(scale.shape))
        for role in ("activation_scale", "output_scale"):
            yield from scalar_problems(catalogue, keys.get(role))

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, all of it as views."""
        tensors = {role: load(key) for role, key in layer.keys.items()}
        codes, scale = tensors["qdata"], tensors["scale"]
        is_int4 = layer.format == "int4"
        columns = codes.shape[1] * (2 if is_int4 else 1)
        inputs, outputs = tensors.get("activation_scale"), tensors.get("output_scale")
        notes = layer.notes
        if outputs is not None and float(outputs):
            notes = (
                *notes,
                "the owner rounds the layer's output to 8 bits (output_activation_scale); nothing here does",
            )
        return PackedWeight(
            format=find_format(layer.format),
            qdata=codes.view(torch.uint8),
            scale=scale,
            out_features=codes.shape[0],
            in_features=columns,
            block_size=columns // scale.shape[1],
            packing=Packing.LOW_FIRST if is_int4 else Packing.BYTES,
            activation_scale=inputs if inputs is not None and float(inputs) else None,
            dtype=dict(layer.extras)["dtype"],
            name=layer.module,
            dialect=self.name,
            notes=notes,
        )


def _stated_widths(catalogue: Catalogue) -> set[int]:
    """Return the widths below 8 bits that ``config.json`` has, for all layers and for some."""
    config = catalogue.quantization_config
    single = config.get("module_quant_configs")
    holders = [config, *(single.values() if isinstance(single, dict) else ())]
    found = (holder.get("num_bits") for holder in holders if isinstance(holder, dict))
    return {bits for bits in found if isinstance(bits, int) and bits != 8}  # noqa: PLR2004  # those have a dtype of their own
