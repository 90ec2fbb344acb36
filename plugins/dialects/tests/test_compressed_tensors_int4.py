"""compressed-tensors INT4: words of eight codes, zero points packed along rows."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_dialects.compressed_tensors_int4 import CompressedTensorsInt4

DIALECT = CompressedTensorsInt4()
Tensors = dict[str, torch.Tensor]


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [R, C] as int32 [R, ceil(C / 8)], by the formula: code i of a word is at bit 4 i."""
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    words = (codes << (4 * torch.arange(8))).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _layer(
    n: int = 20, k: int = 64, groups: int = 4, *, symmetric: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Tensors, torch.Tensor]:
    """Return the stored tensors and the dequantised weight, by the formula."""
    random = torch.Generator().manual_seed(n * k)
    codes = torch.randint(0, 16, (n, k), generator=random)
    scale = (torch.rand(n, groups, generator=random) / 16).to(dtype)
    tensors = {
        "proj.weight_packed": _words(codes),
        "proj.weight_scale": scale,
        "proj.weight_shape": torch.tensor([n, k]),
    }
    middle = torch.full((n, groups), 8)
    if not symmetric:
        middle = torch.randint(0, 16, (n, groups), generator=random)
        tensors["proj.weight_zero_point"] = _words(middle.T).T.contiguous()
    each = k // groups
    value = (codes - middle.repeat_interleave(each, 1)) * scale.float().repeat_interleave(each, 1)
    return tensors, value.to(dtype)


