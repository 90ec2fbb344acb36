"""The two simplified dialects: what they read, what they assume, what they refuse, and what they write."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import q4core as q4
from q4core import detect, detect_or_fail
from q4core.schema import SIMPLE_DIALECTS, SimpleNf4, SimpleNvfp4

NF4 = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook)
FP4 = torch.tensor(q4.BUILTIN_FORMATS["fp4"].codebook)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _trio(n: int = 6, k: int = 128, block: int = 64, table: torch.Tensor = NF4) -> dict[str, torch.Tensor]:
    return {
        "proj.weight": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=_random()),
        "proj.absmax": torch.rand(n * k // block, generator=_random(1)),
        "proj.quant_map": table.clone(),
    }


def _pair(n: int = 6, k: int = 64, dtype: torch.dtype = torch.uint8, head: str = "proj.") -> dict[str, torch.Tensor]:
    scale = torch.rand(n, k // 16, generator=_random(1)) + 0.1
    stored = scale.to(torch.float16) if dtype == torch.float16 else scale.to(torch.float8_e4m3fn).view(dtype)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=_random())
    return {f"{head}qdata": codes, f"{head}scale": stored}


def _read(tensors: dict[str, torch.Tensor], **arguments: Any) -> q4.PackedWeight:
    schema = detect_or_fail(tensors, **arguments)
    layer = schema.layers["proj"]
    dialect = next(item for item in SIMPLE_DIALECTS if item.name == layer.dialect)
    return dialect.read(layer, tensors.__getitem__)


def _problems(tensors: dict[str, torch.Tensor], **arguments: Any) -> set[tuple[str, str]]:
    with pytest.raises(q4.SchemaError) as caught:
        detect_or_fail(tensors, **arguments)
    return {(problem.code, problem.key) for problem in caught.value.problems}


@pytest.mark.parametrize(("order", "high"), [(None, True), ("high_first", True), ("low_first", False)])
@pytest.mark.parametrize("table", [NF4, FP4], ids=["nf4", "fp4"])
@pytest.mark.parametrize(("n", "k", "block"), [(6, 128, 64), (4, 96, 64), (8, 32, 128)])
def test_trio_means_table_times_absmax(
    n: int, k: int, block: int, table: torch.Tensor, order: str | None, high: bool
) -> None:
    """A trio's value is the code book's entry times the absmax of its block of the flattened weight."""
    tensors = _trio(n, k, block, table)
    weight = _read(tensors, options={} if order is None else {"nibble_order": order})
    packed = tensors["proj.weight"].reshape(-1).long()
    first, second = (packed >> 4, packed & 15) if high else (packed & 15, packed >> 4)
    codes = torch.stack((first, second), dim=-1).reshape(-1)
    expected = table[codes] * tensors["proj.absmax"].repeat_interleave(block)
    assert torch.equal(q4.dequantize(weight, torch.float32), expected.reshape(n, k))
    assert weight.format.name == ("nf4" if table is NF4 else "fp4")
    assert weight.shape == (n, k)


def test_assumed_nibble_order_is_on_record() -> None:
    """Without the option the weight's notes say that bitsandbytes' order is assumed; with it they don't."""
    assert any("high_first assumed" in note for note in _read(_trio()).notes)
    told = _read(_trio(), options={"nibble_order": "high_first"})
    assert not any("nibble order" in note for note in told.notes)


def test_dtype_comes_from_the_config() -> None:
    """config.json gives the weight's dtype; without it float32 is assumed, and the notes say so."""
    assert _read(_trio(), config={"dtype": "bfloat16"}).dtype == torch.bfloat16
    assert _read(_pair(), config={"torch_dtype": "float16"}).dtype == torch.float16
    weight = _read(_pair())
    assert weight.dtype == torch.float32
    assert any("float32 assumed" in note for note in weight.notes)


def test_unlike_codebook_is_preserved() -> None:
    """A code book that is NF4's kind but not its very levels becomes the weight's own."""
    table = NF4.to(torch.bfloat16).to(torch.float32)
    weight = _read(_trio(table=table))
    assert weight.codebook is not None
    assert torch.equal(weight.codebook, table)
    assert q4.Feature.CUSTOM_CODEBOOK in weight.features


def test_code_book_of_no_known_format_is_refused() -> None:
    """A code book that starts with neither -1 nor 0 is a problem that names the key."""
    assert _problems(_trio(table=NF4 + 0.5)) == {("value", "proj.quant_map")}


@pytest.mark.parametrize("order", ["", "HIGH", 3])
def test_unknown_nibble_order_is_refused(order: object) -> None:
    """The option takes two values, and the error lists them."""
    with pytest.raises(q4.DialectError) as caught:
        detect(_trio(), options={"nibble_order": order})
    assert (caught.value.name, caught.value.value) == ("nibble_order", order)


