"""ModelOpt and ComfyUI use the same keys for opposite nibble orders: what distinguishes them, and what each reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4_dialects.comfyui import ComfyUiNvfp4
from q4_dialects.modelopt import ModelOptNvfp4
from q4_dialects.swizzle import swizzled_from_linear

if TYPE_CHECKING:
    from pathlib import Path

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
MARK = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"proj": {"format": "nvfp4"}}})}
WHOLE = (128, 64)  # whole tiles: both dialects' shapes are the same
DIALECTS: dict[str, q4.Dialect] = {"modelopt-nvfp4": ModelOptNvfp4(), "comfyui-nvfp4": ComfyUiNvfp4()}


def _json(facts: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


def _layer(n: int = 20, k: int = 80, *, comfy: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored tensors and the dequantised weight, by the dialects' formulas."""
    random = torch.Generator().manual_seed(n * k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=random)
    linear = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=random)
    total = torch.rand((), generator=random)
    scale = linear.view(torch.float8_e4m3fn)
    if comfy:
        scale = swizzled_from_linear(scale).view(-(-n // 128) * 128, -(-k // 64) * 4)
    tensors = {"proj.weight": packed, "proj.weight_scale": scale, "proj.weight_scale_2": total}
    pair = (packed >> 4, packed & 15) if comfy else (packed & 15, packed >> 4)
    codes = torch.stack(pair, dim=-1).flatten(1).long()
    value = linear.view(torch.float8_e4m3fn).to(torch.float32) * total
    return tensors, E2M1[codes] * value.repeat_interleave(16, dim=1)


def _read(tensors: dict[str, torch.Tensor], **arguments: Any) -> q4.PackedWeight:
    layer = q4.detect_or_fail(tensors, **arguments).layers["proj"]
    return DIALECTS[layer.dialect].read(layer, tensors.__getitem__)


def _problems(tensors: dict[str, torch.Tensor], **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


def test_whole_tiles_without_a_word_are_ambiguous() -> None:
    """Where even the shapes coincide, nothing is guessed: both names and a hint are in the error."""
    tensors, _ = _layer(*WHOLE)
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors)
    assert [problem.code for problem in caught.value.problems] == ["ambiguous"]
    assert "comfyui-nvfp4 or modelopt-nvfp4" in str(caught.value)
    assert {layer.dialect for layer in q4.detect_all(tensors)} == set(DIALECTS)


@pytest.mark.parametrize(
    ("arguments", "extra", "expected"),
    [
        ({"config": MODELOPT}, {}, "modelopt-nvfp4"),
        ({"metadata": MARK}, {}, "comfyui-nvfp4"),
        ({}, {"proj.comfy_quant": _json({"format": "nvfp4"})}, "comfyui-nvfp4"),
        ({"dialect": "modelopt-nvfp4"}, {}, "modelopt-nvfp4"),
        ({"dialect": "comfyui-nvfp4"}, {}, "comfyui-nvfp4"),
        # ComfyUI's own mark goes before config.json
        ({"config": MODELOPT, "metadata": MARK}, {}, "comfyui-nvfp4"),
        ({"metadata": {"q4core.dialect": "modelopt-nvfp4"}}, {}, "modelopt-nvfp4"),
    ],
)
def test_what_distinguishes_whole_tiles(
    arguments: dict[str, Any], extra: dict[str, torch.Tensor], expected: str
) -> None:
    """config.json, ComfyUI's two marks, our own mark, or the caller; each gives that dialect's numbers."""
    is_comfy = expected == "comfyui-nvfp4"
    tensors, value = _layer(*WHOLE, comfy=is_comfy)
    weight = _read({**tensors, **extra}, **arguments)
    assert weight.dialect == expected
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    _, other = _layer(*WHOLE, comfy=not is_comfy)
    assert not torch.equal(value, other)


@pytest.mark.parametrize(("n", "k"), [(20, 80), (128, 80), (130, 96), (16, 16)])
@pytest.mark.parametrize("comfy", [False, True])
def test_shapes_decide_where_tiles_are_not_whole(n: int, k: int, comfy: bool) -> None:
    """Elsewhere the shape of the scales decides, without any metadata."""
    n = n // 16 * 16 if comfy else n
    tensors, value = _layer(n, k, comfy=comfy)
    weight = _read(tensors)
    assert weight.dialect == ("comfyui-nvfp4" if comfy else "modelopt-nvfp4")
    assert torch.equal(q4.dequantize(weight, torch.float32), value)


def test_each_module_is_identified_by_itself() -> None:
    """A mark for one layer says nothing of its neighbour."""
    tensors, _ = _layer(*WHOLE)
    other = {name.replace("proj", "other"): tensor for name, tensor in tensors.items()}
    assert _problems({**tensors, **other}, metadata=MARK) == {("ambiguous", "other")}


@pytest.mark.parametrize("comfy", [False, True])
@pytest.mark.parametrize("mark", ["metadata", "tensor"])
def test_writing_a_layer_again_changes_no_byte(comfy: bool, mark: str) -> None:
    """Tensors, ComfyUI's mark in whichever form, and the activation scale come back as they were."""
    tensors, _ = _layer(*WHOLE, comfy=comfy)
    tensors["proj.input_scale"] = torch.tensor(0.125)
    marker = {"format": "nvfp4", "full_precision": True}
    arguments: dict[str, Any] = {"config": MODELOPT}
    if comfy and mark == "metadata":
        arguments = {"metadata": {"_quantization_metadata": json.dumps({"layers": {"proj": marker}})}}
    elif comfy:
        tensors["proj.comfy_quant"] = _json(marker)
        arguments = {}
    weight = _read(tensors, **arguments)
    dialect = DIALECTS[str(weight.dialect)]
    written = dialect.write("proj", weight)
    assert written.tensors.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (written.tensors[key].dtype, written.tensors[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(written.tensors[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    if comfy and mark == "metadata":
        merged = dialect.merge_metadata({"proj": written}, [])
        assert json.loads(merged["_quantization_metadata"])["layers"] == {"proj": marker}


@pytest.mark.parametrize("missing", ["proj.weight", "proj.weight_scale", "proj.weight_scale_2"])
def test_missing_tensor_is_named(missing: str) -> None:
    """Any two of the three are a layer that lacks the third: a missing global scale is never 1.0."""
    tensors, _ = _layer()
    del tensors[missing]
    assert ("missing_key", missing) in _problems(tensors, config=MODELOPT)


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("proj.weight", torch.zeros(20, 40, dtype=torch.int8), "dtype"),
        ("proj.weight", torch.zeros(20, 36, dtype=torch.uint8), "shape"),
        ("proj.weight", torch.zeros(800, dtype=torch.uint8), "shape"),
        ("proj.weight_scale", torch.zeros(20, 5, dtype=torch.uint8), "dtype"),
        ("proj.weight_scale", torch.zeros(5, 20, dtype=torch.float8_e4m3fn), "shape"),
        ("proj.weight_scale_2", torch.zeros(20), "shape"),
        ("proj.weight_scale_2", torch.zeros((), dtype=torch.bfloat16), "dtype"),
        ("proj.input_scale", torch.zeros(3), "shape"),
        ("proj.pre_quant_scale", torch.zeros(79), "shape"),
        ("proj.weight_scale_3", torch.zeros(1), "unknown_key"),
        ("proj.weight.absmax_extra", torch.zeros(1), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, wrong shapes and unknown scales are each named."""
    assert (code, key) in _problems({**_layer()[0], key: tensor}, config=MODELOPT)


def test_scale_of_input_channels_is_read() -> None:
    """``pre_quant_scale`` multiplies the input, which is the weight's columns."""
    tensors, value = _layer()
    tensors["proj.pre_quant_scale"] = torch.rand(80).to(torch.bfloat16)
    weight = _read(tensors)
    assert weight.input_channel_scale is not None
    assert q4.Feature.INPUT_CHANNEL_SCALE in weight.features
    plain = attrs.evolve(weight, input_channel_scale=None)
    assert torch.equal(q4.dequantize(plain, torch.float32), value)
    assert torch.equal(
        ModelOptNvfp4().write("proj", weight).tensors["proj.pre_quant_scale"], weight.input_channel_scale
    )


def test_scales_of_the_cache_are_dense() -> None:
    """``k_scale`` and ``v_scale`` belong to the key and value cache, not to the weight."""
    schema = q4.detect_or_fail({**_layer()[0], "proj.k_scale": torch.ones(()), "proj.v_scale": torch.ones(())})
    assert schema.dense == ("proj.k_scale", "proj.v_scale")


@pytest.mark.parametrize(
    ("extra", "metadata"),
    [
        ({"proj.svdquant_lora_a": torch.ones(4, 80), "proj.svdquant_lora_b": torch.ones(20, 4)}, {}),
        ({"proj.comfy_quant": _json({"format": "nvfp4", "convrot": True})}, {}),
    ],
    ids=["low rank", "rotation"],
)
def test_what_would_change_the_answer_is_unsupported(extra: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A low-rank part or a rotation that is not computed makes the layer unreadable, with the reason."""
    schema = q4.detect({**_layer(16, 80, comfy="proj.comfy_quant" in extra)[0], **extra}, metadata=metadata)
    assert schema is not None
    assert [problem.key for problem in schema.unsupported] == ["proj"]
    assert (dict(schema.layers), schema.dense) == ({}, ())


def test_int4_and_fp8_of_the_same_library_are_not_taken_for_nvfp4() -> None:
    """The same names with other dtypes are ModelOpt's other formats, which are named."""
    int4 = {"proj.weight": torch.zeros(8, 64, dtype=torch.uint8), "proj.weight_scale": torch.ones(16, 1)}
    fp8 = {"proj.weight": torch.zeros(8, 64).to(torch.float8_e4m3fn), "proj.weight_scale": torch.ones(())}
    mxfp4 = {
        "proj.weight": torch.zeros(8, 64, dtype=torch.uint8),
        "proj.weight_scale": torch.zeros(8, 4, dtype=torch.uint8),
    }
    for tensors, name in ((int4, "modelopt-int4"), (mxfp4, "modelopt-mxfp4")):
        assert q4.detect_or_fail(tensors, config=MODELOPT).layers["proj"].dialect == name
    schema = q4.detect(fp8, config=MODELOPT)
    assert schema is not None
    assert (dict(schema.layers), [*schema.decoded], schema.dense) == ({}, ["proj.weight"], ("proj.weight",))


def test_sidecar_speaks_where_config_does_not(tmp_path: Path) -> None:
    """``hf_quant_config.json`` names ModelOpt where config.json says nothing of quantisation."""
    weight = q4.quantize(torch.randn(*WHOLE), "nvfp4")
    q4.save_checkpoint(tmp_path, {"proj": weight}, dialect="modelopt-nvfp4")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8")
    with pytest.raises(q4.SchemaError):
        q4.open(tmp_path)
    sidecar = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar), encoding="utf-8")
    assert q4.open(tmp_path)["proj"].dialect == "modelopt-nvfp4"


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("target", ["x.safetensors", "folder"])
def test_what_is_saved_is_read_as_what_it_is(name: str, target: str, tmp_path: Path) -> None:
    """A file or folder of ours in either dialect is never ambiguous, whole tiles or not."""
    weights = {str(n): q4.quantize(torch.randn(n, 64), "nvfp4") for n in (16, 128)}
    q4.save_checkpoint(tmp_path / target, weights, dialect=name)
    checkpoint = q4.open(tmp_path / target)
    assert checkpoint.schema.dialects == (name,)
    for module, weight in weights.items():
        assert torch.equal(q4.dequantize(checkpoint[module]), q4.dequantize(weight))


def test_rows_that_would_be_padded_are_refused() -> None:
    """ComfyUI's files can't distinguish padding from rows, so that only multiples of 16 are written."""
    with pytest.raises(q4.DialectError) as caught:
        ComfyUiNvfp4().write("proj", q4.quantize(torch.randn(20, 64), "nvfp4"))
    assert caught.value.name == "out_features"
