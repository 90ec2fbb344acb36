"""What was prepared comes back as it was stored, byte for byte, and what has a block for each row runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import q4core as q4
from q4_cpu_native import CpuNative
from q4core import Packing, ScaleKind
from tests.support.cpu_layers import layer_on
from tests.support.samples import WRITTEN_KINDS
from tests.support.samples import random_weight as kinds_of_weight

BACKEND = CpuNative("")
PACKINGS = [Packing.LOW_FIRST, Packing.HIGH_FIRST, Packing.half_split(32), Packing.half_split(128)]


def _layer(weight: q4.PackedWeight, dtype: torch.dtype | None = None) -> q4.Q4Linear:
    return layer_on(BACKEND, weight, "exact", compute_dtype=dtype)


def _kinds() -> list[Any]:
    kinds = []
    for name, kind in WRITTEN_KINDS:
        forms: list[dict[str, Any]] = [{}] if name != "int4" else [{"symmetric": True}, {"symmetric": False}]
        kinds += [
            pytest.param(name, {"scale_kind": kind} | form, id=f"{name}-{kind.value}-{index}")
            for index, form in enumerate(forms)
        ]
    return kinds


def _dense(rows: int = 24, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def _assert_same(got: q4.PackedWeight, weight: q4.PackedWeight) -> None:
    assert {name for name, _ in got.tensors()} == {name for name, _ in weight.tensors()}
    for name, tensor in weight.tensors():
        own = getattr(got, name)
        assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(own.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    for fact in ("format", "scale_kind", "packing", "blocks", "block_size", "nested_block_size", "dtype", "shape"):
        assert getattr(got, fact) == getattr(weight, fact), fact


@pytest.mark.parametrize(("format_", "options"), _kinds())
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_every_kind_comes_back(format_: str, options: dict[str, Any], packing: Packing) -> None:
    """Codes, scales, levels of scales, offsets and zero points are those that were given, in dtype and in bytes."""
    if q4.BUILTIN_FORMATS[format_].bits == 4:  # or 8, a byte for each code
        options = options | {"packing": packing}
    weight = q4.quantize(_dense(), format_, **options)
    _assert_same(_layer(weight).packed_weight(), weight)


@pytest.mark.parametrize("columns", [256, 176])
@pytest.mark.parametrize("format_", ["iq4_nl", "q8_affine", "int8"])
def test_forms_without_a_rule_come_back(format_: str, columns: int) -> None:
    """Codes, scales, offsets and zeros of other tools are given back byte for byte."""
    zeros: list[dict[str, Any]] = [{}]
    if format_ == "int8":
        shape = (24, -(-columns // 16))
        types = (torch.int8, torch.int32, torch.float16)
        zeros += [{"zero": None}, *({"zero": torch.full(shape, 100, dtype=dtype)} for dtype in types)]
    for changes in zeros:
        weight = kinds_of_weight(format_, 24, columns, block=16, **changes)
        _assert_same(_layer(weight).packed_weight(), weight)


@pytest.mark.parametrize(
    ("format_", "packing"),
    [("q4_0", 32), ("q4_1", 32), ("q4_1", 64), ("iq4_nl", 32), ("q8_0", None), ("q8_affine", None)],
)
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("columns", [512, 96])
def test_scales_of_super_blocks(format_: str, packing: int | None, block: int, columns: int) -> None:
    """A weight with super-blocks computes as its resolved numbers do, and comes back with its levels as stored."""
    chosen = None if packing is None else Packing.half_split(packing)
    weight = kinds_of_weight(format_, 24, columns, ScaleKind.SUPER_BLOCK, block=block, packing=chosen)
    layer = _layer(weight)
    for precision in ("exact", "int16", "int8"):
        with_levels, resolved = (layer_on(BACKEND, item, precision) for item in (weight, weight.with_plain_scale()))
        for count in (1, 3, 60):
            assert torch.equal(with_levels(_dense(count, columns)), resolved(_dense(count, columns)))
    assert torch.equal(layer.rows(torch.tensor([5, 0, 23])), q4.dequantize(weight)[[5, 0, 23]])
    _assert_same(layer.packed_weight(), weight)
    again = q4.Q4Linear.empty(24, columns)
    again.load_state_dict(layer.state_dict())
    _assert_same(again.packed_weight(), weight)


@pytest.mark.parametrize("format_", ["nf4", "fp4"])
def test_two_levels_of_scales(format_: str) -> None:
    """A double-quantised weight computes and gives rows as its resolved scales do, and is saved as it was read."""
    weight = q4.quantize(_dense(), format_, scale_kind=ScaleKind.DOUBLE_QUANT)
    layer, plain = _layer(weight), _layer(weight.with_plain_scale())
    x = _dense(3)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.rows(torch.tensor([5, 0, 23])), q4.dequantize(weight)[[5, 0, 23]])
    again = q4.Q4Linear.empty(24, 256)
    again.load_state_dict(layer.state_dict())
    _assert_same(again.packed_weight(), weight)


@pytest.mark.parametrize("fields", [("input_permutation",), ("input_channel_scale",), None])
@pytest.mark.parametrize(
    ("format_", "kind", "columns"),
    [
        ("q4_1", ScaleKind.SUPER_BLOCK, 512),  # tiles hold the levels
        ("q4_1", ScaleKind.SUPER_BLOCK, 48),  # an odd number of blocks of 16: tiles hold float32
        ("nf4", ScaleKind.DOUBLE_QUANT, 256),
        ("int4", ScaleKind.PLAIN, 256),
    ],
)
def test_rows_have_their_order_and_factors(
    format_: str, kind: ScaleKind, columns: int, fields: tuple[str, ...] | None
) -> None:
    """Some rows of a weight whose in-features are permuted or multiplied are those of the whole."""
    inputs = {
        "input_permutation": torch.randperm(columns, generator=torch.Generator().manual_seed(2)),
        "input_channel_scale": torch.linspace(0.5, 2.0, columns),
    }
    chosen: dict[str, Any] = {name: inputs[name] for name in fields or inputs}
    block = 16 if columns == 48 else None
    weight = kinds_of_weight(format_, 24, columns, kind, block=block, **chosen)
    layer = _layer(weight)
    assert torch.equal(layer.rows(torch.tensor([5, 0, 23])), q4.dequantize(weight)[[5, 0, 23]])
    _assert_same(layer.packed_weight(), weight)


@pytest.mark.parametrize("columns", [8, 40, 100])
def test_a_block_for_each_row_may_have_any_length(columns: int) -> None:
    """Checkpoints that store no block size give one of K to a row with one scale: it needs no multiple of 32."""
    for is_symmetric in (True, False):
        weight = q4.quantize(_dense(24, columns), "int4", symmetric=is_symmetric, block_size=128)
        read = q4.quantize(_dense(24, columns), "int4", symmetric=is_symmetric, block_size=columns)
        x = _dense(3, columns)
        layer = _layer(read)
        assert torch.equal(layer(x), _layer(weight)(x))
        _assert_same(layer.packed_weight(), read)


def test_blocks_of_another_length_are_refused_with_the_rule() -> None:
    """A block that is neither 16, nor a multiple of 32, nor a row is refused by name."""
    weight = q4.quantize(_dense(24, 80), "int4", block_size=40)
    with pytest.raises(
        q4.BackendUnavailableError, match="blocks must be of 16, a multiple of 32, or a whole row, got 40"
    ):
        _layer(weight)
