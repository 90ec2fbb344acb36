"""HQQ: folded rows of every width, both axes, groups that cross rows, and bytes stored as floats."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from mutants import judge_mutant

import q4core as q4
from q4_dialects.hqq import Hqq

DIALECT = Hqq()
Tensors = dict[str, torch.Tensor]
FOLDS = {
    8: ("8bit_u8", 1),
    5: ("8bit_u8", 1),
    4: ("4bit_u8", 2),
    3: ("3bit_32", 10),
    2: ("2bit_u8", 4),
    1: ("1bit_u8", 8),
}
SHAPES = [(16, 64, 64), (72, 320, 64), (8, 96, 64), (16, 320, 128), (24, 40, 16), (16, 33, 8), (40, 64, 2560)]
"""N, K and group: one group in a row, several, groups that cross rows (in halves, in small parts), one for all."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CASES = list(itertools.product(FOLDS, (0, 1), range(len(SHAPES)), FLOATS, (False, True)))


def _folded(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Return [R, C] codes as HQQ folds their rows: part p of P is ``bits * (P - 1 - p)`` bits up."""
    _, parts = FOLDS[bits]
    height = -(-len(codes) // parts)
    padded = np.zeros((height * parts, codes.shape[1]), np.uint32)
    padded[: len(codes)] = codes
    words = np.zeros((height, codes.shape[1]), np.uint32)
    for part in range(parts):
        words |= padded[part * height : (part + 1) * height] << ((bits if parts > 1 else 8) * (parts - 1 - part))
    return words.view(np.int32) if bits == 3 else words.astype(np.uint8)


def _text(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _layer(
    n: int = 16, k: int = 128, group: int = 64, *, bits: int = 4, axis: int = 1, dtype: torch.dtype = torch.float16,
    is_float: bool = False, prefix: str = "proj",
) -> tuple[Tensors, torch.Tensor]:  # fmt: skip
    """Return the stored tensors and the weight in float32, difference and product rounded once each."""
    random = np.random.default_rng([n, k, group, bits, axis])
    shape = (n * k // group, group) if axis else (group, n * k // group)
    codes = random.integers(0, 1 << bits, shape)
    codes[0] = 0
    side = (shape[0], 1) if axis else (1, shape[1])
    scale = torch.from_numpy(random.normal(0, 0.05, side).astype(np.float32)).to(dtype)
    zero = torch.from_numpy(random.uniform(-1, 1 << bits, side).astype(np.float32)).to(dtype)
    scale.reshape(-1)[-1] = 0.0
    value = (codes.astype(np.float32) - zero.float().numpy()) * scale.float().numpy()
    words = torch.from_numpy(_folded(codes, bits))
    tensors = {
        "W_q": words.view(dtype) if is_float else words,
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor([n, k]),
        **{
            name: torch.tensor(number, dtype=torch.int32)
            for name, number in (("nbits", bits), ("group_size", group), ("axis", axis))
        },
        "packing": _text(FOLDS[bits][0]),
        "unpack_view_dtype": _text("torch.int32" if bits == 3 else "torch.uint8"),
        "compute_dtype": _text(str(dtype)),
        "view_as_float": torch.tensor(int(is_float), dtype=torch.uint8),
        **{name: torch.tensor(0, dtype=torch.uint8) for name in ("quant_scale", "quant_zero", "offload_meta")},
        **{
            name: torch.tensor(1, dtype=torch.uint8)
            for name in ("channel_wise", "encoded_state_dict", "optimize", "round_zero", "stores_quant_config")
        },
    }
    return {f"{prefix}.{name}": item for name, item in tensors.items()}, torch.from_numpy(value.reshape(n, k))


def _read(tensors: Tensors, **arguments: Any) -> q4.PackedWeight:
    layer = q4.detect_or_fail(tensors, **arguments).layers["proj"]
    assert layer.dialect == "hqq"
    weight = DIALECT.read(layer, tensors.__getitem__)
    weight.check_values()
    assert (layer.shape, layer.block_size, layer.format) == (weight.shape, weight.block_size, weight.format.name)
    return weight


def _problems(tensors: Tensors, **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_layers_have_their_values(case: tuple[int, int, int, torch.dtype, bool]) -> None:
    """Each case is read exactly where its rows fold evenly, and else refused; what is read is written as groups."""
    bits, axis, place, dtype, is_float = case
    n, k, group = SHAPES[place]
    rows, columns = (n * k // group, group) if axis else (group, n * k // group)
    parts = FOLDS[bits][1]
    if rows % parts and bits != 3:
        return  # hqq itself loses rows here
    if is_float and (bits == 3 or columns % dtype.itemsize):
        return  # no such view
    tensors, value = _layer(n, k, group, bits=bits, axis=axis, dtype=dtype, is_float=is_float)
    weight = _read(tensors)
    assert (weight.format.name, weight.dtype) == ("int8" if bits in {8, 5} else "int4", dtype)
    assert torch.equal(q4.dequantize(weight, torch.float32), value)
    if axis == 0:
        assert (weight.block_size, "more than a dense" in weight.notes[0]) == (1, True)
        return
    if bits in {8, 4} and weight.block_size == group and not is_float:
        written = DIALECT.write("proj", weight).tensors
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[key], tensors[key]) for key in tensors)


def test_groups_across_rows_are_blocks_that_the_kernels_have() -> None:
    """Groups of 64 in rows of 96 become blocks of 32; where these would be small, blocks run across rows."""
    assert _read(_layer(8, 96, 64)[0]).block_size == 32
    weight = _read(_layer(16, 33, 8)[0])
    assert (weight.block_size, weight.blocks) == (8, q4.BlockOrder.FLAT)


def test_names_and_shapes_alone_do_not_say_the_layout() -> None:
    """Where only metadata is at hand, the layer has no shape, and that is no problem."""
    tensors, _ = _layer()
    bare = {key: tensor.to("meta") for key, tensor in tensors.items()}
    found = q4.detect(bare)
    assert found is not None
    assert (found.layers["proj"].shape, found.layers["proj"].problems) == (None, ())
    assert q4.validate(found, bare) == ()


@pytest.mark.parametrize("key", ["W_q", "scale", "zero", "shape", "nbits", "group_size", "axis"])
def test_missing_tensor_is_named(key: str) -> None:
    """Each that is needed is named where it is not there."""
    tensors, _ = _layer()
    del tensors[f"proj.{key}"]
    assert ("missing_key", f"proj.{key}") in _problems(tensors)


@pytest.mark.parametrize(
    ("key", "tensor", "code"),
    [
        ("W_q", torch.zeros(16, 64, dtype=torch.int64), "dtype"),
        ("W_q", torch.zeros(16, 64), "dtype"),
        ("W_q", torch.zeros(15, 64, dtype=torch.uint8), "shape"),
        ("W_q", torch.zeros(16, 32, dtype=torch.uint8), "shape"),
        ("W_q", torch.zeros(1024, dtype=torch.uint8), "shape"),
        ("scale", torch.zeros(32, 1, dtype=torch.uint8), "dtype"),
        ("scale", torch.zeros(31, 1), "shape"),
        ("scale", torch.zeros(1, 32), "shape"),
        ("scale", torch.full((32, 1), float("nan")), "value"),
        ("zero", torch.zeros(32), "shape"),
        ("zero", torch.full((32, 1), float("inf")), "value"),
        ("shape", torch.tensor([16, 128, 1]), "shape"),
        ("shape", torch.tensor([16.0, 128.0]), "dtype"),
        ("shape", torch.tensor([-16, 128]), "value"),
        ("nbits", torch.tensor(7, dtype=torch.int32), "value"),
        ("nbits", torch.tensor(8, dtype=torch.int32), "value"),
        ("nbits", torch.tensor(4.0), "dtype"),
        ("nbits", torch.tensor([4, 4]), "shape"),
        ("group_size", torch.tensor(48, dtype=torch.int32), "value"),
        ("group_size", torch.tensor(0, dtype=torch.int32), "value"),
        ("group_size", torch.tensor(-64, dtype=torch.int32), "value"),
        ("axis", torch.tensor(2, dtype=torch.int32), "value"),
        ("packing", _text("4bit_i32"), "value"),
        ("packing", _text("2bit_u8"), "value"),
        ("packing", _text("\x00\xff"), "value"),
        ("compute_dtype", _text("torch.int8"), "value"),
        ("weight_scale", torch.ones(()), "unknown_key"),
        ("scale2", torch.ones(16), "unknown_key"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_part_is_named(key: str, tensor: torch.Tensor, code: str) -> None:
    """Wrong dtypes, shapes and values, and unknown scales, are named (a wrong packing may be its width's)."""
    found = _problems({**_layer()[0], f"proj.{key}": tensor})
    names = {f"proj.{key}", "proj.packing"} if key == "nbits" else {f"proj.{key}"}
    assert {(code, name) for name in names} & found, found


@pytest.mark.parametrize(("flag", "number"), [("quant_scale", 1), ("quant_zero", 1), ("channel_wise", 0)])
def test_other_kinds_are_refused_by_name(flag: str, number: int) -> None:
    """Scales that are quantised in turn, and one scale for a whole weight, are listed and not read."""
    tensors, _ = _layer()
    tensors[f"proj.{flag}"] = torch.tensor(number, dtype=torch.uint8)
    schema = q4.detect(tensors)
    assert schema is not None
    assert [(item.key, flag in str(item.value)) for item in schema.unsupported] == [("proj", True)]
    assert (dict(schema.layers), schema.dense) == ({}, ())


def test_sinq_is_no_hqq() -> None:
    """SINQ stores ``W_q`` next to ``meta``."""
    tensors = {"proj.W_q": torch.zeros(16, 64, dtype=torch.uint8), "proj.meta": torch.zeros(9, dtype=torch.uint8)}
    schema = q4.detect(tensors)
    assert schema is not None
    assert [(item.key, item.value) for item in schema.unsupported] == [("proj", "sinq")]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (
            {"zero": torch.full((8, 2), 1e-9, dtype=torch.float32), "scale": torch.ones(8, 2, dtype=torch.float16)},
            "zero",
        ),
        ({"input_channel_scale": torch.ones(64)}, "features"),
        ({"activation_scale": torch.ones(())}, "activation_scale"),
    ],
    ids=["zero", "channels", "activations"],
)
def test_what_hqq_has_no_place_for_is_refused(change: dict[str, Any], name: str) -> None:
    """Zero points that the scales' dtype can't hold, and features, are refused by name."""
    weight = attrs.evolve(q4.quantize(torch.randn(8, 64), "int4", block_size=32), **change)
    with pytest.raises(q4.DialectError) as caught:
        DIALECT.write("proj", weight)
    assert caught.value.name == name


