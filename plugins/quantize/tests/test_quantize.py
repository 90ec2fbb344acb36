"""The reference quantiser: its rules, one by one, and what holds for all of them."""

from __future__ import annotations

import math
import pickle
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import q4core as q4
from q4_quantize import encode
from tests.support.samples import KINDS, PACKINGS, QUANTISED, WRITTEN_KINDS, bits

NAMES = QUANTISED
PLAIN, DOUBLE = q4.ScaleKind.PLAIN, q4.ScaleKind.DOUBLE_QUANT


def _dense(n: int, k: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("name", "kind"), WRITTEN_KINDS)
def test_facts_of_the_result(name: str, kind: q4.ScaleKind) -> None:
    """The result says its format, shape, kind, dtype and name, stores scales as the dialect does, and is legal."""
    weight = q4.quantize(_dense(6, 256).to(torch.bfloat16), name, scale_kind=kind, name="proj")
    assert (weight.format.name, weight.shape, weight.scale_kind, weight.name) == (name, (6, 256), kind, "proj")
    assert weight.dtype is torch.bfloat16
    stored = {"int4": torch.bfloat16, **dict.fromkeys(("q4_0", "q4_1", "q8_0", "iq4_nl"), torch.float16)}
    by_kind = {PLAIN: torch.float32, DOUBLE: torch.uint8, q4.ScaleKind.E8M0: torch.float8_e8m0fnu}
    assert weight.scale.dtype is stored.get(name, by_kind.get(kind, torch.float8_e4m3fn))
    assert weight.packing == weight.format.packing
    weight.check_values()


@pytest.mark.parametrize(("name", "kind"), WRITTEN_KINDS)
def test_only_reads_its_input(name: str, kind: q4.ScaleKind) -> None:
    """Strides don't matter, the input keeps its bits, and nothing hangs on its graph."""
    dense = _dense(8, 256)
    parameter = torch.nn.Parameter(dense.clone())
    strided = torch.stack((dense, dense), -1)[..., 0]
    turned = dense.t().contiguous().t()
    before = bits(dense).clone()
    reference = q4.quantize(dense, name, scale_kind=kind)
    assert torch.equal(bits(dense), before)
    for other in (parameter, strided, turned):
        weight = q4.quantize(other, name, scale_kind=kind)
        for (field, tensor), (_, expected) in zip(weight.tensors(), reference.tensors(), strict=True):
            assert torch.equal(bits(tensor), bits(expected)), field
            assert not tensor.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "kind"), [pair for pair in WRITTEN_KINDS if pair[0] != "int4"])
def test_half_precision_is_widened(name: str, kind: q4.ScaleKind, dtype: torch.dtype) -> None:
    """bfloat16 and float16 weights are quantised in float32."""
    dense = _dense(4, 256).to(dtype)
    narrow, wide = q4.quantize(dense, name, scale_kind=kind), q4.quantize(dense.float(), name, scale_kind=kind)
    for (field, tensor), (_, expected) in zip(narrow.tensors(), wide.tensors(), strict=True):
        assert torch.equal(bits(tensor), bits(expected)), field


