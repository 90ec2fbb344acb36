"""NVFP4, MXFP4 and packed INT4 as compressed-tensors' compressors store them.

The package decompresses FP4 to bfloat16; the float32 results come from its own unpacking and dequantising functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from case import DTYPE_NAMES, Case, all_codes, dense, edges
from compressed_tensors.compressors import (
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LIBRARY = "compressed-tensors"


def _config(scheme: QuantizationScheme, form: str) -> dict[str, object]:
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        quant_method="compressed-tensors",
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    return {"quantization_config": config.model_dump(mode="json")}


def _named(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"proj.{key}": value.detach() for key, value in stored.items()}


def _fp4(
    name: str,
    stored: dict[str, torch.Tensor],
    source: torch.Tensor | None,
    *,
    preset: str,
    dtype: torch.dtype = torch.bfloat16,
    notes: str = "",
) -> Case:
    is_nvfp4 = preset.startswith("NVFP4")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    compressor = NVFP4PackedCompressor if is_nvfp4 else MXFP4PackedCompressor
    n, half = stored["weight_packed"].shape
    scale = stored["weight_scale"]
    exact = dequantize(
        x_q=unpack_fp4_from_uint8(stored["weight_packed"], n, half * 2, dtype=torch.float32),
        scale=scale.to(torch.float32) if is_nvfp4 else decompress_mx_scale(scale).to(torch.float32),
        args=scheme.weights,
        dtype=torch.float32,
        global_scale=stored.get("weight_global_scale"),
    )
    return Case(
        dialect="compressed-tensors",
        name=name,
        format="nvfp4" if is_nvfp4 else "mxfp4",
        library=LIBRARY,
        tensors=_named(stored),
        expected={"float32": exact, "bfloat16": compressor.decompress(dict(stored), scheme)["weight"]},
        shape=(n, half * 2),
        block=16 if is_nvfp4 else 32,
        dtype=DTYPE_NAMES[dtype],
        source=source,
        config=_config(scheme, f"{'nvfp4' if is_nvfp4 else 'mxfp4'}-pack-quantized"),
        notes=notes,
    )


def _blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest value of each block [N, K / size]."""
    n, k = weight.shape
    blocks = weight.reshape(n, k // size, size)
    return blocks.amin(-1), blocks.amax(-1)


def nvfp4_scales(weight: torch.Tensor, scheme: QuantizationScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block scales and the global scale of a dense weight [N, K] with the package's own arithmetic."""
    total = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(*_blocks(weight, 16), scheme.weights, global_scale=total)
    return scale, total


def _compress_nvfp4(weight: torch.Tensor, preset: str = "NVFP4A16") -> dict[str, torch.Tensor]:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scale, total = nvfp4_scales(weight, scheme)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": total}
    return NVFP4PackedCompressor.compress(state, scheme)


def _compress_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    scale, _ = calculate_qparams(*_blocks(weight, 32), scheme.weights)
    return MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)


def _int4(name: str, source: torch.Tensor, *, group: int | None, symmetric: bool, notes: str = "") -> Case:
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group is None else "group",
        group_size=group,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    scale, zero = calculate_qparams(*_blocks(source, group or source.shape[1]), weights)
    state = {"weight": source, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    stored = PackedQuantizationCompressor.compress(state, scheme)
    return Case(
        dialect="compressed-tensors",
        name=name,
        format="int4",
        library=LIBRARY,
        tensors=_named(stored),
        expected={DTYPE_NAMES[source.dtype]: PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]},
        shape=tuple(source.shape),
        block=group or source.shape[1],
        dtype=DTYPE_NAMES[source.dtype],
        source=source,
        config=_config(scheme, "pack-quantized"),
        notes=notes,
    )


def _enumeration() -> Case:
    codes = all_codes(128, 16).reshape(8, 256)
    levels = torch.cat((torch.arange(127), torch.tensor([126]))).to(torch.uint8).reshape(8, 16)
    stored = {
        "weight_packed": codes[:, ::2] | (codes[:, 1::2] << 4),
        "weight_scale": levels.view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1337.7314453125]),
    }
    note = "every e4m3 scale from 0 to 448 under every code"
    return _fp4("nvfp4-all-scales", stored, None, preset="NVFP4A16", notes=note)


def cases() -> Iterator[Case]:
    """Yield every case of the dialect."""
    bf16 = torch.bfloat16
    source = dense("ct 1", 20, 80, bf16)
    yield _fp4("nvfp4", _compress_nvfp4(source), source, preset="NVFP4A16")
    source = dense("ct 2", 12, 64)
    yield _fp4("nvfp4-float32", _compress_nvfp4(source), source, preset="NVFP4A16", dtype=torch.float32)
    source = dense("ct 3", 8, 48, bf16)
    stored = {**_compress_nvfp4(source, "NVFP4"), "input_global_scale": torch.tensor([412.5])}
    yield _fp4("nvfp4-activations", stored, source, preset="NVFP4", notes="with a static activation divisor")
    rows = edges("ct", 16, 64, largest=40.0, smallest=2.0**-20)
    note = "zero, -0, tied and tiny blocks; a zero block's scale is 0.125"
    yield _fp4("nvfp4-edges", _compress_nvfp4(rows), rows, preset="NVFP4A16", dtype=torch.float32, notes=note)
    yield _enumeration()
    source = dense("ct 4", 10, 96, bf16)
    yield _fp4("mxfp4", _compress_mxfp4(source), source, preset="MXFP4A16")
    source = dense("ct 5", 16, 128, bf16)
    yield _int4("int4-group", source, group=32, symmetric=True)
    yield _int4("int4-group-zero", source, group=64, symmetric=False, notes="zero points packed along N")
    source = dense("ct 6", 5, 19)
    yield _int4("int4-channel-odd", source, group=None, symmetric=True, notes="K = 19: five nibbles of padding")
    source = dense("ct 7", 11, 40, torch.float16)
    yield _int4("int4-channel-zero", source, group=None, symmetric=False, notes="N % 8 is not 0")
