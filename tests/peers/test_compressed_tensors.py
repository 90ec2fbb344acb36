"""NVFP4 and INT4 against compressed-tensors' compressors on the CPU; its NVFP4 one always gives bfloat16."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import safetensors.torch
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

SHAPES = ((16, 64), (20, 80), (128, 64), (1, 16), (33, 272))


@pytest.fixture(scope="module")
def package(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return the compressors' module."""
    return peer("compressed_tensors.compressors")


@pytest.fixture(scope="module")
def scheme(peer: Callable[[str], ModuleType]) -> Any:
    """Return the package's NVFP4 scheme, weights only."""
    return peer("compressed_tensors.quantization").preset_name_to_scheme("NVFP4A16", ["Linear"])


@pytest.fixture(scope="module")
def compress(peer: Callable[[str], ModuleType], package: ModuleType, scheme: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that makes the stored tensors of a dense weight with the package's own arithmetic."""
    helpers = peer("compressed_tensors.quantization.utils.helpers")

    def make(weight: torch.Tensor) -> dict[str, Any]:
        blocks = weight.reshape(weight.shape[0], -1, 16)
        total = helpers.generate_gparam(weight.min(), weight.max())
        scale, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=total)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": total}
        return package.NVFP4PackedCompressor.compress(state, scheme)

    return make


