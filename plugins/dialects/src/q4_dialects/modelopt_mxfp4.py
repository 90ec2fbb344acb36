"""MXFP4 as ModelOpt and AMD Quark export it: the same two tensors, with the same meaning.

``<module>.weight`` uint8 [N, K / 2], low nibble first; ``weight_scale`` uint8 [N, K / 32], powers of two; ModelOpt's
W4A8 recipe adds ``input_scale``. ``config.json`` says whose they are (``quant_method``); without it they are called
ModelOpt's.

Traps: ModelOpt writes ``quant_algo`` in lower case, encodes an exact zero as code 8 and decodes that as +0. Quark's
nibble order is by gptqmodel's converter; no file of its own was at hand.

Reference:
    nvidia-modelopt 0.47.0: torch/quantization/qtensor/mxfp4_tensor.py (MXFP4QTensor.dequantize); gptqmodel 7.7.0:
    utils/model_dequant.py (convert_mx_shard).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from q4_dialects.layer_keys import CACHE_SCALES
from q4_dialects.look_alikes import has_rotation
from q4_dialects.mx_rows import E8M0, MxRows, are_pair
from q4core import Dialect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4core import Catalogue, LayerSchema, WeightSpec

__all__ = ["ModelOptMxfp4", "QuarkMxfp4"]

_QUARK = "quark"


class ModelOptMxfp4(MxRows):
    """MXFP4 as ModelOpt exports it."""

    name: ClassVar[str] = "modelopt-mxfp4"
    suffixes: ClassVar[Mapping[str, str]] = {
        "qdata": "weight",
        "scale": "weight_scale",
        "activation_scale": "input_scale",
    }
    others: ClassVar[tuple[str, ...]] = CACHE_SCALES
    method: ClassVar[str] = "modelopt"

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with codes as bytes next to bytes of scales, unless another owner is named."""
        method, algorithm = (catalogue.quantization_config.get(key) for key in ("quant_method", "quant_algo"))
        if (method == _QUARK) != (self.method == _QUARK):
            return
        is_only = method == self.method and "mxfp4" in str(algorithm).lower()
        for module in catalogue.modules_with("weight_scale"):
            codes, scale = catalogue.get(f"{module}.weight"), catalogue.get(f"{module}.weight_scale")
            others = ("weight_scale_2", "weight_packed")
            is_other = has_rotation(module, catalogue) or any(f"{module}.{key}" in catalogue for key in others)
            if scale is None or is_other:
                continue
            is_part = is_only and codes is None and scale.dtype in E8M0
            if is_part or are_pair(catalogue, f"{module}.weight", f"{module}.weight_scale"):
                yield self.layer(module, catalogue, named=method == self.method)

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return ModelOpt's entry."""
        del layers
        return {"quant_method": "modelopt", "quant_algo": "mxfp4", "ignore": list(unquantised)}


class QuarkMxfp4(ModelOptMxfp4):
    """MXFP4 as AMD Quark exports it; ``config.json`` must say so. Written by none, as the keys alone are ModelOpt's."""

    name: ClassVar[str] = "quark-mxfp4"
    suffixes: ClassVar[Mapping[str, str]] = {"qdata": "weight", "scale": "weight_scale"}
    method: ClassVar[str] = _QUARK

    write = Dialect.write
