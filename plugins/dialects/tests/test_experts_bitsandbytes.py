"""Experts of bitsandbytes: each is its share of flat codes and block scales."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from experts import Tensors, problems, random_bytes, refused, same_after_writing, shares_memory, stored

import q4core as q4
from q4_dialects.bitsandbytes import BitsAndBytes

if TYPE_CHECKING:
    from pathlib import Path


def _bitsandbytes(
    experts: int = 3, n: int = 8, k: int = 128, block: int = 64, *, name: str = "experts.w1", nested: bool = False
) -> tuple[Tensors, torch.Tensor]:
    """Return tensors and values [E, N, K] of experts as bitsandbytes stores them: flat over all experts."""
    total = experts * n * k
    count = -(-total // block)
    random = torch.Generator().manual_seed(total)
    facts: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [experts, n, k]}
    packed = random_bytes(-(-total // 2), 1)
    absmax = torch.rand(count, generator=random)
    table = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook)
    tensors = {name: packed, f"{name}.absmax": absmax, f"{name}.quant_map": table}
    if nested:
        facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        stored, second = random_bytes(count), torch.rand(-(-count // 256), generator=random)
        levels = torch.linspace(-0.4, 1, 256)
        tensors |= {
            f"{name}.absmax": stored,
            f"{name}.nested_absmax": second,
            f"{name}.nested_quant_map": levels,
        }
        absmax = levels[stored.long()] * second.repeat_interleave(256)[:count] + torch.tensor(0.5)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = _text(facts)
    flat = packed.reshape(-1).long()
    codes = torch.stack((flat >> 4, flat & 15), dim=-1).reshape(-1)[:total]
    return tensors, (table[codes] * absmax.repeat_interleave(block)[:total]).reshape(experts, n, k)


def _text(facts: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


STATE = "experts.w1.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["experts.w1", "proj.weight"])
@pytest.mark.parametrize(
    ("experts", "n", "k", "block"),
    [(3, 8, 128, 64), (2, 256, 64, 64), (3, 4, 48, 64), (2, 96, 160, 128), (1, 64, 33, 64), (3, 64, 33, 64)],
)
def test_bitsandbytes_experts_are_read_one_by_one(
    experts: int, n: int, k: int, block: int, name: str, nested: bool, tmp_path: Path
) -> None:
    """Each expert is its share of the flat codes and block scales, whether blocks straddle its rows or not."""
    tensors, values = _bitsandbytes(experts, n, k, block, name=name, nested=nested)
    path = stored(tmp_path / "x.safetensors", {**tensors, "experts.bias": torch.ones(experts, n)})
    checkpoint = q4.open(path)
    stem = name.removesuffix(".weight")
    assert list(checkpoint) == [f"{stem}.{index}" for index in range(experts)]
    assert list(checkpoint.dense) == ["experts.bias"]
    weights = list(checkpoint.values())
    for index, (weight, expected) in enumerate(zip(weights, values, strict=True)):
        assert (weight.shape, weight.dialect, weight.dtype) == ((n, k), "bitsandbytes", torch.bfloat16)
        assert weight.blocks is (q4.BlockOrder.ROW if k % block == 0 else q4.BlockOrder.FLAT)
        is_whole = index * n * k // block % 256 == 0  # no second-level block belongs to two experts
        assert weight.scale_kind is (q4.ScaleKind.DOUBLE_QUANT if nested and is_whole else q4.ScaleKind.PLAIN)
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert shares_memory(weights[0], weights, "qdata")
    assert shares_memory(weights[0], weights, "scale") is (not nested or experts == 1 or n * k // block % 256 == 0)
    same_after_writing(path, values, "bitsandbytes", tmp_path / "again")


@pytest.mark.parametrize(("n", "k"), [(3, 33), (2, 48), (1, 32)])
def test_experts_that_share_a_block_are_refused(n: int, k: int) -> None:
    """Where a block belongs to two experts, or a byte does, the parameter is refused with that reason."""
    tensors, _ = _bitsandbytes(2, n, k)
    ((key, rule, value),) = refused(tensors)
    assert (key, value) == ("experts.w1", [2, n, k])
    assert "N * K" in rule
    assert "64" in rule


@pytest.mark.parametrize("shape", [[6, 128], [1, 1, 6, 128], [768]])
def test_other_ranks_of_a_bitsandbytes_parameter_are_refused(shape: list[int]) -> None:
    """A parameter that is not called ``weight`` is read as experts or not at all; the reason shows its shape."""
    tensors, _ = _bitsandbytes(1, 6, 128)
    tensors[STATE] = _text({**json.loads(bytes(tensors[STATE].tolist())), "shape": shape})
    assert [(key, value) for key, _, value in refused(tensors)] == [("experts.w1", shape)]


def test_bitsandbytes_experts_without_a_part_are_named_once() -> None:
    """Whichever tensor is missing, the others show the experts, and one problem names it."""
    for nested in (False, True):
        for key in _bitsandbytes(nested=nested)[0]:
            tensors, _ = _bitsandbytes(nested=nested)
            del tensors[key]
            if key != STATE:  # without which nothing states whose absmax and quant_map these are
                assert problems(tensors) == {("missing_key", key)}


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("experts.w1", torch.zeros(1536, 1, dtype=torch.int8), "dtype"),
        ("experts.w1", torch.zeros(1535, 1, dtype=torch.uint8), "shape"),
        ("experts.w1", torch.zeros(3, 8, 64, dtype=torch.uint8), "shape"),
        ("experts.w1.absmax", torch.zeros(47), "shape"),
        ("experts.w1.absmax", torch.zeros(48, dtype=torch.float16), "dtype"),
        ("experts.w1.quant_map", torch.zeros(15), "shape"),
        ("experts.w1.nested_absmax", torch.zeros(1), "unknown_key"),
        ("experts.w1.absmax_scale", torch.zeros(1), "unknown_key"),
        ("experts.w1.quant_state.bitsandbytes__fp4", torch.zeros(9, dtype=torch.uint8), "unknown_key"),
        (STATE, torch.zeros(9, dtype=torch.uint8), "value"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_of_bitsandbytes_experts_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, sizes that do not fit the shape, strangers and broken texts are each named."""
    found = problems({**_bitsandbytes()[0], key: tensor})
    assert (code, key) in found or (code == "unknown_key" and any(item[0] == code for item in found))