@pytest.fixture(scope="module")
def config(peer: Callable[[str], ModuleType], scheme: Any) -> dict[str, Any]:
    """Return ``config.json`` as the package writes its entry."""
    quantization = peer("compressed_tensors.quantization").QuantizationConfig(
        config_groups={"group_0": scheme},
        quant_method="compressed-tensors",
        format="nvfp4-pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return {"dtype": "bfloat16", "quantization_config": quantization.model_dump(mode="json")}


def _float32(peer: Callable[[str], ModuleType], scheme: Any, stored: dict[str, Any]) -> torch.Tensor:
    """Return the package's own dequantisation, with float32 in and out."""
    helpers = peer("compressed_tensors.compressors.nvfp4.helpers")
    n, half = stored["weight_packed"].shape
    codes = helpers.unpack_fp4_from_uint8(stored["weight_packed"], n, half * 2, dtype=torch.float32)
    dequantize = peer("compressed_tensors.quantization.lifecycle.forward").dequantize
    return dequantize(
        x_q=codes,
        scale=stored["weight_scale"].to(torch.float32),
        args=scheme.weights,
        dtype=torch.float32,
        global_scale=stored["weight_global_scale"],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dequantize_has_its_bits(
    n: int,
    k: int,
    dtype: torch.dtype,
    peer: Callable[[str], ModuleType],
    package: ModuleType,
    scheme: Any,
    compress: Callable[..., dict[str, Any]],
    config: dict[str, Any],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
    rewritten: Callable[..., None],
) -> None:
    """A compressed layer dequantises to the package's bits (its global scale divides), and is written back."""
    stored = compress(dense(n, k, n * k, dtype))
    path = on_disk({f"proj.{key}": value for key, value in stored.items()}, config=config)
    ours = q4.open(path)["proj"]
    theirs = package.NVFP4PackedCompressor.decompress(dict(stored), scheme)["weight"]
    same_bits(q4.dequantize(ours, torch.bfloat16), theirs)
    same_bits(q4.dequantize(ours, torch.float32), _float32(peer, scheme, stored))
    rewritten(path, ours.dialect)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_quantize_has_its_codes_and_scales(
    n: int,
    k: int,
    seed: int,
    compress: Callable[..., dict[str, Any]],
    dense: Callable[..., torch.Tensor],
    nudged: Callable[[torch.Tensor, int], torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """With a dividing global scale, our quantiser gives the package's bytes for float32 weights."""
    holed = dense(n, k, seed)
    holed[0, :16] = 0.0
    holed[-1, -16:] = -0.0
    halves = torch.tensor(
        [6.0, 0.25, -0.25, 0.75, -0.75, 1.25, -1.25, 1.75, -1.75, 2.5, -2.5, 3.5, -3.5, 5.0, -5.0, 0.0]
    )
    ties = nudged(dense(n * k // 16, 1, seed).abs() * halves, seed).reshape(n, k)
    for weight in (dense(n, k, seed), dense(n, k, seed, scale=1e3), dense(n, k, seed, scale=1e-6), holed, ties):
        theirs = compress(weight)
        ours = q4.quantize(weight, "nvfp4", scale_kind=q4.ScaleKind.E4M3_DIV)
        same_bits(ours.global_scale.reshape(1), theirs["weight_global_scale"])
        same_bits(ours.scale.view(torch.uint8), theirs["weight_scale"].view(torch.uint8))
        same_bits(ours.qdata, theirs["weight_packed"])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("seed", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.bfloat16), (3, torch.float16)]
)
@pytest.mark.parametrize(("n", "k", "group"), [(16, 128, 32), (24, 256, 128), (11, 48, 16), (5, 19, 19)])
def test_int4_has_its_codes_scales_and_values(
    n: int,
    k: int,
    group: int,
    seed: int,
    dtype: torch.dtype,
    symmetric: bool,
    peer: Callable[[str], ModuleType],
    package: ModuleType,
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
    rewritten: Callable[..., None],
) -> None:
    """Our INT4 has the package's codes, scales and zero points for float32 weights, and its values for every dtype.

    What it stored is read with its values, and written back byte for byte. Groups that are all zero are left out.
    Half-precision weights are rounded in half precision there, in float32 here.
    """
    quantization = peer("compressed_tensors.quantization")
    helpers = peer("compressed_tensors.quantization.utils.helpers")
    unpack = peer("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    args = quantization.QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    weight = dense(n, k, seed, dtype)
    blocks = weight.reshape(n, k // group, group)
    scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    stored = package.PackedQuantizationCompressor.compress(state, scheme)
    ours = q4.quantize(weight, "int4", block_size=group, symmetric=symmetric)
    codes = (unpack(stored["weight_packed"], 4, (n, k)) + 8).to(torch.uint8)
    middle = None if symmetric else (zero.to(torch.int8) + 8).to(torch.uint8)
    if dtype == torch.float32:
        same_bits(q4.unpack_codes(ours.qdata, ours.packing)[:, :k], codes)
        same_bits(ours.scale, scale)
        if middle is not None:
            same_bits(ours.zero, middle)
    padded = torch.nn.functional.pad(codes, (0, k % 2))
    ours = attrs.evolve(ours, qdata=q4.pack_codes(padded, ours.packing), scale=scale, zero=middle)
    theirs = package.PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    same_bits(q4.dequantize(ours), theirs)
    path = on_disk({f"proj.{key}": value for key, value in stored.items()})
    read = q4.open(path)["proj"]
    same_bits(q4.dequantize(read), theirs)
    rewritten(path, read.dialect)


@pytest.mark.parametrize("symmetric", [False, True])
def test_loads_int4_that_we_quantised(
    symmetric: bool,
    peer: Callable[[str], ModuleType],
    package: ModuleType,
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``decompress`` computes our numbers from the tensors and the config.json that we write."""
    ours = q4.quantize(dense(24, 64, 1), "int4", block_size=32, symmetric=symmetric)
    q4.save_checkpoint(tmp_path / "ours", {"proj": ours}, dialect="compressed-tensors-int4")
    entry = json.loads((tmp_path / "ours/config.json").read_text(encoding="utf-8"))["quantization_config"]
    config = peer("compressed_tensors.quantization").QuantizationConfig.model_validate(entry)
    stored = safetensors.torch.load_file(tmp_path / "ours/model.safetensors")
    written = {key.removeprefix("proj."): value for key, value in stored.items()}
    theirs = package.PackedQuantizationCompressor.decompress(written, config.config_groups["group_0"])["weight"]
    same_bits(q4.dequantize(ours, torch.float32), theirs)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_loads_what_we_write(
    n: int,
    k: int,
    package: ModuleType,
    scheme: Any,
    compress: Callable[..., dict[str, Any]],
    config: dict[str, Any],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``decompress`` computes our numbers from the tensors that we write."""
    stored = compress(dense(n, k, 4, torch.bfloat16))
    ours = q4.open(on_disk({f"proj.{key}": value for key, value in stored.items()}, config=config))["proj"]
    path = tmp_path / "ours.safetensors"
    q4.save_checkpoint(path, {"proj": ours}, dialect="compressed-tensors-nvfp4")
    written = {key.removeprefix("proj."): value for key, value in safetensors.torch.load_file(path).items()}
    theirs = package.NVFP4PackedCompressor.decompress(written, scheme)["weight"]
    same_bits(q4.dequantize(ours, torch.bfloat16), theirs)
