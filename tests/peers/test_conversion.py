"""Through q4core, one library's file becomes another's, with the same numbers by both libraries' own arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import safetensors
import safetensors.torch
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

SHAPES = ((16, 64), (20, 80), (130, 48), (33, 272))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_torchao_to_modelopt_and_back(
    n: int,
    k: int,
    swizzled: bool,
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """ModelOpt computes torchao's float32 weight from the converted file; torchao's file comes back byte for byte."""
    nvfp4 = peer("torchao.prototype.mx_formats.nvfp4_tensor")
    support = peer("torchao.prototype.safetensors.safetensors_support")
    qtensor = peer("modelopt.torch.quantization.qtensor").NVFP4QTensor
    weight = dense(n, k, 21, torch.bfloat16)
    total = nvfp4.per_tensor_amax_to_scale(weight.abs().max())
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=total, is_swizzled_scales=swizzled)
    source = on_disk(*support.flatten_tensor_state_dict({"proj.weight": theirs}))
    middle, back = tmp_path / "middle.safetensors", tmp_path / "back.safetensors"
    first = q4.open(source)["proj"]
    q4.save_checkpoint(middle, {"proj": first}, dialect="modelopt-nvfp4")
    stored = safetensors.torch.load_file(middle)
    result = qtensor(torch.Size((n, k)), torch.bfloat16, stored["proj.weight"]).dequantize(
        torch.float32,
        scale=stored["proj.weight_scale"],
        double_scale=stored["proj.weight_scale_2"],
        block_sizes={-1: 16},
    )
    same_bits(result, theirs.dequantize(torch.float32), is_zero_signed=False)
    second = q4.open(middle, config={"dtype": "bfloat16", "quantization_config": {"quant_method": "modelopt"}})["proj"]
    q4.save_checkpoint(back, {"proj": second}, dialect=f"torchao-nvfp4-{'swizzled' if swizzled else 'linear'}")
    before, after = safetensors.torch.load_file(source), safetensors.torch.load_file(back)
    assert set(before) == set(after)
    for key, value in before.items():
        same_bits(after[key], value)
    with safetensors.safe_open(back, "pt") as file:
        again, left = support.unflatten_tensor_state_dict(after, file.metadata())
    assert left == {}
    same_bits(again["proj.weight"].dequantize(torch.bfloat16), theirs.dequantize(torch.bfloat16))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("n", "k", "block"), [(16, 128, 64), (8, 256, 128), (6, 96, 64)])
def test_bitsandbytes_to_the_trio_and_back(
    kind: str,
    n: int,
    k: int,
    block: int,
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """bitsandbytes' layer written as the simplified trio, and as bitsandbytes' again, is what it was."""
    bnb = peer("bitsandbytes.functional")
    packed, state = bnb.quantize_4bit(dense(n, k, 22, torch.bfloat16), blocksize=block, quant_type=kind)
    tensors = {f"proj.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    source = on_disk({"proj.weight": packed, **tensors})
    middle, back = tmp_path / "middle.safetensors", tmp_path / "back.safetensors"
    q4.save_checkpoint(middle, {"proj": q4.open(source)["proj"]}, dialect="simple-nf4")
    q4.save_checkpoint(back, {"proj": q4.open(middle, config={"dtype": "bfloat16"})["proj"]}, dialect="bitsandbytes")
    before, after = safetensors.torch.load_file(source), safetensors.torch.load_file(back)
    assert set(before) == set(after)
    for key, value in before.items():
        same_bits(after[key], value)


def test_a_dividing_global_scale_is_not_multiplied(
    peer: Callable[[str], ModuleType], dense: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """torchao's levels can't be compressed-tensors' exactly: refused, and nothing is written, unless asked for."""
    nvfp4 = peer("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = dense(16, 64, 23)
    ours = q4.quantize(weight, "nvfp4")
    path = tmp_path / "converted.safetensors"
    with pytest.raises(q4.DialectError):
        q4.save_checkpoint(path, {"proj": ours}, dialect="compressed-tensors-nvfp4")
    assert not path.exists()
    q4.save_checkpoint(path, {"proj": ours}, dialect="compressed-tensors-nvfp4", lossy=True)
    stored = safetensors.torch.load_file(path)
    total = nvfp4.per_tensor_amax_to_scale(weight.abs().max())
    assert stored["proj.weight_global_scale"].item() == pytest.approx(1 / total.item(), rel=2**-23)
