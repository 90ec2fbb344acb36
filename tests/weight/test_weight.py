"""``PackedWeight``: what it refuses, how it is cut, joined and repacked, and what copies of it carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.samples import FLAT, FORMAT_KINDS, PACKINGS, bits, random_weight

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = q4.ScaleKind
FLOAT8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def _assert_same(actual: q4.PackedWeight, expected: q4.PackedWeight) -> None:
    """Check that two weights have the same fields, to the bit."""
    for field in attrs.fields(q4.PackedWeight):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(theirs, torch.Tensor):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), field.name
            assert torch.equal(bits(ours), bits(theirs)), field.name
        else:
            assert ours == theirs, field.name


def _values(weight: q4.PackedWeight) -> torch.Tensor:
    return q4.dequantize(weight, torch.float32)


BYTES = torch.uint8
FLAT_CODES = torch.zeros(256, dtype=BYTES)
FLAT_BYTES = torch.zeros(16, dtype=torch.int8)
FAULTS: list[tuple[str, str, Kind, dict[str, Any]]] = [
    ("out_features", "nf4", Kind.PLAIN, {"out_features": 0}),
    ("out_features", "nf4", Kind.PLAIN, {"out_features": 2**31}),
    ("out_features", "nf4", Kind.PLAIN, {"out_features": 4.0}),
    ("in_features", "nf4", Kind.PLAIN, {"in_features": -1}),
    ("block_size", "nf4", Kind.PLAIN, {"block_size": 48}),
    ("block_size", "int4", Kind.PLAIN, {"block_size": 0}),
    ("block_size", "nvfp4", Kind.E4M3, {"block_size": 32}),
    ("nested_block_size", "nf4", Kind.DOUBLE_QUANT, {"nested_block_size": 0}),
    ("qdata", "nf4", Kind.PLAIN, {"qdata": torch.zeros(4, 64, dtype=torch.int8)}),
    ("qdata", "nf4", Kind.PLAIN, {"qdata": torch.zeros(3, 64, dtype=BYTES)}),
    ("qdata", "nf4", Kind.PLAIN, {"qdata": torch.zeros(4, 63, dtype=BYTES)}),
    ("qdata", "nf4", Kind.PLAIN, {"qdata": torch.zeros(256, dtype=BYTES)}),
    ("qdata", "nf4", Kind.PLAIN, {"qdata": torch.zeros(4, 1, 1, 64, dtype=BYTES)}),
    ("qdata", "q4_0", Kind.PLAIN, {"qdata": torch.zeros(4, 8, 8, dtype=BYTES)}),
    ("qdata", "nf4", Kind.PLAIN, {"blocks": FLAT}),
    ("qdata", "nf4", Kind.PLAIN, {"blocks": FLAT, "qdata": torch.zeros(255, dtype=BYTES)}),
    ("packing", "nf4", Kind.PLAIN, {"packing": q4.Packing.BYTES}),
    ("packing", "q8_0", Kind.PLAIN, {"packing": q4.Packing.LOW_FIRST}),
    (
        "packing",
        "nf4",
        Kind.PLAIN,
        {"blocks": FLAT, "qdata": torch.zeros(256, dtype=BYTES), "packing": PACKINGS["half32"]},
    ),
    ("scale", "nf4", Kind.PLAIN, {"scale": torch.ones(4, 3)}),
    ("scale", "nf4", Kind.PLAIN, {"scale": torch.ones(8)}),
    ("scale", "nf4", Kind.PLAIN, {"scale": torch.ones(4, 2, dtype=torch.float64)}),
    ("scale", "nf4", Kind.PLAIN, {"scale": torch.ones(4, 2, dtype=BYTES)}),
    ("scale", "nf4", Kind.DOUBLE_QUANT, {"scale": torch.ones(4, 2)}),
    ("scale", "nvfp4", Kind.E4M3, {"scale": torch.ones(4, 8)}),
    ("scale", "nvfp4", Kind.E4M3, {"scale": torch.zeros(4, 8, dtype=BYTES).view(E8M0)}),
    ("scale", "mxfp4", Kind.E8M0, {"scale": torch.zeros(4, 4, dtype=BYTES).view(FLOAT8)}),
    ("offset", "q4_1", Kind.PLAIN, {"offset": None}),
    ("offset", "q4_1", Kind.PLAIN, {"offset": torch.ones(4, 3)}),
    ("offset", "q4_1", Kind.PLAIN, {"offset": torch.ones(4, 4, dtype=BYTES)}),
    ("offset", "nf4", Kind.PLAIN, {"offset": torch.ones(4, 2)}),
    ("zero", "int4", Kind.PLAIN, {"zero": torch.ones(4, 2, dtype=BYTES)}),
    ("zero", "int4", Kind.PLAIN, {"zero": torch.ones(4, 1, dtype=torch.int64)}),
    ("zero", "nf4", Kind.PLAIN, {"zero": torch.ones(4, 2, dtype=BYTES)}),
    ("codebook", "int4", Kind.PLAIN, {"codebook": torch.zeros(16)}),
    ("codebook", "nf4", Kind.PLAIN, {"codebook": torch.zeros(15)}),
    ("codebook", "nf4", Kind.PLAIN, {"codebook": torch.zeros(16, dtype=torch.int32)}),
    ("global_scale", "nvfp4", Kind.E4M3_MUL, {"global_scale": None}),
    ("global_scale", "nvfp4", Kind.E4M3_DIV, {"global_scale": torch.ones(3)}),
    ("global_scale", "nvfp4", Kind.E4M3_DIV, {"global_scale": torch.ones(4, 1)}),
    ("global_scale", "nvfp4", Kind.E4M3, {"global_scale": torch.ones(())}),
    ("nested_codebook", "nf4", Kind.DOUBLE_QUANT, {"nested_codebook": None}),
    ("nested_codebook", "nf4", Kind.DOUBLE_QUANT, {"nested_codebook": torch.zeros(16)}),
    ("nested_scale", "nf4", Kind.DOUBLE_QUANT, {"nested_scale": None}),
    ("nested_scale", "nf4", Kind.DOUBLE_QUANT, {"nested_scale": torch.ones(2)}),
    ("nested_offset", "nf4", Kind.DOUBLE_QUANT, {"nested_offset": None}),
    ("nested_offset", "nf4", Kind.DOUBLE_QUANT, {"nested_offset": torch.ones(2)}),
    ("nested_scale", "nf4", Kind.PLAIN, {"nested_scale": torch.ones(1)}),
    ("input_channel_scale", "nf4", Kind.PLAIN, {"input_channel_scale": torch.ones(127)}),
    ("input_channel_scale", "nf4", Kind.PLAIN, {"input_channel_scale": torch.ones(128, dtype=torch.int64)}),
    ("input_permutation", "nf4", Kind.PLAIN, {"input_permutation": torch.arange(127)}),
    ("input_permutation", "nf4", Kind.PLAIN, {"input_permutation": torch.arange(128, dtype=torch.int32)}),
    ("activation_scale", "nf4", Kind.PLAIN, {"activation_scale": torch.ones(2)}),
    ("tensors", "nf4", Kind.PLAIN, {"scale": torch.ones(4, 2, device="meta")}),
    ("scale", "q4_0", Kind.SUPER_BLOCK, {"scale": torch.ones(4, 4)}),
    ("offset", "q4_1", Kind.SUPER_BLOCK, {"offset": torch.ones(4, 4)}),
    ("nested_scale", "q4_0", Kind.SUPER_BLOCK, {"nested_scale": None}),
    ("nested_scale", "q4_0", Kind.SUPER_BLOCK, {"nested_scale": torch.ones(3)}),
    ("nested_scale", "q4_0", Kind.SUPER_BLOCK, {"nested_scale": torch.ones(4, dtype=BYTES)}),
    ("nested_codebook", "q4_0", Kind.SUPER_BLOCK, {"nested_codebook": torch.zeros(256)}),
    ("nested_offset", "q4_1", Kind.SUPER_BLOCK, {"nested_offset": None}),
    ("nested_offset", "q4_1", Kind.SUPER_BLOCK, {"nested_offset": torch.ones(1)}),
    ("nested_offset", "q4_0", Kind.SUPER_BLOCK, {"nested_offset": torch.ones(4)}),
    ("nested_block_size", "q4_0", Kind.SUPER_BLOCK, {"nested_block_size": 3}),
    (
        "nested_block_size",
        "q4_0",
        Kind.SUPER_BLOCK,
        {"blocks": FLAT, "qdata": FLAT_CODES, "scale": FLAT_BYTES, "packing": PACKINGS["low"]},
    ),
]


@pytest.mark.parametrize(
    ("field", "name", "kind", "changes"), FAULTS, ids=[f"{i}-{fault[0]}" for i, fault in enumerate(FAULTS)]
)
def test_every_contradiction_is_refused(field: str, name: str, kind: Kind, changes: dict[str, Any]) -> None:
    """A shape, dtype, presence or device that contradicts the others is refused under the right field's name."""
    weight = random_weight(name, 4, 128, kind)
    with pytest.raises(q4.WeightError) as caught:
        attrs.evolve(weight, name="proj", **changes)
    assert caught.value.name == field
    assert caught.value.rule
    assert "'proj'" in str(caught.value)