@pytest.mark.parametrize("missing", ["proj.absmax", "proj.quant_map", "proj.weight"])
def test_trio_with_a_missing_tensor_is_refused(missing: str) -> None:
    """Any two of the three make a layer, whose third is missing: never a default."""
    tensors = _trio()
    del tensors[missing]
    assert _problems(tensors) == {("missing_key", missing)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"proj.weight": torch.zeros(6, 64, dtype=torch.int8)}, ("dtype", "proj.weight")),
        ({"proj.weight": torch.zeros(384, dtype=torch.uint8)}, ("shape", "proj.weight")),
        ({"proj.weight": torch.zeros(1, 6, 64, dtype=torch.uint8)}, ("shape", "proj.weight")),
        ({"proj.absmax": torch.rand(5)}, ("shape", "proj.absmax")),
        ({"proj.absmax": torch.rand(48)}, ("shape", "proj.absmax")),  # a block of 16 is not legal
        ({"proj.absmax": torch.rand(6, 2)}, ("shape", "proj.absmax")),
        ({"proj.absmax": torch.zeros(12, dtype=torch.uint8)}, ("dtype", "proj.absmax")),
        ({"proj.absmax": torch.rand(0)}, ("shape", "proj.absmax")),
        ({"proj.quant_map": NF4[:8]}, ("shape", "proj.quant_map")),
        ({"proj.quant_map": NF4.double()}, ("dtype", "proj.quant_map")),
        ({"proj.nested_absmax": torch.rand(1)}, ("unknown_key", "proj.nested_absmax")),
        ({"proj.weight_scale": torch.rand(1)}, ("unknown_key", "proj.weight_scale")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else next(iter(value)),
)
def test_trio_of_wrong_parts_is_refused(change: dict[str, torch.Tensor], problem: tuple[str, str]) -> None:
    """A wrong dtype, a wrong shape and an unknown scale key are each named."""
    assert problem in _problems({**_trio(), **change})


def test_bitsandbytes_keys_are_not_the_trio() -> None:
    """``proj.weight.absmax`` lies below the weight, which is bitsandbytes' own dialect."""
    tensors = {"proj.weight": torch.zeros(64, 1, dtype=torch.uint8), "proj.weight.absmax": torch.rand(2)}
    schema = detect({**tensors, "proj.weight.quant_map": NF4}, dialects=SIMPLE_DIALECTS)
    assert schema is not None
    assert (dict(schema.layers), [problem.code for problem in schema.unsupported]) == ({}, ["unexplained"])


@pytest.mark.parametrize("head", ["proj.", "proj.weight."])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16], ids=str)
def test_pair_means_e2m1_times_scale(dtype: torch.dtype, head: str) -> None:
    """A pair's value is the E2M1 code, low nibble first, times the scale of its 16; e4m3 bytes are bits."""
    tensors = _pair(dtype=dtype, head=head)
    weight = _read(tensors)
    packed = tensors[f"{head}qdata"].long()
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    stored = tensors[f"{head}scale"]
    scale = stored.view(torch.float8_e4m3fn).float() if stored.dtype == torch.uint8 else stored.float()
    expected = E2M1[codes] * scale.repeat_interleave(16, dim=1)
    assert torch.equal(q4.dequantize(weight, torch.float32), expected)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"proj.scale": None}, ("missing_key", "proj.scale")),
        ({"proj.scale": torch.rand(6, 4)}, ("dtype", "proj.scale")),
        ({"proj.scale": torch.zeros(4, 6, dtype=torch.uint8)}, ("shape", "proj.scale")),
        ({"proj.scale": torch.zeros(24, dtype=torch.uint8)}, ("shape", "proj.scale")),
        ({"proj.qdata": torch.zeros(6, 30, dtype=torch.uint8)}, ("shape", "proj.qdata")),
        ({"proj.qdata": torch.zeros(6, 32, dtype=torch.int32)}, ("dtype", "proj.qdata")),
        ({"proj.qdata": torch.zeros(2, 6, 32, dtype=torch.uint8)}, ("shape", "proj.qdata")),
        ({"proj.per_tensor_scale": torch.rand(())}, ("unknown_key", "proj.per_tensor_scale")),
        ({"proj.global_scale": torch.rand(())}, ("unknown_key", "proj.global_scale")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else next(iter(value)),
)
def test_pair_of_wrong_parts_is_refused(change: dict[str, torch.Tensor | None], problem: tuple[str, str]) -> None:
    """A missing scale is never 1.0; wrong dtypes and shapes and an unknown global scale are named."""
    changed = {name: tensor for name, tensor in {**_pair(), **change}.items() if tensor is not None}
    assert problem in _problems(changed)


