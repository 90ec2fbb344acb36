"""Experts for tests: tensors as torchao and ModelOpt store them, their values, and what is asked of a reading."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import q4core as q4
from q4_dialects.swizzle import swizzled_from_linear
from q4_dialects.torchao import TorchaoMxfp4Linear, TorchaoMxfp4Swizzled, TorchaoNvfp4Linear, TorchaoNvfp4Swizzled

if TYPE_CHECKING:
    from pathlib import Path

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
E4M3 = torch.float8_e4m3fn
TORCHAO = (TorchaoNvfp4Linear(), TorchaoNvfp4Swizzled(), TorchaoMxfp4Linear(), TorchaoMxfp4Swizzled())
Tensors = dict[str, torch.Tensor]


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    """Return uint8 numbers of a shape, the same ones each time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def values_of(packed: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Return code times scale of bytes [..., K / 2], low nibble first, and float scales [..., K / block]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return E2M1[codes] * scale.repeat_interleave(block, dim=-1)


def problems(tensors: Tensors, **arguments: Any) -> set[tuple[str, str]]:
    """Return code and key of every problem that ``detect_or_fail`` raises with."""
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


def refused(tensors: Tensors, **arguments: Any) -> list[tuple[str, str, object]]:
    """Return key, rule and value of all that is listed as unsupported, where nothing else is found."""
    schema = q4.detect(tensors, **arguments)
    assert schema is not None
    assert (dict(schema.layers), schema.dense) == ({}, ())
    return [(problem.key, problem.rule, problem.value) for problem in schema.unsupported]


def stored(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """Write tensors to a safetensors file."""
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


def shares_memory(weight: q4.PackedWeight, others: list[q4.PackedWeight], field: str) -> bool:
    """Return whether a field lies in one storage with the same field of the other weights."""
    own = getattr(weight, field).untyped_storage().data_ptr()
    return all(getattr(other, field).untyped_storage().data_ptr() == own for other in others)


def same_after_writing(path: Path, values: torch.Tensor, dialect: str, folder: Path) -> q4.Checkpoint:
    """Check that the experts of a file are written as modules of their own which read as the same weights."""
    first = q4.open(path)
    q4.save_checkpoint(folder, first, dialect=dialect)
    again = q4.open(folder)
    assert list(again) == list(first)
    for module, expected in zip(first, values, strict=True):
        assert torch.equal(again[module].codes(), first[module].codes())
        assert torch.equal(q4.dequantize(again[module], torch.float32), expected)
    return again


def torchao_experts(
    dialect: q4.Dialect, experts: int = 3, n: int = 128, k: int = 96, *, name: str = "experts.w1", levels: int = 2
) -> tuple[Tensors, dict[str, str], torch.Tensor]:
    """Return tensors, metadata and values [E, N, K] of experts as torchao flattens them."""
    is_nvfp4, swizzled = "nvfp4" in dialect.name, "swizzled" in dialect.name
    block, dtype = (16, E4M3) if is_nvfp4 else (32, torch.float8_e8m0fnu)
    packed = random_bytes(experts, n, k // 2)
    scale = random_bytes(experts, n, k // block, low=0 if is_nvfp4 else 100, high=127).view(dtype)
    number = scale.to(torch.float32)
    head, _, parameter = name.rpartition(".")
    prefix = f"{head}._{parameter}_"
    tensors = {f"{prefix}qdata": packed, f"{prefix}scale": scale}
    names = ["qdata", "scale"]
    if swizzled:  # torchao swizzles the rows of all experts as one matrix
        flat = swizzled_from_linear(scale.reshape(experts * n, -1))
        shape = (experts, 32 * -(-n // 128), 16 * -(-k // (4 * block)))
        tensors[f"{prefix}scale"] = flat.view(torch.uint8).view(shape).view(dtype)
    if is_nvfp4 and levels == 2:
        total = torch.rand(experts, 1, 1, generator=torch.Generator().manual_seed(n))
        tensors[f"{prefix}per_tensor_scale"] = total
        number = total * number
        names.append("per_tensor_scale")
    data = {
        "is_swizzled_scales": swizzled,
        "block_size": block,
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        "elem_dtype": {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"},
    }
    kind = "NVFP4Tensor" if is_nvfp4 else "MXTensor"
    entry = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": names})
    return tensors, {name: entry, "tensor_names": json.dumps([name])}, values_of(packed, number, block)


def modelopt_experts(
    experts: int = 3, n: int = 24, k: int = 96, *, name: str = "experts.gate_up_proj", each: bool = True
) -> tuple[Tensors, torch.Tensor]:
    """Return tensors and values [E, N, K] of experts as ModelOpt exports them: transposed, packed along K."""
    packed = random_bytes(experts, k // 2, n)
    scale = random_bytes(experts, k // 16, n, high=127).view(E4M3)
    total = torch.rand(experts if each else (), generator=torch.Generator().manual_seed(n))
    tensors = {name: packed, f"{name}_weight_scale": scale, f"{name}_weight_scale_2": total}
    number = scale.transpose(1, 2).to(torch.float32) * total.reshape(-1, 1, 1)
    return tensors, values_of(packed.transpose(1, 2), number, 16)
