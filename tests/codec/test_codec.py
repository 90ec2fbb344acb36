"""The reference decoder: every layout against an oracle that computes one element after another."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import q4core as q4
from q4core.codec import decode
from tests.support.samples import FLAT, FORMAT_KINDS, PACKINGS, bits, oracle, random_weight


def _assert_exact(weight: q4.PackedWeight) -> None:
    """Check float32, float64 and the two half precisions, bit by bit."""
    expected = oracle(weight)
    assert torch.equal(bits(q4.dequantize(weight, torch.float32)), bits(expected))
    assert torch.equal(bits(q4.dequantize(weight, torch.float64)), bits(oracle(weight, np.float64)))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(bits(q4.dequantize(weight, dtype)), bits(expected.to(dtype)))


@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_values_are_the_formulas(name: str, kind: q4.ScaleKind) -> None:
    """Every format under every scale kind decodes to its formula, rounded once per operation."""
    block = q4.BUILTIN_FORMATS[name].block_size
    _assert_exact(random_weight(name, 5, 2 * block, kind))


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("name", ["nf4", "nvfp4", "q4_1", "int4"])
def test_every_packing_means_the_same(name: str, packing: q4.Packing) -> None:
    """A weight decodes to the same values in any nibble order."""
    weight = random_weight(name, 3, 128, packing=packing)
    _assert_exact(weight)
    for other in PACKINGS.values():
        assert torch.equal(q4.dequantize(weight.repack(other)), q4.dequantize(weight))


@pytest.mark.parametrize("k", [1, 2, 31, 33, 64, 65, 100])
@pytest.mark.parametrize("name", ["nf4", "int4", "q4_0", "q8_0"])
def test_short_last_block(name: str, k: int) -> None:
    """K need not be a multiple of the block: the last block of each row is short."""
    weight = random_weight(name, 4, k, block=32)
    assert (q4.Feature.TAIL_BLOCK in weight.features) == bool(k % 32)
    _assert_exact(weight)


@pytest.mark.parametrize("kind", [q4.ScaleKind.PLAIN, q4.ScaleKind.DOUBLE_QUANT])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 33), (7, 40), (9, 32), (5, 96), (20, 150)])
@pytest.mark.parametrize("packing", [q4.Packing.LOW_FIRST, q4.Packing.HIGH_FIRST], ids=str)
def test_flat_blocks(packing: q4.Packing, n: int, k: int, kind: q4.ScaleKind) -> None:
    """Blocks over the flattened weight may straddle rows, and rows may begin in the middle of a byte."""
    _assert_exact(random_weight("nf4", n, k, kind, packing=packing, blocks=FLAT))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_codes_stored_in_groups_between_other_data(name: str) -> None:
    """Codes of [N, G, P] views, as they lie in ggml's blocks, decode without a copy."""
    weight = random_weight(name, 4, 96)
    size = weight.qdata.shape[1] // 3
    file = torch.zeros(4, 3, size + 5, dtype=torch.uint8)
    file[:, :, 4 : 4 + size] = weight.qdata.view(4, 3, size)
    grouped = attrs.evolve(weight, qdata=file[:, :, 4 : 4 + size])
    _assert_exact(grouped)
    assert torch.equal(grouped.codes(), weight.codes())


def test_strided_codes_and_scales() -> None:
    """Codes and scales may be views with any strides."""
    weight = random_weight("q4_1", 6, 64)
    assert weight.offset is not None
    strided = attrs.evolve(
        weight,
        qdata=weight.qdata.t().contiguous().t(),
        scale=weight.scale.repeat(1, 2)[:, :2],
        offset=torch.stack((weight.offset, weight.offset), -1)[..., 0],
    )
    _assert_exact(strided)
    column_first = random_weight("q8_0", 6, 64)
    turned = attrs.evolve(column_first, qdata=column_first.qdata.t().contiguous().t())
    assert q4.dequantize(turned).is_contiguous()
    _assert_exact(turned)


@pytest.mark.parametrize(
    "changes",
    [
        {"input_channel_scale": torch.linspace(-2, 3, 128)},
        {"input_channel_scale": torch.linspace(0.1, 3, 128).to(torch.bfloat16)},
        {"input_permutation": torch.arange(128).flip(0)},
        {"input_permutation": torch.arange(128).roll(5), "input_channel_scale": torch.linspace(0.5, 2, 128)},
        {"codebook": torch.linspace(-3, 3, 16)},
        {"codebook": torch.arange(16).float() - 7},
    ],
    ids=["channel-scale", "channel-scale-bfloat16", "permutation", "both", "codebook", "whole-number-codebook"],
)
def test_side_tensors(changes: dict[str, Any]) -> None:
    """A permutation moves stored columns to their features, a channel scale then multiplies these."""
    _assert_exact(random_weight("nf4", 5, 128, **changes))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float32, torch.float16, None])