FEATURES: list[tuple[str, dict[str, Any], set[q4.Feature]]] = [
    ("nf4", {}, set()),
    ("q4_1", {}, {q4.Feature.OFFSET}),
    ("int4", {}, {q4.Feature.ZERO_POINT}),
    ("int4", {"zero": torch.zeros(4, 1)}, {q4.Feature.FLOAT_ZERO_POINT}),
    ("int4", {"zero": None}, set()),
    ("nf4", {"input_channel_scale": torch.ones(128)}, {q4.Feature.INPUT_CHANNEL_SCALE}),
    ("nf4", {"input_permutation": torch.arange(128)}, {q4.Feature.INPUT_PERMUTATION}),
    ("nf4", {"codebook": torch.zeros(16)}, {q4.Feature.CUSTOM_CODEBOOK}),
    ("nvfp4", {"global_scale": torch.ones(4), "scale_kind": Kind.E4M3_MUL}, {q4.Feature.ROW_GLOBAL_SCALE}),
    ("nvfp4", {"global_scale": torch.ones(1), "scale_kind": Kind.E4M3_MUL}, set()),
]


@pytest.mark.parametrize(("name", "changes", "features"), FEATURES)
def test_features_say_what_a_backend_needs(name: str, changes: dict[str, Any], features: set[q4.Feature]) -> None:
    """Each part beyond the plain formula is a feature."""
    weight = random_weight(name, 4, 128, Kind.E4M3 if name == "nvfp4" else None)
    assert attrs.evolve(weight, **changes).features == features