@pytest.mark.parametrize("chunk", [1, 100, 1 << 30])
@pytest.mark.parametrize(("name", "k"), [*((name, 256) for name in NAMES), ("nf4", 33), ("fp4", 100), ("int4", 200)])
def test_chunks_do_not_show(name: str, k: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are quantised at once changes no bit."""
    dense = _dense(7, k)
    whole = q4.quantize(dense, name)
    monkeypatch.setattr(encode, "_CHUNK_ELEMENTS", chunk)
    for (field, tensor), (_, expected) in zip(q4.quantize(dense, name).tensors(), whole.tensors(), strict=True):
        assert torch.equal(bits(tensor), bits(expected)), field


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "q8_0"])
def test_packing_by_choice(name: str, packing: q4.Packing) -> None:
    """The packing asked for holds the same codes as the format's own."""
    dense = _dense(3, 256)
    chosen = q4.quantize(dense, name, packing=packing)
    assert chosen.packing == packing
    assert torch.equal(chosen.codes(), q4.quantize(dense, name).codes())


def test_formats_from_another_process() -> None:
    """A format that came through a pickle serves like the one in the table."""
    form = pickle.loads(pickle.dumps(q4.BUILTIN_FORMATS["nf4"]))  # noqa: S301
    assert torch.equal(q4.quantize(_dense(2, 64), form).qdata, q4.quantize(_dense(2, 64), "nf4").qdata)


@pytest.mark.parametrize("k", [1, 31, 33, 100, 129])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_k_that_cuts_blocks_gives_flat_ones(name: str, k: int) -> None:
    """NF4 and FP4 take any K, in flat blocks where rows would cut them, and pad an odd nibble as bitsandbytes does."""
    weight = q4.quantize(_dense(3, k), name)
    assert weight.blocks is q4.BlockOrder.FLAT
    assert weight.qdata.numel() == -(-3 * k // 2)
    if 3 * k % 2:
        assert int(weight.qdata[-1]) & 15 == {"nf4": 7, "fp4": 0}[name]
    assert float((q4.dequantize(weight) - _dense(3, k)).norm() / _dense(3, k).norm()) < 0.15


def test_int4_short_groups() -> None:
    """INT4 takes any K: the last group of a row is short, and has its own scale."""
    dense = torch.cat((_dense(4, 128), 1000 * _dense(4, 5, seed=1)), dim=1)
    weight = q4.quantize(dense, "int4")
    assert weight.features == {q4.Feature.ZERO_POINT, q4.Feature.TAIL_BLOCK}
    error = (q4.dequantize(weight) - dense).abs()
    assert bool((error[:, :128] <= weight.scale[:, :1] * 0.5001).all())
    assert bool((error[:, 128:] <= weight.scale[:, 1:] * 0.5001).all())


def test_int4_symmetric() -> None:
    """Without zero points code 8 stands for 0, and the codes reach from 0 to 15."""
    weight = q4.quantize(_dense(8, 256), "int4", symmetric=True)
    assert weight.zero is None
    assert not weight.features
    assert {int(weight.codes().min()), int(weight.codes().max())} <= {*range(16)}
    assert float((q4.dequantize(weight) - _dense(8, 256)).norm() / _dense(8, 256).norm()) < 0.12


@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_represents_zero(symmetric: bool) -> None:
    """Zero is exact in every group, also where all values have one sign, and a group of zeros stays zeros."""
    dense = torch.stack((_dense(1, 128)[0].abs() + 1, -_dense(1, 128)[0].abs() - 1, torch.zeros(128)))
    dense[:, 5] = 0
    values = q4.dequantize(q4.quantize(dense, "int4", symmetric=symmetric))
    assert not bool(values[:, 5].any())
    assert not bool(values[2].any())


HALVES = torch.tensor(
    [[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]]
)
EVEN = torch.tensor([[6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]])


@pytest.mark.parametrize("kind", [q4.ScaleKind.E4M3, q4.ScaleKind.E4M3_DIV, PLAIN])
def test_e2m1_ties_go_to_even(kind: q4.ScaleKind) -> None:
    """Halfway between two E2M1 values the one with the even code wins, on both sides of zero."""
    values = q4.dequantize(q4.quantize(HALVES, "nvfp4", scale_kind=kind))
    assert torch.equal(values, EVEN)


def test_e2m1_ties_go_to_even_in_mxfp4() -> None:
    """MXFP4 rounds like NVFP4."""
    assert torch.equal(q4.dequantize(q4.quantize(HALVES.repeat(1, 2), "mxfp4")), EVEN.repeat(1, 2))


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_absmax_ties_go_to_the_lower_value(name: str) -> None:
    """Exactly halfway between two codes of NF4 or FP4 the lower value wins."""
    levels = torch.tensor(sorted(set(q4.BUILTIN_FORMATS[name].codebook)))
    between = (levels[:-1] + levels[1:]) / 2
    dense = torch.zeros(1, 32)
    dense[0, : len(between)] = between
    dense[0, -1] = 1.0
    values = q4.dequantize(q4.quantize(dense, name, block_size=32))[0, : len(between)]
    assert torch.equal(values, levels[:-1])


def test_sign_of_zero_in_nvfp4() -> None:
    """torchao's rule keeps the sign of a zero as code 8, compressed-tensors' rule does not."""
    dense = torch.tensor([[1.0, -0.0, 0.0, -1e-12] * 4])
    for kind, codes in (
        (q4.ScaleKind.E4M3_MUL, [8, 0, 8]),
        (q4.ScaleKind.E4M3, [8, 0, 8]),
        (q4.ScaleKind.E4M3_DIV, [0, 0, 8]),
    ):
        assert q4.quantize(dense, "nvfp4", scale_kind=kind).codes()[0, 1:4].tolist() == codes


@pytest.mark.parametrize(("name", "kind"), WRITTEN_KINDS)
def test_zero_weights(name: str, kind: q4.ScaleKind) -> None:
    """A weight of zeros, of either sign, decodes to zeros."""
    for zero in (0.0, -0.0):
        values = q4.dequantize(q4.quantize(torch.full((3, 256), zero), name, scale_kind=kind))
        assert torch.equal(values, torch.zeros(3, 256))


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 7.8e-36, 1e-30, 3e38])
@pytest.mark.parametrize("kind", KINDS["nvfp4"])
def test_nvfp4_of_any_size_is_finite(kind: q4.ScaleKind, largest: float) -> None:
    """Tiny and huge weights never turn into NaN, and with two levels they keep their precision."""
    dense = _dense(4, 64)
    dense = (dense.double() / dense.abs().max() * largest).float()
    weight = q4.quantize(dense, "nvfp4", scale_kind=kind)
    weight.check_values()
    values = q4.dequantize(weight, torch.float64)
    assert bool(torch.isfinite(values).all())
    if kind is q4.ScaleKind.E4M3_MUL and largest >= 1e-36:
        assert float((values - dense.double()).norm() / dense.double().norm()) < 0.12


