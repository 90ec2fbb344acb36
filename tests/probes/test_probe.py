"""The self-probe: a path that computes wrong numbers never serves, and says so loudly."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4core.probes.comparison import error_bound
from q4core.probes.linear import find_product_fault, grid_activations, probe_path
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry
from tests.support.samples import FORMAT_KINDS, random_weight

if TYPE_CHECKING:
    from collections.abc import Callable


def _weight(format_: str = "nf4", rows: int = 40, columns: int = 128) -> q4.PackedWeight:
    generator = torch.Generator().manual_seed(3)
    return q4.quantize(torch.randn(rows, columns, generator=generator), format_)


def _zero_one(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[0, 17] = 0.0
    return y


def _swapped(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[:, [3, 4]] = y[:, [4, 3]]
    return y


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all zero": torch.zeros_like,
    "not finite": lambda y: y / 0,
    "one NaN": lambda y: torch.where(torch.arange(y.numel()).view_as(y) == 5, torch.nan, y),
    "one element zero": _zero_one,
    "two columns swapped": _swapped,
    "scaled by 1 + 2^-7": lambda y: y * (1 + 2**-7),
    "half precision": lambda y: y.to(torch.float16).to(torch.float32),
    "last column off": lambda y: torch.cat((y[:, :-1], y[:, -1:] + 1), 1),
    "zero above one row": lambda y: y if y.shape[0] == 1 else torch.zeros_like(y),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_disqualified_and_the_next_one_serves(fault: str) -> None:
    """Each planted fault is found before the layer serves: a warning, a rejection, and the reference's numbers."""
    backend = FakeBackend("wrong", damage=FAULTS[fault])
    weight = _weight()
    with pytest.warns(q4.Q4ProbeWarning, match="fake_gemm"):
        layer = q4.Session(registry=registry(backend)).linear(weight)
    record = layer.diagnostics()
    assert record.backend == "dequant-fallback"
    assert record.rejections[0].reasons[0].code is q4.ReasonCode.PROBE_FAILED
    x = torch.ones(2, 128)
    torch.testing.assert_close(layer(x), x @ q4.dequantize(weight).T)


def _told(backend: FakeBackend, rows: int = 40, columns: int = 128) -> str:
    """Return what the only warning says of a backend that is wrong."""
    with pytest.warns(q4.Q4ProbeWarning) as caught:
        q4.Session(registry=registry(backend)).linear(_weight(rows=rows, columns=columns))
    (warning,) = caught
    return str(warning.message)


def test_a_failed_probe_names_the_worst_element() -> None:
    """Its index, its value, the exact one and its bound, and how many elements are wrong."""
    backend = FakeBackend("wrong", damage=_zero_one)
    told = _told(backend)
    weight = _weight()
    exact = (grid_activations(1, 128, q4.Precision.W4A32).double() @ q4.dequantize(weight, torch.float64).T)[0, 17]
    found = re.search(
        r"wrong numbers at M = 1: 1 of 40 elements is wrong; worst y\[0, 17\] = 0, exact (\S+) ± (\S+) "
        r"\((\S+) × its bound\)$",
        told,
    )
    assert found, told
    value, bound, ratio = map(float, found.groups())
    assert value == pytest.approx(float(exact), rel=1e-8)
    assert abs(value) / bound == pytest.approx(ratio, rel=0.1)
    assert ratio > 1


def test_the_worst_element_of_a_large_weight_has_its_own_index() -> None:
    """Rows and columns are those of y, also where x repeats and the columns are a sample."""

    def late(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[200:, 1099] += 1
        return y

    path = attrs.evolve(KERNEL_PATH, probe_rows=(210,))
    told = _told(FakeBackend("late", paths=(path,), damage=late), rows=1100)
    assert "at M = 210: 10 of 107520 compared elements are wrong; worst y[20" in told
    assert ", 1099] = " in told


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("all zero", "output is all zero: 40 of 40 elements are wrong; worst y[0, "),
        ("not finite", "output is not finite: 40 of 40 elements are wrong; worst y[0, 0] = "),
        ("one NaN", "1 of 40 elements not written, or NaN, first y[0, 5]"),
    ],
)
def test_a_failed_probe_says_what_kind_of_wrong(fault: str, words: str) -> None:
    """All zero and not finite are reported, and an element with them."""
    assert words in _told(FakeBackend("wrong", damage=FAULTS[fault]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "nothing",
            "at M = 1: 40 of 40 elements not written, or NaN, first y[0, 0]; each element must be set",
        ),
        ("a part", "at M = 1: 8 of 40 elements not written, or NaN, first y[0, 32]; each element must be set"),
        ("NaN", "at M = 1: 40 of 40 elements not written, or NaN, first y[0, 0]"),
    ],
)
def test_what_was_not_written_or_is_nan_is_reported(how: str, words: str, dtype: torch.dtype) -> None:
    """A backend that returns without writing, writes a part or computes NaN is reported, with the first element."""

    class Lazy(FakeBackend):
        def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
            if how == "a part":
                y = torch.empty_like(out)
                super().linear(prepared, x, y, bias=bias, path=path)
                out[:, :32] = y[:, :32]
            elif how == "NaN":
                out.fill_(float("nan"))

    config = q4.SessionConfig(compute_dtype=dtype)
    backend = Lazy("lazy", dtypes={dtype})
    with pytest.warns(q4.Q4ProbeWarning) as caught:
        q4.Session(config, registry=registry(backend)).linear(_weight())
    assert words in str(caught[0].message)