def test_features_of_blocks() -> None:
    """Short last blocks and flat blocks are features, and a weight is never both."""
    assert random_weight("nf4", 4, 100).features == {q4.Feature.TAIL_BLOCK}
    assert random_weight("nf4", 4, 100, Kind.PLAIN, blocks=FLAT).features == {q4.Feature.FLAT_BLOCKS}


def test_facts() -> None:
    """Shape, device, bytes and the printed form come from the fields."""
    weight = random_weight("q4_1", 4, 64, name="proj")
    assert weight.shape == (4, 64)
    assert weight.device == torch.device("cpu")
    assert weight.nbytes == 4 * 32 + 4 * 2 * 4 + 4 * 2 * 2
    assert [name for name, _ in weight.tensors()] == ["qdata", "scale", "offset"]
    assert repr(weight) == "PackedWeight('proj', q4_1, 4×64, block=32, scale=plain, packing=half_split:32, device=cpu)"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        weight.out_features = 5  # type: ignore[misc]


@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_collapsed_scales_mean_the_same(name: str, kind: Kind) -> None:
    """Plain scales in place of levels decode to the same bits."""
    weight = random_weight(name, 5, 256, kind)
    plain = weight.with_plain_scale()
    assert plain.scale_kind is Kind.PLAIN
    assert plain.global_scale is None
    assert plain.nested_scale is None
    assert torch.equal(bits(_values(plain)), bits(_values(weight)))


@pytest.mark.parametrize("rows", [slice(2, 5), slice(None), torch.tensor([4, 0, 4])], ids=str)
@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_scales_of_some_rows(name: str, kind: Kind, rows: Any) -> None:
    """Scales resolved for some rows are those rows of all resolved scales."""
    weight = random_weight(name, 6, 4096, kind)
    assert torch.equal(bits(weight.resolved_scale(rows)), bits(weight.resolved_scale()[rows]))


