"""DeepSeek-V4's routed experts in MXFP4.

``<module>.weight`` int8 [N, K / 2], low nibble first, and ``<module>.scale`` float8_e8m0fnu [N, K / 32], powers of two.
``config.json`` says ``expert_dtype: fp4`` while its ``quant_method`` is ``fp8``: other layers are FP8 in blocks with
the same suffix ``scale``, which fp8.py reads.

Trap: code 8 is decoded as +0 by the owner.

Reference:
    gptqmodel 7.7.0: utils/model_dequant.py (dequantize_deepseek_v4_fp4_expert).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from q4_dialects.mx_rows import MxRows, are_pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4core import Catalogue, LayerSchema

__all__ = ["DeepSeekMxfp4"]


class DeepSeekMxfp4(MxRows):
    """MXFP4 in signed bytes, with scales of a float8 dtype."""

    name: ClassVar[str] = "deepseek-mxfp4"
    suffixes: ClassVar[Mapping[str, str]] = {"qdata": "weight", "scale": "scale"}
    code_dtype: ClassVar[torch.dtype] = torch.int8
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with signed bytes next to scales of that dtype, or other integers."""
        named = catalogue.config.get("expert_dtype") == "fp4"
        for module in catalogue.modules_with("scale"):
            codes = catalogue.get(f"{module}.weight")
            is_byte = codes is not None and codes.dtype == torch.uint8  # another owner's
            if not is_byte and are_pair(catalogue, f"{module}.weight", f"{module}.scale"):
                yield self.layer(module, catalogue, named=named)