def test_mxfp4_scale_rounds_up() -> None:
    """amax / 6 between two powers of two takes the upper one, and an exact power keeps itself."""
    dense = torch.zeros(4, 32)
    dense[:, 3] = torch.tensor([6.0, 6.1, 11.9, 12.0])
    assert q4.quantize(dense, "mxfp4").scale.view(torch.uint8)[:, 0].tolist() == [127, 128, 128, 128]


def test_mxfp4_rounds_the_logarithm_first() -> None:
    """One ulp above a power of two the scale stays, as the float32 logarithm says; further up it does not."""
    base = torch.tensor(6.0 * 2.0**-8)
    steps = torch.tensor([0, 1, 4], dtype=torch.int32)
    dense = torch.zeros(3, 32)
    dense[:, 0] = (base.view(torch.int32) + steps).view(torch.float32)
    assert q4.quantize(dense, "mxfp4").scale.view(torch.uint8)[:, 0].tolist() == [119, 119, 120]


def test_mxfp4_under_its_smallest_scale_is_zero() -> None:
    """Under 2^-127 nothing but the sign is preserved."""
    dense = torch.tensor([[3e-38, -3e-38, 0.0, -0.0] * 8])
    weight = q4.quantize(dense, "mxfp4")
    assert int(weight.scale.view(torch.uint8)) == 0
    assert weight.codes()[0, :4].tolist() == [0, 8, 0, 8]


def test_nvfp4_multiplies_by_the_reciprocal() -> None:
    """Next to a tie the rounding of 1 / global / scale decides, which is torchao's order of operations."""
    value, block, tensor = (float.fromhex(text) for text in ("0x1.64p-8", "0x1.6cp-5", "0x1.64p-4"))
    dense = torch.zeros(2, 16)
    dense[0, :2] = torch.tensor([value, block])
    dense[1, 0] = tensor
    weight = q4.quantize(dense, "nvfp4")
    assert weight.global_scale is not None
    assert int(weight.codes()[0, 0]) == 2
    divided = dense[0, 0] / (weight.scale.float()[0, 0] * weight.global_scale)
    assert float(divided) < 0.75  # below the tie between codes 1 and 2, where division would give 1


def test_fp4_has_two_zeros() -> None:
    """bitsandbytes gives code 8 to what lies between zero and half the smallest value, and code 0 to zero itself."""
    dense = torch.zeros(1, 32)
    dense[0, :4] = torch.tensor([1.0, 1e-20, -1e-20, -0.0])
    assert q4.quantize(dense, "fp4", block_size=32).codes()[0, :5].tolist() == [3, 8, 0, 0, 0]


