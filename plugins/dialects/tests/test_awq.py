"""AWQ: words of interleaved columns, GEMV's padded groups, and what decides between them and GPTQ."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from qwords import Tensors, awq_layer, config, gemv_layer, gptq_layer, make_layer
from safetensors.torch import save_file

import q4core as q4
from q4_dialects.awq import Awq, AwqGemv
from q4_dialects.gptq import Gptq

if TYPE_CHECKING:
    from pathlib import Path

AWQ, GEMV = Awq(), AwqGemv()
SHAPES = [(16, 64, 32), (8, 128, 128), (72, 320, 64), (32, 33, 33), (32, 35, 7), (8, 16, 16), (40, 4096, 128)]
CASES = list(
    itertools.product(range(len(SHAPES)), (False, True), (torch.float16, torch.bfloat16, torch.float32), range(4))
)
_Case = tuple[int, bool, torch.dtype, int]


def _config(version: str = "gemm", **facts: Any) -> dict[str, Any]:
    return config("awq", **{"bits": 4, "version": version, **facts})


def _problems(tensors: Tensors, **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_layers_have_their_values_and_are_written_again(case: _Case) -> None:
    """Each case has the formula's values in float32, and gives its own tensors again, byte for byte."""
    place, symmetric, dtype, seed = case
    n, k, group = SHAPES[place]
    layer = make_layer(n, k, group, dtype=dtype, symmetric=symmetric, seed=seed)
    tensors = awq_layer(layer)
    given = _config(group_size=group) if seed % 2 else None  # without a config shapes say it all
    found = q4.detect_or_fail(tensors, config=given).layers["proj"]
    assert (found.dialect, found.shape, found.block_size) == ("awq", (n, k), group)
    weight = AWQ.read(found, tensors.__getitem__)
    weight.check_values()
    assert (weight.dtype, weight.zero is None) == (dtype, symmetric)
    assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)
    written = AWQ.write("proj", weight).tensors
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (written[key].dtype, written[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(written[key], tensor), key


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("columns", [128, 256, 512, 640, 2048])
@pytest.mark.parametrize("has_config", [True, False])
def test_gemv_is_read_as_a_view(columns: int, group: int, has_config: bool) -> None:
    """Its codes are rows already; groups are counted by the config, or by the padding of the usual sizes."""
    layer = make_layer(24, columns, group)
    tensors = gemv_layer(layer, group)
    given = _config("gemv", group_size=group) if has_config else None
    found = q4.detect_or_fail(tensors, config=given).layers["proj"]
    assert (found.dialect, found.shape, found.block_size) == ("awq-gemv", (24, columns), group)
    weight = GEMV.read(found, tensors.__getitem__)
    assert weight.qdata.data_ptr() == tensors["proj.qweight"].data_ptr()
    assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)
    written = GEMV.write("proj", weight).tensors
    for key, tensor in tensors.items():
        assert torch.equal(written[key], tensor), key


def test_gemv_with_scales_in_its_padding_is_refused() -> None:
    """Scales after the last group mean that the groups are smaller than they are called."""
    tensors = gemv_layer(make_layer(24, 512, 128), 128)
    tensors["proj.scales"] = torch.ones_like(tensors["proj.scales"])
    found = next(iter(GEMV.find(q4.Catalogue(tensors, config=_config("gemv", group_size=128)))))
    with pytest.raises(q4.DialectError) as caught:
        GEMV.read(found, tensors.__getitem__)
    assert caught.value.name == "scales"


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round", None])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (64, 512), (512, 64), (8, 64), (256, 256), (64, 128)])
def test_shapes_decide_against_gptq(n: int, k: int, method: str | None) -> None:
    """Whatever the config says, AWQ's shapes are read as AWQ's, and GPTQ's as GPTQ's."""
    layer = make_layer(n, k, 32, symmetric=True)
    given = None if method is None else config(method, bits=4, group_size=32)
    for tensors, name in (
        (awq_layer(layer), "awq"),
        (gptq_layer(layer, version=1, has_groups=method == "gptq"), "gptq"),
    ):
        schema = q4.detect_or_fail(tensors, config=given)
        found = schema.layers["proj"]
        assert found.dialect == name
        weight = (AWQ if name == "awq" else Gptq()).read(found, tensors.__getitem__)
        assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)


def test_autoround_packs_as_awq_too() -> None:
    """``auto_round:auto_awq`` is AWQ's layout."""
    layer = make_layer(64, 96, 32)
    given = config("auto-round", bits=4, group_size=32, packing_format="auto_round:auto_awq")
    tensors = awq_layer(layer)
    found = q4.detect_or_fail(tensors, config=given).layers["proj"]
    assert (found.dialect, found.named) == ("awq", True)
    assert torch.equal(q4.dequantize(AWQ.read(found, tensors.__getitem__), torch.float32), layer.weight)


def _zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


