"""Tensors of E experts: each is read as a weight of its own, as a view where a matrix is one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import q4core as q4
from q4_dialects.bitsandbytes import BitsAndBytes
from q4_dialects.modelopt import ModelOptNvfp4
from q4_dialects.swizzle import linear_from_swizzled, swizzled_from_linear
from q4_dialects.torchao import (
    TorchaoMxfp4Linear,
    TorchaoMxfp4Swizzled,
    TorchaoNvfp4Linear,
    TorchaoNvfp4Swizzled,
)
from q4core.cli import main

if TYPE_CHECKING:
    from pathlib import Path

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
E4M3 = torch.float8_e4m3fn
TORCHAO = (TorchaoNvfp4Linear(), TorchaoNvfp4Swizzled(), TorchaoMxfp4Linear(), TorchaoMxfp4Swizzled())
Tensors = dict[str, torch.Tensor]


def _random(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def _values(packed: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Return code times scale of bytes [..., K / 2], low nibble first, and float scales [..., K / block]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return E2M1[codes] * scale.repeat_interleave(block, dim=-1)


def _problems(tensors: Tensors, **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


def _refused(tensors: Tensors, **arguments: Any) -> list[tuple[str, str, object]]:
    schema = q4.detect(tensors, **arguments)
    assert schema is not None
    assert (dict(schema.layers), schema.dense) == ({}, ())
    return [(problem.key, problem.rule, problem.value) for problem in schema.unsupported]


def _stored(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


def _shares_memory(weight: q4.PackedWeight, others: list[q4.PackedWeight], field: str) -> bool:
    """Return whether a field lies in one storage with the same field of the other weights."""
    own = getattr(weight, field).untyped_storage().data_ptr()
    return all(getattr(other, field).untyped_storage().data_ptr() == own for other in others)


def _same_after_writing(path: Path, values: torch.Tensor, dialect: str, folder: Path) -> q4.Checkpoint:
    """Check that the experts of a file are written as modules of their own which read as the same weights."""
    first = q4.open(path)
    q4.save_checkpoint(folder, first, dialect=dialect)
    again = q4.open(folder)
    assert list(again) == list(first)
    for module, expected in zip(first, values, strict=True):
        assert torch.equal(again[module].codes(), first[module].codes())
        assert torch.equal(q4.dequantize(again[module], torch.float32), expected)
    return again


def _torchao(
    dialect: q4.Dialect, experts: int = 3, n: int = 128, k: int = 96, *, name: str = "experts.w1", levels: int = 2
) -> tuple[Tensors, dict[str, str], torch.Tensor]:
    """Return tensors, metadata and values [E, N, K] of experts as torchao flattens them."""
    is_nvfp4, swizzled = "nvfp4" in dialect.name, "swizzled" in dialect.name
    block, dtype = (16, E4M3) if is_nvfp4 else (32, torch.float8_e8m0fnu)
    packed = _random(experts, n, k // 2)
    scale = _random(experts, n, k // block, low=0 if is_nvfp4 else 100, high=127).view(dtype)
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
    return tensors, {name: entry, "tensor_names": json.dumps([name])}, _values(packed, number, block)


@pytest.mark.parametrize(("rows", "columns"), [(384, 4), (300, 21), (260, 5)])
def test_rows_of_one_expert_are_cut_from_swizzled_scales(rows: int, columns: int) -> None:
    """Any range of rows is the same range of the linear scales, whether it begins with a tile or inside one."""
    linear = _random(rows, columns)
    stored = swizzled_from_linear(linear)
    for start, stop in ((0, rows), (128, 256), (100, 200), (rows - 1, rows)):
        assert torch.equal(linear_from_swizzled(stored, stop - start, columns, start), linear[start:stop])


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("name", ["experts.w1", "proj.weight"])
@pytest.mark.parametrize(("experts", "n", "k"), [(3, 128, 96), (1, 130, 64), (4, 256, 320), (3, 100, 64), (2, 128, 32)])
@pytest.mark.parametrize("dialect", TORCHAO, ids=lambda dialect: dialect.name)
def test_torchao_experts_are_read_one_by_one(
    dialect: q4.Dialect, experts: int, n: int, k: int, name: str, levels: int, tmp_path: Path
) -> None:
    """A tensor [E, N, K] is E weights with one global scale each; codes and linear scales are views of the file."""
    tensors, metadata, values = _torchao(dialect, experts, n, k, name=name, levels=levels)
    path = _stored(tmp_path / "x.safetensors", {**tensors, "experts.bias": torch.ones(experts, n)}, metadata)
    checkpoint = q4.open(path)
    stem = name.removesuffix(".weight")
    assert list(checkpoint) == [f"{stem}.{index}" for index in range(experts)]
    assert list(checkpoint.dense) == ["experts.bias"]
    weights = list(checkpoint.values())
    for weight, expected in zip(weights, values, strict=True):
        assert (weight.shape, weight.dialect, weight.dtype) == ((n, k), dialect.name, torch.bfloat16)
        assert weight.global_scale is None or weight.global_scale.shape == ()
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert _shares_memory(weights[0], weights, "qdata")
    assert _shares_memory(weights[0], weights, "scale") is ("linear" in dialect.name or experts == 1)
    layers = checkpoint.schema.layers.values()
    assert {layer.shape for layer in layers} == {(n, k)}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert sum(layer.nbytes or 0 for layer in layers) == total // experts * experts


@pytest.mark.parametrize("dialect", TORCHAO, ids=lambda dialect: dialect.name)
def test_torchao_experts_are_written_as_modules_of_their_own(dialect: q4.Dialect, tmp_path: Path) -> None:
    """What becomes of E experts is E matrices by the names they are read under, and these read as the same weights."""
    tensors, metadata, values = _torchao(dialect)
    path = _stored(tmp_path / "x.safetensors", tensors, metadata)
    again = _same_after_writing(path, values, dialect.name, tmp_path / "again")
    assert again.metadata["tensor_names"] == json.dumps([f"experts.w1.{index}.weight" for index in range(3)])
    assert all("own" in " ".join(weight.notes) for weight in q4.open(path).values())


@pytest.mark.parametrize("dialect", TORCHAO, ids=lambda dialect: dialect.name)
def test_torchao_shapes_alone_tell_the_layout_of_experts(dialect: q4.Dialect) -> None:
    """Without metadata the shape of the scales tells linear from swizzled for experts too."""
    tensors, _, values = _torchao(dialect, name="proj.weight")
    schema = q4.detect_or_fail(tensors)
    assert list(schema.layers) == ["proj.0", "proj.1", "proj.2"]
    assert schema.dialects == (dialect.name,)
    for layer, expected in zip(schema.layers.values(), values, strict=True):
        assert torch.equal(q4.dequantize(dialect.read(layer, tensors.__getitem__), torch.float32), expected)


def test_torchao_experts_may_share_one_global_scale() -> None:
    """One number for all experts is every expert's, as torchao multiplies it."""
    tensors, metadata, _ = _torchao(TORCHAO[0])
    tensors["experts._w1_per_tensor_scale"] = torch.tensor(0.25)
    schema = q4.detect_or_fail(tensors, metadata=metadata)
    weights = [TORCHAO[0].read(layer, tensors.__getitem__) for layer in schema.layers.values()]
    assert [float(weight.global_scale) for weight in weights if weight.global_scale is not None] == [0.25] * 3