class _Writer(FakeBackend):
    """Computes right, and writes to one of the things that it is only lent."""

    def __init__(self, writes: str, **facts: Any) -> None:
        super().__init__("writer", **facts)
        self.writes = writes
        self.source: q4.PackedWeight | None = None

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        self.source = weight
        return super().prepare(weight, request, context)

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
        if self.writes == "halves x":
            x.mul_(0.5)
        if self.writes == "replaces out":
            out.set_(torch.empty_like(out))
        super().linear(prepared, x, out, bias=bias, path=path)
        if self.writes == "resizes out":
            out.resize_(0)
        if self.writes == "clears x":
            ctypes.memset(x.data_ptr(), 0, 4)
        if self.writes == "weight":
            assert self.source is not None
            ctypes.memset(self.source.qdata.data_ptr(), 0, 1)

    def _export(self, prepared: q4.Prepared, rows: torch.Tensor | None = None) -> q4.PackedWeight:
        if rows is not None and self.writes == "rows":
            rows.zero_()
        return super()._export(prepared, rows)


@pytest.mark.parametrize(
    ("writes", "words"),
    [
        ("halves x", "path fake_gemm wrote to x at M = 1"),
        ("clears x", "path fake_gemm wrote to x at M = 1"),
        ("resizes out", "path fake_gemm resized or replaced out at M = 1"),
        ("replaces out", "path fake_gemm resized or replaced out at M = 1"),
        ("rows", "export wrote to rows"),
    ],
)
def test_a_backend_that_writes_to_what_it_is_lent_is_disqualified(writes: str, words: str) -> None:
    """The reference is that of what was given, not of what the backend left there."""
    weight = _weight()
    with pytest.warns(q4.Q4ProbeWarning, match=words):
        layer = q4.Session(registry=registry(_Writer(writes))).linear(weight)
    x = torch.ones(2, 128)
    torch.testing.assert_close(layer(x), x @ q4.dequantize(weight).T)
    assert torch.equal(x, torch.ones(2, 128))


def test_resizing_out_is_a_typed_error_where_nothing_else_serves() -> None:
    """Where no other backend may serve, the caller gets a ``BackendError`` that says what was done to out."""
    session = q4.Session(q4.SessionConfig(compute_path="kernel_only"), registry=registry(_Writer("resizes out")))
    with (
        pytest.warns(q4.Q4ProbeWarning),
        pytest.raises(q4.BackendError, match="path fake_gemm resized or replaced out at M = 1"),
    ):
        session.linear(_weight())


def test_a_backend_that_writes_to_the_callers_weight_while_it_computes_is_barred() -> None:
    """The first layer of a kind compares bytes, which finds writes past torch too; the caller hears of the damage."""
    weight = _weight()
    weight.qdata[0, 0] = 0x12
    plugins = registry(_Writer("weight"))
    with pytest.raises(q4.BackendError, match="'writer' changed the caller's weight"):
        q4.Session(registry=plugins).linear(weight)
    layer = q4.Session(registry=plugins).linear(_weight())
    assert layer.diagnostics().backend == "dequant-fallback"


def test_swapped_nibbles_are_found() -> None:
    """A backend that reads the nibbles in the wrong order is consistently wrong, and found."""

    class Swapped(FakeBackend):
        def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
            wrong = attrs.evolve(weight, packing=q4.Packing.LOW_FIRST)
            return super().prepare(wrong, request, context)

    with pytest.warns(q4.Q4ProbeWarning):
        layer = q4.Session(registry=registry(Swapped("swapped"))).linear(_weight())
    assert layer.diagnostics().backend == "dequant-fallback"


