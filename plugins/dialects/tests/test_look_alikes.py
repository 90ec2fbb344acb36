"""Layers with another dialect's keys are refused by name, or the error names the readings; none is read wrongly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from cases import BUILDERS

import q4core as q4
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, torch.Tensor]
U8, I32, F16, E4M3 = torch.uint8, torch.int32, torch.float16, torch.float8_e4m3fn


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=U8).to(dtype)


def _config(method: str, **facts: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **facts}}


MX = {"proj.weight_packed": _of(U8, 16, 32), "proj.weight_scale": _of(U8, 16, 2)}
E5M3 = {"proj.weight_packed": _of(U8, 16, 32), "proj.weight_scale": _of(U8, 16, 4)}
REFUSED: dict[str, tuple[str, Tensors, dict[str, Any]]] = {
    "mxint4": ("mxint4", MX, _config("auto-round", data_type="mx_int", packing_format="auto_round")),
    "e5m3": ("nvfp4-e5m3", E5M3, _config("compressed-tensors", format="nvfp4-e5m3-pack-quantized")),
    "e5m3 by shape": ("nvfp4-e5m3", E5M3, {}),
    "e5m3 as float8": (
        "nvfp4-e5m3",
        {**E5M3, "proj.weight_scale": _of(E4M3, 16, 4)},
        _config("compressed-tensors", format="nvfp4-e5m3-pack-quantized"),
    ),
    "paroquant": (
        "paroquant",
        {
            "proj.weight": _of(U8, 16, 32),
            "proj.weight_scale": _of(U8, 16, 2),
            "proj.theta": _of(F16, 1, 8, 32),
            "proj.pairs": _of(torch.int16, 1, 8, 64),
            "proj.channel_scales": _of(F16, 1, 64),
        },
        {},
    ),
    "exl2": (
        "exl2",
        {"proj.q_weight": _of(I32, 8, 16), "proj.q_scale": _of(I32, 1, 2), "proj.q_invperm": _of(torch.int16, 64)},
        {},
    ),
    "exl3": ("exl3", {"proj.trellis": _of(torch.int16, 4, 4, 64), "proj.suh": _of(F16, 64)}, {}),
    "qtip": (
        "qtip",
        {"proj.trellis": _of(torch.int16, 4, 64), "proj.SU": _of(F16, 64), "proj.SV": _of(F16, 64)},
        {},
    ),
    "vptq": ("vptq", {"proj.indices": _of(I32, 1, 16, 8), "proj.centroids.weight": _of(F16, 1, 256)}, {}),
    "sinq": ("sinq", {"proj.W_q": _of(U8, 32, 64), "proj.meta": _of(U8, 128)}, {}),
    "marlin": ("marlin", {"proj.B": _of(I32, 4, 64), "proj.s": _of(F16, 1, 32)}, {}),
    "marlin 2:4": (
        "marlin-24",
        {
            "proj.weight_packed": _of(I32, 4, 64),
            "proj.scale_packed": _of(F16, 1, 32),
            "proj.meta": _of(torch.int16, 4, 8),
            "proj.weight_shape": torch.tensor([32, 64]),
        },
        _config("compressed-tensors", format="marlin-24"),
    ),
    "qqq": ("qqq", {"proj.B": _of(I32, 4, 64), "proj.s_channel": _of(torch.float32, 1, 32)}, {}),
    "svdquant": ("svdquant", {"proj.qweight": _of(torch.int8, 16, 32), "proj.wscales": _of(F16, 1, 16)}, {}),
    "comfyui fp8": (
        "comfyui fp8",
        {"proj.weight": _of(E4M3, 16, 64), "proj.weight_scale": torch.ones(()), "proj.comfy_quant": _of(U8, 9)},
        {},
    ),
    "fp8 of another kind": (
        "fp8",
        {"proj.weight": _of(torch.float8_e5m2, 16, 64), "proj.weight_scale": torch.ones(())},
        {},
    ),
}
WIDTHS = {
    "2 bits": (2, 4),
    "3 bits": (3, 6),
    "6 bits": (6, 12),
}


@pytest.mark.parametrize("name", REFUSED)
def test_look_alike_is_refused_by_name(name: str) -> None:
    """Each is listed under its name, with all of its tensors, whatever else has the same keys."""
    dialect, tensors, config = REFUSED[name]
    schema = q4.detect(tensors, config=config)
    assert schema is not None
    assert [(item.code, item.key, item.value) for item in schema.unsupported] == [("unsupported", "proj", dialect)]
    assert (dict(schema.layers), schema.dense) == ({}, ())


def test_fp8_that_the_header_marks_is_refused_by_name() -> None:
    """ComfyUI's marker in the metadata counts as its tensor does: such a layer may be rotated."""
    tensors = {"proj.weight": _of(E4M3, 16, 64), "proj.weight_scale": torch.ones(())}
    marks = {"layers": {"proj": {"format": "float8_e4m3fn", "convrot": True}}}
    schema = q4.detect(tensors, metadata={"_quantization_metadata": json.dumps(marks)})
    assert schema is not None
    assert [(item.key, item.value) for item in schema.unsupported] == [("proj", "comfyui fp8")]
    assert (schema.dense, dict(schema.decoded)) == ((), {})


