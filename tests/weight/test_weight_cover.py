"""``PackedWeight.cover``: the whole blocks that hold a range of any weight, which compute the range's exact product."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import q4core as q4
from tests.support.samples import FLAT, FORMAT_KINDS, PACKINGS, bits, random_weight

Kind = q4.ScaleKind


def _values(weight: q4.PackedWeight) -> torch.Tensor:
    return q4.dequantize(weight, torch.float32)


def _assert_covers(weight: q4.PackedWeight, rows: range | None, columns: range | None) -> q4.Cover:
    """Check that a cover holds the range's values, to the bit, and that padded x and cut y have its shape."""
    cover = weight.cover(rows=rows, columns=columns)
    n, k = weight.shape
    rows, columns = range(n) if rows is None else rows, range(k) if columns is None else columns
    before, after = cover.pad
    assert min(before, after) >= 0
    assert before + len(columns) + after == cover.weight.in_features
    held = _values(cover.weight)[cover.cut, before : before + len(columns)]
    asked = _values(weight)[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(bits(held), bits(asked))
    return cover


@st.composite
def _ranges(draw: st.DrawFn, total: int) -> range | None:
    start = draw(st.integers(0, total - 1))
    return draw(st.sampled_from([None, range(start, draw(st.integers(start + 1, total)))]))


@hypothesis.given(
    st.sampled_from(FORMAT_KINDS), st.integers(1, 9), st.integers(1, 600), st.sampled_from([*PACKINGS]), st.data()
)
@hypothesis.settings(max_examples=200)
def test_any_range_of_any_form(pair: tuple[str, Kind], n: int, k: int, packing: str, data: st.DataObject) -> None:
    """Any range of rows and in-features of any format, scale kind and packing is covered, by no more than a step."""
    name, kind = pair
    form = q4.BUILTIN_FORMATS[name]
    chosen = None if form.bits == 8 else PACKINGS[packing]
    changes: dict[str, Any] = {}
    if data.draw(st.booleans()):
        changes["input_channel_scale"] = torch.linspace(1, 2, k)
    if kind in {Kind.E4M3_MUL, Kind.E4M3_DIV} and data.draw(st.booleans()):
        changes["global_scale"] = torch.linspace(1, 2, n)
    weight = random_weight(name, n, k, kind, packing=chosen, **changes)
    rows, columns = data.draw(_ranges(n)), data.draw(_ranges(k))
    cover = _assert_covers(weight, rows, columns)
    assert cover.weight.out_features == (n if rows is None else len(rows))
    step = max(form.block_size, weight.packing.group)
    step *= weight.nested_block_size if kind is Kind.SUPER_BLOCK else 1
    assert max(cover.pad) < step
    if kind is Kind.SUPER_BLOCK:  # of half the size of plain scales
        assert cover.weight.scale_kind is kind


@hypothesis.given(st.sampled_from(["nf4", "fp4", "int4"]), st.integers(1, 40), st.integers(1, 100), st.data())
@hypothesis.settings(max_examples=100)
def test_rows_of_straddling_blocks(name: str, n: int, k: int, data: st.DataObject) -> None:
    """Rows of blocks that run across rows are covered from a row that begins a block; the rest of y is cut."""
    kind = data.draw(st.sampled_from([kind for found, kind in FORMAT_KINDS if found == name]))
    block = data.draw(st.sampled_from([32, 64] if name != "int4" else [24, 33, 64]))
    weight = random_weight(name, n, k, kind, block=block, blocks=FLAT)
    rows = data.draw(_ranges(n))
    cover = _assert_covers(weight, rows, None)
    assert cover.weight.out_features < (n if rows is None else len(rows)) + 2 * block


def test_codes_are_views() -> None:
    """A cover copies no codes: it may lie in a mapped file."""
    for weight in (random_weight("nf4", 8, 200), random_weight("nf4", 32, 100, Kind.PLAIN, blocks=FLAT)):
        columns = None if weight.blocks is FLAT else range(70, 100)
        cover = weight.cover(rows=range(5, 7), columns=columns).weight
        assert cover.qdata.untyped_storage().data_ptr() == weight.qdata.untyped_storage().data_ptr()
        assert cover.nbytes < weight.nbytes


def test_super_blocks_of_a_file() -> None:
    """Q4_K's eight blocks of 32 stay together, and store two levels of scales in the cover, too."""
    weight = random_weight("q4_1", 3, 1024, Kind.SUPER_BLOCK)
    groups = attrs.evolve(weight, qdata=weight.qdata.view(3, 4, 128))
    for each in (weight, groups):
        cover = _assert_covers(each, range(1, 3), range(300, 700))
        assert cover.pad == (300 - 256, 768 - 700)
        assert cover.weight.scale_kind is Kind.SUPER_BLOCK
    assert weight.narrow(1, 32, 64).scale_kind is Kind.PLAIN


def test_act_order_keeps_all_columns() -> None:
    """In-features of a permuted weight lie in all blocks: x is padded to all of them."""
    permutation = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    weight = random_weight("int4", 6, 256, input_permutation=permutation)
    cover = _assert_covers(weight, range(2, 4), range(100, 200))
    assert (cover.pad, cover.weight.shape) == ((100, 56), (2, 256))


def test_parts_sum_to_the_whole() -> None:
    """The products of covers that share a weight's in-features add up to its own, cut anywhere."""
    weight = random_weight("nf4", 10, 352 * 2)
    x = torch.randn(3, 704, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = x @ q4.dequantize(weight, torch.float64).T
    total = torch.zeros_like(whole)
    for rank in range(2):
        for rows in (range(7), range(7, 10)):
            columns = range(rank * 352, (rank + 1) * 352)
            cover = weight.cover(rows=rows, columns=columns)
            padded = torch.nn.functional.pad(x[:, columns.start : columns.stop], cover.pad)
            y = padded @ q4.dequantize(cover.weight, torch.float64).T
            total[:, rows.start : rows.stop] += y[..., cover.cut]
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)


def test_a_whole_weight_is_itself() -> None:
    """Without a range, and with all of a weight, nothing is made anew."""
    for weight in (random_weight("nf4", 4, 100), random_weight("nf4", 4, 100, Kind.PLAIN, blocks=FLAT)):
        for cover in (weight.cover(), weight.cover(rows=range(4), columns=range(100))):
            assert cover.weight is weight
            assert (cover.pad, cover.cut) == ((0, 0), slice(0, 4))


@pytest.mark.parametrize(
    ("name", "asked"),
    [("rows", range(2, 2)), ("rows", range(5)), ("rows", range(-1, 2)), ("rows", range(0, 4, 2)), ("rows", slice(2)),
     ("columns", range(129)), ("columns", (0, 64))],
)  # fmt: skip
def test_illegal_ranges_are_refused(name: str, asked: Any) -> None:
    """A range that is empty, outside the weight, with steps, or none is refused by its name."""
    with pytest.raises(q4.WeightError) as caught:
        random_weight("q4_0", 4, 128, name="proj").cover(**{name: asked})
    assert (caught.value.name, caught.value.value) == (name, asked)
    assert "'proj'" in str(caught.value)


@hypothesis.given(st.sampled_from(["nf4", "fp4", "int4"]), st.integers(1, 9), st.integers(1, 10), st.data())
@hypothesis.settings(max_examples=100)
def test_columns_of_straddling_blocks(name: str, n: int, parts: int, data: st.DataObject) -> None:
    """In-features of blocks that run across rows are copied into blocks that do not, where the format has such."""
    kind = data.draw(st.sampled_from([kind for found, kind in FORMAT_KINDS if found == name]))
    block, size = data.draw(st.sampled_from([(64, 32), (128, 32)] if name != "int4" else [(24, 4), (33, 11), (64, 1)]))
    weight = random_weight(name, n, parts * size, kind, block=block, blocks=FLAT)
    columns = data.draw(_ranges(weight.in_features))
    cover = _assert_covers(weight, data.draw(_ranges(n)), columns)
    if columns is not None and len(columns) < weight.in_features:
        assert cover.weight.blocks is q4.BlockOrder.ROW


def test_columns_that_straddle_every_block_are_refused() -> None:
    """NF4 has no blocks of 4, as 100 in-features in blocks of 64 would need."""
    with pytest.raises(q4.WeightError) as caught:
        random_weight("nf4", 4, 100, Kind.PLAIN, blocks=FLAT).cover(columns=range(64))
    assert (caught.value.name, caught.value.value) == ("blocks", "FLAT")
    assert caught.value.hint