def test_a_right_kernel_is_proven_once_per_kind() -> None:
    """A right path is probed at the ends of its M range, once, and the selection says that it is proven."""
    backend = FakeBackend(
        paths=(attrs.evolve(KERNEL_PATH, m=(1, 8)), attrs.evolve(KERNEL_PATH, name="big", m=(9, None)))
    )
    plugins = registry(backend)
    request = q4.Request.for_weight(_weight())
    assert not q4.select(request, registry=plugins).proven
    session = q4.Session(registry=plugins)
    assert session.linear(_weight()).diagnostics().proven
    assert backend.calls == [("fake_gemm", 1), ("fake_gemm", 2), ("fake_gemm", 8), ("big", 9), ("big", 10), ("big", 25)]
    assert q4.select(request, registry=plugins).proven
    session.linear(_weight())
    assert len(backend.calls) == 6
    session.linear(_weight(rows=41))  # another tail class of N
    assert len(backend.calls) == 12


TILED = attrs.evolve(KERNEL_PATH, probe_rows=(200, 65))


def test_further_rows_are_probed_where_the_path_serves() -> None:
    """The probe also runs at the numbers of rows that a path names, but only at those that it is to serve."""
    backend = FakeBackend(paths=(TILED,))
    plugins = registry(backend)
    session = q4.Session(registry=plugins)
    session.linear(_weight(), m=(1, 64))
    assert backend.calls == [("fake_gemm", rows) for rows in (1, 2, 64)]
    del backend.calls[:]
    assert not q4.select(q4.Request.for_weight(_weight()), registry=plugins).proven
    assert session.linear(_weight()).diagnostics().proven
    assert backend.calls == [("fake_gemm", rows) for rows in (1, 2, 17, 65, 200)]


def test_a_tile_that_is_wrong_is_found_where_it_is_named() -> None:
    """A kernel that is wrong for many rows alone is caught by its further rows, and by nothing else."""

    def wrong_tile(y: torch.Tensor) -> torch.Tensor:
        return y * 1.01 if len(y) >= 65 else y

    silent = FakeBackend("silent", damage=wrong_tile)
    assert q4.Session(registry=registry(silent)).linear(_weight()).diagnostics().backend == "silent"
    honest = FakeBackend("honest", paths=(TILED,), damage=wrong_tile)
    with pytest.warns(q4.Q4ProbeWarning, match="M = 65"):
        layer = q4.Session(registry=registry(honest)).linear(_weight())
    assert layer.diagnostics().backend == "dequant-fallback"
    only = q4.SessionConfig(compute_path=q4.ComputePath.KERNEL_ONLY)
    again = FakeBackend("again", paths=(TILED,), damage=wrong_tile)
    with pytest.warns(q4.Q4ProbeWarning), pytest.raises(q4.BackendUnavailableError, match="M = 65"):
        q4.Session(only, registry=registry(again)).linear(_weight())


def test_many_rows_are_compared_one_by_one_and_cost_little_to_check() -> None:
    """Above 127 rows x repeats, so that little is computed in float64; one row of y that is wrong is still found."""
    seen: list[torch.Tensor] = []

    class Watching(FakeBackend):
        def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
            super().linear(prepared, x, out, bias=bias, path=path)
            seen.append(x.clone())
            out[2000:2001] *= self.factor

        factor = 1.0

    path = attrs.evolve(KERNEL_PATH, probe_rows=(2049,))
    assert q4.Session(registry=registry(Watching("right", paths=(path,)))).linear(_weight()).diagnostics().proven
    assert seen[-1].shape == (2049, 128)
    assert torch.unique(seen[-1], dim=0).shape == (127, 128)
    assert torch.equal(seen[-1][:-127], seen[-1][127:])
    wrong = Watching("wrong", paths=(path,))
    wrong.factor = 1.01
    with pytest.warns(q4.Q4ProbeWarning, match="M = 2049"):
        assert q4.Session(registry=registry(wrong)).linear(_weight()).diagnostics().backend != "wrong"


