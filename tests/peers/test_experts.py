"""Experts of three dimensions against the libraries that store them, on the CPU."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

DTYPES = (torch.float32, torch.bfloat16)
EXPERTS = ((3, 128, 96), (1, 130, 64), (4, 256, 320), (3, 100, 64))
"""Shapes whose swizzled scales torchao can store: E · N rows fill as many tiles of 128 as E times N."""


def _experts(dense: Callable[..., torch.Tensor], experts: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return weights [E, N, K] of unlike magnitudes, so that their global scales differ."""
    return torch.stack([dense(n, k, seed, scale=0.05 * 3.0**seed) for seed in range(experts)]).to(dtype)


def _check(path: Path, name: str, expected: torch.Tensor, same_bits: Callable[..., None], **bits: bool) -> None:
    """Check that experts dequantise to a library's bits, also after they were written as modules of their own."""
    checkpoint = q4.open(path)
    assert list(checkpoint) == [f"{name}.{index}" for index in range(len(expected))]
    again = path.parent / "again"
    q4.save_checkpoint(again, checkpoint, dialect=checkpoint.schema.dialects[0])
    for opened in (checkpoint, q4.open(again)):
        for weight, value in zip(opened.values(), expected, strict=True):
            same_bits(q4.dequantize(weight, expected.dtype), value, **bits)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("levels", ["one", "each", "shared"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "n", "k"), EXPERTS)
def test_torchao_nvfp4(
    experts: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    levels: str,
    swizzled: bool,
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
) -> None:
    """Each expert of an NVFP4 tensor that torchao flattened has torchao's bits, with whatever global scales it has."""
    nvfp4 = peer("torchao.prototype.mx_formats.nvfp4_tensor")
    support = peer("torchao.prototype.safetensors.safetensors_support")
    weight = _experts(dense, experts, n, k, dtype)
    scale = None
    if levels != "one":
        largest = weight.abs().amax((1, 2), keepdim=True) if levels == "each" else weight.abs().max()
        scale = nvfp4.per_tensor_amax_to_scale(largest)
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=swizzled)
    path = on_disk(*support.flatten_tensor_state_dict({"experts.w1": theirs}))
    _check(path, "experts.w1", theirs.dequantize(dtype), same_bits)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "n", "k"), EXPERTS)
def test_torchao_mxfp4(
    experts: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    swizzled: bool,
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
) -> None:
    """Each expert of an MXFP4 tensor that torchao flattened has torchao's bits."""
    mx: Any = peer("torchao.prototype.mx_formats.mx_tensor")
    support = peer("torchao.prototype.safetensors.safetensors_support")
    weight, mode = _experts(dense, experts, n, k, dtype), mx.ScaleCalculationMode.RCEIL
    theirs = mx.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, mode, is_swizzled_scales=swizzled)
    path = on_disk(*support.flatten_tensor_state_dict({"moe.weight": theirs}))
    _check(path, "moe", theirs.dequantize(dtype), same_bits)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("experts", "n", "k"), [(3, 8, 128), (2, 256, 64), (3, 4, 48), (2, 64, 50), (3, 64, 33)])
def test_bitsandbytes(
    experts: int,
    n: int,
    k: int,
    kind: str,
    dtype: torch.dtype,
    nested: bool,
    peer: Callable[[str], ModuleType],
    portable: Callable[..., torch.Tensor],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
) -> None:
    """Each expert of a parameter that bitsandbytes replaced has its bits, with blocks that straddle rows too."""
    functional = peer("bitsandbytes.functional")
    module = torch.nn.Module()
    module.w1 = torch.nn.Parameter(_experts(dense, experts, n, k, dtype), requires_grad=False)
    peer("bitsandbytes.nn.parametrize").replace_parameter_4bit(module, "w1", nested, kind, 64)
    packed, state = module.parametrizations.w1.original, module.parametrizations.w1[0].quant_state
    path = on_disk({f"experts.{name}": tensor for name, tensor in module.state_dict().items()})
    _check(path, "experts.w1", portable(packed, state, dtype), same_bits)
    if k % 64 == 0 or k % 16:  # elsewhere the kernels behind the public call are wrong on some CPUs
        _check(path, "experts.w1", functional.dequantize_4bit(packed, state), same_bits, is_zero_signed=False)


