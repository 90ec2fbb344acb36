"""Experts that pass from one dialect to another, and those that no dialect reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from experts import E4M3, TORCHAO, modelopt_experts, random_bytes, refused, same_after_writing, stored, torchao_experts

import q4core as q4
from q4_cli.app import run
from q4_dialects.experts import expert_layers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["experts.w1", "proj.weight"])
def test_convert_leaves_the_old_entry_of_experts_behind(name: str, tmp_path: Path) -> None:
    """``q4 convert`` writes no header entry that mentions the tensors which the experts came from."""
    tensors, metadata, values = torchao_experts(TORCHAO[1], name=name)
    path = stored(tmp_path / "x.safetensors", tensors, {**metadata, "author": "me"})
    out = tmp_path / "y.safetensors"
    assert run(["convert", str(path), str(out), "--dialect", TORCHAO[0].name]) == 0
    again = q4.open(out)
    assert name not in again.metadata
    assert again.metadata["author"] == "me"
    for weight, expected in zip(again.values(), values, strict=True):
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)


@pytest.mark.parametrize(
    "target", ["torchao-nvfp4-swizzled", "modelopt-nvfp4", "comfyui-nvfp4", "torchao-nvfp4-linear"]
)
@pytest.mark.parametrize("source", ["torchao", "modelopt"])
def test_experts_pass_between_dialects_as_matrices(source: str, target: str, tmp_path: Path) -> None:
    """Experts of one library are written as another's modules with the same codes, scale bytes and names."""
    if source == "torchao":
        tensors, metadata, values = torchao_experts(TORCHAO[1])
        path = stored(tmp_path / "x.safetensors", tensors, metadata)
    else:
        tensors, values = modelopt_experts(3, 32, 64)
        path = stored(tmp_path / "x.safetensors", tensors)
    same_after_writing(path, values, target, tmp_path / "again")


def test_compressed_tensors_experts_are_refused() -> None:
    """The package packs matrices only, so that three dimensions have no meaning of its own: named, with the shape."""
    tensors = {
        "experts.weight_packed": random_bytes(2, 16, 32),
        "experts.weight_scale": random_bytes(2, 16, 4, high=127).view(E4M3),
        "experts.weight_global_scale": torch.ones(2, 1),
    }
    ((key, rule, value),) = refused(tensors)
    assert (key, value) == ("experts", [2, 16, 32])
    assert "2 dimensions" in rule


def test_experts_without_a_byte_are_one_problem() -> None:
    """The number of layers is bounded by the file's bytes: empty codes that claim 4,096 experts are one problem."""
    codes = q4.TensorInfo(torch.uint8, (4096, 0, 0))
    layer = q4.LayerSchema(module="m", dialect="any", format="nvfp4", keys={"qdata": "m.q"})
    (found,) = expert_layers(layer, 4096, q4.Catalogue({"m.q": codes}))
    assert [(problem.code, problem.key) for problem in found.problems] == [("shape", "m.q")]
