"""NVFP4 and MXFP4 as NVIDIA ModelOpt's quantised tensors are exported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from case import DTYPE_NAMES, Case, all_codes, dense, edges
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "nvidia-modelopt"


def _config(algorithm: str, group: int) -> dict[str, object]:
    """Return ``config.json``'s entry as ModelOpt's own converter writes it."""
    return {
        "quantization_config": convert_hf_quant_config_format(
            {
                "producer": {"name": "modelopt", "version": "0.47.0"},
                "quantization": {
                    "quant_algo": algorithm,
                    "kv_cache_quant_algo": None,
                    "group_size": group,
                    "exclude_modules": ["lm_head"],
                },
            }
        )
    }


def _nvfp4(
    name: str,
    tensor: NVFP4QTensor,
    scale: torch.Tensor,
    scale_2: torch.Tensor,
    source: torch.Tensor | None,
    *,
    input_scale: float | None = None,
    notes: str = "",
) -> Case:
    dtype = tensor.metadata["dtype"]
    dtypes = dict.fromkeys((torch.float32, dtype))
    tensors = {
        "proj.weight": tensor._quantized_data,
        "proj.weight_scale": scale,
        "proj.weight_scale_2": scale_2,
    }
    if input_scale is not None:
        tensors["proj.input_scale"] = torch.tensor(input_scale)
    return Case(
        dialect="modelopt",
        name=name,
        format="nvfp4",
        library=LIBRARY,
        tensors=tensors,
        expected={
            DTYPE_NAMES[item]: tensor.dequantize(item, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
            for item in dtypes
        },
        shape=tuple(tensor.metadata["shape"]),
        block=16,
        dtype=DTYPE_NAMES[dtype],
        source=source,
        config=_config("NVFP4" if input_scale is not None else "W4A16_NVFP4", 16),
        drops_negative_zero=True,
        notes=notes,
    )


def _mxfp4(name: str, source: torch.Tensor, notes: str = "") -> Case:
    tensor, scale = MXFP4QTensor.quantize(source, 32)
    n, k = source.shape
    scale = scale.reshape(n, k // 32)
    dtypes = dict.fromkeys((torch.float32, source.dtype))
    return Case(
        dialect="modelopt",
        name=name,
        format="mxfp4",
        library=LIBRARY,
        tensors={"proj.weight": tensor._quantized_data, "proj.weight_scale": scale},
        expected={DTYPE_NAMES[item]: tensor.dequantize(item, scale=scale, block_sizes={-1: 32}) for item in dtypes},
        shape=(n, k),
        block=32,
        dtype=DTYPE_NAMES[source.dtype],
        source=source,
        config=_config("MXFP4", 32),
        notes=notes,
    )


def cases() -> Iterator[Case]:
    """Yield every case of the dialect."""
    source = dense("modelopt 1", 20, 80, torch.bfloat16)
    yield _nvfp4("nvfp4", *NVFP4QTensor.quantize(source.clone(), 16), source)
    source = dense("modelopt 2", 12, 64)
    yield _nvfp4("nvfp4-float32", *NVFP4QTensor.quantize(source.clone(), 16), source)
    source = dense("modelopt 3", 8, 96, torch.float16)
    note = "with a static activation scale"
    yield _nvfp4("nvfp4-float16", *NVFP4QTensor.quantize(source.clone(), 16), source, input_scale=0.0123, notes=note)
    source = dense("modelopt 4", 128, 64, torch.bfloat16)
    note = "N and K make whole tiles: names and shapes are also ComfyUI's, only config.json differs"
    yield _nvfp4("nvfp4-whole-tiles", *NVFP4QTensor.quantize(source.clone(), 16), source, notes=note)
    rows = edges("modelopt", 16, 64, largest=40.0, smallest=2.0**-20)
    note = "zero, -0, tied and tiny blocks; a zero block's scale is 1"
    yield _nvfp4("nvfp4-edges", *NVFP4QTensor.quantize(rows.clone(), 16), rows, notes=note)
    codes = all_codes(128, 16).reshape(8, 256)
    levels = torch.cat((torch.arange(127), torch.tensor([126]))).to(torch.uint8).reshape(8, 16)
    tensor = NVFP4QTensor(torch.Size((8, 256)), torch.bfloat16, codes[:, ::2] | (codes[:, 1::2] << 4))
    scale_2 = torch.tensor(0.0007440476329065859)
    note = "every e4m3 scale from 0 to 448 under every code"
    yield _nvfp4("nvfp4-all-scales", tensor, levels.view(torch.float8_e4m3fn), scale_2, None, notes=note)
    yield _mxfp4("mxfp4", dense("modelopt 5", 10, 96, torch.bfloat16))
    yield _mxfp4("mxfp4-float32", dense("modelopt 6", 8, 64), notes="exact zero is code 8")