@pytest.mark.parametrize("name", WIDTHS)
def test_other_width_is_refused_by_name(name: str) -> None:
    """Words of 2, 3 or 6 bits under pack-quantized's keys are named by their width, by shape or by config alone."""
    bits, width = WIDTHS[name]
    tensors = {
        "proj.weight_packed": _of(I32, 16, width),
        "proj.weight_scale": _of(F16, 16, 1),
        "proj.weight_shape": torch.tensor([16, 64]),
    }
    config = _config("compressed-tensors", config_groups={"g": {"weights": {"num_bits": bits, "type": "int"}}})
    for stated in ({}, config):
        schema = q4.detect(tensors, config=stated)
        assert schema is not None
        ((key, value),) = [(item.key, item.value) for item in schema.unsupported]
        assert key == "proj"
        assert str(value).startswith(f"{bits}-bit codes")


def test_gemma_of_two_bits_is_refused() -> None:
    """Two bits and four have the same shapes, so that a config with both, or with two, is not guessed at."""
    layer = BUILDERS["gemma"](1)
    for configs in ({"num_bits": 2}, {"num_bits": 2, "module_quant_configs": {"x": {"num_bits": 4}}}):
        schema = q4.detect(layer.tensors, config=_config("gemma", **configs))
        assert schema is not None
        assert [(item.code, item.key) for item in schema.unsupported] == [("unsupported", "proj")]
        assert schema.dense == ()


def test_mxfp4_and_mxint4_are_told_apart_by_config_alone() -> None:
    """Without a config both readings fit; the error names both, and ``dialect=`` chooses."""
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(MX)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key, problem.value) == ("ambiguous", "proj", "compressed-tensors-mxfp4 or mxint4")
    assert "dialect=" in problem.rule
    chosen = q4.detect_or_fail(MX, dialect="compressed-tensors-mxfp4").layers["proj"]
    assert chosen.dialect == "compressed-tensors-mxfp4"
    both = _config("auto-round", data_type="mx_fp", extra_config={"proj": {"data_type": "mx_int"}})
    with pytest.raises(q4.SchemaError, match="ambiguous"):
        q4.detect_or_fail(MX, config=both)


def test_both_widths_of_a_tiny_layer_are_named() -> None:
    """Four columns fill one word in either width: the config decides, or nobody does."""
    tensors = {
        "proj.weight_packed": _of(I32, 3, 1),
        "proj.weight_scale": _of(F16, 3, 1),
        "proj.weight_shape": torch.tensor([3, 4]),
    }
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors)
    assert [item.value for item in caught.value.problems] == ["compressed-tensors-int4 or compressed-tensors-int8"]
    for bits in (4, 8):
        config = _config("compressed-tensors", config_groups={"g": {"weights": {"num_bits": bits}}})
        assert q4.detect_or_fail(tensors, config=config).layers["proj"].format == f"int{bits}"