def test_groups_that_do_not_fold_are_refused() -> None:
    """An odd number of groups, and a short one, have no place."""
    for shape, block in (((3, 32), 32), ((2, 48), 32)):
        with pytest.raises(q4.DialectError):
            DIALECT.write("proj", q4.quantize(torch.randn(shape), "int4", block_size=block))


def test_config_has_an_entry_for_each_layout() -> None:
    """One for all, or one for each module."""
    specs = [q4.WeightSpec.of(q4.quantize(torch.randn(8, 64), "int4", block_size=block)) for block in (32, 64)]
    entry = DIALECT.quantization_config({"a": specs[0], "b": specs[0]}, ("lm_head",))
    params = entry["quant_config"]["weight_quant_params"]
    assert (params["group_size"], params["axis"], entry["skip_modules"]) == (32, 1, ["lm_head"])
    entry = DIALECT.quantization_config({"a": specs[0], "b": specs[1]}, ())
    assert entry["quant_config"]["b"]["weight_quant_params"]["group_size"] == 64


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_mutants_are_read_or_have_problems(bits: int, axis: int) -> None:
    """Whatever is wrong with tensors, no error is untyped."""
    tensors, _ = _layer(16, 96, 48, bits=bits, axis=axis)
    for seed in range(200):
        judge_mutant(tensors, seed)