def test_zero_points(dtype: torch.dtype | None) -> None:
    """Zero points may be integers or floats; without them, code 8 is zero."""
    zero = None if dtype is None else torch.tensor([[0, 3], [15, 8], [7, 1]]).to(dtype)
    if dtype is not None and dtype.is_floating_point:
        zero = torch.tensor([[0.5, 3.25], [15.0, -2.5], [7.125, 8.0]]).to(dtype)
    _assert_exact(random_weight("int4", 3, 64, block=32, zero=zero))


@pytest.mark.parametrize("kind", [q4.ScaleKind.E4M3_MUL, q4.ScaleKind.E4M3_DIV])
def test_a_global_for_each_row(kind: q4.ScaleKind) -> None:
    """A global scale per out-feature applies to its own row, also in a chunk or a row by itself."""
    weight = random_weight("nvfp4", 5, 32, kind, global_scale=torch.linspace(0.3, 3, 5))
    _assert_exact(weight)
    assert torch.equal(q4.dequantize(weight, rows=slice(3, 4)), oracle(weight)[3:4])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_negative_zero_and_extreme_scales(name: str) -> None:
    """E2M1's code 8 is -0, and the least and greatest scales are preserved to the bit."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 2)
    qdata = codes[:, ::2] | (codes[:, 1::2] << 4)
    if name == "mxfp4":
        scale = torch.tensor([[0], [1], [254], [255]], dtype=torch.uint8)
    else:
        scale = torch.tensor([[0, 1], [7, 8], [126, 127], [0x38, 0x80]], dtype=torch.uint8)
    weight = random_weight(name, 4, 32, qdata=qdata, scale=scale)
    expected = oracle(weight)
    actual = q4.dequantize(weight)
    assert torch.equal(actual.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(bits(actual[kept]), bits(expected[kept]))
    assert bool(torch.signbit(actual[0, 8]))


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 30])
@pytest.mark.parametrize("blocks", list(q4.BlockOrder))
def test_chunks_do_not_show(blocks: q4.BlockOrder, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are decoded at once changes no bit."""
    monkeypatch.setattr(decode, "_CHUNK_ELEMENTS", chunk)
    _assert_exact(random_weight("nf4", 11, 33, q4.ScaleKind.DOUBLE_QUANT, block=32, blocks=blocks))


ROWS: list[Any] = [
    slice(None),
    slice(2, 5),
    slice(-3, None),
    slice(None, None, 3),
    slice(None, None, -1),
    slice(8, 3, -2),
    slice(5, 2),
    slice(7, 100),
    torch.tensor([4]),
    torch.tensor([8, 0, 8, 3]),
    torch.tensor([], dtype=torch.int64),
]


@pytest.mark.parametrize("blocks", list(q4.BlockOrder))
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("kind", [q4.ScaleKind.PLAIN, q4.ScaleKind.DOUBLE_QUANT])
def test_rows(kind: q4.ScaleKind, rows: Any, blocks: q4.BlockOrder) -> None:
    """Rows chosen by a slice or an index vector are those rows of the whole."""
    weight = random_weight("nf4", 9, 70, kind, block=32, blocks=blocks)
    chosen = torch.arange(9).tolist()[rows] if isinstance(rows, slice) else rows.tolist()
    expected = oracle(weight)[torch.tensor(chosen, dtype=torch.int64)]
    assert torch.equal(q4.dequantize(weight, rows=rows), expected)


