"""``PackedWeight``: joining, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import q4core as q4
from tests.support.samples import FLAT, FORMAT_KINDS, PACKINGS, bits, random_weight

Kind = q4.ScaleKind
GOLDEN = Path(__file__).parents[2] / "conformance/src/q4_conformance/golden"
NAN, INF = float("nan"), float("inf")


def _values(weight: q4.PackedWeight) -> torch.Tensor:
    return q4.dequantize(weight, torch.float32)


def _assert_same(actual: q4.PackedWeight, expected: q4.PackedWeight) -> None:
    """Check that two weights have the same fields, to the bit."""
    for field in attrs.fields(q4.PackedWeight):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(theirs, torch.Tensor):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), field.name
            assert torch.equal(bits(ours), bits(theirs)), field.name
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_cat_keeps_every_value(name: str, kind: Kind) -> None:
    """Joined weights decode to the joined values, also under double quantisation and different globals."""
    parts = [random_weight(name, n, 256, kind, seed=n) for n in (3, 1, 4)]
    if parts[0].global_scale is not None:
        parts = [attrs.evolve(part, global_scale=torch.tensor(0.7 * part.out_features)) for part in parts]
    joined = q4.cat(parts, name="qkv")
    assert (joined.name, joined.shape) == ("qkv", (8, 256))
    assert torch.equal(bits(_values(joined)), bits(torch.cat([_values(part) for part in parts])))


def test_cat_of_globals() -> None:
    """Equal globals stay one scalar; different ones become one for each row."""
    parts = [random_weight("nvfp4", n, 32, Kind.E4M3_MUL, seed=n) for n in (2, 3)]
    same = q4.cat(parts).global_scale
    assert same is not None
    assert same.dim() == 0
    other = attrs.evolve(parts[1], global_scale=torch.tensor(0.5))
    joined = q4.cat([parts[0], other])
    assert joined.global_scale is not None
    assert joined.global_scale.tolist() == [float(same)] * 2 + [0.5] * 3
    assert joined.features == {q4.Feature.ROW_GLOBAL_SCALE}
    again = q4.cat([joined, parts[0]])
    assert torch.equal(_values(again), torch.cat([_values(joined), _values(parts[0])]))


def test_cat_of_packings_and_layouts() -> None:
    """Weights in other packings, with padding, or in groups join the first one's packing."""
    parts = [
        random_weight("q4_0", 2, 100, block=32, packing=packing, seed=i) for i, packing in enumerate(PACKINGS.values())
    ]
    for turn in range(4):
        order = parts[turn:] + parts[:turn]
        joined = q4.cat(order)
        assert joined.packing == order[0].packing
        assert torch.equal(_values(joined), torch.cat([_values(part) for part in order]))
    weight = random_weight("q4_0", 2, 128)
    grouped = attrs.evolve(weight, qdata=weight.qdata.view(2, 4, 16))
    for pair in ([weight, grouped], [grouped, weight], [grouped, grouped]):
        assert torch.equal(_values(q4.cat(pair)), torch.cat([_values(weight)] * 2))


def test_cat_of_padded_rows() -> None:
    """Rows that are stored with more bytes than they need join rows that are not."""
    one = random_weight("int4", 2, 100)
    two = attrs.evolve(one, qdata=torch.nn.functional.pad(one.qdata, (0, 14), value=0xFF))
    for pair in ([one, two], [two, one], [two, two]):
        assert torch.equal(_values(q4.cat(pair)), torch.cat([_values(one)] * 2))


def test_cat_of_float8_and_bytes() -> None:
    """The same scales stored as uint8 by one file and as float8 by another join to the same values."""
    one = random_weight("mxfp4", 2, 64)
    two = attrs.evolve(one, scale=one.scale.view(torch.uint8))
    for pair in ([one, two], [two, one]):
        assert torch.equal(_values(q4.cat(pair)), torch.cat([_values(one)] * 2))


def test_cat_notes_what_it_drops() -> None:
    """Static activation scales that differ are dropped with a note; equal ones and notes appear once."""
    one = random_weight("nf4", 2, 64, activation_scale=torch.tensor(2.0), notes=("a", "b"))
    two = attrs.evolve(one, notes=("b", "c"))
    assert q4.cat([one, two]).notes == ("a", "b", "c")
    assert q4.cat([one, two]).activation_scale is not None
    joined = q4.cat([one, attrs.evolve(two, activation_scale=torch.tensor(3.0))])
    assert joined.activation_scale is None
    assert joined.notes[-1] == "static activation scales differ and were dropped"


