"""What the kit does not ask: tables, packings, strides, rows that int8 can't hold, threads, forks, what is missing."""

from __future__ import annotations

import concurrent.futures
import os
import sys
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch

import q4core as q4
from q4_cpu_native import CpuNative
from q4_cpu_native.tables import table_of, words_of
from q4core.extension import LayerHandle
from tests.support import samples
from tests.support.cpu_layers import layer_on, quantised, random_weight
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

NF4 = q4.BUILTIN_FORMATS["nf4"].codebook


def test_tables_are_exact_where_they_can_be() -> None:
    """E2M1, Q4_0, IQ4_NL and plain numbers stand exactly in 8 bits; NF4 and FP4 within half a step."""
    for name in ("nvfp4", "mxfp4", "q4_0", "q4_1"):
        codebook = q4.BUILTIN_FORMATS[name].codebook
        table = table_of(codebook)
        assert table.values is None
        assert max(table.level) <= 24
        assert [table.step * (level - table.center) for level in table.level] == list(codebook)
    codebook = q4.BUILTIN_FORMATS["iq4_nl"].codebook
    assert table_of(codebook).values is None
    assert [level - table_of(codebook).center for level in table_of(codebook).level] == list(codebook)
    for name in ("nf4", "fp4"):
        codebook = q4.BUILTIN_FORMATS[name].codebook
        table = table_of(codebook)
        assert table.values is not None
        assert max(abs(a - b) for a, b in zip(table.values, codebook, strict=True)) <= table.step / 2
        assert 0 not in table.level  # −128, whose product with −128 has no place


def test_words_are_exact_where_they_can_be() -> None:
    """FP4 and IQ4_NL are exact in 16 bits, NF4 within half a step of ±8191; narrow levels need none."""
    assert all(words_of(q4.BUILTIN_FORMATS[name].codebook) is None for name in ("nvfp4", "mxfp4"))
    iq4_nl = words_of(q4.BUILTIN_FORMATS["iq4_nl"].codebook)
    assert iq4_nl is not None
    assert (iq4_nl.values, iq4_nl.step) == (None, 1.0)
    assert iq4_nl.word == q4.BUILTIN_FORMATS["iq4_nl"].codebook
    fp4, nf4 = (words_of(q4.BUILTIN_FORMATS[name].codebook) for name in ("fp4", "nf4"))
    assert fp4 is not None
    assert fp4.values is None
    torch.testing.assert_close(
        torch.tensor(fp4.word) * fp4.step, torch.tensor(q4.BUILTIN_FORMATS["fp4"].codebook), rtol=2**-23, atol=0
    )
    assert nf4 is not None
    assert nf4.values is not None
    codebook = q4.BUILTIN_FORMATS["nf4"].codebook
    assert max(abs(a - b) for a, b in zip(nf4.values, codebook, strict=True)) <= 1 / 16382
    error = np.mean((np.array(nf4.values) - np.array(codebook)) ** 2)
    assert error / np.mean(np.array(codebook) ** 2) < 1.4e-9
    assert max(map(abs, nf4.word)) * 16 * 16383 < 2**31


def test_the_default_is_int16(backend: CpuNative) -> None:
    """By default, and with few and many rows alike, activations are rounded to int16, for gradients not at all."""
    for format_ in sorted(CpuNative.capabilities.formats):
        weight = random_weight(format_)
        segments = layer_on(backend, weight, "auto").diagnostics().segments
        assert {segment.path.precision for segment in segments} == {q4.Precision.W4I16}
        segments = layer_on(backend, weight, "auto", gradients=True).diagnostics().segments
        assert {segment.path.precision for segment in segments} == {q4.Precision.W4A32}


def test_what_int8_holds_int16_holds(backend: CpuNative) -> None:
    """On the grid of int8 both give the same numbers, but for float32's own rounding."""
    weight = random_weight("q4_0")
    x = torch.randint(-127, 128, (5, 256), generator=torch.Generator().manual_seed(3)).float()
    x[:, ::32] = 127.0
    exact = x.double() @ q4.dequantize(weight, torch.float64).T
    for precision in ("int16", "int8"):
        y = layer_on(backend, weight, precision)(x).double()
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("format_", "most"), [("nf4", 1.2e-5), ("fp4", 6e-6)])
def test_rounded_tables_err_little(format_: str, most: float) -> None:
    """The squared error of a rounded table, over the mean square of its values; the formats' own is some 1e-2."""
    codebook = q4.BUILTIN_FORMATS[format_].codebook
    values = np.array(table_of(codebook).values)
    assert np.mean((values - np.array(codebook)) ** 2) / np.mean(np.array(codebook) ** 2) < most


