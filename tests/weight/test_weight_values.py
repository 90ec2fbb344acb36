"""``PackedWeight.check_values``: legal numbers pass, the first illegal one is named; looking costs little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import safetensors.torch
import torch
from torch.profiler import ProfilerActivity, profile

import q4core as q4
from tests.support.samples import FORMAT_KINDS, bits, random_weight

Kind = q4.ScaleKind
GOLDEN = Path(__file__).parents[2] / "conformance/src/q4_conformance/golden"
NAN, INF = float("nan"), float("inf")


ONE_NAN = torch.ones(4, 2)
ONE_NAN[2, 1] = NAN
BAD_BYTE = torch.full((4, 8), 0x7F, dtype=torch.uint8)
VALUES: list[tuple[str, str, Kind, dict[str, Any]]] = [
    (
        "scale[2, 1]",
        "nf4",
        Kind.PLAIN,
        {"scale": ONE_NAN},
    ),
    ("scale[0, 0]", "nvfp4", Kind.PLAIN, {"scale": -torch.ones(4, 8)}),
    ("scale[0, 0]", "q4_0", Kind.PLAIN, {"scale": torch.full((4, 4), INF)}),
    ("scale[0, 0]", "nvfp4", Kind.E4M3, {"scale": BAD_BYTE}),
    ("scale[0, 0]", "nvfp4", Kind.E4M3_MUL, {"scale": BAD_BYTE + 2}),
    ("scale[0, 0]", "mxfp4", Kind.E8M0, {"scale": torch.full((4, 4), 255, dtype=torch.uint8)}),
    ("offset[0, 0]", "q4_1", Kind.PLAIN, {"offset": torch.full((4, 4), -INF)}),
    ("zero[0, 0]", "int4", Kind.PLAIN, {"zero": torch.full((4, 1), NAN)}),
    ("codebook[3]", "nf4", Kind.PLAIN, {"codebook": torch.ones(16).index_fill_(0, torch.tensor([3]), NAN)}),
    ("global_scale[]", "nvfp4", Kind.E4M3_MUL, {"global_scale": torch.tensor(-1.0)}),
    ("global_scale[]", "nvfp4", Kind.E4M3_MUL, {"global_scale": torch.tensor(INF)}),
    ("global_scale[]", "nvfp4", Kind.E4M3_DIV, {"global_scale": torch.tensor(0.0)}),
    ("global_scale[1]", "nvfp4", Kind.E4M3_DIV, {"global_scale": torch.tensor([1.0, NAN, 1.0, 1.0])}),
    ("nested_codebook[0]", "nf4", Kind.DOUBLE_QUANT, {"nested_codebook": torch.full((256,), NAN)}),
    ("nested_scale[0]", "nf4", Kind.DOUBLE_QUANT, {"nested_scale": torch.tensor([-1.0])}),
    ("nested_offset[]", "nf4", Kind.DOUBLE_QUANT, {"nested_offset": torch.tensor(NAN)}),
    ("nested_scale[2]", "q4_0", Kind.SUPER_BLOCK, {"nested_scale": torch.tensor([1.0, -1.0, INF, 1.0])}),
    ("nested_offset[0]", "q4_1", Kind.SUPER_BLOCK, {"nested_offset": torch.full((4,), NAN)}),
    ("input_channel_scale[0]", "nf4", Kind.PLAIN, {"input_channel_scale": torch.full((128,), INF)}),
    ("activation_scale[]", "nf4", Kind.PLAIN, {"activation_scale": torch.tensor(-1.0)}),
    ("input_permutation", "nf4", Kind.PLAIN, {"input_permutation": torch.zeros(128, dtype=torch.int64)}),
]


@pytest.mark.parametrize(
    ("field", "name", "kind", "changes"), VALUES, ids=[f"{i}-{row[0]}" for i, row in enumerate(VALUES)]
)
def test_illegal_values_are_found(field: str, name: str, kind: Kind, changes: dict[str, Any]) -> None:
    """NaN, infinities and negative scales are found, and named with their place."""
    weight = random_weight(name, 4, 128, kind, name="proj", dialect="some", **changes)
    with pytest.raises(q4.WeightError) as caught:
        weight.check_values()
    assert (caught.value.name, caught.value.where) == (field, "some")
    assert "'proj'" in str(caught.value)


@pytest.mark.parametrize(("name", "kind"), FORMAT_KINDS)
def test_legal_values_pass(name: str, kind: Kind) -> None:
    """Ordinary weights are legal, and so are zero scales."""
    weight = random_weight(name, 4, 256, kind)
    weight.check_values()
    bits(weight.scale).zero_()
    weight.check_values()


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "int4", "nf4", "fp4"])
def test_plain_scales_may_be_negative_where_they_are_no_magnitudes(name: str) -> None:
    """ggml's steps, INT4's scales and what bitsandbytes' second level decodes to may be negative."""
    weight = random_weight(name, 4, 128)
    attrs.evolve(weight, scale=-weight.scale).check_values()


