"""GPTQ in both versions: words of any dtype, orders of in-features, zero points that borrow, and AutoRound's kinds."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch
from qwords import Tensors, config, gptq_layer, make_layer
from safetensors.torch import save_file

import q4core as q4
from q4_dialects.gptq import Gptq, GptqV2
from q4_dialects.qweight_config import PACK_DTYPES

if TYPE_CHECKING:
    from pathlib import Path

DIALECTS = {1: Gptq(), 2: GptqV2()}
FORMS = {1: "gptq", 2: "gptq_v2"}
SHAPES = [(16, 64, 32), (24, 128, 128), (72, 320, 64), (16, 40, 32), (32, 35, 16), (8, 16, 16)]
"""N, K and group: whole groups, one group, groups and words that do not divide K."""
CASES = list(itertools.product((1, 2), PACK_DTYPES.values(), (4, 8), range(len(SHAPES)), (False, True)))
_Case = tuple[int, torch.dtype, int, int, bool]


def _config(version: int, group: int, **facts: Any) -> dict[str, Any]:
    return config("gptq", **{"bits": 4, "group_size": group, "checkpoint_format": FORMS[version], **facts})


def _read(tensors: Tensors, **arguments: Any) -> q4.PackedWeight:
    layer = q4.detect_or_fail(tensors, **arguments).layers["proj"]
    return next(item for item in DIALECTS.values() if item.name == layer.dialect).read(layer, tensors.__getitem__)


def _problems(tensors: Tensors, **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_layers_have_their_values_and_are_written_again(case: _Case) -> None:
    """Each case has the formula's values in float32, and gives its own tensors again, byte for byte."""
    version, pack_dtype, bits, place, scattered = case
    n, k, group = SHAPES[place]
    layer = make_layer(n, k, group, bits=bits, scattered=scattered, seed=place)
    tensors = gptq_layer(layer, version=version, bits=bits, pack_dtype=pack_dtype)
    name = str(pack_dtype).removeprefix("torch.")
    facts = _config(version, group, bits=bits, desc_act=scattered, pack_dtype=name)
    found = q4.detect_or_fail(tensors, config=facts).layers["proj"]
    assert (found.dialect, found.shape, found.block_size) == (FORMS[version].replace("_", "-"), (n, k), min(group, k))
    weight = DIALECTS[version].read(found, tensors.__getitem__)
    weight.check_values()
    assert (weight.format.name, weight.dtype) == (f"int{bits}", torch.float16)
    assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)
    assert (weight.input_permutation is not None) == bool((np.diff(layer.groups) < 0).any())
    if n % (8 * pack_dtype.itemsize // bits):
        return
    written = DIALECTS[version].write("proj", weight).tensors
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (written[key].dtype, written[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(written[key], tensor), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_layers_need_no_config(version: int, bits: int, dtype: torch.dtype) -> None:
    """Zero points that are all in the middle say the version, are not held, and are written as they were."""
    layer = make_layer(32, 96, 32, bits=bits, dtype=dtype, symmetric=True)
    tensors = gptq_layer(layer, version=version, bits=bits)
    weight = _read(tensors)
    assert (weight.dialect, weight.zero, weight.dtype) == (DIALECTS[version].name, None, dtype)
    assert any("zero points" in note for note in weight.notes)
    assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)
    assert torch.equal(DIALECTS[version].write("proj", weight).tensors["proj.qzeros"], tensors["proj.qzeros"])


def test_asymmetric_layers_need_the_config_or_a_choice() -> None:
    """Without either both versions fit, and the error names them; ``dialect`` chooses."""
    layer = make_layer(16, 64, 32)
    for version in (1, 2):
        tensors = gptq_layer(layer, version=version)
        with pytest.raises(q4.SchemaError) as caught:
            q4.detect_or_fail(tensors)
        assert "gptq or gptq-v2" in str(caught.value)
        weight = _read(tensors, dialect=DIALECTS[version].name)
        assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel", "auto_round:auto_gptq", "auto", None])
@pytest.mark.parametrize("has_groups", [True, False])
def test_autoround_stores_zero_points_in_two_ways(packing: str | None, has_groups: bool) -> None:
    """Its packing format says whether a stored zero point is one less; ``g_idx`` may be absent."""
    layer = make_layer(32, 96, 32)
    is_plain = packing in {"auto_round", "auto_round:gptqmodel"}
    if not is_plain:
        layer = attrs.evolve(layer, zeros=np.maximum(layer.zeros, 1))
    tensors = gptq_layer(layer, version=2 if is_plain else 1, has_groups=has_groups)
    facts = {"bits": 4, "group_size": 32, **({} if packing is None else {"packing_format": packing})}
    weight = _read(tensors, config=config("auto-round", **facts))
    assert weight.dialect == ("gptq-v2" if is_plain else "gptq")
    assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_autoround_adds_one_to_each_code_alone(bits: int) -> None:
    """The largest stored code stands for the power of two above it: AutoRound neither masks nor carries."""
    layer = make_layer(32, 96, 32, bits=bits)
    tensors = gptq_layer(layer, version=2, bits=bits, has_groups=False)
    facts = {"bits": bits, "group_size": 32, "packing_format": "auto_round:auto_gptq"}
    weight = _read(tensors, config=config("auto-round", **facts))
    above = attrs.evolve(layer, zeros=layer.zeros + 1)
    assert torch.equal(q4.dequantize(weight, torch.float32), above.weight)
    with pytest.raises(q4.DialectError) as caught:
        Gptq().write("proj", weight)
    assert caught.value.name == "zero"


def test_layers_of_their_own_bits_and_groups() -> None:
    """``dynamic`` and ``extra_config`` name modules by name, by its end and by expression."""
    for name in ("dynamic", "extra_config"):
        for pattern in ("model.layers.0.proj", "layers.0.proj", r"+:.*\.0\.proj$", r".*proj"):
            layer = make_layer(32, 96, 48, bits=8)
            tensors = gptq_layer(layer, version=1, bits=8, module="model.layers.0.proj")
            facts = _config(1, 32, **{name: {pattern: {"bits": 8, "group_size": 48}, "other": {"bits": 4}}})
            found = q4.detect_or_fail(tensors, config=facts).layers["model.layers.0.proj"]
            assert (found.format, found.block_size) == ("int8", 48)
            assert torch.equal(q4.dequantize(Gptq().read(found, tensors.__getitem__), torch.float32), layer.weight)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_widths_are_refused_by_name(bits: int) -> None:
    """A layer of other bits is unsupported, by its width; others of the file are read."""
    layer = make_layer(32, 96, 32)
    tensors = gptq_layer(layer, version=1)
    tensors |= {
        "other.qweight": torch.zeros(96 * bits // 32, 64, dtype=torch.int32),
        "other.qzeros": torch.zeros(3, 2 * bits, dtype=torch.int32),
        "other.scales": torch.ones(3, 64, dtype=torch.float16),
        "other.g_idx": torch.arange(96, dtype=torch.int32) // 32,
    }
    schema = q4.detect(tensors, config=_config(1, 32, dynamic={"other": {"bits": bits}}))
    assert schema is not None
    assert list(schema.layers) == ["proj"]
    assert [(item.key, item.value) for item in schema.unsupported] == [("other", f"{bits}-bit GPTQ")]


@pytest.mark.parametrize("form", ["marlin", "bitblas", "gptq_p", "exllama_v9"])
def test_other_forms_are_refused_by_name(form: str) -> None:
    """What the config calls otherwise is not read as either version."""
    schema = q4.detect(gptq_layer(make_layer(16, 64, 32), version=1), config=config("gptq", checkpoint_format=form))
    assert schema is not None
    assert [item.value for item in schema.unsupported] == [f"gptq {form}"]


DAMAGES: dict[str, tuple[dict[str, Any], set[tuple[str, str]]]] = {
    "no scales": ({"scales": None}, {("missing_key", "proj.scales")}),
    "no zeros": ({"qzeros": None}, {("missing_key", "proj.qzeros")}),
    "no groups": ({"g_idx": None}, {("missing_key", "proj.g_idx")}),
    "groups beyond": ({"g_idx": lambda t: t + 1}, {("value", "proj.g_idx")}),
    "groups below": ({"g_idx": lambda t: t - 1}, {("value", "proj.g_idx")}),
    "groups all alike": ({"g_idx": lambda t: t * 0}, {("value", "proj.g_idx")}),
    "groups of int64": ({"g_idx": lambda t: t.long()}, {("dtype", "proj.g_idx")}),
    "a group less": ({"g_idx": lambda t: t[:-8]}, {("shape", "proj.qweight")}),
    "scales of int32": ({"scales": lambda t: t.int()}, {("dtype", "proj.scales")}),
    "not finite": ({"scales": lambda t: t * float("inf")}, {("value", "proj.scales")}),
    "zeros too short": ({"qzeros": lambda t: t[:1]}, {("shape", "proj.qzeros")}),
    "zeros of another word": (
        {"qzeros": lambda t: t.to(torch.int16)},
        {("dtype", "proj.qzeros"), ("shape", "proj.qzeros")},
    ),
    "codes of another word": ({"qweight": lambda t: t.long()}, {("dtype", "proj.qweight"), ("shape", "proj.qweight")}),
    "a rotation": ({"rotation": lambda _: torch.ones(2, 2)}, {("unknown_key", "proj.rotation")}),
    "another scale": ({"scale_of_scales": lambda _: torch.ones(3)}, {("unknown_key", "proj.scale_of_scales")}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named(damage: str) -> None:
    """The problem has the key that is wrong."""
    tensors = gptq_layer(make_layer(16, 64, 32), version=1)
    changes, wanted = DAMAGES[damage]
    for suffix, change in changes.items():
        key = f"proj.{suffix}"
        if change is None:
            del tensors[key]
        else:
            tensors[key] = change(tensors.get(key))
    assert wanted <= _problems(tensors, config=_config(1, 32, pack_dtype="int32"))


@pytest.mark.parametrize(
    "facts", [{"bits": 8}, {"group_size": 16}, {"group_size": -1}, {"pack_dtype": "int64"}], ids=str
)
def test_config_that_contradicts_the_tensors_is_an_error(facts: dict[str, Any]) -> None:
    """Neither is believed."""
    codes = {
        code for code, _ in _problems(gptq_layer(make_layer(16, 64, 32), version=1), config=_config(1, 32, **facts))
    }
    assert codes & {"value", "dtype"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"zero": torch.full((16, 2), 7.5)}, "zero"),
        ({"zero": torch.full((16, 2), 16, dtype=torch.int32)}, "zero"),
        ({"zero": torch.full((16, 2), -1, dtype=torch.int8)}, "zero"),
        ({"input_channel_scale": torch.ones(64)}, "features"),
        ({"activation_scale": torch.ones(())}, "activation_scale"),
    ],
    ids=["half", "16", "-1", "channels", "activations"],
)
def test_what_the_dialect_has_no_place_for_is_refused(change: dict[str, Any], name: str) -> None:
    """Zero points that are no code, and features that the libraries do not store, are refused by name."""
    weight = attrs.evolve(q4.quantize(torch.randn(16, 64), "int4", block_size=32), **change)
    for dialect in DIALECTS.values():
        with pytest.raises(q4.DialectError) as caught:
            dialect.write("proj", weight)
        assert caught.value.name == name


def test_versions_convert_into_each_other() -> None:
    """What one version holds the other writes, and the way back gives the same bytes."""
    layer = make_layer(16, 64, 32, scattered=True)
    first, second = (gptq_layer(layer, version=version) for version in (1, 2))
    weight = _read(first, config=_config(1, 32))
    for key, tensor in GptqV2().write("proj", weight).tensors.items():
        assert torch.equal(tensor, second[key])
    for key, tensor in Gptq().write("proj", _read(second, config=_config(2, 32))).tensors.items():
        assert torch.equal(tensor, first[key])


@pytest.mark.parametrize("name", ["quantize_config.json", "config.json"])
def test_files_are_opened_by_either_config(name: str, tmp_path: Path) -> None:
    """AutoGPTQ's own file speaks where config.json says nothing, and names no method."""
    layer = make_layer(16, 64, 32)
    save_file(gptq_layer(layer, version=1), tmp_path / "model.safetensors")
    entry = {"bits": 4, "group_size": 32, "desc_act": False}
    whole = {"quantization_config": {"quant_method": "gptq", **entry}} if name == "config.json" else entry
    (tmp_path / name).write_text(json.dumps(whole), encoding="utf-8")
    with q4.open(tmp_path) as opened:
        weight = opened["proj"]
        assert (opened.schema.layers["proj"].dialect, weight.dialect) == ("gptq", "gptq")
        assert torch.equal(q4.dequantize(weight, torch.float32), layer.weight)
