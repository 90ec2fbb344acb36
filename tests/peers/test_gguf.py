"""Q4_0, Q4_1 and Q8_0 against the ``gguf`` package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

KINDS = ("Q4_0", "Q4_1", "Q8_0")
SHAPES = ((16, 64), (20, 96), (1, 32), (33, 288), (128, 576))
HEAD = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}


@pytest.fixture(scope="module")
def gguf(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return the package ``gguf``."""
    return peer("gguf")


def _blocks(gguf: ModuleType, weight: torch.Tensor, kind: str) -> np.ndarray:
    return gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])


def _write(gguf: ModuleType, path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> None:
    writer = gguf.GGUFWriter(str(path), "peer")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_has_its_bits(
    kind: str,
    n: int,
    k: int,
    seed: int,
    gguf: ModuleType,
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """A tensor of a GGUF file dequantises to the package's bits."""
    rows = _blocks(gguf, dense(n, k, seed), kind)
    _write(gguf, tmp_path / "model.gguf", {"blk.0.attn_q.weight": (rows, kind)})
    ours = q4.open(tmp_path / "model.gguf")["blk.0.attn_q"]
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    same_bits(q4.dequantize(ours, torch.float32), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_agrees_on_random_bytes(
    kind: str, gguf: ModuleType, tmp_path: Path, same_bits: Callable[..., None]
) -> None:
    """Blocks of random codes under random finite half-precision scales give the package's bits."""
    generator = np.random.default_rng(3)
    head = HEAD[kind]
    codes = generator.integers(0, 256, (32, 4, 32 if kind == "Q8_0" else 16), np.uint8)
    scales = generator.integers(0, 1 << 16, (32, 4, head // 2), np.uint16)
    scales[(scales & 0x7C00) == 0x7C00] &= 0x83FF  # infinities and NaN become subnormal
    rows = np.concatenate((scales.view(np.uint8), codes), axis=-1).reshape(32, -1)
    _write(gguf, tmp_path / "model.gguf", {"proj.weight": (rows, kind)})
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    ours = q4.open(tmp_path / "model.gguf")["proj"]
    same_bits(q4.dequantize(ours, torch.float32), torch.from_numpy(expected))


def _awkward(n: int, k: int) -> torch.Tensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(2))
    weight[0, :32] = 0.0
    weight[-1, -32:] = 2.5
    weight[-1, 0] = -0.0
    weight[0, -16:] = torch.linspace(-8, 7.5, 16)
    return weight


def _near_ties(seed: int, nudged: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Return blocks of 32 whose values lie within one ulp of halfway between two codes of one of the types."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.rand(64, 3, 1, generator=generator) + 0.5
    fourth = torch.cat((torch.tensor([-8.0]), torch.arange(-7.5, 7.5).repeat(3)[:31]))
    fifteen = torch.cat((torch.tensor([0.0, 15.0]), torch.arange(0.5, 15.5).repeat(2)[:30]))
    eighth = torch.cat(
        (torch.tensor([127.0]), torch.arange(-126.5, 126.5)[torch.randperm(253, generator=generator)[:31]])
    )
    return nudged(step * torch.stack((fourth, fifteen, eighth)), seed).reshape(64, 96)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_has_its_codes_and_scales(
    kind: str,
    n: int,
    k: int,
    seed: int,
    gguf: ModuleType,
    dense: Callable[..., torch.Tensor],
    nudged: Callable[[torch.Tensor, int], torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Our quantiser gives the package's codes, scales and offsets for float32 weights, near ties too."""
    for weight in (dense(n, k, seed), dense(n, k, seed, scale=50.0), _awkward(n, k), _near_ties(seed, nudged)):
        n, k = weight.shape
        blocks = torch.from_numpy(_blocks(gguf, weight, kind)).reshape(n, k // 32, -1)
        ours = q4.quantize(weight, format=kind.lower())
        same_bits(ours.qdata.reshape(n, k // 32, -1), blocks[..., HEAD[kind] :])
        same_bits(ours.scale, blocks[..., :2].contiguous().view(torch.float16)[..., 0])
        if kind == "Q4_1":
            same_bits(ours.offset, blocks[..., 2:4].contiguous().view(torch.float16)[..., 0])