@pytest.mark.parametrize(
    "packing", [q4.Packing.LOW_FIRST, q4.Packing.HIGH_FIRST, q4.Packing.half_split(32), q4.Packing.half_split(128)]
)
def test_every_packing_is_read_and_given_back(backend: CpuNative, packing: q4.Packing) -> None:
    """Each nibble order gives the same numbers, and comes back from export byte for byte."""
    weight = random_weight().repack(packing)
    layer = layer_on(backend, weight, "exact")
    x = torch.randn(3, 256)
    torch.testing.assert_close(layer(x), x @ q4.dequantize(weight).T, rtol=1e-5, atol=1e-5)
    given = layer.packed_weight()
    assert given.packing == packing
    assert torch.equal(given.qdata, weight.qdata)
    assert torch.equal(given.scale, weight.scale)


def test_strided_sources_are_read_in_place(backend: CpuNative) -> None:
    """Codes and scales that are views (a transposed file, ggml's blocks) are read as they lie."""
    weight = random_weight("q4_0", 40, 256)
    raw = torch.empty(40, 8, 18, dtype=torch.uint8)  # 2 bytes of scale and 16 of codes in each block
    raw[:, :, 2:] = weight.qdata.view(40, 8, 16)
    raw[:, :, :2] = weight.scale.to(torch.float16).view(torch.uint8).view(40, 8, 2)
    blocks = attrs.evolve(weight, qdata=raw[:, :, 2:], scale=raw.view(torch.float16)[:, :, 0])
    x = torch.randn(2, 256)
    same = attrs.evolve(weight, scale=weight.scale.to(torch.float16))
    assert torch.equal(layer_on(backend, blocks, "int8")(x), layer_on(backend, same, "int8")(x))
    turned = attrs.evolve(weight, qdata=weight.qdata.T.contiguous().T, scale=weight.scale.T.contiguous().T)
    assert torch.equal(layer_on(backend, turned, "exact")(x), layer_on(backend, weight, "exact")(x))


