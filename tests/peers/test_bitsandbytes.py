"""NF4 and FP4 against bitsandbytes on the CPU.

The oracle is bitsandbytes' portable kernel; the fixture ``portable`` says why. The public call is compared wherever its
kernels are sound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

KINDS = ("nf4", "fp4")
SHAPES = (
    (16, 128, 64),
    (8, 256, 128),
    (6, 96, 64),
    (9, 32, 128),
    (5, 33, 64),
    (7, 50, 32),
    (10, 48, 32),
    (130, 128, 64),
    (3, 1, 64),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def bnb(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return ``bitsandbytes.functional``."""
    return peer("bitsandbytes.functional")


def _stored(packed: torch.Tensor, state: Any) -> dict[str, torch.Tensor]:
    return {
        "proj.weight": packed,
        **{f"proj.weight.{key}": value for key, value in state.as_dict(packed=True).items()},
    }


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k", "block"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_has_its_bits(
    kind: str,
    n: int,
    k: int,
    block: int,
    dtype: torch.dtype,
    nested: bool,
    bnb: ModuleType,
    portable: Callable[..., torch.Tensor],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
) -> None:
    """A layer that bitsandbytes stored dequantises to bitsandbytes' bits, in its own dtype and in float32."""
    weight = dense(n, k, n + k, dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type=kind)
    ours = q4.open(on_disk(_stored(packed, state)))["proj"]
    same_bits(q4.dequantize(ours), portable(packed, state, dtype))
    same_bits(q4.dequantize(ours, torch.float32), portable(packed, state, torch.float32))
    if k % block == 0 or k % 16:
        same_bits(q4.dequantize(ours), bnb.dequantize_4bit(packed, state), is_zero_signed=False)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_reads_every_storage_dtype(
    storage: torch.dtype,
    bnb: ModuleType,
    portable: Callable[..., torch.Tensor],
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    same_bits: Callable[..., None],
) -> None:
    """Codes that bitsandbytes stored as a view of a float dtype give the same weight."""
    packed, state = bnb.quantize_4bit(dense(8, 64, 1), blocksize=64, quant_type="nf4", quant_storage=storage)
    ours = q4.open(on_disk(_stored(packed, state)))["proj"]
    same_bits(q4.dequantize(ours), portable(packed, state, torch.float32))


def _awkward(n: int, k: int, block: int) -> torch.Tensor:
    """Return a weight with zero, negative-zero, tiny, huge and tied blocks, as far as they fit."""
    flat = torch.randn(n * k, generator=torch.Generator().manual_seed(7))
    flat[: min(block, 5)] = -0.0
    flat[block : 2 * block] = 0.0
    flat[2 * block : 3 * block] *= 1e-42
    flat[3 * block : 4 * block] *= 3e37
    flat[4 * block : 5 * block] = 1e-30
    flat[-3:] = 0.0
    return flat.reshape(n, k)


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (2, torch.float16)])
@pytest.mark.parametrize(("n", "k", "block"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_has_its_codes_and_scales(
    kind: str,
    n: int,
    k: int,
    block: int,
    seed: int,
    dtype: torch.dtype,
    bnb: ModuleType,
    dense: Callable[..., torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Our quantiser gives bitsandbytes' bytes and absmax for weights of every dtype, short and zero tails included."""
    for weight in (dense(n, k, seed, dtype), _awkward(n, k, block).to(dtype).nan_to_num(posinf=1e4, neginf=-1e4)):
        packed, state = bnb.quantize_4bit(weight, blocksize=block, quant_type=kind)
        ours = q4.quantize(weight, format=kind, block_size=block)
        same_bits(ours.qdata.reshape(-1), packed.reshape(-1))
        same_bits(ours.scale.reshape(-1), state.absmax)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_has_its_codes_halfway_between_levels(
    kind: str,
    seed: int,
    bnb: ModuleType,
    nudged: Callable[[torch.Tensor, int], torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Values within one ulp of a midpoint get bitsandbytes' codes, in whole blocks and in the short last one."""
    levels = bnb.get_4bit_type(kind, device="cpu").sort().values
    midpoints = ((levels[:-1] + levels[1:]) / 2).repeat(4)[:59]
    absmax = torch.rand(33, generator=torch.Generator().manual_seed(seed)) + 0.5
    parts = [torch.cat((largest.reshape(1), nudged(midpoints * largest, seed), torch.zeros(4))) for largest in absmax]
    flat = torch.cat(parts)[: 32 * 64 + 60]
    packed, state = bnb.quantize_4bit(flat.reshape(1, -1), blocksize=64, quant_type=kind)
    ours = q4.quantize(flat.reshape(1, -1), kind)
    same_bits(ours.qdata, packed.reshape(-1))
    same_bits(ours.scale, state.absmax)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k", "block"), [*SHAPES, (600, 256, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_double_quantisation_has_its_levels(
    kind: str,
    n: int,
    k: int,
    block: int,
    dtype: torch.dtype,
    bnb: ModuleType,
    dense: Callable[..., torch.Tensor],
    same_bits: Callable[..., None],
) -> None:
    """Double quantisation gives bitsandbytes' 8-bit scales, second absmax, mean and table."""
    weight = dense(n, k, 13, dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=block, compress_statistics=True, quant_type=kind)
    ours = q4.quantize(weight, format=kind, block_size=block, scale_kind=q4.ScaleKind.DOUBLE_QUANT)
    same_bits(ours.qdata.reshape(-1), packed.reshape(-1))
    same_bits(ours.scale.reshape(-1), state.absmax)
    same_bits(ours.nested_scale, state.state2.absmax)
    same_bits(ours.nested_codebook, state.state2.code)
    same_bits(ours.nested_offset.reshape(()), state.offset)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k", "block"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_loads_what_we_write(
    kind: str,
    n: int,
    k: int,
    block: int,
    nested: bool,
    bnb: ModuleType,
    portable: Callable[..., torch.Tensor],
    dense: Callable[..., torch.Tensor],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """``QuantState.from_dict`` takes our file, and bitsandbytes computes our numbers from it."""
    levels = q4.ScaleKind.DOUBLE_QUANT if nested else q4.ScaleKind.PLAIN
    ours = q4.quantize(dense(n, k, 3, torch.bfloat16), format=kind, block_size=block, scale_kind=levels)
    path = tmp_path / "ours.safetensors"
    q4.save_checkpoint(path, {"proj": ours}, dialect="bitsandbytes")
    tensors = safetensors.torch.load_file(path)
    packed = tensors.pop("proj.weight")
    state = bnb.QuantState.from_dict({key.removeprefix("proj.weight."): t for key, t in tensors.items()}, "cpu")
    assert (state.quant_type, state.nested) == (kind, nested)
    assert state.blocksize == block
    assert tuple(state.shape) == (n, k)
    same_bits(q4.dequantize(ours), portable(packed, state, state.dtype))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k", "block"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rewriting_changes_no_byte(
    kind: str,
    n: int,
    k: int,
    block: int,
    nested: bool,
    bnb: ModuleType,
    dense: Callable[..., torch.Tensor],
    on_disk: Callable[..., Path],
    rewritten: Callable[..., None],
) -> None:
    """Reading a bitsandbytes layer and writing it again gives the same tensors, the packed JSON included."""
    weight = dense(n, k, 11, torch.bfloat16)
    packed, state = bnb.quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type=kind)
    rewritten(on_disk(_stored(packed, state)), "bitsandbytes")
