"""Experts of torchao: each is read as a weight of its own, as a view where a matrix is one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from experts import (
    E4M3,
    TORCHAO,
    problems,
    random_bytes,
    refused,
    same_after_writing,
    shares_memory,
    stored,
    torchao_experts,
)

import q4core as q4
from q4_dialects.swizzle import linear_from_swizzled, swizzled_from_linear

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("rows", "columns"), [(384, 4), (300, 21), (260, 5)])
def test_rows_of_one_expert_are_cut_from_swizzled_scales(rows: int, columns: int) -> None:
    """Any range of rows is the same range of the linear scales, whether it begins with a tile or inside one."""
    linear = random_bytes(rows, columns)
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
    tensors, metadata, values = torchao_experts(dialect, experts, n, k, name=name, levels=levels)
    path = stored(tmp_path / "x.safetensors", {**tensors, "experts.bias": torch.ones(experts, n)}, metadata)
    checkpoint = q4.open(path)
    stem = name.removesuffix(".weight")
    assert list(checkpoint) == [f"{stem}.{index}" for index in range(experts)]
    assert list(checkpoint.dense) == ["experts.bias"]
    weights = list(checkpoint.values())
    for weight, expected in zip(weights, values, strict=True):
        assert (weight.shape, weight.dialect, weight.dtype) == ((n, k), dialect.name, torch.bfloat16)
        assert weight.global_scale is None or weight.global_scale.shape == ()
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert shares_memory(weights[0], weights, "qdata")
    assert shares_memory(weights[0], weights, "scale") is ("linear" in dialect.name or experts == 1)
    layers = checkpoint.schema.layers.values()
    assert {layer.shape for layer in layers} == {(n, k)}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert sum(layer.nbytes or 0 for layer in layers) == total // experts * experts


@pytest.mark.parametrize("dialect", TORCHAO, ids=lambda dialect: dialect.name)
def test_torchao_experts_are_written_as_modules_of_their_own(dialect: q4.Dialect, tmp_path: Path) -> None:
    """What becomes of E experts is E matrices by the names they are read under, and these read as the same weights."""
    tensors, metadata, values = torchao_experts(dialect)
    path = stored(tmp_path / "x.safetensors", tensors, metadata)
    again = same_after_writing(path, values, dialect.name, tmp_path / "again")
    assert again.metadata["tensor_names"] == json.dumps([f"experts.w1.{index}.weight" for index in range(3)])
    assert all("own" in " ".join(weight.notes) for weight in q4.open(path).values())


@pytest.mark.parametrize("dialect", TORCHAO, ids=lambda dialect: dialect.name)
def test_torchao_shapes_alone_determine_the_layout_of_experts(dialect: q4.Dialect) -> None:
    """Without metadata the shape of the scales distinguishes linear from swizzled for experts too."""
    tensors, _, values = torchao_experts(dialect, name="proj.weight")
    schema = q4.detect_or_fail(tensors)
    assert list(schema.layers) == ["proj.0", "proj.1", "proj.2"]
    assert schema.dialects == (dialect.name,)
    for layer, expected in zip(schema.layers.values(), values, strict=True):
        assert torch.equal(q4.dequantize(dialect.read(layer, tensors.__getitem__), torch.float32), expected)


def test_torchao_experts_may_share_one_global_scale() -> None:
    """One number for all experts is every expert's, as torchao multiplies it."""
    tensors, metadata, _ = torchao_experts(TORCHAO[0])
    tensors["experts._w1_per_tensor_scale"] = torch.tensor(0.25)
    schema = q4.detect_or_fail(tensors, metadata=metadata)
    weights = [TORCHAO[0].read(layer, tensors.__getitem__) for layer in schema.layers.values()]
    assert [float(weight.global_scale) for weight in weights if weight.global_scale is not None] == [0.25] * 3


def test_torchao_parameters_of_one_module_are_told_apart() -> None:
    """Experts ``w1`` and ``w1_b`` of one module are two parameters, neither a stray scale of the other."""
    tensors, metadata, _ = torchao_experts(TORCHAO[0])
    more, entries, _ = torchao_experts(TORCHAO[0], name="experts.w1_b", experts=2)
    schema = q4.detect_or_fail({**tensors, **more}, metadata={**metadata, **entries})
    assert list(schema.layers) == [*(f"experts.w1.{i}" for i in range(3)), "experts.w1_b.0", "experts.w1_b.1"]


@pytest.mark.parametrize("dialect", TORCHAO, ids=lambda dialect: dialect.name)
def test_torchao_experts_without_a_part_are_named_once(dialect: q4.Dialect) -> None:
    """A part that the metadata lists and the file lacks is one problem, not one for each expert."""
    for key in torchao_experts(dialect, name="proj.weight")[0]:
        tensors, metadata, _ = torchao_experts(dialect, name="proj.weight")
        del tensors[key]
        assert problems(tensors, metadata=metadata) >= {("missing_key", key)}
    tensors, metadata, _ = torchao_experts(dialect)
    del tensors["experts._w1_scale"]
    assert problems(tensors, metadata=metadata) == {("missing_key", "experts._w1_scale")}


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
    tensors, metadata, _ = torchao_experts(TORCHAO[0])
    assert (code, f"experts._w1_{part}") in problems({**tensors, f"experts._w1_{part}": tensor}, metadata=metadata)


def test_swizzled_scales_of_experts_must_fill_their_tiles() -> None:
    """Where E · N rows fill fewer tiles than E times those of N, torchao could not have stored them."""
    tensors, metadata, _ = torchao_experts(TORCHAO[1], experts=2)
    tensors["experts._w1_qdata"] = random_bytes(2, 20, 48)
    tensors["experts._w1_scale"] = torch.zeros(2, 32, 32, dtype=torch.uint8).view(E4M3)
    assert ("shape", "experts._w1_qdata") in problems(tensors, metadata=metadata)


def test_torchao_lists_no_more_experts_than_there_can_be() -> None:
    """A header that claims very many experts is refused with the number, in one line."""
    tensors, metadata, _ = torchao_experts(TORCHAO[0], experts=4097, n=1, k=32)
    assert [(key, value) for key, _, value in refused(tensors, metadata=metadata)] == [("experts.w1", 4097)]


def test_an_expert_and_a_module_of_its_name_are_ambiguous() -> None:
    """Where an expert's name is also that of another module, the file is refused, and neither is lost."""
    tensors, metadata, _ = torchao_experts(TORCHAO[0])
    other = {"experts.w1.1.qdata": random_bytes(4, 16), "experts.w1.1.scale": torch.ones(4, 2).to(E4M3)}
    assert ("ambiguous", "experts.w1.1") in problems({**tensors, **other}, metadata=metadata)


def test_matrices_of_another_parameter_are_still_refused_by_name() -> None:
    """A 2-D parameter that is not called ``weight`` is listed as torchao's."""
    tensors, metadata, _ = torchao_experts(TORCHAO[0], experts=1)
    tensors = {name: tensor[0] for name, tensor in tensors.items()}
    assert [(key, value) for key, _, value in refused(tensors, metadata=metadata)] == [
        ("experts.w1", "torchao NVFP4Tensor")
    ]
