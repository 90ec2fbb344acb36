"""gpt-oss MXFP4, as transformers reads and stores the experts of that model.

``<name>_blocks`` uint8 [E, N, K / 32, 16], low nibble first, and ``<name>_scales`` uint8 [E, N, K / 32], powers of two.
The experts of ``<name>`` are the layers ``<name>.0`` …; their biases ``<name>_bias`` [E, N] are dense tensors. A matrix
[N, K / 32, 16] is the layer ``<name>`` itself.

Reference:
    transformers 5.23.0: integrations/mxfp4.py (convert_moe_packed_tensors).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.experts import expert_layers, expert_of
from q4_dialects.layer_keys import assumed_dtype
from q4_dialects.nvfp4 import weight_of
from q4core import Catalogue, Dialect, LayerSchema, PackedWeight, Packing, Problem, ScaleKind, WrittenLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["GptOssMxfp4"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK, _BYTES = 32, 16
_MATRIX, _EXPERTS = 3, 4
"""Dimensions of the blocks of a matrix, and of experts."""


class GptOssMxfp4(Dialect):
    """MXFP4 in blocks of 16 bytes next to their scales. transformers decodes it to bfloat16 by default."""

    name: ClassVar[str] = "gpt-oss-mxfp4"
    formats: ClassVar[frozenset[str]] = frozenset({"mxfp4"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite and not negative"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each name with blocks of bytes, alone or with scales."""
        named = catalogue.quantization_config.get("quant_method") == "mxfp4"
        strangers: dict[str, list[str]] = {}
        for key in catalogue.tensors:
            name, mark, end = key.rpartition("_scale")
            if mark and end != "s":
                strangers.setdefault(name, []).append(key)
        for key in catalogue.tensors:
            name = key.removesuffix(_BLOCKS)
            if key != name and name and not name.endswith(".") and _are_blocks(name, catalogue):
                yield from self._layers(name, catalogue, strangers.get(name, []), named=named)
            name = key.removesuffix(_SCALES)
            if named and key != name and name and name + _BLOCKS not in catalogue:
                yield from self._layers(name, catalogue, strangers.get(name, []), named=named)

    def _layers(self, name: str, catalogue: Catalogue, strangers: list[str], *, named: bool) -> Iterator[LayerSchema]:
        """Yield a matrix, or a layer for each of several experts."""
        blocks = catalogue.get(name + _BLOCKS)
        sizes = () if blocks is None else blocks.shape
        rule = f"one that the dialect knows ({_BLOCKS}, {_SCALES}, _bias)"
        dtype, assumed = assumed_dtype(catalogue, torch.bfloat16)
        layer = LayerSchema(
            module=name,
            dialect=self.name,
            format="mxfp4",
            keys={"qdata": name + _BLOCKS, "scale": name + _SCALES},
            shape=(sizes[-3], sizes[-2] * _BLOCK) if len(sizes) in {_MATRIX, _EXPERTS} else None,
            block_size=_BLOCK,
            problems=(
                *(Problem("unknown_key", key, rule) for key in strangers),
                *catalogue.unknown_scales(name, ("bias",)),
            ),
            notes=assumed,
            extras=(("dtype", dtype),),
            named=named,
        )
        if len(sizes) == _EXPERTS:
            yield from expert_layers(layer, sizes[0], catalogue)
        else:
            yield layer

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        blocks = catalogue.get(layer.keys["qdata"])
        experts = (None,) if blocks is not None and len(blocks.shape) == _EXPERTS else ()
        shape = (*experts, None, None, _BYTES)
        yield from self.expect(catalogue, layer.keys["qdata"], dtypes={torch.uint8}, shape=shape)
        if blocks is not None:  # without them, scales of any rank may be right
            rows = (None, None) if layer.shape is None else blocks.shape[:-1]
            yield from self.expect(catalogue, layer.keys["scale"], dtypes={torch.uint8}, shape=rows)

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the powers of two that the bytes hold."""
        del layer, role, catalogue
        return stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else None

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, all of it as views."""
        blocks, scales = load(layer.keys["qdata"]), load(layer.keys["scale"])
        expert = expert_of(layer)
        if expert is not None:
            blocks, scales = blocks[expert], scales[expert]
        scale = scales.view(torch.float8_e8m0fnu)
        facts = {"scale_kind": ScaleKind.E8M0, "packing": Packing.LOW_FIRST, "dtype": dict(layer.extras)["dtype"]}
        return weight_of(layer, blocks.flatten(1), scale, **facts)

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return blocks and scales of a matrix; an expert is written as one, by the name that it was read under.

        Raises:
            DialectError: Another format, a last block that is not whole, or any feature.
        """
        self.check_writable(module, weight)
        rows, columns = weight.shape
        blocks = self.row_bytes(weight, Packing.LOW_FIRST).reshape(rows, columns // _BLOCK, _BYTES)
        return WrittenLayer(tensors={module + _BLOCKS: blocks, module + _SCALES: weight.scale.view(torch.uint8)})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return transformers' entry."""
        del layers
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(unquantised)}


def _are_blocks(name: str, catalogue: Catalogue) -> bool:
    """Return whether ``<name>_blocks`` are bytes of that rank, or have scales next to them and are integers."""
    blocks, scales = catalogue.get(name + _BLOCKS), catalogue.get(name + _SCALES)
    if blocks is None or blocks.dtype.is_floating_point:
        return False
    return scales is not None or (blocks.dtype == torch.uint8 and len(blocks.shape) in {_MATRIX, _EXPERTS})
