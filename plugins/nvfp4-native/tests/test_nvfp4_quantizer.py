"""The native quantiser in Triton's interpreter: byte for byte the reference's, and unbiased by chance."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4_nvfp4_native
import q4_quantize
from q4_nvfp4_native import Nvfp4Native, quantize_packed, swizzle_scales
from q4_nvfp4_native.quantizer import KINDS, quantize_parts
from q4_quantize import find_quantizer, quantize_request
from q4core import (
    BUILTIN_FORMATS,
    FormatError,
    InputError,
    PackedWeight,
    Packing,
    PathKind,
    ReasonCode,
    Registry,
    Request,
    Rounding,
    ScaleKind,
    dequantize,
    quantize,
)

pytestmark = [
    pytest.mark.interpreted,
    # numpy, which computes there, warns of the very overflows and NaNs that are tested.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]

CHOICES = [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
IDS = [f"{name}-{kind.value}" for name, kind in CHOICES]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _assert_same(got: PackedWeight, wanted: PackedWeight) -> None:
    assert torch.equal(got.qdata, wanted.qdata)
    assert torch.equal(got.scale.view(torch.uint8), wanted.scale.view(torch.uint8))
    assert (got.global_scale is None) == (wanted.global_scale is None)
    if wanted.global_scale is not None and got.global_scale is not None:
        assert torch.equal(got.global_scale, wanted.global_scale)
        assert got.global_scale.shape == wanted.global_scale.shape
    assert (got.scale_kind, got.packing, got.dtype, got.shape) == (
        wanted.scale_kind, wanted.packing, wanted.dtype, wanted.shape,
    )  # fmt: skip


def _draws() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(33, 256, generator=generator)
    spread = normal[:8] * torch.exp2(torch.randint(-20, 20, (8, 256), generator=generator))
    ties = torch.randint(-24, 25, (40, 64), generator=generator) * 0.25
    zeros = normal[:6, :96].clone()
    zeros[0] = 0.0
    zeros[1, :32] = -0.0
    zeros[2, 5] = 2.0**-140
    return [normal, spread, ties, zeros, torch.zeros(3, 64), torch.full((2, 32), 3e38), torch.full((2, 32), 2.0**-149)]


@pytest.mark.parametrize(("name", "kind"), CHOICES, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_reference(name: str, kind: ScaleKind, dtype: torch.dtype) -> None:
    """Codes, scales and the global scale equal the reference codec's, ties, zeros and extremes included."""
    for dense in _draws():
        given = dense.clamp(-6e4, 6e4).to(dtype) if dtype is torch.float16 else dense.to(dtype)
        if dtype is torch.bfloat16:
            given = given.clamp(-3e38, 3e38)
        _assert_same(quantize_packed(given, name, scale_kind=kind), quantize(given, name, scale_kind=kind))


