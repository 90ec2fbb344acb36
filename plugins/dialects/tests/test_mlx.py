"""MLX: affine codes of every width, MXFP4 and NVFP4, with and without a config, and ``metal``'s keys."""

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
from q4_dialects.mlx import Mlx

if TYPE_CHECKING:
    from pathlib import Path

DIALECT = Mlx()
Tensors = dict[str, torch.Tensor]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2, np.float32) * np.repeat(np.array([1, -1], np.float32), 8)
SHAPES = [(1, 1), (3, 1), (16, 3), (40, 5)]
"""N, and groups in a row."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CASES = list(itertools.product((1, 2, 3, 4, 5, 6, 8), (32, 64, 128), SHAPES, FLOATS))


def _words(codes: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Return codes [R, K] as uint32 words: code i of a row starts at bit ``bits * i`` of the row."""
    rows, columns = codes.shape
    stream = (codes[..., None] >> np.arange(bits)) & 1
    words = stream.reshape(rows, columns * bits // 32, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return torch.from_numpy(words.sum(-1).astype(np.uint32))


def _affine(
    n: int, k: int, bits: int = 4, group: int = 64, dtype: torch.dtype = torch.float16, prefix: str = "proj"
) -> tuple[Tensors, torch.Tensor]:
    """Return the stored tensors and the weight in float32, product and sum rounded once each."""
    random = np.random.default_rng([n, k, bits, group])
    codes = random.integers(0, 1 << bits, (n, k))
    scale = torch.from_numpy(random.normal(0, 0.05, (n, k // group)).astype(np.float32)).to(dtype)
    bias = torch.from_numpy(random.normal(0, 0.3, (n, k // group)).astype(np.float32)).to(dtype)
    codes[0], scale[0, 0], bias[0, 0] = 0, 0.0, 0.0  # a block of zeros
    codes[-1, -group:] = (1 << bits) - 1  # and one of the largest code
    each = [np.repeat(item.float().numpy(), group, 1) for item in (scale, bias)]
    value = codes.astype(np.float32) * each[0] + each[1]
    tensors = {"weight": _words(codes, bits), "scales": scale, "biases": bias}
    return {f"{prefix}.{suffix}": item for suffix, item in tensors.items()}, torch.from_numpy(value)


def _bytes_scaled(mode: str, n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    """Return an MXFP4 or NVFP4 layer, and its weight."""
    random = np.random.default_rng([n, k])
    codes, group = random.integers(0, 16, (n, k)), 32 if mode == "mxfp4" else 16
    scale = random.integers(100 if mode == "mxfp4" else 0, 127, (n, k // group)).astype(np.uint8)
    scale[0, 0] = 0
    tiny = np.where(scale < 8, scale * 2.0**-9, (1 + (scale & 7) / 8) * 2.0 ** ((scale >> 3) - 7.0))
    number = np.ldexp(1.0, scale.astype(int) - 127) if mode == "mxfp4" else tiny
    value = E2M1[codes] * np.repeat(number.astype(np.float32), group, 1)
    return {"proj.weight": _words(codes, 4), "proj.scales": torch.from_numpy(scale)}, torch.from_numpy(value)


def _config(bits: int = 4, group: int = 64, **facts: Any) -> dict[str, Any]:
    return {"quantization": {"group_size": group, "bits": bits, **facts}}


def _read(tensors: Tensors, module: str = "proj", **arguments: Any) -> q4.PackedWeight:
    layer = q4.detect_or_fail(tensors, **arguments).layers[module]
    assert layer.dialect == "mlx"
    weight = DIALECT.read(layer, tensors.__getitem__)
    weight.check_values()
    return weight


def _problems(tensors: Tensors, **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize(("bits", "group", "shape", "dtype"), CASES)
def test_affine_codes_have_their_values(bits: int, group: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Each width, group and dtype gives the formula's float32; 4 and 8 bits are views, written again as they were."""
    n, k = shape[0], shape[1] * group
    tensors, value = _affine(n, k, bits, group, dtype)
    weight = _read(tensors, config=_config(bits, group))
    assert (weight.format.name, weight.block_size) == ("q4_1" if bits <= 4 else "q8_affine", group)
    assert (weight.shape, weight.dtype) == ((n, k), dtype)
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    assert (weight.qdata.data_ptr() == tensors["proj.weight"].data_ptr()) == (bits in {4, 8})
    written = dict(DIALECT.write("proj", weight).tensors)
    if bits in {4, 8}:
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[key], tensors[key]) for key in tensors)
    again = _read(written, config=_config(4 if bits <= 4 else 8, group))
    assert torch.equal(q4.dequantize(again, torch.float32), value)


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 96), (40, 320)])
def test_scales_of_one_byte(mode: str, n: int, k: int, is_stated: bool) -> None:
    """MXFP4 and NVFP4 have their values, are views, and their mode follows from shapes where no config says it."""
    tensors, value = _bytes_scaled(mode, n, k)
    weight = _read(tensors, config={"quantization": {"mode": mode}} if is_stated else None)
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    assert weight.qdata.data_ptr() == tensors["proj.weight"].data_ptr()
    assert weight.scale.data_ptr() == tensors["proj.scales"].data_ptr()
    written = DIALECT.write("proj", weight).tensors
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_experts_are_layers_of_their_own(bits: int) -> None:
    """Stacks of experts give a layer each."""
    parts = [_affine(6 + 0 * index, 128, bits, 64) for index in range(3)]
    stacked = {key: torch.stack([tensors[key] for tensors, _ in parts]) for key in parts[0][0]}
    stacked["proj.scales"][1] *= -2
    for index in range(3):
        weight = _read(stacked, f"proj.{index}", config=_config(bits))
        one = {key: tensor[index].clone() for key, tensor in stacked.items()}
        alone = _read(one, config=_config(bits))
        assert torch.equal(q4.dequantize(weight, torch.float32), q4.dequantize(alone, torch.float32))


def test_metal_has_another_name_for_biases() -> None:
    """``qbiases`` of transformers' ``metal`` are biases."""
    tensors, value = _affine(16, 128, dtype=torch.float32)
    tensors["proj.qbiases"] = tensors.pop("proj.biases")
    config = {"quantization_config": {"quant_method": "metal", "bits": 4, "group_size": 64}}
    assert torch.equal(q4.dequantize(_read(tensors, config=config)), value)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"bits": 8, "group_size": 32}},
        {"quantization": {"bits": 4, "group_size": 64, "proj": {"bits": 8, "group_size": 32}}},
        {"quantization": {"mode": "mxfp4", "proj": {"bits": 8, "group_size": 32}}},
        {"quantization_config": {"quant_method": "auto-round", "packing_format": "mlx", "bits": 8, "group_size": 32}},
        {
            "quantization_config": {
                "quant_method": "auto-round",
                "packing_format": "auto_round:mlx",
                "bits": 4,
                "group_size": 64,
                "extra_config": {"proj": {"bits": 8, "group_size": 32}},
            }
        },
    ],
    ids=["quantization_config", "module", "other mode", "auto-round", "extra_config"],
)
def test_config_says_the_width(config: dict[str, Any]) -> None:
    """A layer of 8 bits in groups of 32, whose shapes 4 bits in groups of 64 have too, is read as stated."""
    tensors, value = _affine(16, 128, 8, 32)
    assert torch.equal(q4.dequantize(_read(tensors, config=config), torch.float32), value)


def test_sizes_of_other_tensors_say_the_width() -> None:
    """Without a config the one width counts whose K is the size of another tensor; none or two are ambiguous."""
    tensors, value = _affine(16, 128, 8, 32)
    weight = _read({**tensors, "norm.weight": torch.ones(128)})
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    assert "8 bits in groups of 32, by the sizes" in weight.notes[0]
    assert _problems(tensors) == {("ambiguous", "proj")}
    alone, _ = _affine(256, 128, 8, 32)  # 4 bits have as many columns as the layer has rows, which says nothing
    assert _problems({**alone, "proj.bias": torch.ones(256)}) == {("ambiguous", "proj")}
    both = {**tensors, "norm.weight": torch.ones(128), "embedding.weight": torch.ones(8, 256)}
    assert _problems(both) == {("ambiguous", "proj")}
    weight = _read(tensors, options={"mlx_bits": 8})
    assert (weight.shape, weight.notes) == ((16, 128), ())


def test_two_readings_without_a_usual_one_are_refused() -> None:
    """3 bits in groups of 64 and 6 bits in groups of 32 have the same shapes, and neither is assumed."""
    tensors, value = _affine(16, 128, 3, 64)
    assert _problems(tensors) == {("ambiguous", "proj")}
    weight = _read(tensors, options={"mlx_bits": 3})
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    with pytest.raises(q4.DialectError) as caught:
        q4.detect(tensors, options={"mlx_bits": 7})
    assert (caught.value.name, caught.value.value) == ("mlx_bits", 7)


def test_mxfp8_is_refused_by_name() -> None:
    """8-bit floats in words are listed, not read."""
    tensors = {
        "proj.weight": torch.zeros(16, 32, dtype=torch.uint32),
        "proj.scales": torch.zeros(16, 4, dtype=torch.uint8),
    }
    for config in (None, {"quantization": {"mode": "mxfp8"}}):
        schema = q4.detect(tensors, config=config)
        assert schema is not None
        assert [(item.key, item.value) for item in schema.unsupported] == [("proj", "mlx mxfp8")]
        assert schema.dense == ()


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        ({"bits": 7}, "config.json's quantization.bits"),
        ({"bits": True}, "config.json's quantization.bits"),
        ({"bits": "4"}, "config.json's quantization.bits"),
        ({"group_size": 48}, "config.json's quantization.group_size"),
        ({"mode": "mxfp4"}, "config.json's quantization.group_size"),
        ({"mode": "nf4"}, "config.json's quantization.mode"),
        ({"proj": {"bits": 16}}, "config.json's quantization['proj'].bits"),
        ({"bits": 8}, "proj.weight"),
        ({"group_size": 32}, "proj.scales"),
        ({"group_size": 128}, "proj.weight"),
        ({"mode": "mxfp4", "group_size": 32}, "proj.biases"),
        ({"proj": False}, "proj.weight"),
    ],
    ids=str,
)
def test_config_that_contradicts_is_named(facts: dict[str, Any], key: str) -> None:
    """What no layer can have, and what this one has not, is a problem of the entry or of the tensor."""
    tensors, _ = _affine(16, 192)
    config = {"quantization": {"bits": 4, "group_size": 64, **facts}}
    assert key in {name for _, name in _problems(tensors, config=config)}


JUNK: list[Any] = [None, [], {}, "x", 3, -1, 2**70, True, 0.5, [4], {"bits": []}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize(
    "fact", ["bits", "group_size", "mode", "proj", "quant_method", "packing_format", "extra_config"]
)
def test_config_of_any_content_is_no_crash(fact: str, junk: object) -> None:
    """Whatever an entry holds, a layer is found, and what is wrong with it is a problem."""
    tensors, _ = _affine(16, 192)
    for name, more in (("quantization", {}), ("quantization_config", {}), ("quantization_config", AUTO_ROUND)):
        schema = q4.detect(tensors, config={name: {"bits": 4, "group_size": 64, **more, fact: junk}})
        assert schema is not None
        assert "proj" in schema.layers
    for config in ({"quantization": junk}, {"quantization_config": junk}, {"text_config": junk}):
        assert q4.detect(tensors, config=config) is not None


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "mlx"}
DAMAGE: dict[str, Any] = {
    "gone": lambda _: None,
    "cut": lambda tensor: tensor[:, :-1],
    "short": lambda tensor: tensor[:-1],
    "flat": lambda tensor: tensor.reshape(-1),
    "stacked": lambda tensor: tensor[None],
    **{str(dtype): lambda tensor, dtype=dtype: tensor.to(dtype) for dtype in (torch.int64, torch.int8, torch.uint8)},
}
PARTS = ("weight", "scales", "biases")


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("parts", [*itertools.combinations(PARTS, 1), *itertools.combinations(PARTS, 2)], ids="+".join)
def test_damage_is_named(parts: tuple[str, ...], damage: str, is_stated: bool) -> None:
    """A tensor that is missing, or of another dtype or shape, is named, or one that its shape contradicts."""
    tensors, _ = _affine(16, 192)
    for part in parts:
        changed = DAMAGE[damage](tensors.pop(f"proj.{part}"))
        if changed is not None:
            tensors[f"proj.{part}"] = changed
    if not is_stated and damage == "gone" and len(parts) > 1:
        return  # what is left is no layer to anyone
    names = {name for _, name in _problems(tensors, config=_config() if is_stated else None)}
    assert names & {f"proj.{part}" for part in (parts if damage == "gone" else PARTS)} | names & {"proj"}, names


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("global_scale", torch.ones(()), "unknown_key"),
        ("qbiases", torch.zeros(16, 3), "unknown_key"),
        ("scales", torch.full((16, 3), float("nan")), "value"),
        ("biases", torch.full((16, 3), float("inf")), "value"),
    ],
)
def test_foreign_and_illegal_parts_are_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Scales that the dialect does not know, and numbers that are not finite, are problems."""
    assert (code, f"proj.{key}") in _problems({**_affine(16, 192)[0], f"proj.{key}": tensor}, config=_config())


def test_illegal_bytes_are_named() -> None:
    """No scale is NaN or negative."""
    for mode, byte in (("mxfp4", 255), ("nvfp4", 0x7F), ("nvfp4", 0x81)):
        tensors, _ = _bytes_scaled(mode, 4, 64)
        tensors["proj.scales"][1, 1] = byte
        assert _problems(tensors) == {("value", "proj.scales")}


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        (q4.quantize(torch.ones(8, 64), "nf4"), "format"),
        (q4.quantize(torch.ones(8, 64), "q4_1", block_size=16), "block_size"),
        (q4.quantize(torch.ones(8, 64), "nvfp4"), "scale levels"),
        (attrs.evolve(q4.quantize(torch.ones(8, 64), "q4_1"), input_channel_scale=torch.ones(64)), "features"),
    ],
    ids=["format", "16", "levels", "channels"],
)
def test_what_mlx_has_no_place_for_is_refused(weight: q4.PackedWeight, name: str) -> None:
    """Other formats, groups that MLX has no kernel for, global scales and features are refused by name."""
    with pytest.raises(q4.DialectError) as caught:
        DIALECT.write("proj", weight)
    assert caught.value.name == name


def test_config_names_the_layers_that_differ() -> None:
    """The commonest layout is for all; the others are mappings, which say everything."""
    dense = torch.randn(8, 64)
    usual, other = (q4.WeightSpec.of(q4.quantize(dense, name)) for name in ("q4_1", "mxfp4"))
    entry = DIALECT.quantization_config({"a": usual, "b": usual, "c": other}, ("norm",))
    assert entry == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "c": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    }


def test_config_is_written_under_both_names_and_leaves_with_the_dialect(tmp_path: Path) -> None:
    """mlx-lm looks for ``quantization``; another dialect written over it leaves neither name behind."""
    weight = q4.quantize(torch.randn(8, 64), "mxfp4")
    q4.save_checkpoint(tmp_path, {"proj": weight}, dialect="mlx", config={"model_type": "x"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert torch.equal(q4.dequantize(q4.open(tmp_path)["proj"]), q4.dequantize(weight))
    q4.save_checkpoint(tmp_path, {"proj": weight}, dialect="torchao-mxfp4-linear")
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization" not in config
    assert config["quantization_config"]["quant_method"] == "torchao"


def test_a_folder_with_a_file_and_its_index_is_one_checkpoint(tmp_path: Path) -> None:
    """mlx-lm writes ``model.safetensors`` and an index of it; an index of other files remains ambiguous."""
    weight = q4.quantize(torch.randn(8, 64), "q4_1")
    q4.save_checkpoint(tmp_path, {"proj": weight}, dialect="mlx")
    index = tmp_path / "model.safetensors.index.json"
    names = ("proj.weight", "proj.scales", "proj.biases")
    index.write_text(str({"weight_map": dict.fromkeys(names, "model.safetensors")}).replace("'", '"'))
    assert torch.equal(q4.dequantize(q4.open(tmp_path)["proj"], torch.float32), q4.dequantize(weight))
    index.write_text(str({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}).replace("'", '"'))
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(tmp_path)
    assert caught.value.name == "folder"


@pytest.mark.parametrize("bits", [0, 3, 4, 8])
def test_mutants_are_read_or_have_problems(bits: int) -> None:
    """Whatever is wrong with tensors, no error is untyped; 0 stands for MXFP4."""
    tensors = _affine(16, 192, bits)[0] if bits else _bytes_scaled("mxfp4", 8, 64)[0]
    for seed in range(300):
        judge_mutant(tensors, seed, config=_config(bits) if bits and seed % 2 else None)