I8, I16, I32, U8, F16 = torch.int8, torch.int16, torch.int32, torch.uint8, torch.float16
LOOK_ALIKES: dict[str, Tensors] = {
    "awq-gemv-fast": {"qweight": _zeros(I16, 16, 512), "qzeros": _zeros(F16, 8, 64), "scales": _zeros(F16, 8, 64)},
    "marlin": {"qweight": _zeros(I32, 32, 128), "scales": _zeros(F16, 4, 64)},
    "bitblas": {"qweight": _zeros(I8, 64, 256), "scales": _zeros(F16, 64, 4), "qzeros": _zeros(I8, 4, 32)},
    "fp-quant": {
        "qweight": _zeros(U8, 64, 256),
        "scales": _zeros(U8, 64, 16),
        "forward_hadamard_matrix": _zeros(F16, 32, 32),
    },
    "paroquant": {
        **{name.removeprefix("proj."): tensor for name, tensor in awq_layer(make_layer(64, 128, 32)).items()},
        "theta": _zeros(F16, 8, 64),
        "pairs": _zeros(I16, 8, 128),
        "channel_scales": _zeros(F16, 1, 128),
    },
    "8-bit AWQ": {"qweight": _zeros(I32, 128, 16), "qzeros": _zeros(I32, 4, 16), "scales": _zeros(F16, 4, 64)},
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_refused_by_name(name: str) -> None:
    """Keys of AWQ with other shapes or with side matrices are not read, and not dense."""
    schema = q4.detect({f"proj.{suffix}": tensor for suffix, tensor in LOOK_ALIKES[name].items()})
    assert schema is not None
    assert (dict(schema.layers), schema.dense) == ({}, ())
    assert [(item.code, item.key, item.value) for item in schema.unsupported] == [("unsupported", "proj", name)]


@pytest.mark.parametrize("method", ["paroquant", "quip", "sinq"])
def test_another_method_is_believed(method: str) -> None:
    """A method that is none of the three is named, whatever the shapes."""
    schema = q4.detect(awq_layer(make_layer(64, 128, 32)), config=config(method))
    assert schema is not None
    assert [item.value for item in schema.unsupported] == [method]


DAMAGES: dict[str, tuple[str, Any, tuple[str, str]]] = {
    "no scales": ("scales", None, ("missing_key", "proj.scales")),
    "no zeros": ("qzeros", None, ("missing_key", "proj.qzeros")),
    "no codes": ("qweight", None, ("missing_key", "proj.qweight")),
    "codes of int64": ("qweight", lambda t: t.long(), ("dtype", "proj.qweight")),
    "scales of int32": ("scales", lambda t: t.int(), ("dtype", "proj.scales")),
    "not finite": ("scales", lambda t: t * float("nan"), ("value", "proj.scales")),
    "zeros too short": ("qzeros", lambda t: t[:1], ("shape", "proj.qzeros")),
    "zeros too narrow": ("qzeros", lambda t: t[:, :1], ("shape", "proj.qzeros")),
    "groups that do not divide": ("qweight", lambda t: t[:-1], ("shape", "proj.scales")),
    "an order": ("g_idx", lambda _: torch.zeros(64, dtype=torch.int32), ("unknown_key", "proj.g_idx")),
    "a rotation": ("rotation", lambda _: torch.ones(2, 2), ("unknown_key", "proj.rotation")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named(damage: str) -> None:
    """The problem has the key that is wrong."""
    tensors = awq_layer(make_layer(32, 64, 32))
    suffix, change, wanted = DAMAGES[damage]
    if change is None:
        del tensors[f"proj.{suffix}"]
    else:
        tensors[f"proj.{suffix}"] = change(tensors.get(f"proj.{suffix}"))
    assert wanted in _problems(tensors, config=_config(group_size=32))


@pytest.mark.parametrize("facts", [{"bits": 8}, {"group_size": 16}, {"group_size": -1}], ids=str)
def test_config_that_contradicts_the_tensors_is_an_error(facts: dict[str, Any]) -> None:
    """Neither is believed."""
    given = _config(**{"group_size": 32, **facts})
    assert {code for code, _ in _problems(awq_layer(make_layer(32, 64, 32)), config=given)} == {"value"}


@pytest.mark.parametrize(
    ("shape", "change", "name"),
    [
        ((32, 64), {"zero": torch.full((32, 2), 7.5)}, "zero"),
        ((32, 64), {"zero": torch.full((32, 2), 16, dtype=torch.int32)}, "zero"),
        ((32, 64), {"input_channel_scale": torch.ones(64)}, "features"),
        ((32, 64), {"input_permutation": torch.arange(64).flip(0)}, "features"),
        ((33, 64), {}, "out_features"),
        ((32, 40), {}, "features"),
    ],
    ids=["half", "16", "channels", "order", "rows", "tail"],
)
def test_what_the_dialect_has_no_place_for_is_refused(
    shape: tuple[int, int], change: dict[str, Any], name: str
) -> None:
    """Zero points that are no code, an order of the in-features, and a short last block are refused by name."""
    weight = attrs.evolve(q4.quantize(torch.randn(shape), "int4", block_size=32), **change)
    with pytest.raises(q4.DialectError) as caught:
        AWQ.write("proj", weight)
    assert caught.value.name == name


def test_several_group_sizes_have_no_config() -> None:
    """AutoAWQ's entry has one group size for all layers."""
    specs = {
        str(size): q4.WeightSpec.of(q4.quantize(torch.randn(8, 128), "int4", block_size=size)) for size in (32, 64)
    }
    with pytest.raises(q4.DialectError) as caught:
        AWQ.quantization_config(specs, ())
    assert caught.value.name == "group_size"


def test_old_files_are_opened_by_their_own_config(tmp_path: Path) -> None:
    """AutoAWQ's ``quant_config.json`` has other names, and no method."""
    layer = make_layer(32, 64, 32)
    save_file(awq_layer(layer), tmp_path / "model.safetensors")
    entry = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(entry), encoding="utf-8")
    with q4.open(tmp_path) as opened:
        assert opened.schema.layers["proj"].named
        assert torch.equal(q4.dequantize(opened["proj"], torch.float32), layer.weight)