LEVELS: dict[str, Any] = {name: torch.ones(4) for name in ("nested_scale", "nested_offset")}
DIFFERENCES: list[tuple[str, Any]] = [
    ("format", random_weight("fp4", 2, 128)),
    ("in_features", random_weight("nf4", 2, 64)),
    ("block_size", random_weight("nf4", 2, 128, block=32)),
    ("blocks", random_weight("nf4", 2, 128, blocks=FLAT)),
    ("dtype", random_weight("nf4", 2, 128, dtype=torch.bfloat16)),
    ("device", random_weight("nf4", 2, 128).map_tensors(lambda tensor: tensor.to("meta"))),
    ("codebook", random_weight("nf4", 2, 128, codebook=torch.zeros(16))),
    ("input_channel_scale", random_weight("nf4", 2, 128, input_channel_scale=torch.ones(128))),
    ("input_permutation", random_weight("nf4", 2, 128, input_permutation=torch.arange(128))),
]


@pytest.mark.parametrize(("field", "other"), DIFFERENCES, ids=[field for field, _ in DIFFERENCES])
def test_cat_refuses_what_one_weight_cannot_hold_twice(field: str, other: q4.PackedWeight) -> None:
    """Weights that differ in more than rows are refused under the field's name."""
    with pytest.raises(q4.WeightError) as caught:
        q4.cat([random_weight("nf4", 2, 128), other])
    assert caught.value.name == field


def test_cat_joins_plain_and_double_quantised_scales() -> None:
    """Double-quantised scales are resolved to plain ones, so they join others that are plain already."""
    pair = [random_weight("nf4", 2, 128, Kind.PLAIN), random_weight("nf4", 2, 128, Kind.DOUBLE_QUANT)]
    for parts in (pair, pair[::-1]):
        assert torch.equal(_values(q4.cat(parts)), torch.cat([_values(part) for part in parts]))
    nvfp4 = [random_weight("nvfp4", 2, 32, kind) for kind in (Kind.E4M3, Kind.E4M3_MUL)]
    with pytest.raises(q4.WeightError) as caught:
        q4.cat(nvfp4)
    assert caught.value.name == "scale_kind"


def test_super_blocks_are_joined_and_cut_as_stored() -> None:
    """Rows and joined rows have their bytes and levels; columns are resolved; super-blocks of two sizes don't join."""
    weight = random_weight("q4_1", 4, 512, Kind.SUPER_BLOCK)
    values = _values(weight)
    for part, rows in ((weight.narrow(0, 1, 2), [1, 2]), (weight.take_rows(torch.tensor([3, 0])), [3, 0])):
        assert part.scale_kind is Kind.SUPER_BLOCK
        assert torch.equal(_values(part), values[rows])
    joined = q4.cat([weight, weight.narrow(0, 0, 1)])
    assert joined.scale_kind is Kind.SUPER_BLOCK
    assert torch.equal(_values(joined), torch.cat([values, values[:1]]))
    columns = weight.narrow(1, 64, 96)
    assert columns.scale_kind is Kind.PLAIN
    assert torch.equal(_values(columns), values[:, 64:160])
    assert torch.equal(_values(weight.with_plain_scale()), values)
    other = random_weight("q4_1", 4, 512, Kind.SUPER_BLOCK, nested_block_size=16, **LEVELS)
    with pytest.raises(q4.WeightError) as caught:
        q4.cat([weight, other])
    assert caught.value.name == "nested_block_size"
    signed, unsigned = (attrs.evolve(weight, scale=weight.scale.view(dtype)) for dtype in (torch.int8, torch.uint8))
    with pytest.raises(q4.WeightError) as caught:
        q4.cat([unsigned, signed])
    assert caught.value.name == "scale"