def test_bfl_file_is_read_as_modelopt() -> None:
    """BFL's NVFP4 has ModelOpt's layout and no config: shapes decide where no tile is full, else dialect= does."""
    odd = {
        "proj.weight": _of(U8, 48, 16),
        "proj.weight_scale": _of(E4M3, 48, 2),
        "proj.weight_scale_2": torch.ones(()),
        "proj.input_scale": torch.ones(()),
    }
    assert q4.detect_or_fail(odd).layers["proj"].dialect == "modelopt-nvfp4"
    even = {**odd, "proj.weight": _of(U8, 128, 32), "proj.weight_scale": _of(E4M3, 128, 4)}
    with pytest.raises(q4.SchemaError, match="comfyui-nvfp4 or modelopt-nvfp4"):
        q4.detect_or_fail(even)
    assert q4.detect_or_fail(even, dialect="modelopt-nvfp4").layers["proj"].dialect == "modelopt-nvfp4"


@pytest.mark.parametrize(
    "tensors",
    [
        {"proj.codes": _of(U8, 16, 32), "proj.block_scale": _of(F16, 16, 2)},
        {"proj.packed": _of(I32, 16, 8), "proj.scales": _of(F16, 16, 1)},
        {"proj.weight": _of(I32, 16, 8), "proj.weight_scales": _of(F16, 16, 1)},
        {"proj.weight": _of(U8, 16, 8), "proj.weight_absmaxima": _of(F16, 16, 1)},
    ],
    ids=" ".join,
)
def test_packed_integers_that_nothing_explains_are_no_dense_tensors(tensors: Tensors, tmp_path: Path) -> None:
    """Opening such a file names the keys; ``q4 inspect`` says the same, and fails."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(q4.UnknownDialectError) as caught:
        q4.open(path)
    assert all(key.removeprefix("proj.") in str(caught.value) for key in tensors)
    answer = run_interpreter(["-m", "q4_cli", "inspect", str(path)], timeout=scaled(120))
    assert answer.returncode != 0
    assert "dense tensor" not in answer.stdout.split("no layer")[0]
    norm = {
        **tensors,
        **{f"mlp.{key.removeprefix('proj.')}": item for key, item in BUILDERS["modelopt-mxfp4"](1).tensors.items()},
    }
    safetensors.torch.save_file(norm, path)
    with q4.open(path, config={}) as checkpoint:
        assert list(checkpoint) == ["mlp"]
        assert [(item.code, item.key) for item in checkpoint.schema.unsupported] == [("unexplained", "proj")]
        assert not set(tensors) & set(checkpoint.dense)


@pytest.mark.parametrize("scale", ["weight_scale", "scale"])
def test_pair_of_long_integers_is_no_mxfp4(scale: str) -> None:
    """Codes and powers of two are bytes; what has other integers is claimed by no dialect."""
    assert q4.detect({"proj.weight": _of(torch.int64, 16, 32), f"proj.{scale}": _of(torch.int64, 16, 2)}) is None


@pytest.mark.parametrize("dialect", ["modelopt-mxfp4", "deepseek-mxfp4", "gemma"])
def test_dtype_that_nothing_states_is_noted(dialect: str) -> None:
    """Where ``config.json`` has no dtype, the layer's notes say which one is assumed."""
    layer = BUILDERS[dialect](0)
    for stated, is_noted in (({}, True), ({"dtype": "float16"}, False)):
        found = q4.detect_or_fail(layer.tensors, config={**layer.config, **stated})
        assert {"dtype bfloat16 assumed" in " ".join(item.notes) for item in found.layers.values()} == {is_noted}
