"""The checkpoint dialects of other libraries, one file each, for q4core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_dialects.awq import Awq, AwqGemv
from q4_dialects.bitsandbytes import BitsAndBytes
from q4_dialects.comfyui import ComfyUiNvfp4
from q4_dialects.compressed_tensors import CompressedTensorsNvfp4
from q4_dialects.compressed_tensors_int4 import CompressedTensorsInt4, CompressedTensorsInt8
from q4_dialects.compressed_tensors_mxfp4 import CompressedTensorsMxfp4
from q4_dialects.deepseek_mxfp4 import DeepSeekMxfp4
from q4_dialects.fp8 import Fp8
from q4_dialects.gemma import Gemma
from q4_dialects.gpt_oss import GptOssMxfp4
from q4_dialects.gptq import Gptq, GptqV2
from q4_dialects.gptqmodel_bitsandbytes import GptqModelBitsAndBytes
from q4_dialects.hqq import Hqq
from q4_dialects.mlx import Mlx
from q4_dialects.modelopt import ModelOptNvfp4
from q4_dialects.modelopt_int4 import ModelOptInt4
from q4_dialects.modelopt_mxfp4 import ModelOptMxfp4, QuarkMxfp4
from q4_dialects.recognised import Recognised
from q4_dialects.torchao import (
    TorchaoMxfp4Linear,
    TorchaoMxfp4Swizzled,
    TorchaoNvfp4Linear,
    TorchaoNvfp4Swizzled,
)
from q4_dialects.torchao_int4 import TorchaoInt4, TorchaoInt4TilePacked
from q4core import hookimpl

if TYPE_CHECKING:
    from q4core import Dialect

__all__ = ["q4_dialects"]


@hookimpl
def q4_dialects() -> list[Dialect]:
    """Return the dialects."""
    return [
        Awq(),
        AwqGemv(),
        BitsAndBytes(),
        ComfyUiNvfp4(),
        CompressedTensorsInt4(),
        CompressedTensorsInt8(),
        CompressedTensorsMxfp4(),
        CompressedTensorsNvfp4(),
        DeepSeekMxfp4(),
        Fp8(),
        Gemma(),
        GptOssMxfp4(),
        Gptq(),
        GptqV2(),
        GptqModelBitsAndBytes(),
        Hqq(),
        Mlx(),
        ModelOptInt4(),
        ModelOptMxfp4(),
        ModelOptNvfp4(),
        QuarkMxfp4(),
        TorchaoInt4(),
        TorchaoInt4TilePacked(),
        TorchaoMxfp4Linear(),
        TorchaoMxfp4Swizzled(),
        TorchaoNvfp4Linear(),
        TorchaoNvfp4Swizzled(),
        Recognised(),
    ]
