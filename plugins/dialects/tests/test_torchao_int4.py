"""torchao's int4: plain, with zero points that offsets stand for, and tiles in the order of CUDA's tensor cores."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch
from mutants import judge_mutant

import q4core as q4
from q4_dialects.torchao_int4 import TorchaoInt4, TorchaoInt4TilePacked

if TYPE_CHECKING:
    from pathlib import Path

PLAIN, TILED = TorchaoInt4(), TorchaoInt4TilePacked()
Tensors = dict[str, torch.Tensor]
SHAPES = [(1, 32, 32), (72, 320, 64), (40, 192, 192), (7, 96, 48), (128, 256, 128), (3, 10, 5)]
"""N, K and group."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("usual", "symmetric", "far", "scaled", "float8")
TILES = [(8, 1024, 32), (1, 64, 64), (13, 320, 128), (72, 1100, 256), (40, 2048, 32), (9, 96, 64)]


def _numbers(n: int, k: int, group: int, dtype: torch.dtype, kind: str) -> tuple[np.ndarray[Any, Any], ...]:
    """Return codes -8 … 7 [N, K], and scale, zero [N, groups] and the weight in float32, rounded step by step."""
    random = np.random.default_rng([n, k, group, KINDS.index(kind)])
    codes, groups = random.integers(-8, 8, (n, k)), -(-k // group)
    scale = random.normal(0, 0.02, (n, groups))
    zero = np.zeros_like(scale) if kind in {"symmetric", "float8"} else random.normal(0, 0.05, (n, groups))
    if kind == "far":
        zero *= 2.0**-30  # no float32 holds it next to the scale
    codes[0, :group], scale[-1, -1], zero[-1, -1] = -8, 0.0, 0.0
    scale, zero = (torch.from_numpy(item).to(dtype).float().numpy() for item in (scale, zero))
    each = [np.repeat(item, group, 1)[:, :k] for item in (scale, zero)]
    return codes, scale, zero, codes.astype(np.float32) * each[0] + each[1]


def _entry(kind: str, names: tuple[str, ...], shape: tuple[int, ...], group: int, **facts: Any) -> str:
    data = {**facts, "block_size": [*[1] * (len(shape) - 1), group], "shape": list(shape)}
    return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": list(names)})


def _plain(
    n: int = 16, k: int = 128, group: int = 32, dtype: torch.dtype = torch.bfloat16, kind: str = "usual"
) -> tuple[Tensors, dict[str, str], torch.Tensor]:
    codes, scale, zero, value = _numbers(n, k, group, dtype, kind)
    nibbles = codes & 15
    packed = (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8).view(np.int8)
    tensors = {
        "qdata": torch.from_numpy(packed),
        "scale": torch.from_numpy(scale.T.copy()).to(dtype),
        "zero_point": torch.from_numpy(zero.T.copy()).to(dtype),
    }
    weight = torch.from_numpy(value)
    if kind == "scaled":
        tensors["act_pre_scale"] = torch.rand(k, generator=torch.Generator().manual_seed(0)).to(dtype)
        weight *= tensors["act_pre_scale"].float()
    active = {"_type": "torch.dtype", "_data": "float8_e4m3fn" if kind == "float8" else str(dtype)[6:]}
    entry = _entry("Int4Tensor", tuple(tensors), (n, k), group, activation_dtype=active)
    stored = {f"proj._weight_{name}": item for name, item in tensors.items()}
    return stored, {"proj.weight": entry, "tensor_names": '["proj.weight"]'}, weight


def _tiled(n: int = 13, k: int = 320, group: int = 64) -> tuple[Tensors, dict[str, str], torch.Tensor]:
    """Return a tile-packed layer, each code put where the documented map has it."""
    codes, scale, zero, value = _numbers(n, k, group, torch.bfloat16, "usual")
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    words = np.zeros((rows // 8, columns // 128, 32, 4), np.int64)
    for row, column in itertools.product(range(n), range(k)):
        inside, half = column % 16, column % 32 // 16
        place = (row // 8, column // 128, row % 8 * 4 + inside // 2 % 4, column % 128 // 32)
        words[place] |= int(codes[row, column] + 8) << (4 * (2 * half + inside // 8 + 4 * (inside % 2)))
    both = torch.zeros(columns // group, rows, 2)
    both[: scale.shape[1], :n, 0], both[: scale.shape[1], :n, 1] = torch.from_numpy(scale.T), torch.from_numpy(zero.T)
    stored = {
        "proj._weight_qdata": torch.from_numpy(words.astype(np.uint32).view(np.int32)),
        "proj._weight_scale_and_zero": both.to(torch.bfloat16),
    }
    entry = _entry(TILED.tensor_type, ("qdata", "scale_and_zero"), (n, k), group)
    return stored, {"proj.weight": entry}, torch.from_numpy(value)


def _read(tensors: Tensors, metadata: dict[str, str] | None, module: str = "proj") -> q4.PackedWeight:
    layer = q4.detect_or_fail(tensors, metadata=metadata).layers[module]
    weight = next(item for item in (PLAIN, TILED) if item.name == layer.dialect).read(layer, tensors.__getitem__)
    weight.check_values()
    assert (layer.shape, layer.block_size) == (weight.shape, weight.block_size)
    return weight


def _problems(tensors: Tensors, metadata: dict[str, str] | None) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, metadata=metadata)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize("has_metadata", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_plain_layers_have_their_values(
    n: int, k: int, group: int, dtype: torch.dtype, kind: str, has_metadata: bool
) -> None:
    """Each case has the formula's float32, and gives its own tensors again, byte for byte."""
    tensors, metadata, value = _plain(n, k, group, dtype, kind)
    weight = _read(tensors, metadata if has_metadata else None)
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    if kind != "far":
        assert (weight.codebook is None) == (dtype is not torch.float32)
    elif n > 1 and dtype is torch.bfloat16:
        assert weight.codebook is not None
    assert any("float8" in note for note in weight.notes) == (kind == "float8" and has_metadata)
    written = PLAIN.write("proj", weight)
    assert written.tensors.keys() == tensors.keys()
    assert all(torch.equal(written.tensors[key], tensors[key]) for key in tensors)
    if has_metadata:
        assert json.loads(written.metadata["proj.weight"]) == json.loads(metadata["proj.weight"])


@pytest.mark.parametrize(("n", "k", "group"), TILES)
def test_tiles_have_their_values(n: int, k: int, group: int) -> None:
    """Codes are found where the map has them, without the padding; a short last group is one."""
    tensors, metadata, value = _tiled(n, k, group)
    weight = _read(tensors, metadata)
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    written = TILED.write("proj", weight)
    again = _read(dict(written.tensors), dict(written.metadata))
    assert torch.equal(q4.dequantize(again, torch.float32), value)
    if k % 1024 == n % 8 == 0:
        assert all(torch.equal(written.tensors[key], tensors[key]) for key in tensors)


def test_experts_are_layers_of_their_own() -> None:
    """A stack under any name gives a layer for each expert."""
    parts = [_plain(kind=kind) for kind in ("usual", "symmetric")]
    tensors = {
        f"experts._up_{name}": torch.stack([part[0][f"proj._weight_{name}"] for part in parts])
        for name in ("qdata", "scale", "zero_point")
    }
    metadata = {"experts.up": _entry("Int4Tensor", ("qdata", "scale", "zero_point"), (2, 16, 128), 32)}
    for index, (_, _, value) in enumerate(parts):
        assert torch.equal(q4.dequantize(_read(tensors, metadata, f"experts.up.{index}"), torch.float32), value)


@pytest.mark.parametrize("kind", ["Int4PlainInt32Tensor", "Int4PreshuffledTensor"])
def test_other_classes_are_refused_by_name(kind: str) -> None:
    """Layouts of single devices are listed, not read."""
    tensors, _, _ = _plain()
    metadata = {"proj.weight": _entry(kind, ("qdata", "scale", "zero_point"), (16, 128), 32)}
    schema = q4.detect(tensors, metadata=metadata)
    assert schema is not None
    assert [(item.key, item.value) for item in schema.unsupported] == [("proj", f"torchao {kind}")]
    assert (dict(schema.layers), schema.dense) == ({}, ())


def test_tiles_without_metadata_are_named() -> None:
    """Nothing else holds N, K and the group size."""
    assert ("missing_key", "metadata proj.weight") in _problems(_tiled()[0], None)


DAMAGE: dict[str, Any] = {
    "gone": lambda _: None,
    "cut": lambda tensor: tensor[:, :-1],
    "short": lambda tensor: tensor[:-1],
    "flat": lambda tensor: tensor.reshape(-1),
    "int64": lambda tensor: tensor.to(torch.int64),
    "float64": lambda tensor: tensor.to(torch.float64),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("make", "part"),
    [
        *((_plain, part) for part in ("qdata", "scale", "zero_point")),
        *((_tiled, part) for part in ("qdata", "scale_and_zero")),
    ],
    ids=lambda item: item if isinstance(item, str) else item.__name__[1:],
)
def test_damage_is_named(make: Any, part: str, damage: str) -> None:
    """A tensor that is missing, or of another dtype or shape, is named, or the entry that it contradicts."""
    tensors, metadata, _ = make()
    changed = DAMAGE[damage](tensors.pop(f"proj._weight_{part}"))
    if changed is not None:
        tensors[f"proj._weight_{part}"] = changed
    names = {name for _, name in _problems(tensors, metadata)}
    assert any(name.startswith(("proj._weight_", "metadata proj.weight.")) for name in names)
    if damage in {"gone", "flat", "int64", "float64"}:
        assert f"proj._weight_{part}" in names


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("act_pre_scale", torch.ones(127), "shape"),
        ("act_pre_scale", torch.ones(128, dtype=torch.int32), "dtype"),
        ("act_pre_scale", torch.full((128,), float("nan")), "value"),
        ("scale", torch.full((4, 16), float("inf"), dtype=torch.bfloat16), "value"),
        ("zero_point", torch.full((4, 16), float("nan"), dtype=torch.bfloat16), "value"),
        ("row_scale", torch.ones(16), "unknown_key"),
    ],
)
def test_wrong_part_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong pre-scales, numbers that are not finite and unknown scales are named."""
    tensors, metadata, _ = _plain()
    assert (code, f"proj._weight_{key}") in _problems({**tensors, f"proj._weight_{key}": tensor}, metadata)


@pytest.mark.parametrize("make", [_plain, _tiled], ids=["plain", "tiled"])
@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("block_size", None),
        ("block_size", [1, 48]),
        ("block_size", [2, 32]),
        ("block_size", 32),
        ("shape", None),
        ("shape", [0, 128]),
        ("shape", [True, 128]),
        ("shape", [16, 2**70]),
        ("shape", ["16", "128"]),
        ("_tensor_data_names", ["qdata"]),
        ("_tensor_data_names", None),
        ("_tensor_data_names", ["qdata", "scale", "zero_point", "scale_and_zero"]),
    ],
)
def test_entry_that_contradicts_is_named(make: Any, fact: str, value: object) -> None:
    """What the metadata says must be what the tensors have."""
    tensors, metadata, _ = make()
    entry = json.loads(metadata["proj.weight"])
    (entry if fact.startswith("_") else entry["_data"])[fact] = value
    names = {name for _, name in _problems(tensors, {"proj.weight": json.dumps(entry)})}
    assert any(name.startswith(("metadata proj.weight.", "proj._weight_")) for name in names)


@pytest.mark.parametrize(
    ("dialect", "change", "name"),
    [
        (PLAIN, {"offset": torch.full((8, 2), 2.0**-30, dtype=torch.bfloat16)}, "offset"),
        (PLAIN, {"scale": torch.ones(8, 2), "offset": torch.ones(8, 2)}, "offset"),
        (PLAIN, {"codebook": torch.arange(16.0)}, "codebook"),
        (PLAIN, {"activation_scale": torch.ones(())}, "activation_scale"),
        (TILED, {"scale": torch.ones(8, 2, dtype=torch.float16)}, "scale"),
    ],
    ids=["offset", "float32", "codebook", "activations", "float16"],
)
def test_what_torchao_has_no_place_for_is_refused(dialect: q4.Dialect, change: dict[str, Any], name: str) -> None:
    """Offsets that no zero point stands for, and other dtypes, are refused by name."""
    weight = q4.quantize(torch.randn(8, 64), "q4_1", block_size=32)
    ones = torch.ones(8, 2, dtype=torch.bfloat16)
    with pytest.raises(q4.DialectError) as caught:
        dialect.write("proj", attrs.evolve(weight, **{"scale": ones, "offset": ones, **change}))
    assert caught.value.name == name


def test_a_file_is_written_with_metadata_and_config(tmp_path: Path) -> None:
    """What was read is saved and opened again, with the entries and config that transformers looks for."""
    tensors, metadata, value = _plain()
    weight = _read(tensors, metadata)
    path = tmp_path / "folder"
    q4.save_checkpoint(path, {"proj": weight}, dialect="torchao-int4", config={"model_type": "x"})
    with q4.open(path) as opened:
        assert opened.schema.layers["proj"].named
        assert torch.equal(q4.dequantize(opened["proj"], torch.float32), value)
    entry = json.loads((path / "config.json").read_text())["quantization_config"]["quant_type"]["default"]
    assert (entry["_type"], entry["_data"]["group_size"]) == ("Int4WeightOnlyConfig", 32)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_mutants_are_read_or_have_problems(is_tiled: bool) -> None:
    """Whatever is wrong with tensors, no error is untyped."""
    tensors, metadata, _ = _tiled(9, 96, 32) if is_tiled else _plain(kind="scaled")
    for seed in range(400):
        judge_mutant(tensors, seed, metadata=metadata if is_tiled or seed % 2 else None)