def test_a_proof_holds_for_one_variant_and_one_dtype_of_the_second_number() -> None:
    """Where other code runs, for the backend's own reasons or for another dtype of the offset, it is probed too."""

    class Cut(FakeBackend):
        def check(self, request: q4.Request) -> q4.Support:
            path = attrs.evolve(KERNEL_PATH, variant=f"{request.out_features // 64} parts")
            return q4.Support.yes([path], native_state="fake")

    backend = Cut("cut")
    session = q4.Session(registry=registry(backend))
    session.linear(_weight(rows=32))
    assert len(backend.calls) == 3
    session.linear(_weight(rows=64))
    assert len(backend.calls) == 6
    session.linear(_weight(rows=96))
    assert len(backend.calls) == 6

    plain = FakeBackend("plain", formats={"q4_1"}, features={q4.Feature.OFFSET})
    session = q4.Session(registry=registry(plain))
    weight = _weight("q4_1")
    assert weight.offset is not None
    for dtype in (torch.float16, torch.float32, torch.float16):
        session.linear(attrs.evolve(weight, offset=weight.offset.to(dtype)))
    assert len(plain.calls) == 6


def test_nothing_proven_under_kernel_only_is_an_error() -> None:
    """Where the only kernel is wrong, KERNEL_ONLY fails with the probe's reason."""
    config = q4.SessionConfig(compute_path=q4.ComputePath.KERNEL_ONLY)
    with pytest.warns(q4.Q4ProbeWarning), pytest.raises(q4.BackendUnavailableError) as caught:
        q4.Session(config, registry=registry(FakeBackend("wrong", damage=torch.zeros_like))).linear(_weight())
    reasons = {item.backend: item.reasons[0].code for item in caught.value.rejections}
    assert reasons["wrong"] is q4.ReasonCode.PROBE_FAILED