@pytest.mark.parametrize(("name", "kind"), CHOICES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_subnormal_numbers_are_no_zeros(name: str, kind: ScaleKind, dtype: torch.dtype) -> None:
    """Each subnormal number of 16 bits, alone in a block and next to others, gives the reference's bytes."""
    lowest = torch.arange(1, 128 if dtype is torch.bfloat16 else 1024, dtype=torch.int16).view(dtype)
    alone = torch.zeros(len(lowest), 32, dtype=dtype)
    alone[:, 3], alone[:, 20] = lowest, -lowest
    for dense in (alone, lowest[:96].repeat(3, 1), torch.full((1, 32), 2.0**-127, dtype=dtype)):
        _assert_same(quantize_packed(dense, name, scale_kind=kind), quantize(dense, name, scale_kind=kind))


def test_every_mxfp4_scale_is_the_reference_s() -> None:
    """Around every power of two, where the reference rounds its logarithm before the ceiling, the scale is the same."""
    near = [*range(40), *(0x400000 + step for step in range(-2, 16)), 0x7FFFFF]
    bits = torch.tensor([(power << 23) | fraction for power in range(253) for fraction in near], dtype=torch.int32)
    largest = (bits.view(torch.float32).to(torch.float64) * 6).to(torch.float32)
    largest = largest[torch.isfinite(largest)]
    dense = torch.zeros(len(largest), 32)
    dense[:, 0] = largest
    _assert_same(quantize_packed(dense, "mxfp4"), quantize(dense, "mxfp4"))


@pytest.mark.parametrize(("name", "kind"), CHOICES, ids=IDS)
def test_strided_weights_and_many_programs(name: str, kind: ScaleKind) -> None:
    """Rows at any stride, columns apart, and more blocks than one program takes give the reference's bytes."""
    room = torch.randn(300, 101)
    for dense in (room[:, 3:99], room.T[:, :96], torch.randn(1200, 64), torch.randn(1, 32)):
        _assert_same(quantize_packed(dense, name, scale_kind=kind), quantize(dense, name, scale_kind=kind))


@pytest.mark.parametrize(("name", "kind"), CHOICES, ids=IDS)
@pytest.mark.parametrize("shape", [(1, 32), (128, 64), (200, 320), (33, 96)])
def test_swizzled_scales_are_the_same_scales(name: str, kind: ScaleKind, shape: tuple[int, int]) -> None:
    """Written in tiles of 128 by 4 at once, or row by row and then moved, scales are the same bytes."""
    dense = torch.randn(*shape)
    plain = quantize_parts(dense, name, scale_kind=kind)
    tiled = quantize_parts(dense, name, scale_kind=kind, swizzle=True)
    assert torch.equal(tiled.codes, plain.codes)
    assert torch.equal(tiled.scales.view(torch.uint8), swizzle_scales(plain.scales).view(torch.uint8))


def test_swizzle_puts_each_scale_where_cublas_reads_it() -> None:
    """The place of scale [r, c] is the formula of cuBLAS' 1D block scaling layout."""
    rows, columns = 200, 10
    scales = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    flat = swizzle_scales(scales)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = row // 128 * -(-columns // 4) + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    assert torch.equal(flat[place], scales)
    assert int((flat != 0).sum()) == rows * columns


@pytest.mark.parametrize(("name", "kind"), CHOICES, ids=IDS)
def test_rounding_by_chance_is_unbiased(name: str, kind: ScaleKind) -> None:
    """Over many seeds each value's mean is the value; each draw is one of its two neighbours, with their spread."""
    draws = 128
    dense = torch.randn(8, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(torch.float32)
    weights = [quantize_packed(dense, name, scale_kind=kind, stochastic=True, seed=seed) for seed in range(draws)]
    scale = weights[0].resolved_scale().to(torch.float64).repeat_interleave(weights[0].block_size, 1)
    values = torch.stack([dequantize(weight, torch.float64) for weight in weights]) / scale
    exact = dense.to(torch.float64) / scale
    levels = torch.tensor(sorted(set(BUILTIN_FORMATS[name].codebook)), dtype=torch.float64)
    place = torch.searchsorted(levels, exact).clamp(1, len(levels) - 1)
    low, high = levels[place - 1], levels[place]
    near = 1e-12  # dequantised values are divided by the scale again
    assert bool((((values - low).abs() < near) | ((values - high).abs() < near)).all())
    chance = (exact - low) / (high - low)
    drawn = (chance > 0.02) & (chance < 0.98)  # rarer draws are no normal numbers
    variance = ((exact - low) * (high - exact) / draws)[drawn]
    score = (values.mean(0) - exact)[drawn] / variance.sqrt()
    assert len(score) > 400
    assert float(score.abs().max()) < 5.0  # p = 3e-4 for all of them
    assert 0.75 < float((score**2).mean()) < 1.25  # its standard deviation is below 0.07
    assert abs(float(score.sum()) / len(score) ** 0.5) < 4.0


def test_seeds_make_draws() -> None:
    """Equal seeds give equal codes, other seeds others; scales do not depend on them."""
    dense = torch.randn(16, 64)
    first, again, other = (quantize_parts(dense, stochastic=True, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.codes, again.codes)
    assert not torch.equal(first.codes, other.codes)
    assert torch.equal(first.scales.view(torch.uint8), other.scales.view(torch.uint8))


def test_blocks_draw_apart() -> None:
    """Equal blocks in different places are rounded by different draws."""
    dense = torch.randn(1, 16).repeat(64, 4)
    codes = quantize_parts(dense, stochastic=True, seed=1).codes.view(-1, 8)
    assert len(torch.unique(codes, dim=0)) > len(codes) // 2


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_refused_as_the_reference_does(name: str, bad: float) -> None:
    """NaN and infinities are the reference's own error, with the same place and count."""
    dense = torch.randn(4, 64)
    dense[2, 33] = bad
    with pytest.raises(InputError) as ours:
        quantize_packed(dense, name)
    with pytest.raises(InputError) as reference:
        quantize(dense, name)
    assert (ours.value.details, ours.value.name) == (reference.value.details, reference.value.name)


@pytest.mark.parametrize(
    ("dense", "choices", "error"),
    [
        (torch.randn(4, 40), {}, InputError),
        (torch.randn(4), {}, InputError),
        (torch.randn(0, 32), {}, InputError),
        (torch.ones(4, 32, dtype=torch.int32), {}, InputError),
        ([1.0], {}, InputError),
        (torch.randn(4, 32), {"seed": -1}, InputError),
        (torch.randn(4, 32), {"seed": 2**31}, InputError),
        (torch.randn(4, 32), {"format": "nf4"}, FormatError),
        (torch.randn(4, 32), {"format": "mxfp4", "scale_kind": ScaleKind.E4M3}, FormatError),
        (torch.randn(4, 32), {"scale_kind": ScaleKind.PLAIN}, FormatError),
    ],
)
def test_what_does_not_fit_is_a_typed_error(dense: Any, choices: dict[str, Any], error: type[Exception]) -> None:
    """Shapes, dtypes, seeds, formats and scale kinds that do not fit are refused by name."""
    with pytest.raises(error):
        quantize_parts(dense, **choices)


@pytest.mark.parametrize(("name", "kind"), CHOICES, ids=IDS)
@pytest.mark.parametrize("rounding", Rounding)
def test_the_core_proves_it(name: str, kind: ScaleKind, rounding: Rounding) -> None:
    """The probe of the core passes to nearest and by chance; the quantiser is then what the public function uses."""
    plugins = Registry([("nvfp4-native", q4_nvfp4_native), ("quantize", q4_quantize)])
    dense = torch.randn(8, 64)
    request = quantize_request(dense, name, scale_kind=kind, rounding=rounding)
    found = find_quantizer(plugins, request)
    assert (found.backend, found.path.kind) == ("nvfp4-native", PathKind.QUANTIZE)
    if rounding is Rounding.NEAREST:
        _assert_same(Nvfp4Native().quantize(dense, request), quantize(dense, name, scale_kind=kind))
        return
    got = quantize(dense, name, scale_kind=kind, rounding=rounding, seed=9, registry=plugins)
    _assert_same(got, quantize_packed(dense, name, scale_kind=kind, stochastic=True, seed=9))


def test_the_backend_leaves_finite_values_to_the_core() -> None:
    """Asked through the contract, it looks at no value on the host."""
    dense = torch.full((4, 32), torch.nan)
    request = quantize_request(dense, "nvfp4")
    assert Nvfp4Native().quantize(dense, request).shape == (4, 32)


def test_codes_in_another_order_are_refused() -> None:
    """The quantiser writes the lower nibble first, and refuses by `format` to be asked for more."""
    request = quantize_request(torch.randn(4, 32), "nvfp4", packing=Packing.HIGH_FIRST)
    assert [reason.code for reason in Nvfp4Native().check(request).reasons] == [ReasonCode.FORMAT]


def test_request_for_other_scales_is_refused() -> None:
    """A request for float scales is refused by `format`, not answered by others."""
    weight = quantize(torch.randn(4, 32), "nvfp4").with_plain_scale()
    request = attrs.evolve(Request.for_weight(weight), op="quantize")
    assert [reason.code for reason in Nvfp4Native().check(request).reasons] == [ReasonCode.FORMAT]