@pytest.fixture
def exported(peer: Callable[[str], ModuleType]) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function that calibrates Llama 4's experts with ModelOpt, and exports them as it does."""
    modelopt = peer("modelopt.torch.quantization")
    export = peer("modelopt.torch.export.unified_export_hf")
    squeezed = peer("modelopt.torch.export.quant_utils")._maybe_squeeze_scale
    llama = peer("transformers.models.llama4.modeling_llama4")
    config = peer("transformers").Llama4TextConfig

    def run(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        experts, hidden, width = weights["gate_up_proj"].shape
        facts = {"hidden_size": hidden, "intermediate_size": width // 2, "num_local_experts": experts}
        model = torch.nn.Module()
        model.experts = llama.Llama4TextExperts(config(**facts))
        for name, weight in weights.items():
            setattr(model.experts, name, torch.nn.Parameter(weight.clone()))
        x = torch.randn(4 * experts, hidden, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            modelopt.quantize(model, modelopt.NVFP4_DEFAULT_CFG, lambda model: model.experts(x))
            for name in weights:
                export._export_quantized_weight(model.experts, weight.dtype, name)
        state = {name: tensor for name, tensor in model.state_dict().items() if "_quantizer" not in name}
        return {name: squeezed(name, tensor) for name, tensor in state.items()}

    return run


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "hidden", "width"), [(3, 64, 32), (1, 32, 48), (2, 96, 64)])
def test_modelopt(
    experts: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    each: bool,
    exported: Callable[..., dict[str, torch.Tensor]],
    peer: Callable[[str], ModuleType],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
) -> None:
    """Each expert that ModelOpt exported has the bits of ModelOpt's tensor, turned back as its exporter turned it."""
    tensor_type = peer("modelopt.torch.quantization.qtensor").NVFP4QTensor
    turned = peer("modelopt.torch.export.quant_utils").maybe_transpose_expert_weight_dimensions
    weights = {
        "gate_up_proj": _experts(dense, experts, hidden, 2 * width, dtype),
        "down_proj": _experts(dense, experts, width, hidden, dtype),
    }
    stored = exported(weights)
    config = {"quantization_config": {"quant_method": "modelopt"}, "dtype": str(dtype).removeprefix("torch.")}
    for name, weight in weights.items():
        own = {key: tensor for key, tensor in stored.items() if f".{name}" in key}
        codes, scale, total = (own[f"experts.{name}{part}"] for part in ("", "_weight_scale", "_weight_scale_2"))
        if each:  # which the exporter's code allows, and its calibration does not give
            total = own[f"experts.{name}_weight_scale_2"] = total * torch.arange(1.0, experts + 1)
        packed, scales = turned(codes, scale.reshape(experts, -1, scale.shape[-1]))
        theirs = tensor_type(weight.transpose(1, 2).shape, dtype, packed)
        expected = theirs.dequantize(dtype, scale=scales, double_scale=total.reshape(-1, 1, 1), block_sizes={-1: 16})
        if not each:  # half a step of E2M1 is a sixth of a block's largest magnitude, and e4m3 rounds by a sixteenth
            error = (expected.transpose(1, 2) - weight).abs().amax((1, 2))
            assert bool((error < weight.abs().amax((1, 2)) / 5).all())
        _check(on_disk(own, config=config), f"experts.{name}", expected, same_bits, is_zero_signed=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("experts", "n", "k"), EXPERTS)
def test_gpt_oss(
    experts: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    peer: Callable[[str], ModuleType],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
) -> None:
    """Each expert of gpt-oss has the bits of transformers' own dequantiser, which transposes it."""
    generator = torch.Generator().manual_seed(n * k)
    blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 250, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
    convert = peer("transformers.integrations.mxfp4").convert_moe_packed_tensors
    expected = convert(blocks, scales, dtype=dtype).transpose(1, 2)
    path = on_disk({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales})
    _check(path, "experts.down_proj", expected, same_bits)


def test_compressed_tensors_packs_no_experts(peer: Callable[[str], ModuleType]) -> None:
    """The package packs no weight of three dimensions; once it does, its experts can be read."""
    compressor = peer("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor
    package = peer("compressed_tensors.quantization")
    weights = package.QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = package.QuantizationScheme(targets=["Linear"], weights=weights)
    weight = {"weight": torch.ones(2, 8, 32), "weight_scale": torch.ones(2, 8, 2)}
    with pytest.raises(ValueError, match="2D"):
        compressor.compress({**weight, "weight_global_scale": torch.ones(1)}, scheme)