@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
@pytest.mark.parametrize(("start", "length"), [(0, 6), (0, 1), (5, 1), (2, 3)])
def test_narrow_rows(name: str, kind: Kind, start: int, length: int) -> None:
    """Rows cut from a weight are those rows of its values, and its codes are not copied."""
    weight = random_weight(name, 6, 4096, kind)
    cut = weight.narrow(0, start, length)
    assert torch.equal(bits(_values(cut)), bits(_values(weight)[start : start + length]))
    assert cut.qdata.untyped_storage().data_ptr() == weight.qdata.untyped_storage().data_ptr()


@pytest.mark.parametrize(("start", "kept"), [(0, True), (4, True), (8, True), (2, False), (3, False)])
def test_narrow_keeps_double_quantisation_where_its_blocks_allow(start: int, kept: bool) -> None:
    """A second level is preserved where the cut falls between its blocks; elsewhere it is resolved to equal values."""
    weight = random_weight("nf4", 12, 4096, Kind.DOUBLE_QUANT)
    cut = weight.narrow(0, start, 3)
    assert (cut.scale_kind is Kind.DOUBLE_QUANT) == kept
    assert torch.equal(_values(cut), _values(weight)[start : start + 3])


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize(("start", "length"), [(0, 128), (32, 64), (96, 54), (0, 150), (128, 22)])
def test_narrow_columns(packing: q4.Packing, start: int, length: int) -> None:
    """In-features cut from a weight are those columns of its values, up to a short last block."""
    for name in ("q4_1", "int4"):
        weight = random_weight(name, 3, 150, block=32, packing=packing, input_channel_scale=torch.linspace(1, 2, 150))
        cut = weight.narrow(1, start, length)
        assert torch.equal(_values(cut), _values(weight)[:, start : start + length])


def test_narrow_columns_needs_both_a_block_and_a_group() -> None:
    """Where neither blocks nor packed groups hold the other, a cut falls where both end."""
    weight = random_weight("int4", 3, 192, block=24, packing=PACKINGS["half32"])
    assert torch.equal(_values(weight.narrow(1, 96, 96)), _values(weight)[:, 96:])
    for start in (24, 32, 48, 64):
        with pytest.raises(q4.WeightError) as caught:
            weight.narrow(1, start, 96)
        assert caught.value.name == "start and length"


def test_narrow_columns_of_groups() -> None:
    """Codes stored in groups between other data are cut between groups."""
    weight = random_weight("q4_0", 4, 128)
    file = torch.zeros(4, 4, 18, dtype=torch.uint8)
    file[:, :, 2:] = weight.qdata.view(4, 4, 16)
    grouped = attrs.evolve(weight, qdata=file[:, :, 2:])
    assert torch.equal(_values(grouped.narrow(1, 32, 64)), _values(weight)[:, 32:96])


@pytest.mark.parametrize("kind", [Kind.E4M3_MUL, Kind.E4M3_DIV])
def test_narrow_takes_its_rows_globals(kind: Kind) -> None:
    """A global per row is cut with the rows, down to one."""
    weight = random_weight("nvfp4", 4, 32, kind, global_scale=torch.linspace(1, 2, 4))
    for start, length in ((1, 2), (3, 1)):
        assert torch.equal(_values(weight.narrow(0, start, length)), _values(weight)[start : start + length])


@pytest.mark.parametrize(
    ("dim", "start", "length"),
    [(0, 0, 0), (0, -1, 2), (0, 3, 2), (1, 0, 129), (2, 0, 1), (-1, 0, 1), (1, 16, 32), (1, 0, 40)],
)
def test_illegal_cuts_are_refused(dim: int, start: int, length: int) -> None:
    """A range outside the weight, or through a block, is refused with the range."""
    with pytest.raises(q4.WeightError) as caught:
        random_weight("q4_0", 4, 128).narrow(dim, start, length)
    assert caught.value.rule
    assert caught.value.value in {(dim, start, length), (start, length)}


