"""compressed-tensors MXFP4 (``mxfp4-pack-quantized``), as AutoRound writes it too.

``<module>.weight_packed`` uint8 [N, K / 2], low nibble first; ``weight_scale`` uint8 [N, K / 32], powers of two. There
is no global scale. AutoRound writes the same under ``quant_method: auto-round`` with ``data_type: mx_fp``.

Traps: AutoRound's MXINT4 has the same keys, dtypes and shapes, and they differ by ``data_type: mx_int`` alone: without
``config.json`` both readings count. Its NVFP4 with E5M3 scales has uint8 scales [N, K / 16], and no global scale
either.

Reference:
    compressed-tensors 0.20.0: compressors/mxfp4, compressors/mx_utils.py (decompress); auto-round 0.16.1:
    experimental/qmodules/mx.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from q4_dialects.compressed_tensors_config import config_entry, stated_formats, transform_problems
from q4_dialects.layer_keys import CACHE_SCALES
from q4_dialects.look_alikes import is_e5m3, may_be_mxfp4, may_be_mxint4
from q4_dialects.mx_rows import MX_BLOCK, MxRows, are_pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4core import Catalogue, LayerSchema, WeightSpec

__all__ = ["CompressedTensorsMxfp4"]

_FORMAT = "mxfp4-pack-quantized"


class CompressedTensorsMxfp4(MxRows):
    """MXFP4 as compressed-tensors stores it. The package always decompresses to bfloat16."""

    name: ClassVar[str] = "compressed-tensors-mxfp4"
    shares_keys: ClassVar[bool] = True
    suffixes: ClassVar[Mapping[str, str]] = {"qdata": "weight_packed", "scale": "weight_scale"}
    others: ClassVar[tuple[str, ...]] = CACHE_SCALES

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with codes as bytes next to bytes of scales, and no global scale."""
        formats = stated_formats(catalogue)
        is_only = _FORMAT in formats and not any("nvfp4" in item for item in formats)
        named = _FORMAT in formats or not may_be_mxint4(catalogue)
        if not may_be_mxfp4(catalogue):
            return
        for module in catalogue.modules_with("weight_packed", "weight_scale"):
            codes, scale = catalogue.get(f"{module}.weight_packed"), catalogue.get(f"{module}.weight_scale")
            if f"{module}.weight_global_scale" in catalogue or is_e5m3(module, catalogue):
                continue
            if codes is not None and codes.dtype == torch.int32:  # words of another dialect
                continue
            is_pair = are_pair(catalogue, f"{module}.weight_packed", f"{module}.weight_scale")
            is_part = is_only and (codes is None or scale is None)
            if is_pair or (is_part and f"{module}.weight" not in catalogue):
                layer = self.layer(module, catalogue, named=named)
                yield attrs.evolve(layer, problems=(*layer.problems, *transform_problems(module, catalogue)))

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return the package's ``QuantizationConfig``."""
        del layers
        scheme = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": MX_BLOCK,
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        }
        group = {
            "targets": ["Linear"],
            "weights": scheme,
            "input_activations": None,
            "output_activations": None,
            "format": _FORMAT,
        }
        return config_entry(_FORMAT, {"group_0": group}, unquantised)
