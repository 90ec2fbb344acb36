"""bitsandbytes layers: the formula, the JSON text, every way to be incomplete, and writing."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_dialects.bitsandbytes import BitsAndBytes

NF4 = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook)
FP4 = torch.tensor(q4.BUILTIN_FORMATS["fp4"].codebook)
STATE = "proj.weight.quant_state.bitsandbytes__nf4"


def _text(facts: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


def _layer(n: int = 6, k: int = 128, block: int = 64, kind: str = "nf4", *, nested: bool = False) -> dict[str, Any]:
    """Return a layer's tensors as bitsandbytes stores them, with random numbers."""
    random = torch.Generator().manual_seed(n * k)
    count = -(-n * k // block)
    facts: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {
        "proj.weight": torch.randint(0, 256, (-(-n * k // 2), 1), dtype=torch.uint8, generator=random),
        "proj.weight.absmax": torch.rand(count, generator=random),
        "proj.weight.quant_map": (NF4 if kind == "nf4" else FP4).clone(),
    }
    if nested:
        facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        tensors["proj.weight.absmax"] = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random)
        tensors["proj.weight.nested_absmax"] = torch.rand(-(-count // 256), generator=random)
        tensors["proj.weight.nested_quant_map"] = torch.linspace(-0.99, 1, 256)
    tensors[f"proj.weight.quant_state.bitsandbytes__{kind}"] = _text(facts)
    return tensors


def _read(tensors: dict[str, torch.Tensor]) -> q4.PackedWeight:
    schema = q4.detect_or_fail(tensors)
    return BitsAndBytes().read(schema.layers["proj"], tensors.__getitem__)


def _problems(tensors: dict[str, torch.Tensor]) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("n", "k", "block"), [(6, 128, 64), (6, 96, 64), (9, 32, 128), (5, 33, 64), (200, 128, 64)])
def test_value_is_table_times_absmax_of_the_flat_block(n: int, k: int, block: int, kind: str, nested: bool) -> None:
    """W.flat[i] = table[code i] · absmax[i // block], with the absmax of two levels multiplied, then added."""
    tensors = _layer(n, k, block, kind, nested=nested)
    weight = _read(tensors)
    packed = tensors["proj.weight"].reshape(-1).long()
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).reshape(-1)[: n * k]
    absmax = tensors["proj.weight.absmax"]
    if nested:
        second = tensors["proj.weight.nested_absmax"].repeat_interleave(256)[: absmax.numel()]
        absmax = tensors["proj.weight.nested_quant_map"][absmax.long()] * second + torch.tensor(0.5)
    expected = tensors["proj.weight.quant_map"][codes] * absmax.repeat_interleave(block)[: n * k]
    assert torch.equal(q4.dequantize(weight, torch.float32), expected.reshape(n, k))
    assert (weight.dtype, weight.dialect, weight.format.name) == (torch.bfloat16, "bitsandbytes", kind)
    assert weight.blocks is (q4.BlockOrder.ROW if k % block == 0 else q4.BlockOrder.FLAT)
    written = BitsAndBytes().write("proj", weight).tensors
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_may_be_stored_as_a_view_of_a_float_dtype(storage: torch.dtype) -> None:
    """``quant_storage`` changes the dtype of the same bytes, when read and when written again."""
    tensors = _layer()
    plain = _read(tensors)
    tensors["proj.weight"] = tensors["proj.weight"].reshape(-1).view(storage).reshape(-1, 1)
    weight = _read(tensors)
    assert torch.equal(weight.qdata, plain.qdata)
    written = BitsAndBytes().write("proj", weight).tensors["proj.weight"]
    assert (written.dtype, written.shape) == (storage, tensors["proj.weight"].shape)
    assert torch.equal(written.view(torch.uint8), tensors["proj.weight"].view(torch.uint8))


def test_unusual_json_text_is_written_again_as_it_was() -> None:
    """Another order of keys or other spaces are preserved, as long as the text still says what the weight is."""
    tensors = _layer()
    facts = json.loads(bytes(tensors[STATE].tolist()))
    tensors[STATE] = torch.tensor(list(json.dumps(facts, sort_keys=True, indent=1).encode()), dtype=torch.uint8)
    weight = _read(tensors)
    assert torch.equal(BitsAndBytes().write("proj", weight).tensors[STATE], tensors[STATE])
    changed = attrs.evolve(weight, dtype=torch.float16)
    text = bytes(BitsAndBytes().write("proj", changed).tensors[STATE].tolist())
    assert json.loads(text) == {**facts, "dtype": "float16"}


@pytest.mark.parametrize("nested", [False, True])
def test_missing_tensor_is_named(nested: bool) -> None:
    """Whichever tensor is missing, the layer is found by the others, and the missing key is named."""
    for key in _layer(nested=nested):
        tensors = _layer(nested=nested)
        del tensors[key]
        assert ("missing_key", key) in _problems(tensors)


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("proj.weight", torch.zeros(384, 1, dtype=torch.int8), "dtype"),
        ("proj.weight", torch.zeros(383, 1, dtype=torch.uint8), "shape"),
        ("proj.weight", torch.zeros(6, 64, dtype=torch.uint8), "shape"),
        ("proj.weight.absmax", torch.zeros(12, dtype=torch.float16), "dtype"),
        ("proj.weight.absmax", torch.zeros(12, dtype=torch.uint8), "dtype"),
        ("proj.weight.absmax", torch.zeros(11), "shape"),
        ("proj.weight.absmax", torch.zeros(12, 1), "shape"),
        ("proj.weight.quant_map", torch.zeros(15), "shape"),
        ("proj.weight.quant_map", NF4.double(), "dtype"),
        (STATE, torch.zeros(20, dtype=torch.int8), "dtype"),
        ("proj.weight.nested_absmax", torch.zeros(1), "unknown_key"),
        ("proj.weight.absmax_scale", torch.zeros(1), "unknown_key"),
        ("proj.weight_scale", torch.zeros(1), "unknown_key"),
        ("proj.weight.quant_state.bitsandbytes__fp4", _layer()[STATE], "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """A wrong dtype or shape, an undeclared second level, and an unknown scale are each named."""
    found = _problems({**_layer(), key: tensor})
    assert (code, key) in found or (code == "unknown_key" and any(item[0] == code for item in found))


def test_missing_json_is_asked_for_under_the_name_of_the_code_books_format() -> None:
    """Without its JSON text, a layer whose code book is FP4's lacks FP4's text."""
    tensors = _layer(kind="fp4")
    del tensors["proj.weight.quant_state.bitsandbytes__fp4"]
    assert _problems(tensors) == {("missing_key", "proj.weight.quant_state.bitsandbytes__fp4")}


@pytest.mark.parametrize(
    "change",
    [
        {"quant_type": "fp4"},
        {"blocksize": 63},
        {"blocksize": 64.0},
        {"blocksize": "64"},
        {"blocksize": 0},
        {"dtype": "float8"},
        {"dtype": 3},
        {"dtype": "nn"},
        {"shape": []},
        {"shape": [6, 0]},
        {"shape": [6, -128]},
        {"shape": [True, 768]},
        {"shape": [2**40, 2**40]},
        {"shape": "6x128"},
        {"shape": None},
        {"scale_2": 1.0},
        {"nested_offset": 0.5},
        {"nested_offset": float("nan"), "nested_blocksize": 256, "nested_dtype": "float32"},
        {"nested_offset": 0.5, "nested_blocksize": 0, "nested_dtype": "float32"},
        {"nested_offset": 0.5, "nested_blocksize": 256, "nested_dtype": "float16"},
        {"nested_offset": 10**400, "nested_blocksize": 256, "nested_dtype": "float32"},
    ],
    ids=lambda change: str(change)[:60],
)
def test_wrong_json_is_named(change: dict[str, Any]) -> None:
    """The JSON text is read strictly: what is not as bitsandbytes writes it is a problem of its key."""
    tensors = _layer()
    facts = {**json.loads(bytes(tensors[STATE].tolist())), **change}
    tensors[STATE] = _text(facts)
    assert STATE in {key for _, key in _problems(tensors)}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10_000, b"null", b'{"quant_type": "nf4"}', b'{"a": 1, "a": 2}']
)
def test_text_that_is_no_json_object_is_named(raw: bytes) -> None:
    """Bytes that are no such text at all are a problem too, never an exception of another kind."""
    assert STATE in {key for _, key in _problems({**_layer(), STATE: torch.tensor(list(raw), dtype=torch.uint8)})}


def test_shape_must_fit_the_bytes() -> None:
    """A shape that the stored codes do not fill is a problem of the codes."""
    tensors = _layer()
    tensors[STATE] = _text({**json.loads(bytes(tensors[STATE].tolist())), "shape": [6, 256]})
    assert ("shape", "proj.weight") in _problems(tensors)


@pytest.mark.parametrize("shape", [[768], [1, 2, 3, 128]])
def test_weights_of_other_dimensions_are_unsupported(shape: list[int]) -> None:
    """A weight of neither 2 nor 3 dimensions is listed with the reason; it is neither a layer nor dense."""
    tensors = _layer()
    tensors[STATE] = _text({**json.loads(bytes(tensors[STATE].tolist())), "shape": shape})
    schema = q4.detect({**tensors, "norm.weight": torch.ones(2)})
    assert schema is not None
    assert [(problem.key, problem.value) for problem in schema.unsupported] == [("proj", shape)]
    assert (list(schema.layers), schema.dense) == ([], ("norm.weight",))


def test_metadata_alone_finds_the_layer() -> None:
    """Without numbers the layer, its format and its keys are found; the shape stays unknown."""
    infos = {name: q4.TensorInfo(tensor.dtype, tensor.shape) for name, tensor in _layer(nested=True).items()}
    layer = q4.detect_or_fail(infos).layers["proj"]
    assert (layer.format, layer.shape, len(layer.keys)) == ("nf4", None, 6)


def _dense() -> torch.Tensor:
    return torch.randn(8, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("weight", "field"),
    [
        (q4.quantize(_dense(), "nvfp4"), "format"),
        (attrs.evolve(q4.quantize(_dense(), "nf4"), input_channel_scale=torch.ones(128)), "features"),
        (attrs.evolve(q4.quantize(_dense(), "nf4"), activation_scale=torch.ones(())), "activation_scale"),
    ],
    ids=["format", "features", "activation_scale"],
)
def test_what_it_can_not_express_is_refused(weight: q4.PackedWeight, field: str) -> None:
    """The error names what has no place in the dialect."""
    with pytest.raises(q4.DialectError) as caught:
        BitsAndBytes().write("proj", weight)
    assert caught.value.name == field


def test_config_speaks_of_what_was_written() -> None:
    """config.json says format, second level, dtype, and which modules are not quantised."""
    weight = _read(_layer(nested=True))
    entry = BitsAndBytes().quantization_config({"proj": q4.WeightSpec.of(weight)}, ("lm_head",))
    assert entry["quant_method"] == "bitsandbytes"
    assert (entry["bnb_4bit_quant_type"], entry["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert entry["bnb_4bit_compute_dtype"] == "bfloat16"
    assert entry["llm_int8_skip_modules"] == ["lm_head"]