def test_experts_that_the_codes_can_not_hold_are_not_told_apart() -> None:
    """A text that claims more experts than there are bytes is one problem of one layer, however many it claims."""
    tensors, _ = _bitsandbytes()
    tensors[STATE] = _text({**json.loads(bytes(tensors[STATE].tolist())), "shape": [4096, 8, 128]})
    schema = q4.detect(tensors)
    assert schema is not None
    assert list(schema.layers) == ["experts.w1"]
    assert ("shape", "experts.w1") in problems(tensors)


def test_bitsandbytes_experts_need_numbers_to_be_told_apart() -> None:
    """Names alone show one layer of unknown shape; reading that one says why it can't be."""
    tensors, _ = _bitsandbytes()
    infos = {name: q4.TensorInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    (layer,) = q4.detect_or_fail(infos).layers.values()
    assert (layer.module, layer.shape) == ("experts.w1", None)
    with pytest.raises(q4.DialectError) as caught:
        BitsAndBytes().read(layer, tensors.__getitem__)
    assert caught.value.value == [3, 8, 128]


def test_experts_whose_absmax_decodes_below_zero_are_read(tmp_path: Path) -> None:
    """An absmax slightly below zero, from a near-zero block next to an outlier, is legal in every expert."""
    tensors, values = _bitsandbytes(nested=True)
    name = "experts.w1"
    tensors[f"{name}.absmax"][20] = 0  # of the second expert
    tensors[f"{name}.nested_quant_map"][0] = -1.0
    tensors[f"{name}.nested_absmax"][:] = 0.51
    text = json.loads(bytes(tensors[STATE].tolist()))
    codes = tensors[f"{name}.absmax"].long()
    absmax = tensors[f"{name}.nested_quant_map"][codes] * tensors[f"{name}.nested_absmax"][0] + text["nested_offset"]
    assert float(absmax.min()) < 0
    weights = list(q4.open(stored(tmp_path / "x.safetensors", tensors)).values())
    assert len(weights) == len(values)
    for index, weight in enumerate(weights):
        assert torch.equal(weight.resolved_scale().reshape(-1), absmax[index * 16 : index * 16 + 16])