def test_torchao_parameters_of_one_module_are_told_apart() -> None:
    """Experts ``w1`` and ``w1_b`` of one module are two parameters, neither a stray scale of the other."""
    tensors, metadata, _ = _torchao(TORCHAO[0])
    more, entries, _ = _torchao(TORCHAO[0], name="experts.w1_b", experts=2)
    schema = q4.detect_or_fail({**tensors, **more}, metadata={**metadata, **entries})
    assert list(schema.layers) == [*(f"experts.w1.{i}" for i in range(3)), "experts.w1_b.0", "experts.w1_b.1"]


@pytest.mark.parametrize("dialect", TORCHAO, ids=lambda dialect: dialect.name)
def test_torchao_experts_without_a_part_are_named_once(dialect: q4.Dialect) -> None:
    """A part that the metadata lists and the file lacks is one problem, not one for each expert."""
    for key in _torchao(dialect, name="proj.weight")[0]:
        tensors, metadata, _ = _torchao(dialect, name="proj.weight")
        del tensors[key]
        assert _problems(tensors, metadata=metadata) >= {("missing_key", key)}
    tensors, metadata, _ = _torchao(dialect)
    del tensors["experts._w1_scale"]
    assert _problems(tensors, metadata=metadata) == {("missing_key", "experts._w1_scale")}


