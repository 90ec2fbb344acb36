"""Experts of ModelOpt: each is a transposed view of its slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from experts import E4M3, modelopt_experts, problems, refused, same_after_writing, shares_memory, stored

import q4core as q4
from q4_dialects.modelopt import ModelOptNvfp4

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", ["experts.gate_up_proj", "layers.0.experts.down_proj"])
@pytest.mark.parametrize(("experts", "n", "k"), [(3, 24, 96), (1, 16, 32), (2, 128, 64), (5, 7, 16)])
def test_modelopt_experts_are_transposed_views(
    experts: int, n: int, k: int, name: str, each: bool, tmp_path: Path
) -> None:
    """Codes and scales of an expert are the transposed views of its slice, with one global scale and the input's."""
    tensors, values = modelopt_experts(experts, n, k, name=name, each=each)
    inputs = {f"{name}_input_scale": torch.tensor(0.25), f"{name}_bias": torch.ones(experts, n)}
    path = stored(tmp_path / "x.safetensors", {**tensors, **inputs})
    checkpoint = q4.open(path)
    assert list(checkpoint) == [f"{name}.{index}" for index in range(experts)]
    assert list(checkpoint.dense) == [f"{name}_bias"]
    weights = list(checkpoint.values())
    for weight, expected in zip(weights, values, strict=True):
        assert (weight.shape, weight.dialect) == ((n, k), "modelopt-nvfp4")
        assert (weight.global_scale is not None, weight.activation_scale is not None) == (True, True)
        assert weight.qdata.stride() == (1, n)
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert shares_memory(weights[0], weights, "qdata")
    assert shares_memory(weights[0], weights, "scale")
    again = same_after_writing(path, values, "modelopt-nvfp4", tmp_path / "again")
    assert [float(weight.activation_scale) for weight in again.values() if weight.activation_scale is not None] == [
        0.25
    ] * experts


def test_modelopt_scales_of_one_expert_may_be_squeezed() -> None:
    """The exporter drops a leading 1 from the scales of a single expert, but not from its codes."""
    tensors, values = modelopt_experts(1, each=False)
    tensors["experts.gate_up_proj_weight_scale"] = tensors["experts.gate_up_proj_weight_scale"][0]
    (layer,) = q4.detect_or_fail(tensors).layers.values()
    weight = ModelOptNvfp4().read(layer, tensors.__getitem__)
    assert torch.equal(q4.dequantize(weight, torch.float32), values[0])


def test_projections_of_modelopt_experts_stand_side_by_side() -> None:
    """The scales of one projection are no strangers to the other."""
    one, _ = modelopt_experts(2)
    two, _ = modelopt_experts(2, name="experts.down_proj")
    names = [f"experts.{part}.{index}" for part in ("gate_up_proj", "down_proj") for index in range(2)]
    assert list(q4.detect_or_fail({**one, **two}).layers) == names


@pytest.mark.parametrize("part", ["", "_weight_scale", "_weight_scale_2"])
def test_modelopt_experts_without_a_part_are_named_once(part: str) -> None:
    """Any two of the three are experts that lack the third."""
    tensors, _ = modelopt_experts()
    del tensors[f"experts.gate_up_proj{part}"]
    assert problems(tensors) == {("missing_key", f"experts.gate_up_proj{part}")}


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
    assert (code, key) in problems({**modelopt_experts()[0], key: tensor})


def test_modelopt_experts_that_are_not_transposed_are_refused() -> None:
    """Rows of [E, N, K / 2] are no layout that the exporter writes: named, and not guessed."""
    tensors, _ = modelopt_experts()
    tensors = {key: tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for key, tensor in tensors.items()}
    ((key, rule, value),) = refused(tensors)
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
    assert [(key, value) for key, _, value in refused(tensors)] == [("experts.down_proj", "modelopt experts")]