def test_a_kernel_that_raises_in_its_probe_is_disqualified() -> None:
    """An exception in linear while probing is a reason, not a crash."""

    def explode(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal instruction")

    with pytest.warns(q4.Q4ProbeWarning, match="illegal instruction"):
        layer = q4.Session(registry=registry(FakeBackend("wild", damage=explode))).linear(_weight())
    assert layer.diagnostics().backend == "dequant-fallback"


def test_a_prepare_that_raises_gives_way_to_the_next_backend() -> None:
    """An exception in prepare is a plugin_error rejection of that layer, and the next backend is asked."""
    backend = FakeBackend("wild", prepare_error=MemoryError("no room"))
    layer = q4.Session(registry=registry(backend)).linear(_weight())
    record = layer.diagnostics()
    assert record.backend == "dequant-fallback"
    assert record.rejections[0].reasons[0].code is q4.ReasonCode.PLUGIN_ERROR
    assert "no room" in record.rejections[0].reasons[0].message


def test_an_approximated_codebook_is_judged_against_its_own_table() -> None:
    """A path that declares the table that it really uses is right by that table, and wrong by another."""
    table = tuple(round(value * 127) / 127 for value in q4.BUILTIN_FORMATS["nf4"].codebook)

    class Table(FakeBackend):
        def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
            weight = attrs.evolve(prepared.meta.build(prepared.tensors), codebook=torch.tensor(table))
            out.copy_(x.to(torch.float32) @ q4.dequantize(weight, torch.float32).T)

    path = attrs.evolve(KERNEL_PATH, precision=q4.Precision.W4A8)
    honest = Table("honest", paths=(attrs.evolve(path, codebook=table),))
    config = q4.SessionConfig(activation_precision="int8")
    assert q4.Session(config, registry=registry(honest)).linear(_weight()).diagnostics().backend == "honest"
    silent = q4.Session(config, registry=registry(Table("silent", paths=(path,))))
    with pytest.warns(q4.Q4ProbeWarning), pytest.raises(q4.BackendUnavailableError):
        silent.linear(_weight())


GRIDS = {q4.Precision.W4A8: 127.0, q4.Precision.W4I16: 16383.0, q4.Precision.W4A16: 255.0, q4.Precision.W4A32: 65535.0}


@pytest.mark.parametrize("precision", list(q4.Precision))
def test_grid_activations_lie_on_their_grid(precision: q4.Precision) -> None:
    """They are exact in the path's precision, with the peak in every block, and on no coarser precision's grid."""
    x = grid_activations(5, 200, precision).to(torch.float64)
    scale = 64 if precision in {q4.Precision.W4A4, q4.Precision.W4A8} else 256
    block, peak = (16, 6.0) if precision is q4.Precision.W4A4 else (32, GRIDS[precision])
    for start in range(0, 200, block):
        part = x[:, start : start + block].abs()
        assert bool((part.amax(1) * scale == peak).all())
    if precision is q4.Precision.W4A4:
        assert set((x.abs() * 64).unique().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
        return
    assert torch.equal((x * scale).round(), x * scale)
    is_wide = precision in {q4.Precision.W4A32, q4.Precision.W4I16}
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(x.to(dtype).to(torch.float64), x) != is_wide
    step = x[:, :32].abs().amax(1, keepdim=True) / 127
    in_int8 = torch.equal((x[:, :32] / step).round() * step, x[:, :32])
    assert in_int8 == (precision is q4.Precision.W4A8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grid_activations_of_16_bits_lie_on_the_grid_of_int16_and_not_of_int8(dtype: torch.dtype) -> None:
    """Where x has few bits itself, its peak divides 16383, and no level of int8 stands for the rest."""
    x = grid_activations(5, 200, q4.Precision.W4I16, dtype=dtype)[:, :32].to(torch.float64)
    peak = x.abs().amax(1, keepdim=True)
    for levels, holds in ((16383, True), (32766, True), (127, False)):
        held = (x * levels / peak).round() * peak / levels
        assert bool(((held - x).abs() <= 1e-12).all()) == holds


@pytest.mark.parametrize(
    ("coarser", "declared"),
    [
        (torch.int8, q4.Precision.W4A16),
        (torch.int8, q4.Precision.W4A32),
        (torch.bfloat16, q4.Precision.W4A32),
        (torch.float16, q4.Precision.W4A32),
    ],
)
def test_a_path_that_rounds_activations_in_secret_is_found(coarser: torch.dtype, declared: q4.Precision) -> None:
    """A path that computes in a lower precision than it declares is disqualified."""

    class Secret(FakeBackend):
        def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
            if coarser is torch.int8:
                blocks = x.float().view(len(x), -1, 32)
                step = blocks.abs().amax(-1, keepdim=True) / 127
                x = ((blocks / step).round() * step).view(x.shape)
            super().linear(prepared, x if coarser is torch.int8 else x.to(coarser), out, bias=bias, path=path)

    backend = Secret("secret", paths=(attrs.evolve(KERNEL_PATH, precision=declared),))
    with pytest.warns(q4.Q4ProbeWarning, match="wrong numbers"):
        layer = q4.Session(registry=registry(backend)).linear(_weight())
    assert layer.diagnostics().backend == "dequant-fallback"


def test_the_bound_holds_for_float32_and_catches_one_lost_product() -> None:
    """Sums in float32, in any order, stay inside the bound; leaving out one large product does not."""
    columns = 4096
    x = grid_activations(3, columns, q4.Precision.W4A32)
    w = torch.randn(64, columns, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ w.double().T
    bound = error_bound(exact, x.double().abs() @ w.double().abs().T, columns, torch.float32)
    for order in (torch.arange(columns), torch.arange(columns).flip(0), torch.randperm(columns)):
        total = torch.zeros(3, 64)
        for k in order.tolist():
            total += x[:, k : k + 1] * w[:, k]
        assert bool(((total.double() - exact).abs() <= bound).all())
    assert bool(((torch.zeros(3, 64).double() - exact).abs() > bound).any())


@pytest.mark.parametrize(("format_", "kind"), FORMAT_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_passes_its_own_probe_for_every_format(
    format_: str, kind: q4.ScaleKind, dtype: torch.dtype
) -> None:
    """The fallback is right within the bound for every format and dtype, also for a large weight that is sampled."""
    weight = random_weight(format_, 1100, 256, kind)
    backend = registry().backends()["dequant-fallback"]
    request = q4.Request.for_weight(weight, dtype=dtype)
    (path,) = backend.check(request).paths
    prepared = backend.prepare(weight, request, q4.PrepareContext(torch.device("cpu")))
    result = probe_path(backend, prepared, weight, request, path, [1, 2, 17])
    assert result.fault is None
    assert 0 <= result.worst_ratio <= 1


def test_a_product_is_compared_in_the_rows_that_probes_compare() -> None:
    """``find_product_fault`` is silent about a right product, and names the worst element of a wrong one."""
    weight, x = _weight(rows=1100), torch.eye(3, 128)
    out = x @ q4.dequantize(weight).T
    assert find_product_fault(x, out, weight) is None
    out[1, 1099] += 1
    message = find_product_fault(x, out, weight)
    assert message is not None
    assert "1 of" in message
    assert "worst y[1, 1099] = " in message
