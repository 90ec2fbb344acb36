"""Layers that public packages stored are read with the bits that those packages give (``golden/make.py`` made them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import q4core as q4

GOLDEN = Path(__file__).parents[2] / "conformance/src/q4_conformance/golden"
MANIFEST: dict[str, dict[str, Any]] = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
PACKINGS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "packing.json").read_text(encoding="utf-8"))
MODELS = sorted(path.name for path in (GOLDEN / "models").iterdir())
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


IN_SAFETENSORS = [name for name, case in MANIFEST.items() if case["dialect"] != "gguf"]
IN_GGUF = [name for name, case in MANIFEST.items() if case["dialect"] == "gguf"]


def _assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, *, is_zero_signed: bool = True) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if not is_zero_signed:  # x + 0 is x, but for -0, which becomes +0
        actual, expected = actual + 0.0, expected + 0.0
    bits = BITS[actual.element_size()]
    wrong = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    assert not bool(wrong.any()), f"{int(wrong.sum())} differ: {actual[wrong][:4]} for {expected[wrong][:4]}"


def _stored(name: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a case as it lies on disk to ``folder``; return the file, and all of the case's tensors."""
    source = GOLDEN / f"{name}.safetensors"
    tensors = safetensors.torch.load_file(source)
    with safetensors.safe_open(source, "pt") as file:
        metadata = file.metadata()
    path = folder / "model.safetensors"
    own = {key: value for key, value in tensors.items() if key.startswith(("proj.", "proj_"))}
    safetensors.torch.save_file(own, path, metadata)
    if MANIFEST[name]["config"]:
        (folder / "config.json").write_text(json.dumps(MANIFEST[name]["config"]), encoding="utf-8")
    return path, tensors


@pytest.mark.parametrize("name", IN_SAFETENSORS)
def test_stored_layer_has_its_librarys_bits(name: str, tmp_path: Path) -> None:
    """A stored layer is detected, and dequantises to every result that its own library gave, bit for bit."""
    case = MANIFEST[name]
    path, tensors = _stored(name, tmp_path)
    weight = q4.open(path)["proj"]
    assert weight.format.name == case["format"]
    assert (weight.out_features, weight.in_features, weight.block_size) == (case["n"], case["k"], case["block"])
    for dtype in case["expected"]:
        actual = q4.dequantize(weight, getattr(torch, dtype))
        _assert_same_bits(actual, tensors[f"expected.{dtype}"], is_zero_signed=not case["drops_negative_zero"])
    if case["dialect"] in {"bitsandbytes", "torchao"}:  # those say what dtype the weight had
        assert weight.dtype == getattr(torch, case["dtype"])


@pytest.mark.parametrize("name", IN_SAFETENSORS)
def test_writing_a_layer_again_changes_no_byte(name: str, tmp_path: Path) -> None:
    """What was read is written again in the same dialect with the same keys, dtypes, shapes and bytes."""
    path, tensors = _stored(name, tmp_path)
    weight = q4.open(path)["proj"]
    again = tmp_path / "again.safetensors"
    assert weight.dialect is not None
    q4.save_checkpoint(again, {"proj": weight}, dialect=weight.dialect)
    written = safetensors.torch.load_file(again)
    own = {key: value for key, value in tensors.items() if key.startswith(("proj.", "proj_")) and key != "proj.bias"}
    assert set(written) == set(own)
    for key, value in own.items():
        _assert_same_bits(written[key], value)
    with safetensors.safe_open(path, "pt") as before, safetensors.safe_open(again, "pt") as after:
        entry = "proj.weight"
        if entry in (before.metadata() or {}):
            assert json.loads(after.metadata()[entry]) == json.loads(before.metadata()[entry])


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_tensor_has_the_packages_bits(name: str) -> None:
    """A tensor of a GGUF file dequantises to the ``gguf`` package's float32, bit for bit."""
    is_fp4 = MANIFEST[name]["format"] in {"mxfp4", "nvfp4"}  # whose code 8 the package decodes as +0
    weight = q4.open(GOLDEN / "gguf" / ("fp4.gguf" if is_fp4 else "blocks.gguf"))[name.removeprefix("gguf/")]
    assert weight.format.name == MANIFEST[name]["format"]
    expected = safetensors.torch.load_file(GOLDEN / f"{name}.safetensors")["expected.float32"]
    _assert_same_bits(q4.dequantize(weight, torch.float32), expected, is_zero_signed=not is_fp4)


def _assert_is_model(checkpoint: Any, name: str) -> None:
    expected = safetensors.torch.load_file(GOLDEN / "models" / name / "expected.safetensors")
    assert set(checkpoint) == set(expected)
    for module, value in expected.items():
        actual = q4.dequantize(checkpoint[module], torch.bfloat16)
        _assert_same_bits(actual, value, is_zero_signed=not name.startswith("modelopt"))
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= set(checkpoint.dense)


@pytest.mark.parametrize("name", MODELS)
def test_exported_model_has_its_librarys_bits(name: str) -> None:
    """Every quantised module of an exported model, and no other, is found and dequantises to the library's bits."""
    _assert_is_model(q4.open(GOLDEN / "models" / name), name)


@pytest.mark.parametrize("name", MODELS)
def test_shards_may_part_a_weight_from_its_scales(name: str, tmp_path: Path) -> None:
    """The same model in two shards, neighbouring tensors in different ones, gives the same bits."""
    folder = GOLDEN / "models" / name
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    keys = sorted(tensors)
    weight_map = {key: f"model-{index % 2 + 1:05d}-of-00002.safetensors" for index, key in enumerate(keys)}
    for shard in sorted(set(weight_map.values())):
        own = {key: tensors[key] for key in keys if weight_map[key] == shard}
        safetensors.torch.save_file(own, tmp_path / shard, metadata)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    _assert_is_model(q4.open(tmp_path), name)


@pytest.mark.parametrize("name", sorted(PACKINGS))
def test_packing_has_the_packages_bytes(name: str) -> None:
    """Codes and bytes that a package packed are each other's image in our packing of that order."""
    vector = PACKINGS[name]
    packing = q4.Packing(q4.NibbleOrder(vector["order"]), vector["group"])
    codes = torch.tensor([int(digit, 16) for digit in vector["codes"]], dtype=torch.uint8)
    packed = torch.frombuffer(bytearray.fromhex(vector["bytes"]), dtype=torch.uint8)
    assert q4.unpack_codes(packed, packing)[: codes.numel()].tolist() == codes.tolist()
    whole = codes.numel() // 2
    assert q4.pack_codes(codes, packing)[:whole].tolist() == packed[:whole].tolist()