def test_rows_in_another_dtype() -> None:
    """Some rows are decoded to the dtype asked for, or to the weight's own."""
    weight = random_weight("q4_1", 9, 64, dtype=torch.bfloat16)
    expected = oracle(weight)
    assert torch.equal(q4.dequantize(weight, torch.float32, rows=slice(2, 6)), expected[2:6])
    assert torch.equal(q4.dequantize(weight, torch.float32, rows=slice(7, None)), expected[7:])
    assert torch.equal(q4.dequantize(weight, torch.float32, rows=torch.tensor([6, 1])), expected[[6, 1]])
    assert q4.dequantize(weight, torch.float64, rows=slice(1)).dtype is torch.float64
    assert q4.dequantize(weight).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        (torch.tensor([0, 9]), 9),
        (torch.tensor([-1]), -1),
        (torch.tensor([1], dtype=torch.int32), "torch.int32 [1]"),
        (torch.tensor([[1]]), "torch.int64 [1, 1]"),
        ([0, 1], "list"),
    ],
)
def test_illegal_rows_are_refused(rows: Any, value: object) -> None:
    """Rows outside the weight, and things that are no rows, are named."""
    with pytest.raises(q4.InputError) as caught:
        q4.dequantize(random_weight("nf4", 9, 64), rows=rows)
    assert (caught.value.name, caught.value.value) == ("rows", value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_illegal_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Only float dtypes that hold a weight are decoded to."""
    with pytest.raises(q4.InputError) as caught:
        q4.dequantize(random_weight("nf4", 2, 64), dtype)
    assert (caught.value.name, caught.value.value) == ("dtype", dtype)


def test_a_false_permutation_is_refused() -> None:
    """A permutation that names a feature twice would leave another one undefined."""
    weight = random_weight("nf4", 2, 64, input_permutation=torch.zeros(64, dtype=torch.int64))
    with pytest.raises(q4.WeightError) as caught:
        q4.dequantize(weight)
    assert caught.value.name == "input_permutation"


def test_absurd_sizes_are_refused_before_allocation() -> None:
    """A weight of 2^62 elements, which a few bytes can claim to be, is refused at once."""
    n = k = 2**31 - 1
    weight = random_weight("int4", 1, 2)
    absurd = attrs.evolve(
        weight,
        qdata=torch.zeros(1, dtype=torch.uint8).expand(n, 2**30),
        scale=torch.ones(1).expand(n, 1),
        zero=None,
        out_features=n,
        in_features=k,
        block_size=k,
    )
    with pytest.raises(q4.InputError) as caught:
        q4.dequantize(absurd)
    assert caught.value.value == n * k
    assert caught.value.hint is not None


def test_the_weight_is_only_read() -> None:
    """Decoding changes no byte of the weight, and no result shares memory with it."""
    for name, kind in FORMAT_KINDS:
        weight = random_weight(name, 3, 256, kind)
        before = [(field, tensor.clone()) for field, tensor in weight.tensors()]
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            q4.dequantize(weight, dtype).zero_()
        for (field, tensor), (_, now) in zip(before, weight.tensors(), strict=True):
            assert torch.equal(bits(tensor), bits(now)), field


class _Sizes(TorchDispatchMode):
    """Notes the size of each storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_memory_is_bounded(name: str, kind: q4.ScaleKind) -> None:
    """Besides the result and the weight itself, no tensor is larger than one chunk in float64."""
    n, k = 100, 16384
    form = q4.BUILTIN_FORMATS[name]
    small = random_weight(name, 1, k, kind)
    spread = {
        field: getattr(small, field).expand(n, -1)
        for field in ("scale", "offset", "zero")
        if getattr(small, field) is not None
    }
    if kind is q4.ScaleKind.DOUBLE_QUANT:
        spread["nested_scale"] = torch.ones(-(-n * k // form.block_size // 256))
    if kind is q4.ScaleKind.SUPER_BLOCK:
        names = ("nested_scale", "nested_offset") if form.has_offset else ("nested_scale",)
        spread |= {field: getattr(small, field).repeat(n) for field in names}
    weight = attrs.evolve(small, qdata=small.qdata.expand(n, -1), out_features=n, **spread)
    with _Sizes() as sizes:
        result = q4.dequantize(weight, torch.float64)
    largest = max(size for size in sizes.nbytes if size < result.nbytes)
    assert largest <= 8 << 19
    assert max(sizes.nbytes) == result.nbytes


@hypothesis.given(
    st.sampled_from(FORMAT_KINDS),
    st.integers(1, 6),
    st.integers(1, 90),
    st.sampled_from([*PACKINGS]),
    st.integers(0, 99),
)
@hypothesis.settings(max_examples=60)
def test_any_shape(pair: tuple[str, q4.ScaleKind], n: int, k: int, packing: str, seed: int) -> None:
    """Any N, K, format, scale kind and packing decode to the formula."""
    name, kind = pair
    chosen = None if q4.BUILTIN_FORMATS[name].bits == 8 else PACKINGS[packing]
    _assert_exact(random_weight(name, n, k, kind, packing=chosen, seed=seed))


def test_a_codebook_is_copied_to_a_device_once_and_never_a_watched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plain tensor per format and device is cached, and nothing that a dispatch mode or inference mode made."""
    monkeypatch.setattr(decode, "_TABLES", {})
    form, device = q4.BUILTIN_FORMATS["nf4"], torch.device("meta")
    with FakeTensorMode():
        decode._table(form, device)
    assert decode._TABLES == {}
    with torch.inference_mode():
        kept = decode._table(form, device)
    assert not kept.is_inference()
    assert decode._table(form, device) is kept
    assert type(kept) is torch.Tensor
    with FakeTensorMode():
        assert decode._table(form, device) is not kept
