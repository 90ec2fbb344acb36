"""gpt-oss MXFP4: blocks next to scales, for a matrix and for experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from experts import problems, random_bytes, same_after_writing, shares_memory, stored, values_of

import q4core as q4
from q4_dialects.gpt_oss import GptOssMxfp4

if TYPE_CHECKING:
    from pathlib import Path

DIALECT = GptOssMxfp4()
NAME = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}


def _experts(*shape: int, name: str = NAME) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return tensors and values [..., N, K] of experts, or of a matrix."""
    *rows, k = shape
    blocks = random_bytes(*rows, k // 32, 16)
    scales = random_bytes(*rows, k // 32, low=100, high=140)
    value = values_of(blocks.flatten(-2), torch.exp2(scales.float() - 127), 32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, value


@pytest.mark.parametrize(("experts", "n", "k"), [(3, 24, 96), (1, 16, 32), (8, 7, 64)])
def test_experts_are_views(experts: int, n: int, k: int, tmp_path: Path) -> None:
    """Each expert is a view of its slice with the formula's values; biases stay dense."""
    tensors, values = _experts(experts, n, k)
    path = stored(tmp_path / "x.safetensors", {**tensors, f"{NAME}_bias": torch.ones(experts, n)})
    checkpoint = q4.open(path)
    assert list(checkpoint) == [f"{NAME}.{index}" for index in range(experts)]
    assert list(checkpoint.dense) == [f"{NAME}_bias"]
    weights = list(checkpoint.values())
    for weight, expected in zip(weights, values, strict=True):
        assert (weight.shape, weight.dialect, weight.dtype) == ((n, k), "gpt-oss-mxfp4", torch.bfloat16)
        assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert shares_memory(weights[0], weights, "qdata")
    assert shares_memory(weights[0], weights, "scale")
    for dialect in ("gpt-oss-mxfp4", "torchao-mxfp4-linear"):
        same_after_writing(path, values, dialect, tmp_path / dialect)


def test_matrix_is_written_byte_for_byte() -> None:
    """A matrix is a layer of the name before ``_blocks``, and is written again as it was."""
    tensors, value = _experts(24, 96, name="proj")
    weight = DIALECT.read(q4.detect_or_fail(tensors).layers["proj"], tensors.__getitem__)
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    written = DIALECT.write("proj", weight).tensors
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())


def test_a_short_block_is_refused() -> None:
    """K must hold whole blocks, or there is no place for the last one."""
    weight = attrs.evolve(q4.quantize(torch.randn(8, 64), "mxfp4"), in_features=40)
    with pytest.raises(q4.DialectError) as caught:
        DIALECT.write("proj", weight)
    assert caught.value.name == "features"


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_missing_part_is_named_once(part: str) -> None:
    """Blocks without scales lack them, and so do scales without blocks where config.json names the dialect."""
    tensors, _ = _experts(3, 24, 96)
    del tensors[f"{NAME}_{part}"]
    assert problems(tensors, config=CONFIG) == {("missing_key", f"{NAME}_{part}")}


@pytest.mark.parametrize(
    ("part", "tensor", "code"),
    [
        ("_blocks", torch.zeros(3, 24, 3, 16, dtype=torch.int32), "dtype"),
        ("_blocks", torch.zeros(3, 24, 3, 8, dtype=torch.uint8), "shape"),
        ("_blocks", torch.zeros(0, 24, 3, 16, dtype=torch.uint8), "shape"),
        ("_scales", torch.zeros(3, 24, 3), "dtype"),
        ("_scales", torch.zeros(2, 24, 3, dtype=torch.uint8), "shape"),
        ("_scales", torch.full((3, 24, 3), 255, dtype=torch.uint8), "value"),
        ("_scale_2", torch.zeros(3), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_is_named(part: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, shapes of another number of experts, scales that are NaN, and unknown parts are each named."""
    assert (code, NAME + part) in problems({**_experts(3, 24, 96)[0], NAME + part: tensor})


@pytest.mark.parametrize(
    "tensors",
    [
        {"grid_blocks": torch.ones(3, 4, 2, 16), "grid_scales": torch.ones(3, 4, 2)},
        {"grid_blocks": torch.ones(3, dtype=torch.uint8)},
        {"grid_scales": torch.ones(3, 4, 2, dtype=torch.uint8)},
    ],
    ids=["floats", "vector", "scales"],
)
def test_other_blocks_are_left_alone(tensors: dict[str, torch.Tensor]) -> None:
    """Floats, vectors and scales that nothing says are gpt-oss's are no layer."""
    assert q4.detect(tensors) is None


def test_config_is_that_of_transformers() -> None:
    """The entry names the method and what stayed dense."""
    assert DIALECT.quantization_config({}, ("lm_head",)) == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head"],
    }
