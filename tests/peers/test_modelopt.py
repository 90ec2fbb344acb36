"""NVFP4 against NVIDIA ModelOpt's quantised tensors on the CPU. ModelOpt decodes code 8 as +0, E2M1 as -0."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONFIG = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}}


@pytest.fixture(scope="module")
def tensor_type(peer: Callable[[str], ModuleType]) -> type:
    """Return ``NVFP4QTensor``."""
    return peer("modelopt.torch.quantization.qtensor").NVFP4QTensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dequantize_has_its_bits(
    n: int,
    k: int,
    dtype: torch.dtype,
    tensor_type: type,
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
    rewritten: Callable[..., None],
) -> None:
    """A layer that ModelOpt stored dequantises to ModelOpt's bits, and is written back byte for byte."""
    theirs, scale, scale_2 = tensor_type.quantize(dense(n, k, n * k, dtype), 16)
    stored = {
        "proj.weight": theirs._quantized_data,
        "proj.weight_scale": scale,
        "proj.weight_scale_2": scale_2,
        "proj.input_scale": torch.tensor(0.25),
    }
    path = on_disk(stored, config={**CONFIG, "dtype": str(dtype).removeprefix("torch.")})
    ours = q4.open(path)["proj"]
    for item in dict.fromkeys((dtype, torch.float32)):
        expected = theirs.dequantize(item, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        same_bits(q4.dequantize(ours, item), expected, is_zero_signed=False)
    rewritten(path, ours.dialect)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_quantize_agrees_on_normal_weights(
    n: int,
    k: int,
    seed: int,
    tensor_type: type,
    dense: Callable[..., torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Our float32 NVFP4 scales are ModelOpt's where no block is tiny or zero (there the rules differ by design)."""
    weight = dense(n, k, seed)
    _, scale, scale_2 = tensor_type.quantize(weight.clone(), 16)
    ours = q4.quantize(weight, format="nvfp4")
    same_bits(ours.global_scale.reshape(()), scale_2)
    same_bits(ours.scale.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_loads_what_we_write(
    n: int,
    k: int,
    dtype: torch.dtype,
    tensor_type: type,
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``NVFP4QTensor.dequantize`` computes our numbers from the tensors that we write."""
    ours = q4.quantize(dense(n, k, 5, dtype), format="nvfp4")
    path = tmp_path / "ours.safetensors"
    q4.save_checkpoint(path, {"proj": ours}, dialect="modelopt-nvfp4")
    stored = safetensors.torch.load_file(path)
    theirs = tensor_type(torch.Size((n, k)), dtype, stored["proj.weight"])
    expected = theirs.dequantize(
        dtype, scale=stored["proj.weight_scale"], double_scale=stored["proj.weight_scale_2"], block_sizes={-1: 16}
    )
    same_bits(q4.dequantize(ours), expected, is_zero_signed=False)