SIZES = [(1, 64), (3, 64), (16, 192), (17, 128), (33, 1088), (160, 320)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format_", ["q4_0", "q4_1", "q8_0", "mxfp4", "nf4", "nvfp4"])
def test_prepared_size(backend: CpuNative, format_: str, size: tuple[int, int]) -> None:
    """Prepared bytes are the packed ones, rows filled up to whole tiles of 16 and in-features to chunks of 32."""
    weight = random_weight(format_, *size)
    record = layer_on(backend, weight, "exact").diagnostics()
    rows, columns = size
    filled = (-(-rows // 16) * 16 / rows) * (-(-columns // 64) * 64 / columns)
    assert record.prepared_bytes <= weight.nbytes * filled + 16
    assert record.source_bytes == 0


@pytest.mark.parametrize("block", [16, 32, 96, 384])
@pytest.mark.parametrize(
    ("format_", "zero"),
    [("iq4_nl", None), ("q8_0", None), ("q8_affine", None), ("int8", None)]
    + [("int8", dtype) for dtype in (torch.uint8, torch.int8, torch.int32, torch.float32)],
)
def test_wide_codes_keep_their_values(backend: CpuNative, format_: str, zero: torch.dtype | None, block: int) -> None:
    """Of rows of x with a single 1, each path gives each weight, to float32's rounding of its terms."""
    shape = (40, 384 // block)
    changes: dict[str, Any] = {}
    if format_ == "int8":
        zeros = torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(3))
        given = zeros + 0.37 if zero is torch.float32 else zeros
        changes["zero"] = None if zero is None else given.to(zero)
    weight = samples.random_weight(format_, 40, 384, block=block, **changes)
    decoded = q4.dequantize(weight, torch.float64)
    # A weight's term, at most 255 scales, is rounded four times: the step of x, times that, times the scale, plus the
    # offset (before the scale: less the zero). An offset is rounded three times. Each is by 2^-24; products
    # of two roundings fit between 255 and 256.
    terms = 256 * weight.resolved_scale().abs().max()
    offset = weight.resolved_offset()
    terms += 0 if offset is None else offset.abs().max().float()
    for precision in ("exact", "int16", "int8"):
        y = layer_on(backend, weight, precision)(torch.eye(384))
        assert float((y.double().T - decoded).abs().max()) <= 2**-22 * float(terms)
        if precision == "exact" and offset is None:
            assert torch.equal(y.T, q4.dequantize(weight))


_FEWER = {"q4_0": (2, 3), "q4_1": (2, 3), "int4": (2, 3), "q8_0": (5, 6), "q8_affine": (5, 6), "int8": (5, 6)}
"""Formats → bits in which tiles hold their codes where these suffice."""


def _few_codes(format_: str, bits: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Return codes, one per byte, that need so many bits: around zero's, or from it on."""
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    codes[:2, ::3], codes[:2, 1::3] = (1 << bits) - 1, 0  # the ends
    zero = {"q4_0": 8, "int4": 8, "q8_0": 0, "int8": 128}.get(format_)
    return codes if zero is None else codes + zero - (1 << bits - 1)


@pytest.mark.parametrize("block", [16, 32, 96])
@pytest.mark.parametrize(("format_", "bits"), [(name, bits) for name, both in _FEWER.items() for bits in both])
@pytest.mark.parametrize("seed", range(2))
def test_codes_of_fewer_bits_have_the_bits_of_wider_ones(
    backend: CpuNative, format_: str, bits: int, block: int, seed: int
) -> None:
    """Tiles hold codes in fewer bits, and a row of theirs gives the same next to one that has wider codes."""
    weight = attrs.evolve(samples.random_weight(format_, 41, 384, block=block), zero=None)
    generator = torch.Generator().manual_seed(seed)
    codes = _few_codes(format_, bits, (41, 384), generator)
    wide = codes.clone()
    wide[40] = 127 if weight.format.bits == 8 else 15
    wide[40, 0] = 0
    x = torch.randn(70, 384, generator=generator) * torch.logspace(-2, 2, 70)[:, None]
    for precision in ("exact", "int16", "int8"):
        layers = [
            layer_on(backend, attrs.evolve(weight, qdata=q4.pack_codes(item, weight.packing)), precision)
            for item in (codes, wide)
        ]
        metas = [LayerHandle(layer).prepared.meta for layer in layers]
        assert [meta.held_bits for meta in metas] == [bits, weight.format.bits]
        for rows in (1, 2, 4, 7, 70):
            few, other = (layer(x[:rows]) for layer in layers)
            assert torch.equal(few[:, :40], other[:, :40])
        assert torch.equal(layers[0].packed_weight().codes(), codes)
        assert backend.meta_from(backend.describe(metas[0])) == metas[0]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_small_scales_and_offsets_share_a_byte(backend: CpuNative, bits: int) -> None:
    """Levels below 16 of scales and offsets lie in one byte, come back as they were, and give the same numbers."""
    weight = samples.random_weight("q4_1", 41, 512, q4.ScaleKind.SUPER_BLOCK, block=16)
    generator = torch.Generator().manual_seed(bits)
    scale, offset = weight.scale % 16, torch.as_tensor(weight.offset) % 16
    given = attrs.evolve(
        weight,
        qdata=q4.pack_codes(_few_codes("q4_1", bits, (41, 512), generator), weight.packing),
        scale=scale.to(torch.uint8),
        offset=offset.to(torch.uint8),
    )
    larger = attrs.evolve(given, scale=given.scale.clone())
    larger.scale[40, 0] = 16
    x = torch.randn(70, 512, generator=generator)
    for precision in ("exact", "int16", "int8"):
        layers = [layer_on(backend, item, precision) for item in (given, larger)]
        assert [LayerHandle(layer).prepared.meta.has_halves for layer in layers] == [True, False]
        for rows in (1, 3, 70):
            halves, other = (layer(x[:rows]) for layer in layers)
            assert torch.equal(halves[:, :40], other[:, :40])
        back = layers[0].packed_weight()
        assert torch.equal(back.scale, given.scale)
        assert torch.equal(torch.as_tensor(back.offset), torch.as_tensor(given.offset))
        meta = LayerHandle(layers[0]).prepared.meta
        assert backend.meta_from(backend.describe(meta)) == meta


@pytest.mark.parametrize(
    ("format_", "name", "value"),
    [
        ("q4_0", "held_bits", 5), ("nf4", "held_bits", 3), ("q8_0", "held_bits", 4), ("q4_1", "has_halves", True),
        ("q4_0", "held_bits", None), ("q4_0", "layout", 1),
    ],
)  # fmt: skip
def test_what_tiles_hold_is_described_as_it_can_be(backend: CpuNative, format_: str, name: str, value: object) -> None:
    """Bits that a format has not, halves of bytes without super-blocks, and an older layout are refused by name."""
    meta = LayerHandle(layer_on(backend, random_weight(format_, 32, 64))).prepared.meta
    facts = backend.describe(meta) | {name: value}
    with pytest.raises(q4.ConfigError, match=name):
        backend.meta_from(facts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_order", [True, False])
@pytest.mark.parametrize("factors", [None, torch.float32, torch.float16])
def test_permuted_and_scaled_in_features(
    backend: CpuNative, dtype: torch.dtype, has_order: bool, factors: torch.dtype | None
) -> None:
    """Act-order and factors of in-features give the bits of x permuted and multiplied beforehand, for any rows."""
    weight = random_weight("int4", 40, 288)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(288, generator=generator) if has_order else torch.arange(288)
    factor = torch.ones(288) if factors is None else (torch.rand(288, generator=generator) + 0.5).to(factors)
    sides: dict[str, Any] = {"input_permutation": order} if has_order else {}
    sides |= {} if factors is None else {"input_channel_scale": factor}
    given = attrs.evolve(weight, **sides)
    x = torch.randn(70, 288, generator=generator).to(dtype)
    met = (x.float() * factor.float())[:, order]
    for precision in ("exact", "int16", "int8"):
        layer = layer_on(backend, given, precision, compute_dtype=dtype)
        plain = layer_on(backend, weight, precision, compute_dtype=torch.float32)
        y = layer(x)
        assert torch.equal(y, plain(met).to(dtype))
        assert torch.equal(y[:3], layer(x[:3]))
        assert torch.equal(y[4], layer(x[4:5])[0])
        for name, tensor in sides.items():
            assert torch.equal(getattr(layer.packed_weight(), name), tensor)


@pytest.mark.parametrize("format_", sorted(CpuNative.capabilities.formats))
def test_free_range_error(backend: CpuNative, format_: str) -> None:
    """On activations of any value the exact path errs by rounding alone, int16 and int8 by their own steps."""
    weight = random_weight(format_, 96, 512)
    x = torch.randn(33, 512, generator=torch.Generator().manual_seed(2))
    exact = x.double() @ q4.dequantize(weight, torch.float64).T
    for precision, most in (("exact", 1e-11), ("int16", 1e-8 if format_ == "nf4" else 1e-9), ("int8", 1e-4)):
        y = layer_on(backend, weight, precision)(x).double()
        assert float((y - exact).square().mean() / exact.square().mean()) <= most


@pytest.mark.parametrize("precision", ["int8", "int16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e-44, 3e38])
def test_rows_that_integers_can_not_hold_are_computed_exactly(backend: CpuNative, value: float, precision: str) -> None:
    """A value that is not finite, or too small for a scale, gives its row what the exact path gives, and no other."""
    weight = random_weight("q4_0")
    x = torch.randn(11, 256)
    x[4] = 0.0
    x[4, 7] = value
    rounded, exact = layer_on(backend, weight, precision), layer_on(backend, weight, "exact")
    got = rounded(x)
    assert torch.equal(got[4].nan_to_num(9.0), exact(x)[4].nan_to_num(9.0))
    x[4] = 0.0
    rest = torch.arange(11) != 4
    assert torch.equal(got[rest], rounded(x)[rest])


@pytest.mark.parametrize("precision", ["exact", "int16", "int8"])
@pytest.mark.parametrize("format_", sorted(CpuNative.capabilities.formats))
def test_huge_activations_overflow_only_where_the_product_does(
    backend: CpuNative, format_: str, precision: str
) -> None:
    """Finite results are finite, however large the levels that they are made of."""
    dense = torch.randn(48, 256, generator=torch.Generator().manual_seed(1)) * 1e-3
    weight = quantised(dense, format_)
    decoded = q4.dequantize(weight, torch.float64)
    layer = layer_on(backend, weight, precision)
    usual = torch.randn(14, 256, generator=torch.Generator().manual_seed(2))
    for value in (1e26, 1e28, 1e34, 1e37):
        x = usual.clone()
        x[3] *= value / 4
        exact = x.double() @ decoded.T
        got = layer(x).double()
        magnitude = x.double().abs() @ decoded.abs().T
        assert bool(((got[3] - exact[3]).abs() <= 1e-2 * magnitude[3]).all()), value


def test_weights_of_zero_give_zero(backend: CpuNative) -> None:
    """Where every code stands for zero, y is zero, and not what rounding leaves of two large terms."""
    zero = torch.full((16, 8), 7, dtype=torch.uint8)
    codes = torch.full((16, 128), 0x77, dtype=torch.uint8)
    int4 = q4.PackedWeight(
        format=q4.BUILTIN_FORMATS["int4"],
        qdata=codes,
        scale=torch.full((16, 8), 0.37),
        zero=zero,
        out_features=16,
        in_features=256,
        block_size=32,
    )
    mxfp4 = q4.quantize(torch.zeros(16, 256), "mxfp4")
    x = torch.rand(3, 256) + 0.1
    for weight in (int4, mxfp4, q4.quantize(torch.zeros(16, 256), "q4_0")):
        assert bool((layer_on(backend, weight, "int8")(x) == 0).all())


def test_scratch_is_bounded() -> None:
    """A call with very many rows keeps no more than a few megabytes afterwards."""
    code = """
import torch, q4core as q4
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS:")).split()[1]) // 1024
weight = q4.quantize(torch.randn(64, 4096), "q4_0")
configs = [q4.SessionConfig(backend="cpu-native", activation_precision=name) for name in ("int16", "int8", "exact")]
layers = [q4.Session(config).linear(weight) for config in configs]
x = torch.randn(8192, 4096)
out = torch.empty(8192, 64)
for layer in layers: layer(x[:4], out=out[:4])
before = resident()
for layer in layers: layer(x, out=out)
print(resident() - before)
"""
    done = run_interpreter(["-W", "ignore", "-c", code], timeout=scaled(120), check=True)
    assert int(done.stdout) < 24  # MB; 128 would be the activations themselves


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_child_forked_before_the_first_call_computes() -> None:
    """The guard exists from the import on: a child may be the first to prepare and to call."""
    code = """
import os, sys, torch, q4core as q4
torch.set_num_threads(2)
weight = q4.quantize(torch.randn(1024, 1024), "q4_0")
q4.Session(q4.SessionConfig(backend="cpu-native")).linear(weight)
weight = q4.quantize(torch.randn(1040, 1024), "q4_0")
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # torch's own operations would hang
    q4.Session(q4.SessionConfig(backend="cpu-native")).linear(weight)(torch.randn(2, 1024))
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_interpreter(["-W", "ignore", "-c", code], timeout=scaled(60))
    assert done.returncode == 0


@pytest.mark.parametrize("precision", ["exact", "int16", "int8"])
def test_threads_and_rows_do_not_change_bits(backend: CpuNative, precision: str) -> None:
    """A row's result depends on that row alone: not on the number of threads, nor on the rows next to it."""
    layer = layer_on(backend, random_weight("nvfp4", 320, 1056), precision)
    x = torch.randn(70, 1056)  # beyond every threshold from which panels are decoded
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer(row[None]) for row in x])
        one = layer(x)
        torch.set_num_threads(2)
        two = layer(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)
    assert torch.equal(one, alone)


def test_two_sessions_on_two_threads(backend: CpuNative) -> None:
    """Calls from several threads give the numbers of calls from one."""
    layers = [layer_on(backend, random_weight("q4_1", 640, 1024, seed), "int8") for seed in range(2)]
    x = torch.randn(5, 1024)
    expected = [layer(x) for layer in layers]

    def work(index: int) -> bool:
        return all(torch.equal(layers[index](x), expected[index]) for _ in range(60))

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert all(threads.map(work, range(2)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_computes() -> None:
    """After a fork the OpenMP workers are gone: the child runs alone, at once, and right."""
    code = """
import os, sys, torch, q4core as q4
torch.set_num_threads(2)
weight = q4.quantize(torch.randn(1024, 1024), "q4_0")
layer = q4.Session(q4.SessionConfig(backend="cpu-native")).linear(weight)
x = torch.randn(16, 1024)
y = layer(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), y) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_interpreter(["-W", "ignore", "-c", code], timeout=scaled(60))
    assert done.returncode == 0


def test_calls_keep_to_their_memory(backend: CpuNative) -> None:
    """Nothing is written outside y, and nothing read outside x: guard values stay, NaN around x does no harm."""
    weight = random_weight("q4_0", 35, 64)
    layer = layer_on(backend, weight, "int8")
    for rows in (1, 2, 5, 9):
        around = torch.full((rows * 64 + 64,), torch.nan)
        x = around[32:-32].view(rows, 64)
        x.copy_(torch.randn(rows, 64))
        guarded = torch.full((rows * 35 + 64,), 7.0)
        out = guarded[32:-32].view(rows, 35)
        layer(x, out=out)
        assert bool((guarded[:32] == 7).all())
        assert bool((guarded[-32:] == 7).all())
        assert torch.equal(out, layer(x.clone()))


@pytest.fixture
def _no_wish() -> Iterator[None]:
    """Start and end with no instruction set requested."""
    before = os.environ.pop("Q4_CPU_ISA", None)
    yield
    if before is not None:
        os.environ["Q4_CPU_ISA"] = before


@pytest.mark.usefixtures("_no_wish")
def test_an_instruction_set_is_obeyed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_CPU_ISA names one; a name that is none is a refusal with its reason, and another backend serves."""
    request = q4.Request.for_weight(random_weight())
    monkeypatch.setenv("Q4_CPU_ISA", "avx2")
    kinds = tuple(f"{family}_avx2{many}" for family in ("exact", "w4a8", "w4i16") for many in ("", "_panel"))
    assert tuple(path.name for path in CpuNative().check(request).paths) == kinds
    monkeypatch.setenv("Q4_CPU_ISA", "sse9")
    verdict = CpuNative().check(request)
    assert verdict.reasons[0].code is q4.ReasonCode.POLICY
    assert "sse9" in verdict.reasons[0].message
    weight, x = random_weight(), torch.randn(3, 256)
    with q4.Session(registry=q4.Registry(environment={})) as session:
        layer = session.linear(weight)
        torch.testing.assert_close(layer(x), x @ q4.dequantize(weight).T, rtol=1e-5, atol=1e-5)
        record = layer.diagnostics()
    assert record.backend == "dequant-fallback"
    assert any(item.backend == "cpu-native" and "sse9" in str(item) for item in record.rejections)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped from /proc")
def test_one_openmp_runtime_is_loaded() -> None:
    """Kernels share torch's threads; a second runtime's would fight them for the cores."""
    program = "import torch, q4_cpu_native._native, pathlib; print(pathlib.Path('/proc/self/maps').read_text())"
    done = run_interpreter(["-c", program], check=True)
    mapped = {line.split()[-1] for line in done.stdout.splitlines() if "gomp" in line or "omp5" in line}
    assert len(mapped) == 1, mapped


def test_the_installed_plugin_serves_by_default() -> None:
    """Found by its entry point, it outranks the reference for every built-in format, proven, under AUTO."""
    registry = q4.Registry(environment={})
    assert "cpu-native" in registry.backends()
    with q4.Session(registry=registry) as session:
        for format_ in CpuNative.capabilities.formats:
            record = session.linear(random_weight(format_)).diagnostics()
            assert record.backend == "cpu-native"
            assert record.path_name.startswith("w4i16_")
            assert record.proven
            assert "dequant-fallback" in {item.backend for item in record.rejections}


def test_a_compiled_model_is_one_graph() -> None:
    """torch.compile(fullgraph=True) over layers of these kernels gives one graph and the eager numbers."""
    registry = q4.Registry(environment={})
    session = q4.Session(registry=registry)
    model = torch.nn.Sequential(*[session.linear(random_weight(seed=seed, rows=256)) for seed in range(4)])
    x = torch.randn(3, 256)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph

    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(x), model(x))
    assert graphs == 1


def test_kernels_for_many_rows_are_proven_and_told_apart(backend: CpuNative) -> None:
    """They are a path of their own, probed at rows of their own, and the record says which ran."""
    layer = layer_on(backend, random_weight(), "int8")
    record = layer.diagnostics()
    few, many = record.segments
    assert record.proven
    assert many.path.name == f"{few.path.name}_panel"
    assert few.high == many.low - 1
    for rows, calls in ((few.high, (1, 0)), (many.low, (1, 1))):
        layer(torch.randn(rows, 256))
        assert layer.diagnostics().calls == calls
