"""compressed-tensors NVFP4: its global scales divide."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_dialects.compressed_tensors import CompressedTensorsNvfp4

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
DIALECT = CompressedTensorsNvfp4()


def _layer(n: int = 20, k: int = 80, divisor: float = 700.3) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored tensors and the dequantised float32 weight, by the formula."""
    random = torch.Generator().manual_seed(n * k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=random)
    scale = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=random).view(torch.float8_e4m3fn)
    total = torch.tensor([divisor])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    value = E2M1[codes] * (scale.to(torch.float32) / total).repeat_interleave(16, dim=1)
    return {"proj.weight_packed": packed, "proj.weight_scale": scale, "proj.weight_global_scale": total}, value


def _read(tensors: dict[str, torch.Tensor], **arguments: Any) -> q4.PackedWeight:
    return DIALECT.read(q4.detect_or_fail(tensors, **arguments).layers["proj"], tensors.__getitem__)


def _problems(tensors: dict[str, torch.Tensor]) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize(("n", "k"), [(20, 80), (128, 64), (1, 16)])
def test_global_scale_divides(n: int, k: int) -> None:
    """The block scale is divided by the global one, and the package's own dtype is bfloat16."""
    tensors, value = _layer(n, k)
    weight = _read(tensors)
    assert (weight.dialect, weight.dtype) == ("compressed-tensors-nvfp4", torch.bfloat16)
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    assert torch.equal(q4.dequantize(weight), value.to(torch.bfloat16))
    written = DIALECT.write("proj", weight).tensors
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (written[key].dtype, written[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(written[key].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("divisor", [4.0, 3.3, 41.25, 1e-3])
def test_divisor_of_the_input_becomes_a_factor_and_is_preserved(divisor: float) -> None:
    """The activation scale is the reciprocal, with a note; the stored number itself is written again."""
    tensors, _ = _layer()
    tensors["proj.input_global_scale"] = torch.tensor([divisor])
    weight = _read(tensors)
    assert weight.activation_scale is not None
    assert torch.equal(weight.activation_scale, 1.0 / torch.tensor([divisor]))
    assert any("divisor" in note for note in weight.notes)
    written = DIALECT.write("proj", weight).tensors
    assert torch.equal(written["proj.input_global_scale"], tensors["proj.input_global_scale"])


def test_activation_scale_without_a_divisor_is_refused() -> None:
    """A factor that is no float32 number's reciprocal can't be stored; with leave to lose it is left out."""
    factors = torch.arange(1, 200, dtype=torch.float32) / 7
    factor = next(item for item in factors if not torch.equal(1.0 / (1.0 / item), item))
    weight = attrs.evolve(_read(_layer()[0]), activation_scale=factor, notes=())
    with pytest.raises(q4.DialectError) as caught:
        DIALECT.write("proj", weight)
    assert caught.value.name == "activation_scale"
    assert "proj.input_global_scale" not in DIALECT.write("proj", DIALECT.approximate(weight)).tensors


@pytest.mark.parametrize("role", ["weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize("value", [0.0, -2.0, float("inf")])
def test_divisor_must_be_positive(role: str, value: float) -> None:
    """To divide by zero, less, or infinity is refused when the layer is read, by role and value, and when validated."""
    tensors = {**_layer()[0], f"proj.{role}": torch.tensor([value])}
    assert _problems(tensors) == {("value", f"proj.{role}")}
    schema = q4.detect(tensors)
    assert schema is not None
    with pytest.raises(q4.DialectError) as caught:
        DIALECT.read(schema.layers["proj"], tensors.__getitem__)
    assert caught.value.value == value


@pytest.mark.parametrize("missing", ["proj.weight_packed", "proj.weight_scale", "proj.weight_global_scale"])
def test_missing_tensor_is_named(missing: str) -> None:
    """Any two of the three are a layer that lacks the third."""
    tensors, _ = _layer()
    del tensors[missing]
    assert _problems(tensors) == {("missing_key", missing)}


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("proj.weight_packed", torch.zeros(20, 40, dtype=torch.int8), "dtype"),
        ("proj.weight_packed", torch.zeros(20, 36, dtype=torch.uint8), "shape"),
        ("proj.weight_scale", torch.zeros(20, 5), "dtype"),
        ("proj.weight_scale", torch.zeros(5, 20, dtype=torch.float8_e4m3fn), "shape"),
        ("proj.weight_global_scale", torch.zeros(2), "shape"),
        ("proj.weight_global_scale", torch.zeros(1, dtype=torch.float64), "dtype"),
        ("proj.weight_zero_point", torch.zeros(1), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, wrong shapes and unknown parts are each named."""
    assert (code, key) in _problems({**_layer()[0], key: tensor})


def test_rotated_weights_are_unsupported() -> None:
    """A transform in config.json means weights that need its inverse: listed, not read."""
    config = {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"u": {"type": "h"}}}}
    schema = q4.detect(_layer()[0], config=config)
    assert schema is not None
    assert [problem.key for problem in schema.unsupported] == ["proj"]
    config["quantization_config"]["transform_config"] = {}
    assert list(q4.detect_or_fail(_layer()[0], config=config).layers) == ["proj"]


@pytest.mark.parametrize("static", [False, True])
def test_config_speaks_of_activations_where_there_are_scales(static: bool) -> None:
    """config.json has an input scheme only where every layer has a static scale."""
    weight = _read(_layer()[0])
    if static:
        weight = attrs.evolve(weight, activation_scale=torch.ones(()))
    entry = DIALECT.quantization_config({"proj": q4.WeightSpec.of(weight)}, ("lm_head",))
    group = entry["config_groups"]["group_0"]
    assert (entry["format"], entry["ignore"]) == ("nvfp4-pack-quantized", ["lm_head"])
    assert (group["input_activations"] is not None) == static