def test_flat_and_permuted_weights_are_not_cut() -> None:
    """Flat blocks straddle rows, and permuted columns are spread: neither is cut where values would change."""
    flat = random_weight("nf4", 4, 100, Kind.PLAIN, blocks=FLAT)
    cuts: list[Callable[[], q4.PackedWeight]] = [
        lambda: flat.narrow(0, 0, 1),
        lambda: flat.take_rows(torch.tensor([0])),
    ]
    for cut in cuts:
        with pytest.raises(q4.WeightError) as caught:
            cut()
        assert (caught.value.name, caught.value.value) == ("blocks", "FLAT")
    permuted = random_weight("nf4", 4, 128, input_permutation=torch.arange(128).flip(0))
    with pytest.raises(q4.WeightError):
        permuted.narrow(1, 0, 64)
    assert torch.equal(_values(permuted.narrow(0, 1, 2)), _values(permuted)[1:3])


@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_take_rows(name: str, kind: Kind) -> None:
    """Rows in any order, with repeats, keep their values."""
    weight = random_weight(name, 6, 256, kind)
    rows = torch.tensor([5, 0, 5, 2])
    assert torch.equal(bits(_values(weight.take_rows(rows))), bits(_values(weight)[rows]))


def test_take_rows_of_a_second_level_with_blocks_of_one() -> None:
    """Where each scale has an entry of its own in the second level, rows in any order get theirs."""
    weight = random_weight("nf4", 6, 256, Kind.DOUBLE_QUANT)
    second = torch.linspace(0.5, 2, weight.scale.numel())
    weight = attrs.evolve(weight, nested_block_size=1, nested_scale=second)
    rows = torch.tensor([5, 0, 2])
    assert torch.equal(_values(weight.take_rows(rows)), _values(weight)[rows])
    assert torch.equal(_values(weight.narrow(0, 1, 3)), _values(weight)[1:4])


@pytest.mark.parametrize(
    "rows", [torch.tensor([6]), torch.tensor([-1]), torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([0])[:0]]
)
def test_illegal_rows_are_refused(rows: torch.Tensor) -> None:
    """Rows that are not there, and things that are no rows, are refused."""
    with pytest.raises(q4.WeightError) as caught:
        random_weight("nf4", 6, 64).take_rows(rows)
    assert caught.value.name == "rows"


@pytest.mark.parametrize("source", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("target", PACKINGS.values(), ids=PACKINGS)
def test_repack(source: q4.Packing, target: q4.Packing) -> None:
    """Codes keep their meaning in every other packing, and come back to the same bytes."""
    weight = random_weight("int4", 3, 160, block=32, packing=source)
    other = weight.repack(target)
    assert other.packing == target
    assert torch.equal(other.codes(), weight.codes())
    _assert_same(other.repack(source), weight)


def test_repack_pads_rows_to_whole_groups() -> None:
    """A packing with groups pads each row, whatever K is, and the values stay."""
    weight = random_weight("int4", 3, 41, block=8, packing=q4.Packing.LOW_FIRST)
    for packing in PACKINGS.values():
        other = weight.repack(packing)
        assert torch.equal(other.codes(), weight.codes())
        assert torch.equal(_values(other), _values(weight))
        _assert_same(other.repack(q4.Packing.LOW_FIRST), weight)


def test_repack_of_flat_codes_keeps_the_last_nibble() -> None:
    """What pads an odd number of flat codes survives a change of order and back."""
    weight = q4.quantize(torch.ones(3, 33), "nf4")
    assert int(weight.qdata[-1]) & 15 == 7
    other = weight.repack(q4.Packing.LOW_FIRST)
    assert torch.equal(_values(other), _values(weight))
    _assert_same(other.repack(q4.Packing.HIGH_FIRST), weight)


def test_repack_refuses_what_does_not_fit() -> None:
    """A packing for codes of another width, and groups in flat blocks, are refused."""
    cases = [
        (random_weight("q8_0", 2, 64), q4.Packing.LOW_FIRST),
        (random_weight("nf4", 2, 64), q4.Packing.BYTES),
        (random_weight("nf4", 2, 40, Kind.PLAIN, blocks=FLAT), PACKINGS["half32"]),
    ]
    for weight, packing in cases:
        with pytest.raises(q4.WeightError) as caught:
            weight.repack(packing)
        assert caught.value.name == "packing"