@given(
    table=st.sampled_from([NF4, FP4]),
    n=st.integers(1, 9),
    blocks=st.integers(1, 5),
    block=st.sampled_from([32, 64, 128]),
    order=st.sampled_from([None, "low_first", "high_first"]),
)
def test_writing_a_trio_again_changes_no_byte(
    table: torch.Tensor, n: int, blocks: int, block: int, order: str | None
) -> None:
    """What is read as a trio is written as the same bytes, whatever the nibble order was said to be."""
    tensors = _trio(block, n * blocks * 2, block, table)
    options = {} if order is None else {"nibble_order": order}
    weight = _read(tensors, options=options)
    written = SimpleNf4().write("proj", weight).tensors
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("head", ["proj.", "proj.weight."])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16], ids=str)
def test_writing_a_pair_again_changes_no_byte(dtype: torch.dtype, head: str) -> None:
    """What is read as a pair is written under the same keys, with the same dtypes and bytes."""
    tensors = _pair(dtype=dtype, head=head)
    written = SimpleNvfp4().write("proj", _read(tensors)).tensors
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("packing", [q4.Packing.LOW_FIRST, q4.Packing.HIGH_FIRST, q4.Packing.half_split(32)], ids=str)
def test_other_packings_are_put_in_order(packing: q4.Packing) -> None:
    """Codes in another nibble order are re-packed, and mean the same when read again."""
    weight = q4.quantize(torch.randn(8, 64, generator=_random()), "nf4").repack(packing)
    tensors = dict(SimpleNf4().write("proj", weight).tensors)
    assert torch.equal(q4.dequantize(_read(tensors)), q4.dequantize(weight))


def _dense() -> torch.Tensor:
    return torch.randn(8, 128, generator=_random())


def _double_quantised() -> q4.PackedWeight:
    weight = q4.quantize(_dense(), "nf4")
    return attrs.evolve(
        weight,
        scale=torch.randint(0, 256, weight.scale.shape, dtype=torch.uint8, generator=_random()),
        scale_kind=q4.ScaleKind.DOUBLE_QUANT,
        nested_codebook=torch.linspace(-1, 1, 256),
        nested_scale=torch.ones(1),
        nested_offset=torch.tensor(1.5),
    )


def _short_last_blocks() -> q4.PackedWeight:
    return q4.PackedWeight(
        format=q4.find_format("nf4"),
        qdata=torch.zeros(8, 48, dtype=torch.uint8),
        scale=torch.ones(8, 2),
        out_features=8,
        in_features=96,
        block_size=64,
    )


@pytest.mark.parametrize(
    ("dialect", "weight", "field"),
    [
        (SimpleNf4(), q4.quantize(_dense(), "nvfp4"), "format"),
        (SimpleNf4(), _double_quantised(), "scale_kind"),
        (SimpleNf4(), _short_last_blocks(), "features"),
        (SimpleNf4(), attrs.evolve(q4.quantize(_dense(), "nf4"), activation_scale=torch.ones(())), "activation_scale"),
        (SimpleNf4(), attrs.evolve(q4.quantize(_dense(), "nf4"), input_channel_scale=torch.ones(128)), "features"),
        (SimpleNvfp4(), q4.quantize(_dense(), "nf4"), "format"),
        (SimpleNvfp4(), q4.quantize(_dense(), "nvfp4"), "scale levels"),
        (SimpleNvfp4(), q4.quantize(_dense(), "nvfp4").with_plain_scale(), "scale levels"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_a_dialect_can_not_express_is_refused(dialect: q4.Dialect, weight: q4.PackedWeight, field: str) -> None:
    """Levels and features without a place in the dialect are refused by name, not dropped."""
    with pytest.raises(q4.DialectError) as caught:
        dialect.write("proj", weight)
    assert caught.value.name == field


def test_global_scale_of_one_is_expressible() -> None:
    """A second level that is exactly 1 can be left out: the values stay the same bits."""
    weight = attrs.evolve(q4.quantize(_dense(), "nvfp4"), global_scale=torch.ones(()))
    tensors = dict(SimpleNvfp4().write("proj", weight).tensors)
    assert torch.equal(q4.dequantize(_read(tensors)), q4.dequantize(weight))


def test_lossy_collapse_of_double_quantised_scales_keeps_values() -> None:
    """With the caller's leave the two levels become one plain float32 level of the same values."""
    weight = _double_quantised()
    dialect = SimpleNf4()
    tensors = dict(dialect.write("proj", dialect.approximate(weight)).tensors)
    assert torch.equal(q4.dequantize(_read(tensors)), q4.dequantize(weight))


def test_lossy_collapse_of_a_global_scale_rounds_to_float16() -> None:
    """With the caller's leave two levels become one float16 level, within float16's precision."""
    weight = q4.quantize(_dense(), "nvfp4")
    dialect = SimpleNvfp4()
    tensors = dict(dialect.write("proj", dialect.approximate(weight)).tensors)
    assert tensors["proj.scale"].dtype == torch.float16
    torch.testing.assert_close(q4.dequantize(_read(tensors)), q4.dequantize(weight), rtol=2**-11, atol=0.0)
