"""torchao's NVFP4 and MXFP4: both layouts, the metadata entry, and layouts inferred from shapes alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import safetensors
import torch

import q4core as q4
from q4_dialects.swizzle import linear_from_swizzled, swizzled_from_linear
from q4_dialects.torchao import (
    TorchaoMxfp4Linear,
    TorchaoMxfp4Swizzled,
    TorchaoNvfp4Linear,
    TorchaoNvfp4Swizzled,
)

if TYPE_CHECKING:
    from pathlib import Path

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
DIALECTS = (TorchaoNvfp4Linear(), TorchaoNvfp4Swizzled(), TorchaoMxfp4Linear(), TorchaoMxfp4Swizzled())
SHAPES = ((20, 96), (128, 128), (130, 32), (1, 32), (300, 320))


def _offset(row: int, column: int, columns: int) -> int:
    """Return the byte of a scale in the swizzled order, by the documented formula."""
    wide = -(-columns // 4)
    return ((row // 128) * wide + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _entry(kind: str, *, swizzled: bool, names: tuple[str, ...], **changes: Any) -> str:
    data = {
        "is_swizzled_scales": swizzled,
        "block_size": 16 if kind == "NVFP4Tensor" else 32,
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        "elem_dtype": {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"},
        **changes,
    }
    return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": list(names)})


def _layer(
    dialect: q4.Dialect, n: int = 20, k: int = 96, *, two_level: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, str], torch.Tensor]:
    """Return tensors, metadata and the dequantised weight, made from the formulas."""
    random = torch.Generator().manual_seed(n * k)
    is_nvfp4, swizzled = "nvfp4" in dialect.name, "swizzled" in dialect.name
    block = 16 if is_nvfp4 else 32
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=random)
    scale_bytes = torch.randint(0 if is_nvfp4 else 100, 127, (n, k // block), dtype=torch.uint8, generator=random)
    dtype = torch.float8_e4m3fn if is_nvfp4 else torch.float8_e8m0fnu
    value = scale_bytes.view(dtype).to(torch.float32)
    tensors = {"proj._weight_qdata": packed, "proj._weight_scale": scale_bytes.view(dtype)}
    if swizzled:
        high, wide = -(-n // 128), -(-(k // block) // 4)
        stored = torch.zeros(high * wide * 512, dtype=torch.uint8)
        for row in range(n):
            for column in range(k // block):
                stored[_offset(row, column, k // block)] = scale_bytes[row, column]
        tensors["proj._weight_scale"] = stored.view(32 * high, 16 * wide).view(dtype)
    names: tuple[str, ...] = ("qdata", "scale")
    if is_nvfp4 and two_level:
        tensors["proj._weight_per_tensor_scale"] = torch.rand((), generator=random)
        value = tensors["proj._weight_per_tensor_scale"] * value
        names = ("per_tensor_scale", *names)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    kind = "NVFP4Tensor" if is_nvfp4 else "MXTensor"
    metadata = {"proj.weight": _entry(kind, swizzled=swizzled, names=names), "tensor_names": '["proj.weight"]'}
    return tensors, metadata, E2M1[codes] * value.repeat_interleave(block, dim=1)


def _read(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> q4.PackedWeight:
    layer = q4.detect_or_fail(tensors, metadata=metadata).layers["proj"]
    dialect = next(item for item in DIALECTS if item.name == layer.dialect)
    return dialect.read(layer, tensors.__getitem__)


def _problems(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, metadata=metadata)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (129, 5), (300, 21)])
def test_swizzled_order_is_the_documented_one(rows: int, columns: int) -> None:
    """Every scale lies where the formula puts it, padding is zero, and the way back gives the same scales."""
    linear = torch.randint(1, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stored = swizzled_from_linear(linear)
    assert stored.numel() == -(-rows // 128) * -(-columns // 4) * 512
    expected = torch.zeros_like(stored)
    for row in range(rows):
        for column in range(columns):
            expected[_offset(row, column, columns)] = linear[row, column]
    assert torch.equal(stored, expected)
    assert torch.equal(linear_from_swizzled(stored, rows, columns), linear)


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_value_is_code_times_scales(dialect: q4.Dialect, n: int, k: int, two_level: bool) -> None:
    """The scales are multiplied first, then the code; the layer is written again byte for byte."""
    tensors, metadata, expected = _layer(dialect, n, k, two_level=two_level)
    weight = _read(tensors, metadata)
    assert weight.dialect == dialect.name
    assert weight.dtype == torch.bfloat16
    assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    written = dialect.write("proj", weight)
    assert written.tensors.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert written.tensors[key].dtype == tensor.dtype
        assert torch.equal(_bytes(written.tensors[key]), _bytes(tensor))
    assert json.loads(written.metadata["proj.weight"]) == json.loads(metadata["proj.weight"])


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_shapes_alone_determine_the_layout(dialect: q4.Dialect, n: int, k: int) -> None:
    """Without metadata the shape of the scales distinguishes linear from swizzled, and the notes say so."""
    tensors, _, expected = _layer(dialect, n, k)
    weight = _read(tensors, None)
    assert weight.dialect == dialect.name
    assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert any("shapes alone" in note for note in weight.notes)


def test_other_facts_of_the_entry_are_preserved() -> None:
    """What the entry says of activations and kernels is written again, also when the layout changes."""
    tensors, metadata, _ = _layer(DIALECTS[1])
    facts = {"act_quant_kwargs": {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {"x": 1}}, "use_triton_kernel": True}
    metadata["proj.weight"] = _entry(
        "NVFP4Tensor", swizzled=True, names=("per_tensor_scale", "qdata", "scale"), **facts
    )
    weight = _read(tensors, metadata)
    same = json.loads(DIALECTS[1].write("proj", weight).metadata["proj.weight"])
    assert same == json.loads(metadata["proj.weight"])
    other = json.loads(DIALECTS[0].write("proj", weight).metadata["proj.weight"])
    assert other == {**same, "_data": {**same["_data"], "is_swizzled_scales": False}}


def test_activation_scale_is_preserved() -> None:
    """``act_per_tensor_scale`` is the static activation scale."""
    tensors, metadata, _ = _layer(DIALECTS[0])
    tensors["proj._weight_act_per_tensor_scale"] = torch.tensor(0.25)
    names = ("per_tensor_scale", "act_per_tensor_scale", "qdata", "scale")
    metadata["proj.weight"] = _entry("NVFP4Tensor", swizzled=False, names=names)
    weight = _read(tensors, metadata)
    assert weight.activation_scale is not None
    assert float(weight.activation_scale) == 0.25
    written = DIALECTS[0].write("proj", weight)
    assert torch.equal(written.tensors["proj._weight_act_per_tensor_scale"], torch.tensor(0.25))
    assert json.loads(written.metadata["proj.weight"]) == json.loads(metadata["proj.weight"])


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_missing_tensor_is_named(dialect: q4.Dialect) -> None:
    """A tensor that the metadata lists and the file lacks is named; a missing global scale is never 1.0."""
    for key in _layer(dialect)[0]:
        tensors, metadata, _ = _layer(dialect)
        del tensors[key]
        assert ("missing_key", key) in _problems(tensors, metadata)


@pytest.mark.parametrize(
    ("changes", "names", "key"),
    [
        ({"block_size": 32}, None, "metadata proj.weight.block_size"),
        ({"is_swizzled_scales": "no"}, None, "metadata proj.weight.is_swizzled_scales"),
        ({"is_swizzled_scales": None}, None, "metadata proj.weight.is_swizzled_scales"),
        ({"orig_dtype": "bfloat16"}, None, "metadata proj.weight.orig_dtype"),
        ({"orig_dtype": {"_type": "torch.dtype", "_data": "int8"}}, None, "metadata proj.weight.orig_dtype"),
        ({"orig_dtype": {"_type": "torch.dtype", "_data": []}}, None, "metadata proj.weight.orig_dtype"),
        ({}, ("qdata", "scale"), "proj._weight_per_tensor_scale"),
        ({}, ("qdata",), "metadata proj.weight._tensor_data_names"),
        ({}, ("qdata", "scale", "zero_point"), "metadata proj.weight._tensor_data_names"),
    ],
    ids=str,
)
def test_wrong_entry_is_named(changes: dict[str, Any], names: tuple[str, ...] | None, key: str) -> None:
    """What contradicts the tensors or torchao's own classes in the entry is a problem."""
    tensors, metadata, _ = _layer(DIALECTS[0])
    names = ("per_tensor_scale", "qdata", "scale") if names is None else names
    swizzled = changes.pop("is_swizzled_scales", False)
    metadata["proj.weight"] = _entry("NVFP4Tensor", swizzled=swizzled, names=names, **changes)
    assert key in {found for _, found in _problems(tensors, metadata)}


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("proj._weight_qdata", torch.zeros(20, 48, dtype=torch.int8), "dtype"),
        ("proj._weight_qdata", torch.zeros(20, 44, dtype=torch.uint8), "shape"),
        ("proj._weight_qdata", torch.zeros(960, dtype=torch.uint8), "shape"),
        ("proj._weight_scale", torch.zeros(20, 6, dtype=torch.uint8), "dtype"),
        ("proj._weight_scale", torch.zeros(6, 20, dtype=torch.float8_e4m3fn), "shape"),
        ("proj._weight_scale", torch.zeros(32, 32, dtype=torch.float8_e4m3fn), "shape"),
        ("proj._weight_per_tensor_scale", torch.zeros(20), "shape"),
        ("proj._weight_per_tensor_scale", torch.zeros((), dtype=torch.bfloat16), "dtype"),
        ("proj._weight_zero_point", torch.zeros(1), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, wrong shapes and unknown parts are named; swizzled scales that the entry denies, too."""
    tensors, metadata, _ = _layer(DIALECTS[0])
    assert (code, key) in _problems({**tensors, key: tensor}, metadata)


@pytest.mark.parametrize("kind", ["Int4PreshuffledTensor", "Float8Tensor", "Int8Tensor"])
def test_other_classes_are_named_and_not_read(kind: str) -> None:
    """A class of torchao's that nothing here reads is unsupported by name; its tensors are not dense."""
    tensors = {"proj._weight_qdata": torch.zeros(8, 32, dtype=torch.int8), "proj._weight_scale": torch.ones(2, 8)}
    metadata = {"proj.weight": json.dumps({"_type": kind, "_data": {}, "_tensor_data_names": ["qdata", "scale"]})}
    schema = q4.detect({**tensors, "proj.bias": torch.ones(8)}, metadata=metadata)
    assert schema is not None
    assert [problem.value for problem in schema.unsupported] == [f"torchao {kind}"]
    assert schema.dense == ("proj.bias",)


def test_merged_metadata_lists_layers_and_plain_tensors() -> None:
    """A file's metadata has an entry for each layer and each plain tensor, and the list of both."""
    dialect = DIALECTS[1]
    weight = q4.quantize(torch.randn(16, 32), "nvfp4")
    layers = {module: dialect.write(module, weight) for module in ("a", "b")}
    merged = dialect.merge_metadata(layers, ["a.bias", "lonely"])
    assert json.loads(merged["tensor_names"]) == ["a.weight", "b.weight", "a.bias"]
    assert json.loads(merged["a.bias"]) == {"_type": "Tensor"}
    assert json.loads(merged["a.weight"])["_type"] == "NVFP4Tensor"


def test_every_shard_has_the_metadata_of_all(tmp_path: Path) -> None:
    """Readers that let one shard's metadata replace another's find every entry in each."""
    weight = q4.quantize(torch.randn(16, 32), "nvfp4")
    weights = dict.fromkeys("abc", weight)
    q4.save_checkpoint(
        tmp_path, weights, dialect="torchao-nvfp4-linear", max_shard_bytes=1, dense={"n.weight": torch.ones(2)}
    )
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 4
    for shard in shards:
        with safetensors.safe_open(shard, "pt") as file:
            metadata = file.metadata()
        assert json.loads(metadata["tensor_names"]) == ["a.weight", "b.weight", "c.weight", "n.weight"]
        assert "c.weight" in metadata
    assert list(q4.open(tmp_path)) == ["a", "b", "c"]


def test_what_it_can_not_express_is_refused() -> None:
    """A divisor that is no power of two, plain scales, and features without a place are named."""
    weight = q4.quantize(torch.randn(16, 32), "nvfp4")
    divided = attrs.evolve(weight, scale_kind=q4.ScaleKind.E4M3_DIV, global_scale=torch.tensor(3.0))
    scaled = attrs.evolve(weight, input_channel_scale=torch.ones(32))
    for item, field in ((divided, "scale levels"), (weight.with_plain_scale(), "scale levels"), (scaled, "features")):
        with pytest.raises(q4.DialectError) as caught:
            DIALECTS[0].write("proj", item)
        assert caught.value.name == field
    with pytest.raises(q4.DialectError) as caught:
        DIALECTS[2].write("proj", weight)
    assert caught.value.name == "format"