@pytest.mark.parametrize(
    ("part", "tensor", "code"),
    [
        ("qdata", torch.zeros(3, 128, 48, dtype=torch.int8), "dtype"),
        ("qdata", torch.zeros(3, 128, 44, dtype=torch.uint8), "shape"),
        ("qdata", torch.zeros(0, 128, 48, dtype=torch.uint8), "shape"),
        ("scale", torch.zeros(3, 128, 6, dtype=torch.uint8), "dtype"),
        ("scale", torch.zeros(2, 128, 6, dtype=E4M3), "shape"),
        ("scale", torch.zeros(3, 6, 128, dtype=E4M3), "shape"),
        ("scale", torch.zeros(128, 6, dtype=E4M3), "shape"),
        ("per_tensor_scale", torch.zeros(3), "shape"),
        ("per_tensor_scale", torch.zeros(2, 1, 1), "shape"),
        ("per_tensor_scale", torch.zeros((3, 1, 1), dtype=torch.bfloat16), "dtype"),
        ("zero_point", torch.zeros(1), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_of_torchao_experts_is_named(part: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, shapes of another number of experts, and unknown parts are each named."""
    tensors, metadata, _ = _torchao(TORCHAO[0])
    assert (code, f"experts._w1_{part}") in _problems({**tensors, f"experts._w1_{part}": tensor}, metadata=metadata)


def test_swizzled_scales_of_experts_must_fill_their_tiles() -> None:
    """Where E · N rows fill fewer tiles than E times those of N, torchao could not have stored them."""
    tensors, metadata, _ = _torchao(TORCHAO[1], experts=2)
    tensors["experts._w1_qdata"] = _random(2, 20, 48)
    tensors["experts._w1_scale"] = torch.zeros(2, 32, 32, dtype=torch.uint8).view(E4M3)
    assert ("shape", "experts._w1_qdata") in _problems(tensors, metadata=metadata)


def test_torchao_tells_no_more_experts_than_there_can_be() -> None:
    """A header that claims very many experts is refused with the number, in one line."""
    tensors, metadata, _ = _torchao(TORCHAO[0], experts=4097, n=1, k=32)
    assert [(key, value) for key, _, value in _refused(tensors, metadata=metadata)] == [("experts.w1", 4097)]


def test_an_expert_and_a_module_of_its_name_are_ambiguous() -> None:
    """Where an expert's name is also that of another module, the file is refused, and neither is lost."""
    tensors, metadata, _ = _torchao(TORCHAO[0])
    other = {"experts.w1.1.qdata": _random(4, 16), "experts.w1.1.scale": torch.ones(4, 2).to(E4M3)}
    assert ("ambiguous", "experts.w1.1") in _problems({**tensors, **other}, metadata=metadata)


def test_matrices_of_another_parameter_are_still_refused_by_name() -> None:
    """A 2-D parameter that is not called ``weight`` is listed as torchao's."""
    tensors, metadata, _ = _torchao(TORCHAO[0], experts=1)
    tensors = {name: tensor[0] for name, tensor in tensors.items()}
    assert [(key, value) for key, _, value in _refused(tensors, metadata=metadata)] == [
        ("experts.w1", "torchao NVFP4Tensor")
    ]


@pytest.mark.parametrize("name", ["experts.w1", "proj.weight"])
def test_convert_leaves_the_old_entry_of_experts_behind(name: str, tmp_path: Path) -> None:
    """``q4 convert`` writes no header entry that speaks of the tensors which the experts came from."""
    tensors, metadata, values = _torchao(TORCHAO[1], name=name)
    path = _stored(tmp_path / "x.safetensors", tensors, {**metadata, "author": "me"})
    out = tmp_path / "y.safetensors"
    assert main(["convert", str(path), str(out), "--dialect", TORCHAO[0].name]) == 0
    again = q4.open(out)
    assert name not in again.metadata
    assert again.metadata["author"] == "me"
    for weight, expected in zip(again.values(), values, strict=True):
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)


def _bitsandbytes(
    experts: int = 3, n: int = 8, k: int = 128, block: int = 64, *, name: str = "experts.w1", nested: bool = False
) -> tuple[Tensors, torch.Tensor]:
    """Return tensors and values [E, N, K] of experts as bitsandbytes stores them: flat over all experts."""
    total = experts * n * k
    count = -(-total // block)
    random = torch.Generator().manual_seed(total)
    facts: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [experts, n, k]}
    packed = _random(-(-total // 2), 1)
    absmax = torch.rand(count, generator=random)
    table = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook)
    tensors = {name: packed, f"{name}.absmax": absmax, f"{name}.quant_map": table}
    if nested:
        facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        stored, second = _random(count), torch.rand(-(-count // 256), generator=random)
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
    path = _stored(tmp_path / "x.safetensors", {**tensors, "experts.bias": torch.ones(experts, n)})
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
    assert _shares_memory(weights[0], weights, "qdata")
    assert _shares_memory(weights[0], weights, "scale") is (not nested or experts == 1 or n * k // block % 256 == 0)
    _same_after_writing(path, values, "bitsandbytes", tmp_path / "again")


@pytest.mark.parametrize(("n", "k"), [(3, 33), (2, 48), (1, 32)])
def test_experts_that_share_a_block_are_refused(n: int, k: int) -> None:
    """Where a block belongs to two experts, or a byte does, the parameter is refused with that reason."""
    tensors, _ = _bitsandbytes(2, n, k)
    ((key, rule, value),) = _refused(tensors)
    assert (key, value) == ("experts.w1", [2, n, k])
    assert "N * K" in rule
    assert "64" in rule


@pytest.mark.parametrize("shape", [[6, 128], [1, 1, 6, 128], [768]])
def test_other_ranks_of_a_bitsandbytes_parameter_are_refused(shape: list[int]) -> None:
    """A parameter that is not called ``weight`` is read as experts or not at all; the reason shows its shape."""
    tensors, _ = _bitsandbytes(1, 6, 128)
    tensors[STATE] = _text({**json.loads(bytes(tensors[STATE].tolist())), "shape": shape})
    assert [(key, value) for key, _, value in _refused(tensors)] == [("experts.w1", shape)]


def test_bitsandbytes_experts_without_a_part_are_named_once() -> None:
    """Whichever tensor is missing, the others show the experts, and one problem names it."""
    for nested in (False, True):
        for key in _bitsandbytes(nested=nested)[0]:
            tensors, _ = _bitsandbytes(nested=nested)
            del tensors[key]
            if key != STATE:  # without which nothing tells whose absmax and quant_map these are
                assert _problems(tensors) == {("missing_key", key)}


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
    found = _problems({**_bitsandbytes()[0], key: tensor})
    assert (code, key) in found or (code == "unknown_key" and any(item[0] == code for item in found))


def test_experts_that_the_codes_can_not_hold_are_not_told_apart() -> None:
    """A text that claims more experts than there are bytes is one problem of one layer, however many it claims."""
    tensors, _ = _bitsandbytes()
    tensors[STATE] = _text({**json.loads(bytes(tensors[STATE].tolist())), "shape": [4096, 8, 128]})
    schema = q4.detect(tensors)
    assert schema is not None
    assert list(schema.layers) == ["experts.w1"]
    assert ("shape", "experts.w1") in _problems(tensors)


def test_bitsandbytes_experts_need_numbers_to_be_told_apart() -> None:
    """Names alone show one layer of unknown shape; reading that one says why it can't be."""
    tensors, _ = _bitsandbytes()
    infos = {name: q4.TensorInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    (layer,) = q4.detect_or_fail(infos).layers.values()
    assert (layer.module, layer.shape) == ("experts.w1", None)
    with pytest.raises(q4.DialectError) as caught:
        BitsAndBytes().read(layer, tensors.__getitem__)
    assert caught.value.value == [3, 8, 128]


def _modelopt(
    experts: int = 3, n: int = 24, k: int = 96, *, name: str = "experts.gate_up_proj", each: bool = True
) -> tuple[Tensors, torch.Tensor]:
    """Return tensors and values [E, N, K] of experts as ModelOpt exports them: transposed, packed along K."""
    packed = _random(experts, k // 2, n)
    scale = _random(experts, k // 16, n, high=127).view(E4M3)
    total = torch.rand(experts if each else (), generator=torch.Generator().manual_seed(n))
    tensors = {name: packed, f"{name}_weight_scale": scale, f"{name}_weight_scale_2": total}
    number = scale.transpose(1, 2).to(torch.float32) * total.reshape(-1, 1, 1)
    return tensors, _values(packed.transpose(1, 2), number, 16)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", ["experts.gate_up_proj", "layers.0.experts.down_proj"])
@pytest.mark.parametrize(("experts", "n", "k"), [(3, 24, 96), (1, 16, 32), (2, 128, 64), (5, 7, 16)])
def test_modelopt_experts_are_transposed_views(
    experts: int, n: int, k: int, name: str, each: bool, tmp_path: Path
) -> None:
    """Codes and scales of an expert are the transposed views of its slice, with one global scale and the input's."""
    tensors, values = _modelopt(experts, n, k, name=name, each=each)
    inputs = {f"{name}_input_scale": torch.tensor(0.25), f"{name}_bias": torch.ones(experts, n)}
    path = _stored(tmp_path / "x.safetensors", {**tensors, **inputs})
    checkpoint = q4.open(path)
    assert list(checkpoint) == [f"{name}.{index}" for index in range(experts)]
    assert list(checkpoint.dense) == [f"{name}_bias"]
    weights = list(checkpoint.values())
    for weight, expected in zip(weights, values, strict=True):
        assert (weight.shape, weight.dialect) == ((n, k), "modelopt-nvfp4")
        assert (weight.global_scale is not None, weight.activation_scale is not None) == (True, True)
        assert weight.qdata.stride() == (1, n)
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert _shares_memory(weights[0], weights, "qdata")
    assert _shares_memory(weights[0], weights, "scale")
    again = _same_after_writing(path, values, "modelopt-nvfp4", tmp_path / "again")
    assert [float(weight.activation_scale) for weight in again.values() if weight.activation_scale is not None] == [
        0.25
    ] * experts


def test_modelopt_scales_of_one_expert_may_be_squeezed() -> None:
    """The exporter drops a leading 1 from the scales of a single expert, but not from its codes."""
    tensors, values = _modelopt(1, each=False)
    tensors["experts.gate_up_proj_weight_scale"] = tensors["experts.gate_up_proj_weight_scale"][0]
    (layer,) = q4.detect_or_fail(tensors).layers.values()
    weight = ModelOptNvfp4().read(layer, tensors.__getitem__)
    assert torch.equal(q4.dequantize(weight, torch.float32), values[0])


def test_projections_of_modelopt_experts_stand_side_by_side() -> None:
    """The scales of one projection are no strangers to the other."""
    one, _ = _modelopt(2)
    two, _ = _modelopt(2, name="experts.down_proj")
    names = [f"experts.{part}.{index}" for part in ("gate_up_proj", "down_proj") for index in range(2)]
    assert list(q4.detect_or_fail({**one, **two}).layers) == names


@pytest.mark.parametrize("part", ["", "_weight_scale", "_weight_scale_2"])
def test_modelopt_experts_without_a_part_are_named_once(part: str) -> None:
    """Any two of the three are experts that lack the third."""
    tensors, _ = _modelopt()
    del tensors[f"experts.gate_up_proj{part}"]
    assert _problems(tensors) == {("missing_key", f"experts.gate_up_proj{part}")}


@pytest.mark.parametrize(
    ("part", "tensor", "code"),
    [
        ("", torch.zeros(3, 48, 24, dtype=torch.int8), "dtype"),
        ("", torch.zeros(3, 44, 24, dtype=torch.uint8), "shape"),
        ("", torch.zeros(0, 48, 24, dtype=torch.uint8), "shape"),
        ("_weight_scale", torch.zeros(3, 6, 24, dtype=torch.uint8), "dtype"),
        ("_weight_scale", torch.zeros(3, 24, 6, dtype=E4M3), "shape"),
        ("_weight_scale", torch.zeros(2, 6, 24, dtype=E4M3), "shape"),
        ("_weight_scale", torch.zeros(6, 24, dtype=E4M3), "shape"),
        ("_weight_scale_2", torch.zeros(3, 1, 1), "shape"),
        ("_weight_scale_2", torch.zeros(2), "shape"),
        ("_weight_scale_2", torch.zeros(3, dtype=torch.bfloat16), "dtype"),
        ("_input_scale", torch.zeros(2), "shape"),
        ("_weight_scale_3", torch.zeros(1), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_of_modelopt_experts_is_named(part: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, shapes of another number of experts, and unknown parts are each named."""
    key = f"experts.gate_up_proj{part}"
    assert (code, key) in _problems({**_modelopt()[0], key: tensor})


def test_modelopt_experts_that_are_not_transposed_are_refused() -> None:
    """Rows of [E, N, K / 2] are no layout that the exporter writes: named, and not guessed."""
    tensors, _ = _modelopt()
    tensors = {key: tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for key, tensor in tensors.items()}
    ((key, rule, value),) = _refused(tensors)
    assert (key, value) == ("experts.gate_up_proj", [3, 24, 48])
    assert "[E, K / 2, N]" in rule


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        (torch.zeros(3, 32, 16).to(E4M3), torch.ones(3)),
        (torch.zeros(3, 8, 64, dtype=torch.uint8), torch.ones(3, 16, 1, dtype=torch.bfloat16)),
        (torch.zeros(3, 32, 16, dtype=torch.uint8), torch.zeros(3, 2, 16, dtype=torch.uint8)),
    ],
    ids=["fp8", "int4", "mxfp4"],
)
def test_other_formats_of_modelopt_experts_are_named(codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Experts of ModelOpt's other formats are listed by name; only NVFP4 is read."""
    tensors = {"experts.down_proj": codes, "experts.down_proj_weight_scale": scale}
    assert [(key, value) for key, _, value in _refused(tensors)] == [("experts.down_proj", "modelopt experts")]


@pytest.mark.parametrize(
    "target", ["torchao-nvfp4-swizzled", "modelopt-nvfp4", "comfyui-nvfp4", "torchao-nvfp4-linear"]
)
@pytest.mark.parametrize("source", ["torchao", "modelopt"])
def test_experts_pass_between_dialects_as_matrices(source: str, target: str, tmp_path: Path) -> None:
    """Experts of one library are written as another's modules with the same codes, scale bytes and names."""
    if source == "torchao":
        tensors, metadata, values = _torchao(TORCHAO[1])
        path = _stored(tmp_path / "x.safetensors", tensors, metadata)
    else:
        tensors, values = _modelopt(3, 32, 64)
        path = _stored(tmp_path / "x.safetensors", tensors)
    _same_after_writing(path, values, target, tmp_path / "again")


def test_compressed_tensors_experts_are_refused() -> None:
    """The package packs matrices only, so that three dimensions have no meaning of its own: named, with the shape."""
    tensors = {
        "experts.weight_packed": _random(2, 16, 32),
        "experts.weight_scale": _random(2, 16, 4, high=127).view(E4M3),
        "experts.weight_global_scale": torch.ones(2, 1),
    }
    ((key, rule, value),) = _refused(tensors)
    assert (key, value) == ("experts", [2, 16, 32])
    assert "2 dimensions" in rule