def test_pruned_rows_stay_legal_under_double_quantisation() -> None:
    """What 8 bits make of a zero absmax may lie a little below zero; such files are sound."""
    stored = safetensors.torch.load_file(GOLDEN / "bitsandbytes" / "nf4-double-pruned-rows.safetensors")
    weight = q4.quantize(stored["source"], "nf4", scale_kind=Kind.DOUBLE_QUANT)
    assert float(weight.resolved_scale().min()) < 0
    weight.check_values()


# -- large weights


def _large(scale: torch.Tensor, kind: Kind, name: str = "nvfp4") -> q4.PackedWeight:
    """Return a weight around given scales; its codes are one byte, seen everywhere."""
    form = q4.BUILTIN_FORMATS[name]
    block = form.block_size
    is_flat = scale.dim() == 1
    n, k = (scale.numel() // 64, 64 * block) if is_flat else (scale.shape[0], scale.shape[1] * block)
    codes = torch.zeros(1, dtype=torch.uint8)
    has_global = kind in {Kind.E4M3_MUL, Kind.E4M3_DIV}
    return q4.PackedWeight(
        format=form,
        qdata=codes.expand(n * k // 2) if is_flat else codes.expand(n, k // 2),
        scale=scale,
        out_features=n,
        in_features=k,
        block_size=block,
        scale_kind=kind,
        packing=form.packing,
        blocks=q4.BlockOrder.FLAT if is_flat else q4.BlockOrder.ROW,
        global_scale=torch.ones(()) if has_global else None,
    )


WIDE, TALL, LONG = (3, 100_001), (100_001, 3), (1 << 18,)


@pytest.mark.parametrize("shape", [WIDE, TALL, LONG, (512, 512)], ids=str)
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("nf4", Kind.PLAIN, torch.float32),
        ("nf4", Kind.PLAIN, torch.float16),
        ("q4_0", Kind.PLAIN, torch.bfloat16),
        ("nvfp4", Kind.E4M3_MUL, torch.float8_e4m3fn),
        ("nvfp4", Kind.E4M3_DIV, torch.uint8),
        ("mxfp4", Kind.E8M0, torch.float8_e8m0fnu),
    ],
    ids=str,
)
def test_illegal_value_far_inside_is_named(name: str, kind: Kind, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The first illegal scale, row by row, is named by its place anywhere in large scales, strided ones too."""
    if name == "q4_0" and len(shape) == 1:
        shape = (1 << 17, 2)  # its codes are HALF_SPLIT, which has no flat blocks
    storage = torch.ones(*shape, 2).to(torch.float8_e8m0fnu if kind is Kind.E8M0 else torch.float32)
    storage = storage.to(torch.float8_e4m3fn).view(torch.uint8) if dtype is torch.uint8 else storage.to(dtype)
    for scale in (storage[..., 0], storage[..., 0].contiguous()):
        _large(scale, kind, name).check_values()
        places = [tuple(size - 1 for size in shape), tuple(size * 3 // 4 for size in shape)]
        nan = 0x7F if dtype is torch.uint8 else NAN
        for place in places:
            scale[place] = nan
            with pytest.raises(q4.WeightError) as caught:
                _large(scale, kind, name).check_values()
            assert caught.value.name == f"scale{list(place)}"
            assert str(caught.value.value) == "nan"


def test_minus_zero_is_legal() -> None:
    """An e4m3 scale of -0 is a zero; the least negative number is not."""
    scale = torch.full((512, 512), 0x80, dtype=torch.uint8)
    weight = _large(scale, Kind.E4M3)
    weight.check_values()
    scale[511, 7] = 0x81
    with pytest.raises(q4.WeightError) as caught:
        weight.check_values()
    assert (caught.value.name, caught.value.value) == ("scale[511, 7]", -(2.0**-9))


@pytest.mark.parametrize("what", ["float32", "float16 among codes", "e4m3", "e4m3 of minus zeros", "nan at the end"])
def test_looking_at_values_copies_pieces_only(what: str) -> None:
    """The check of 4 million scales never allocates more than 1 MB at a time, whatever it finds."""
    shape = (2048, 2048)
    scale, kind = torch.ones(shape, dtype=torch.float8_e4m3fn), Kind.E4M3
    if what == "float32":
        scale, kind = torch.ones(shape), Kind.PLAIN
    elif what == "float16 among codes":
        scale, kind = torch.ones(*shape, 9, dtype=torch.float16)[..., 0], Kind.PLAIN
    elif what == "e4m3 of minus zeros":
        scale.view(torch.uint8).fill_(0x80)
    elif what == "nan at the end":
        scale.view(torch.uint8)[-1, -1] = 0x7F
    weight = _large(scale, kind)
    illegal = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        try:
            weight.check_values()
        except q4.WeightError as error:
            illegal = error.name
    assert illegal == ("scale[2047, 2047]" if what == "nan at the end" else None)
    assert max(event.self_cpu_memory_usage for event in record.events()) <= 1 << 20


def test_looking_at_values_needs_no_detached_tensors() -> None:
    """Scales that record gradients are checked in silence."""
    scale = torch.ones(8, 8, requires_grad=True)
    _large(scale, Kind.PLAIN).check_values()
    with torch.no_grad():
        scale[3, 3] = NAN
    with pytest.raises(q4.WeightError):
        _large(scale, Kind.PLAIN).check_values()
