"""NVFP4 and MXFP4 against torchao's tensor subclasses on the CPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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

SHAPES = ((16, 64), (20, 80), (128, 64), (130, 48), (1, 16), (33, 272))
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def nvfp4(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return torchao's NVFP4 module."""
    return peer("torchao.prototype.mx_formats.nvfp4_tensor")


@pytest.fixture(scope="module")
def mx(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return torchao's MX module."""
    return peer("torchao.prototype.mx_formats.mx_tensor")


@pytest.fixture(scope="module")
def support(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return torchao's flattening into safetensors."""
    return peer("torchao.prototype.safetensors.safetensors_support")


def _quantize(nvfp4: ModuleType, weight: torch.Tensor, *, two_level: bool, swizzled: bool = False) -> Any:
    scale = nvfp4.per_tensor_amax_to_scale(weight.abs().max()) if two_level else None
    return nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=swizzled)


def _mxfp4(mx: ModuleType, weight: torch.Tensor, mode: str = "RCEIL", *, swizzled: bool = False) -> Any:
    return mx.MXTensor.to_mx(
        weight, torch.float4_e2m1fn_x2, 32, mx.ScaleCalculationMode[mode], is_swizzled_scales=swizzled
    )


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dequantize_has_its_nvfp4_bits(
    n: int,
    k: int,
    dtype: torch.dtype,
    two_level: bool,
    swizzled: bool,
    nvfp4: ModuleType,
    support: ModuleType,
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
    rewritten: Callable[..., None],
) -> None:
    """An NVFP4 layer that torchao flattened dequantises to torchao's bits, and is written back byte for byte."""
    theirs = _quantize(nvfp4, dense(n, k, n * k, dtype), two_level=two_level, swizzled=swizzled)
    path = on_disk(*support.flatten_tensor_state_dict({"proj.weight": theirs}))
    ours = q4.open(path)["proj"]
    same_bits(q4.dequantize(ours), theirs.dequantize(dtype))
    same_bits(q4.dequantize(ours, torch.float32), theirs.dequantize(torch.float32))
    rewritten(path, ours.dialect)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("mode", ["FLOOR", "RCEIL", "CEIL", "EVEN"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (20, 96), (130, 32), (1, 32), (33, 160)])
def test_dequantize_has_its_mxfp4_bits(
    n: int,
    k: int,
    dtype: torch.dtype,
    mode: str,
    swizzled: bool,
    mx: ModuleType,
    support: ModuleType,
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
    rewritten: Callable[..., None],
) -> None:
    """An MXFP4 layer that torchao flattened dequantises to torchao's bits, and is written back byte for byte."""
    theirs = _mxfp4(mx, dense(n, k, n * k, dtype), mode, swizzled=swizzled)
    path = on_disk(*support.flatten_tensor_state_dict({"proj.weight": theirs}))
    ours = q4.open(path)["proj"]
    same_bits(q4.dequantize(ours), theirs.dequantize(dtype))
    same_bits(q4.dequantize(ours, torch.float32), theirs.dequantize(torch.float32))
    rewritten(path, ours.dialect)


def _awkward(n: int, k: int, block: int) -> torch.Tensor:
    """Return a weight with zero, negative-zero, tiny and large blocks, and every tie between two E2M1 codes."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(5))
    weight[0, :block] = 0.0 if k > block else weight[0, :block]
    if n > 2:
        weight[-1, -block:] = -0.0
        halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        ties = torch.cat((torch.tensor([6.0, 0.0]), halves, -halves))
        weight[1] = ties.repeat(k // 16)
        weight[2] *= 2.0**-14
    return weight


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_quantize_has_its_nvfp4_codes_and_scales(
    n: int,
    k: int,
    seed: int,
    dtype: torch.dtype,
    two_level: bool,
    nvfp4: ModuleType,
    dense: Callable[..., torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Our NVFP4 quantiser gives torchao's codes, block scales and global scale for float32 and bfloat16 weights."""
    scales = (0.05, 1e20, 1e-20) if two_level else (0.05, 8.0, 1e-20)  # e4m3 alone reaches 448
    for weight in (*(dense(n, k, seed, dtype, scale) for scale in scales), _awkward(n, k, 16).to(dtype)):
        theirs = _quantize(nvfp4, weight, two_level=two_level)
        ours = q4.quantize(weight, "nvfp4", scale_kind=None if two_level else q4.ScaleKind.E4M3)
        if two_level:
            same_bits(ours.global_scale.reshape(()), theirs.per_tensor_scale)
        same_bits(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
        same_bits(ours.qdata, theirs.qdata)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_level_nvfp4_is_equal_down_to_two_e_minus_33(
    dtype: torch.dtype, nvfp4: ModuleType, dense: Callable[..., torch.Tensor], same_bits: Callable[..., None]
) -> None:
    """Bytes are equal where the largest magnitude is 2688 * 2^-120 or more; far below it, torchao's scales overflow."""
    weight = dense(16, 64, 0).to(dtype)
    weight = (weight / weight.abs().max()).to(dtype)
    weight[3] = 0.0
    weight[4] *= 2.0**-13
    least = 2688 * 2.0**-120  # two bfloat16 numbers, and their product is one
    for largest in (least, 1.5 * least):
        small = (weight.double() * largest).to(dtype)
        assert float(small.abs().max()) == largest
        theirs, ours = _quantize(nvfp4, small, two_level=True), q4.quantize(small, "nvfp4")
        same_bits(ours.global_scale.reshape(()), theirs.per_tensor_scale)
        same_bits(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
        same_bits(ours.qdata, theirs.qdata)
    small = (weight.double() * 1e-36).to(dtype)
    errors = [
        float((result - small.float()).abs().max()) / 1e-36
        for result in (
            q4.dequantize(q4.quantize(small, "nvfp4"), torch.float32),
            _quantize(nvfp4, small, two_level=True).dequantize(torch.float32),
        )
    ]
    assert errors[0] < 1 / 6 < errors[1]  # half the widest step of E2M1


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (20, 96), (130, 32), (1, 32), (33, 160)])
def test_quantize_has_its_mxfp4_codes_and_scales(
    n: int,
    k: int,
    seed: int,
    dtype: torch.dtype,
    mx: ModuleType,
    dense: Callable[..., torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Our MXFP4 quantiser gives torchao's codes and scales (scaling mode RCEIL) for float32 and bfloat16 weights."""
    scales = (0.05, 1e20, 1e-20)
    for weight in (*(dense(n, k, seed, dtype, scale) for scale in scales), _awkward(n, k, 32).to(dtype)):
        theirs = _mxfp4(mx, weight)
        ours = q4.quantize(weight, format="mxfp4")
        same_bits(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
        same_bits(ours.qdata, theirs.qdata)


def _near_ties(block: int, largest: torch.Tensor, nudged: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Return blocks whose largest magnitudes are given, filled with values within one ulp of a tie."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) / 6
    ties = torch.cat((ties, -ties)).repeat(3)[: block - 1]
    return nudged(torch.cat((largest[:, None], ties * largest[:, None]), dim=1), block)


@pytest.mark.parametrize("seed", range(10))
def test_nvfp4_near_ties_has_its_codes_and_scales(
    seed: int,
    nvfp4: ModuleType,
    nudged: Callable[[torch.Tensor, int], torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Codes and block scales within one ulp of a tie are rounded as torchao rounds them."""
    levels = torch.arange(0x08, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    halfway = (levels[:-1] + levels[1:]) / 2
    total = torch.rand((), generator=torch.Generator().manual_seed(seed)) * 1e-3
    largest = nudged(torch.cat((levels, halfway)) * total * 6, seed)
    weight = _near_ties(16, torch.cat((total.reshape(1) * 2688, largest)), nudged).reshape(1, -1)
    theirs = _quantize(nvfp4, weight, two_level=True)
    ours = q4.quantize(weight, "nvfp4")
    same_bits(ours.global_scale.reshape(()), theirs.per_tensor_scale)
    same_bits(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
    same_bits(ours.qdata, theirs.qdata)


def test_mxfp4_near_powers_of_two_has_its_codes_and_scales(
    mx: ModuleType, nudged: Callable[[torch.Tensor, int], torch.Tensor], same_bits: Callable[..., None]
) -> None:
    """Blocks whose largest magnitude is within one ulp of 6 times a power of two get torchao's scales and codes."""
    powers = torch.exp2(torch.arange(-120.0, 121.0)).repeat(9) * 6
    weight = _near_ties(32, nudged(powers, 1), nudged).reshape(9, -1)
    theirs = _mxfp4(mx, weight)
    ours = q4.quantize(weight, "mxfp4")
    same_bits(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
    same_bits(ours.qdata, theirs.qdata)


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "n", "k"), [*(("nvfp4", *shape) for shape in SHAPES), ("mxfp4", 33, 160)])
def test_loads_what_we_write(
    kind: str,
    n: int,
    k: int,
    dtype: torch.dtype,
    layout: str,
    support: ModuleType,
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``unflatten_tensor_state_dict`` takes our file, and torchao computes our numbers from it."""
    ours = q4.quantize(dense(n, k, 9, dtype), kind)
    path = tmp_path / "ours.safetensors"
    q4.save_checkpoint(path, {"proj": ours}, dialect=f"torchao-{kind}-{layout}")
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    theirs, left = support.unflatten_tensor_state_dict(safetensors.torch.load_file(path), metadata)
    assert left == {}
    assert json.loads(metadata["tensor_names"]) == ["proj.weight"]
    same_bits(theirs["proj.weight"].dequantize(dtype), q4.dequantize(ours))
    same_bits(theirs["proj.weight"].dequantize(torch.float32), q4.dequantize(ours, torch.float32))