def test_cat_refuses_nothing_and_flat_and_half_a_zero() -> None:
    """No weight, flat blocks, and zero points in some weights only are refused."""
    flat = random_weight("nf4", 2, 100, blocks=FLAT)
    signed = random_weight("int4", 2, 128)
    cases: list[tuple[str, list[q4.PackedWeight]]] = [
        ("weights", []),
        ("blocks", [flat, flat]),
        ("zero", [signed, attrs.evolve(signed, zero=None)]),
    ]
    for name, weights in cases:
        with pytest.raises(q4.WeightError) as caught:
            q4.cat(weights)
        assert caught.value.name == name


@hypothesis.given(
    st.sampled_from(FORMAT_KINDS), st.integers(1, 9), st.integers(1, 4), st.sampled_from([*PACKINGS]), st.data()
)
@hypothesis.settings(max_examples=60)
def test_cutting_and_joining_are_inverse(
    pair: tuple[str, Kind], n: int, blocks: int, packing: str, data: st.DataObject
) -> None:
    """A weight cut into rows and joined again has its values, and each cut has its part of them."""
    name, kind = pair
    chosen = None if q4.BUILTIN_FORMATS[name].bits == 8 else PACKINGS[packing]
    block = q4.BUILTIN_FORMATS[name].block_size
    weight = random_weight(name, n, blocks * max(block, 32), kind, packing=chosen)
    values = _values(weight)
    ends = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
    parts = [weight.narrow(0, low, high - low) for low, high in pairwise(ends)]
    for part, (low, high) in zip(parts, pairwise(ends), strict=True):
        assert torch.equal(bits(_values(part)), bits(values[low:high]))
    assert torch.equal(bits(_values(q4.cat(parts))), bits(values))
    step = max(block, 32)
    first = data.draw(st.integers(0, blocks - 1))
    count = data.draw(st.integers(1, blocks - first))
    columns = weight.narrow(1, first * step, count * step)
    assert torch.equal(bits(_values(columns)), bits(values[:, first * step : (first + count) * step]))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))])  # noqa: S301
@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_copies_are_equal(name: str, kind: Kind, duplicate: Any) -> None:
    """Copies, deep copies and pickles have every field, to the bit."""
    weight = random_weight(
        name,
        3,
        256,
        kind,
        name="proj",
        dialect="some",
        notes=("assumed",),
        dtype=torch.bfloat16,
        input_channel_scale=torch.ones(256),
        activation_scale=torch.tensor(2.0),
    )
    _assert_same(duplicate(weight), weight)


def test_copies_of_a_view_leave_the_file_behind() -> None:
    """A weight that views 100 MB of a file pickles and copies as its own few bytes."""
    file = torch.zeros(100 << 20, dtype=torch.uint8)
    weight = random_weight("nf4", 4, 128, qdata=file[1000 : 1000 + 4 * 64].view(4, 64))
    assert len(pickle.dumps(weight)) < 10_000
    deep = copy.deepcopy(weight)
    assert deep.qdata.untyped_storage().nbytes() == 4 * 64
    assert deep.qdata.data_ptr() != weight.qdata.data_ptr()
    file.fill_(255)
    assert not bool(deep.qdata.any())


def test_deepcopy_keeps_shared_weights_shared() -> None:
    """Two references to one weight stay one weight in a deep copy."""
    weight = random_weight("nf4", 2, 64)
    first, second = copy.deepcopy([weight, weight])
    assert first is second
    assert first is not weight


def test_contiguous_lets_go_of_the_file() -> None:
    """``contiguous`` owns its bytes, and ``map_tensors`` sees every tensor once."""
    file = torch.zeros(4, 100, dtype=torch.uint8)
    weight = random_weight("nf4", 4, 128, qdata=file[:, 3:67])
    owned = weight.contiguous()
    file.fill_(1)
    assert owned.qdata.is_contiguous()
    assert not bool(owned.qdata.any())
    seen: list[torch.Tensor] = []
    weight.map_tensors(lambda tensor: seen.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert [id(tensor) for tensor in seen] == [id(tensor) for _, tensor in weight.tensors()]


def test_to_moves_everything() -> None:
    """``to`` moves every tensor, and keeps its dtype."""
    weight = random_weight("nvfp4", 4, 32, Kind.E4M3_MUL).to("meta")
    assert weight.device.type == "meta"
    assert {tensor.device.type for _, tensor in weight.tensors()} == {"meta"}
    assert weight.scale.dtype is torch.float8_e4m3fn