def test_int4_group_of_zeros() -> None:
    """A group of zeros has the machine epsilon for a scale, and code and zero point in the middle."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for symmetric in (False, True):
            weight = q4.quantize(torch.zeros(1, 128, dtype=dtype), "int4", symmetric=symmetric)
            assert float(weight.scale) == torch.finfo(dtype).eps
            assert weight.zero is None if symmetric else weight.zero is not None and int(weight.zero) == 8
            assert weight.codes().unique().tolist() == [8]


def test_q4_1_stores_the_last_zeros_sign() -> None:
    """Where the least value is a zero, the last one's sign is stored, whatever the vector unit would pick."""
    dense = torch.ones(2, 32)
    dense[0, [3, 20]] = torch.tensor([-0.0, 0.0])
    dense[1, [3, 20]] = torch.tensor([0.0, -0.0])
    offset = q4.quantize(dense, "q4_1").offset
    assert offset is not None
    assert torch.signbit(offset[:, 0]).tolist() == [False, True]


def test_ggml_keeps_the_first_of_equal_extremes() -> None:
    """Q4_0 gives code 0 to the first value of the largest magnitude, whose sign the step then has."""
    dense = torch.zeros(2, 32)
    dense[0, [3, 7]] = torch.tensor([4.0, -4.0])
    dense[1, [3, 7]] = torch.tensor([-4.0, 4.0])
    weight = q4.quantize(dense, "q4_0")
    assert weight.scale[:, 0].tolist() == [-0.5, 0.5]
    assert weight.codes()[:, 3].tolist() == [0, 0]
    assert weight.codes()[:, 7].tolist() == [15, 15]


def test_q8_0_rounds_halves_away_from_zero() -> None:
    """A half step goes to the greater magnitude."""
    dense = torch.zeros(1, 32)
    dense[0, :5] = torch.tensor([127.0, 0.5, -0.5, 2.5, -2.5])
    assert q4.quantize(dense, "q8_0").codes()[0, :5].view(torch.int8).tolist() == [127, 1, -1, 3, -3]


@hypothesis.given(
    st.sampled_from(
        [("nf4", PLAIN), ("fp4", PLAIN), *(("nvfp4", kind) for kind in KINDS["nvfp4"]), ("mxfp4", q4.ScaleKind.E8M0)]
    ),
    st.integers(0, 10_000),
    st.integers(-20, 20),
)
@hypothesis.settings(max_examples=80)
def test_codes_are_the_nearest(pair: tuple[str, q4.ScaleKind], seed: int, exponent: int) -> None:
    """Given the stored scales, no other code comes closer to the dense value, but for rounding in the last place."""
    name, kind = pair
    dense = _dense(3, 64, seed, 2.0**exponent)
    weight = q4.quantize(dense, name, scale_kind=kind)
    scale = weight.resolved_scale().double().repeat_interleave(weight.block_size, dim=1)
    every = scale[..., None] * weight.format.codebook_tensor(dtype=torch.float64)
    best = (every - dense.double()[..., None]).abs().amin(-1)
    error = (q4.dequantize(weight, torch.float64) - dense.double()).abs()
    assert bool((error <= best + scale * 1e-6).all())


@hypothesis.given(st.sampled_from([pair for pair in WRITTEN_KINDS if pair[1] is not DOUBLE]), st.integers(0, 10_000))
@hypothesis.settings(max_examples=80)
def test_quantising_again_changes_little(pair: tuple[str, q4.ScaleKind], seed: int) -> None:
    """What has been quantised lies on the format's grid: quantising it again moves values by rounding only."""
    name, kind = pair
    once = q4.dequantize(q4.quantize(_dense(3, 256, seed), name, scale_kind=kind))
    twice = q4.dequantize(q4.quantize(once, name, scale_kind=kind))
    slack = {"q4_0": 2e-3, "q4_1": 2e-3, "q8_0": 1e-2}.get(name, 1e-6)
    assert float((twice - once).abs().max()) <= slack * float(once.abs().max())


class _Divisions(TorchDispatchMode):
    """Keeps the divisors of every division that is a Python number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.numbers: list[float] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            self.numbers.append(float(args[1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "q4_0", "q4_1", "q8_0", "int4"])
def test_no_division_by_a_number_that_cuda_would_round_twice(name: str) -> None:
    """On CUDA torch multiplies by the reciprocal of a number, which is exact for powers of two alone."""
    with _Divisions() as divisions:
        q4.quantize(torch.randn(4, 128), name)
    assert [number for number in divisions.numbers if math.frexp(abs(number))[0] != 0.5] == []