def _config(*, symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


def _problems(tensors: Tensors, **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


def _refused(tensors: Tensors, **arguments: Any) -> list[tuple[str, str, object]]:
    schema = q4.detect(tensors, **arguments)
    assert schema is not None
    assert (dict(schema.layers), schema.dense) == ({}, ())
    return [(problem.key, problem.rule, problem.value) for problem in schema.unsupported]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k", "groups"), [(20, 64, 4), (16, 128, 1), (5, 19, 1), (1, 8, 1), (9, 96, 3)])
def test_words_are_codes_low_nibble_first(n: int, k: int, groups: int, dtype: torch.dtype, symmetric: bool) -> None:
    """A layer has the formula's values, is a view of what is stored, and is written again byte for byte."""
    tensors, value = _layer(n, k, groups, symmetric=symmetric, dtype=dtype)
    layer = q4.detect_or_fail(tensors).layers["proj"]
    assert (layer.shape, layer.block_size) == ((n, k), k // groups)
    weight = DIALECT.read(layer, tensors.__getitem__)
    assert (weight.dialect, weight.dtype) == ("compressed-tensors-int4", dtype)
    assert weight.qdata.data_ptr() == tensors["proj.weight_packed"].data_ptr()
    assert torch.equal(q4.dequantize(weight), value)
    written = DIALECT.write("proj", weight).tensors
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (written[key].dtype, written[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(written[key], tensor)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_stored_sizes_keep_their_dtype(dtype: torch.dtype) -> None:
    """Sizes of 32 bits, which some exporters write, are written again as they were."""
    tensors, _ = _layer()
    tensors["proj.weight_shape"] = tensors["proj.weight_shape"].to(dtype)
    weight = DIALECT.read(q4.detect_or_fail(tensors).layers["proj"], tensors.__getitem__)
    assert DIALECT.write("proj", weight).tensors["proj.weight_shape"].dtype == dtype


def test_own_weights_in_any_packing_are_written() -> None:
    """Codes in another nibble order, of an odd K, or with float zero points, are read as the same values."""
    dense = torch.randn(11, 35, generator=torch.Generator().manual_seed(0))
    for weight in (
        q4.quantize(dense, "int4", block_size=7).repack(q4.Packing.HIGH_FIRST),
        q4.quantize(dense, "int4", block_size=128, symmetric=True),
        attrs.evolve(q4.quantize(dense, "int4", block_size=35), zero=torch.full((11, 1), 3.0)),
    ):
        tensors = dict(DIALECT.write("proj", weight).tensors)
        again = DIALECT.read(q4.detect_or_fail(tensors).layers["proj"], tensors.__getitem__)
        assert torch.equal(q4.dequantize(again, torch.float32), q4.dequantize(weight, torch.float32))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"zero": torch.full((8, 2), 7.5)}, "zero"),
        ({"zero": torch.full((8, 2), 16, dtype=torch.int32)}, "zero"),
        ({"zero": torch.full((8, 2), -1, dtype=torch.int8)}, "zero"),
        ({"input_channel_scale": torch.ones(64)}, "features"),
        ({"activation_scale": torch.ones(())}, "activation_scale"),
    ],
    ids=["half", "16", "-1", "channels", "activations"],
)
def test_what_the_dialect_has_no_place_for_is_refused(change: dict[str, Any], name: str) -> None:
    """Zero points that are no code, and features that the package does not store, are refused by name."""
    weight = attrs.evolve(q4.quantize(torch.randn(8, 64), "int4", block_size=32), **change)
    with pytest.raises(q4.DialectError) as caught:
        DIALECT.write("proj", weight)
    assert caught.value.name == name


def test_a_short_block_is_refused() -> None:
    """Several groups of which the last is short have no place: the package wants groups that divide K."""
    weight = q4.quantize(torch.randn(8, 48), "int4", block_size=32)
    with pytest.raises(q4.DialectError) as caught:
        DIALECT.write("proj", weight)
    assert caught.value.name == "block_size"


@pytest.mark.parametrize("missing", ["weight_packed", "weight_scale", "weight_shape"])
def test_missing_tensor_is_named(missing: str) -> None:
    """Any two of the three are a layer that lacks the third."""
    tensors, _ = _layer()
    del tensors[f"proj.{missing}"]
    assert _problems(tensors, config=_config()) == {("missing_key", f"proj.{missing}")}


def test_zero_points_that_config_promises_must_be_there() -> None:
    """Where config.json says that layers are asymmetric, one without zero points lacks them."""
    tensors, _ = _layer(symmetric=False)
    assert "proj" in q4.detect_or_fail(tensors, config=_config(symmetric=False)).layers
    del tensors["proj.weight_zero_point"]
    key = "proj.weight_zero_point"
    assert _problems(tensors, config=_config(symmetric=False)) == {("missing_key", key)}


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("weight_packed", torch.zeros(20, 8, dtype=torch.int64), "dtype"),
        ("weight_packed", torch.zeros(19, 8, dtype=torch.int32), "shape"),
        ("weight_scale", torch.zeros(20, 4, dtype=torch.uint8), "dtype"),
        ("weight_scale", torch.zeros(20, 7), "shape"),
        ("weight_scale", torch.zeros(1), "shape"),
        ("weight_shape", torch.tensor([20.0, 64.0]), "dtype"),
        ("weight_shape", torch.tensor([20, 64, 1]), "shape"),
        ("weight_shape", torch.tensor([20, -64]), "value"),
        ("weight_zero_point", torch.zeros(20, 4, dtype=torch.int32), "shape"),
        ("weight_zero_point", torch.zeros(3, 4, dtype=torch.int8), "dtype"),
        ("weight_zeros", torch.zeros(1), "unknown_key"),
        ("input_scale", torch.zeros(1), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, shapes and values, and unknown parts are each named."""
    assert (code, f"proj.{key}") in _problems({**_layer()[0], f"proj.{key}": tensor})


def test_experts_of_three_dimensions_are_refused() -> None:
    """What the package does not write is named by its shape."""
    ((key, _, value),) = _refused({**_layer()[0], "proj.weight_packed": torch.zeros(2, 20, 8, dtype=torch.int32)})
    assert (key, value) == ("proj", [2, 20, 8])


def test_width_that_contradicts_config_is_an_error() -> None:
    """Nibbles that config.json calls bytes, or the other way, are read in neither width."""
    weights = {"num_bits": 8, "type": "int"}
    config = {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}
    assert _problems(_layer()[0], config=config) == {("shape", "proj.weight_packed")}


@pytest.mark.parametrize("kind", ["in order", "unused", "permuted"])
def test_order_of_in_features_is_written_as_it_was(kind: str) -> None:
    """An order that says nothing costs no copy; any other sorts columns, and its index is written again."""
    tensors, value = _layer()
    places = torch.arange(64, dtype=torch.int32)
    groups = {"in order": places // 16, "unused": torch.full_like(places, -1), "permuted": (places * 5 % 64) // 16}[
        kind
    ]
    tensors["proj.weight_g_idx"] = groups
    weight = DIALECT.read(q4.detect_or_fail(tensors).layers["proj"], tensors.__getitem__)
    assert (weight.input_permutation is None) == (kind != "permuted")
    assert (weight.qdata.data_ptr() == tensors["proj.weight_packed"].data_ptr()) == (kind != "permuted")
    if kind != "permuted":
        assert torch.equal(q4.dequantize(weight), value)
    written = DIALECT.write("proj", weight).tensors
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())


def test_names_and_shapes_alone_do_not_determine_k() -> None:
    """Where only metadata is at hand, the layer has no shape, and that is no problem."""
    tensors, _ = _layer()
    bare = {key: tensor.to("meta") for key, tensor in tensors.items()}
    found = q4.detect(bare)
    assert found is not None
    assert (found.layers["proj"].shape, found.layers["proj"].problems) == (None, ())
    assert q4.validate(found, bare) == ()


def test_config_has_a_group_for_each_kind_of_layer() -> None:
    """One kind targets every Linear; of several each names its modules."""
    dense = torch.randn(8, 64)
    grouped = q4.WeightSpec.of(q4.quantize(dense, "int4", block_size=32))
    channel = q4.WeightSpec.of(q4.quantize(dense, "int4", block_size=64, symmetric=True))
    entry = DIALECT.quantization_config({"a": grouped, "b": grouped}, ("lm_head",))
    assert (entry["format"], entry["ignore"]) == ("pack-quantized", ["lm_head"])
    (group,) = entry["config_groups"].values()
    assert (group["targets"], group["weights"]["group_size"], group["weights"]["symmetric"]) == (["Linear"], 32, False)
    groups = DIALECT.quantization_config({"a": grouped, "b": channel}, ())["config_groups"]
    assert [(item["targets"], item["weights"]["strategy"]) for item in groups.values()] == [
        (["a"], "group"),
        (["b"], "channel"),
    ]
