"""Selection: one winner, a reason for every loser, and no request replaced."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import q4core as q4
from q4core.selection.probe_results import ProbeResults
from q4core.selection.select import select_backend
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry

REQUEST = q4.Request(
    format=q4.BUILTIN_FORMATS["nf4"],
    scale_kind=q4.ScaleKind.PLAIN,
    packing=q4.Packing.HIGH_FIRST,
    block_size=64,
    out_features=64,
    in_features=128,
)
REFERENCE = q4.KernelPath("ref", (1, None), q4.PathKind.REFERENCE, q4.Precision.W4A32, 0)
MISSING = q4.Reason(q4.ReasonCode.NOT_BUILT, "the library is missing")


def _path(name: str, low: int, high: int | None, tier: int, **facts: Any) -> q4.KernelPath:
    return attrs.evolve(KERNEL_PATH, name=name, m=(low, high), tier=tier, **facts)


def _reference() -> FakeBackend:
    return FakeBackend("reference", paths=(REFERENCE,))


def _select(*backends: FakeBackend, **wishes: object) -> q4.Selection:
    request = wishes.pop("request", REQUEST)
    return select_backend(request, {item.name: item for item in backends}, **wishes)  # type: ignore[arg-type]


def test_highest_tier_wins_and_the_loser_is_reported() -> None:
    """The higher tier wins, and the other one is listed as outranked."""
    low, high = (
        FakeBackend("low", paths=(_path("a", 1, None, 20),)),
        FakeBackend("high", paths=(_path("b", 1, None, 30),)),
    )
    selection = _select(low, high, _reference())
    assert selection.backend == "high"
    assert [item.backend for item in selection.rejections] == ["low", "reference"]
    assert {reason.code for item in selection.rejections for reason in item.reasons} == {q4.ReasonCode.OUTRANKED}
    assert selection.fallback_reason is None


def test_ties_go_by_name_whatever_the_order() -> None:
    """Equal tiers are decided by name, not by the order of registration."""
    backends = [FakeBackend("b"), FakeBackend("a"), FakeBackend("c")]
    for order in itertools.permutations(backends):
        assert _select(*order).backend == "a"


def test_tiers_are_compared_at_the_lowest_m_first() -> None:
    """A tuned decode kernel beats a tuned prefill kernel, unless the request starts at prefill."""
    decode = FakeBackend("decode", paths=(_path("gemv", 1, 8, 30), _path("slow", 9, None, 20)))
    prefill = FakeBackend("prefill", paths=(_path("any", 1, None, 20), _path("gemm", 64, None, 30)))
    assert _select(decode, prefill).backend == "decode"
    assert _select(decode, prefill, request=attrs.evolve(REQUEST, m=(64, None))).backend == "prefill"


def test_segments_cover_the_range_with_the_best_path_each() -> None:
    """Each stretch of M has its highest path, and together they cover exactly what was asked for."""
    backend = FakeBackend(paths=(_path("any", 1, None, 20), _path("gemv", 1, 8, 30), _path("gemm", 64, 512, 30)))
    selection = _select(backend, request=attrs.evolve(REQUEST, m=(2, 100)))
    assert [(item.low, item.high, item.path.name) for item in selection.segments] == [
        (2, 8, "gemv"),
        (9, 63, "any"),
        (64, 100, "gemm"),
    ]
    assert selection.path_for(63).name == "any"
    with pytest.raises(LookupError):
        selection.path_for(101)


def test_a_gap_in_m_is_a_rejection() -> None:
    """A backend that leaves part of the range unserved is refused with the gap."""
    backend = FakeBackend("gappy", paths=(_path("a", 1, 8, 20), _path("b", 17, None, 20)))
    selection = _select(backend, _reference())
    assert selection.backend == "reference"
    (rejection,) = selection.rejections
    assert rejection.reasons[0].code is q4.ReasonCode.SHAPE
    assert "9…16" in rejection.reasons[0].message


def test_default_deny_names_every_undeclared_fact() -> None:
    """The core refuses what the manifest does not declare, all facts at once, without asking the backend."""
    backend = FakeBackend("narrow", formats={"fp4"}, dtypes={torch.float16}, features=frozenset(), devices={"cuda"})
    request = attrs.evolve(REQUEST, features=frozenset({q4.Feature.TAIL_BLOCK}), gradients=True)
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _select(backend, request=request)
    (rejection,) = caught.value.rejections
    codes = [reason.code for reason in rejection.reasons]
    assert set(codes) == {q4.ReasonCode.FORMAT, q4.ReasonCode.DTYPE, q4.ReasonCode.DEVICE, q4.ReasonCode.FEATURE}
    assert codes.count(q4.ReasonCode.FEATURE) == 2
    assert backend.requests == []


def test_kernel_only_raises_with_every_rejection() -> None:
    """KERNEL_ONLY without a kernel raises, and the error carries all reasons."""
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _select(FakeBackend("broken", reasons=(MISSING,)), _reference(), compute_path=q4.ComputePath.KERNEL_ONLY)
    assert {item.backend for item in caught.value.rejections} == {"broken", "reference"}
    assert "the library is missing" in str(caught.value)


def test_kernel_or_fallback_serves_the_reference_with_the_reason() -> None:
    """KERNEL_OR_FALLBACK falls back to the reference and says why."""
    selection = _select(
        FakeBackend("broken", reasons=(MISSING,)), _reference(), compute_path=q4.ComputePath.KERNEL_OR_FALLBACK
    )
    assert selection.backend == "reference"
    assert "the library is missing" in (selection.fallback_reason or "")


def test_dequant_matmul_only_takes_the_reference_though_a_kernel_is_there() -> None:
    """DEQUANT_MATMUL_ONLY takes the reference path and lists the kernel under policy."""
    selection = _select(FakeBackend(), _reference(), compute_path=q4.ComputePath.DEQUANT_MATMUL_ONLY)
    assert selection.path.kind is q4.PathKind.REFERENCE
    assert selection.rejections[0].reasons[0].code is q4.ReasonCode.POLICY


def test_unknown_override_lists_the_names_and_the_closest() -> None:
    """An override that no backend has is an error of its own."""
    with pytest.raises(q4.UnknownBackendError) as caught:
        _select(FakeBackend("cpu-native"), override="cpu-nativ")
    assert caught.value.available == ("cpu-native",)
    assert caught.value.closest == "cpu-native"
    assert isinstance(caught.value, LookupError)


def test_override_that_cannot_serve_is_refused_not_replaced() -> None:
    """Another backend that could serve is not taken instead of the one asked for."""
    broken = FakeBackend("broken", reasons=(MISSING,))
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _select(broken, FakeBackend("good"), _reference(), override="broken")
    assert [item.backend for item in caught.value.rejections] == ["broken"]


def test_override_falls_back_to_the_reference_only_where_the_policy_says_so() -> None:
    """Under KERNEL_OR_FALLBACK a broken override gives the reference, not another kernel."""
    broken = FakeBackend("broken", reasons=(MISSING,))
    selection = _select(
        broken, FakeBackend("good"), _reference(), override="broken", compute_path=q4.ComputePath.KERNEL_OR_FALLBACK
    )
    assert selection.backend == "reference"
    assert "broken" in (selection.fallback_reason or "")
    assert {item.backend for item in selection.rejections} == {"broken", "good"}


@pytest.mark.parametrize(
    ("name", "compute_path"),
    [("reference", q4.ComputePath.KERNEL_ONLY), ("fake", q4.ComputePath.DEQUANT_MATMUL_ONLY)],
)
def test_override_at_odds_with_the_compute_path_is_a_conflict(name: str, compute_path: q4.ComputePath) -> None:
    """An override that could serve, but not under the compute path, is a third kind of error."""
    with pytest.raises(q4.PolicyConflictError) as caught:
        _select(FakeBackend(), _reference(), override=name, compute_path=compute_path)
    assert caught.value.value == name


def test_int8_asked_for_is_never_answered_with_another_precision() -> None:
    """A precision asked for is obeyed or refused."""
    request = attrs.evolve(REQUEST, precision=q4.ActivationPrecision.INT8)
    with pytest.raises(q4.BackendUnavailableError):
        _select(FakeBackend(), _reference(), request=request)
    quantised = FakeBackend("int8", paths=(_path("w4a8", 1, None, 30, precision=q4.Precision.W4A8),))
    assert _select(quantised, FakeBackend(), request=request).path.precision is q4.Precision.W4A8


def test_gradients_need_an_exact_path() -> None:
    """A layer that trains never gets rounded activations."""
    quantised = FakeBackend("int16", paths=(_path("w4i16", 1, None, 30, precision=q4.Precision.W4I16),))
    assert _select(quantised, FakeBackend()).backend == "int16"
    assert _select(quantised, FakeBackend(), request=attrs.evolve(REQUEST, gradients=True)).backend == "fake"


def test_an_undeclared_scale_kind_is_resolved_by_the_core() -> None:
    """A backend that reads plain scales alone sees just these; the packing stays the weight's own."""
    backend = FakeBackend(scale_kinds={q4.ScaleKind.PLAIN})
    request = attrs.evolve(REQUEST, scale_kind=q4.ScaleKind.DOUBLE_QUANT, scale_dtype=torch.uint8)
    selection = _select(backend, request=request)
    assert selection.backend_request.scale_kind is q4.ScaleKind.PLAIN
    assert selection.backend_request.scale_dtype is torch.float32
    assert selection.backend_request.packing == REQUEST.packing
    assert selection.request is request


def test_a_check_that_raises_is_a_rejection() -> None:
    """A backend that raises in check loses, and nothing else does."""
    selection = _select(FakeBackend("wild", check_error=RuntimeError("boom")), _reference())
    assert selection.backend == "reference"
    assert selection.rejections[0].reasons[0].code is q4.ReasonCode.PLUGIN_ERROR
    assert "boom" in selection.rejections[0].reasons[0].message


def test_a_path_of_undeclared_precision_is_a_rejection() -> None:
    """What the manifest does not declare can't be offered."""
    backend = FakeBackend("sly", precisions={q4.Precision.W4A16})
    selection = _select(backend, _reference())
    assert selection.rejections[0].reasons[0].code is q4.ReasonCode.PLUGIN_ERROR


def test_a_disqualified_path_is_not_used() -> None:
    """A path that failed its probe is passed over, with the probe's reason."""

    class History(ProbeResults):
        def disqualified(self, backend: str, path: q4.KernelPath, request: q4.Request) -> q4.Reason | None:
            return q4.Reason(q4.ReasonCode.PROBE_FAILED, "all zero") if path.name == "fake_gemm" else None

    selection = _select(FakeBackend(), _reference(), results=History())
    assert selection.backend == "reference"
    assert selection.rejections[0].reasons[0].code is q4.ReasonCode.PROBE_FAILED


KINDS = st.sampled_from([kind for kind in q4.PathKind if kind is not q4.PathKind.QUANTIZE])
PATHS = st.builds(
    q4.KernelPath,
    name=st.just("p"),
    m=st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(4, 9))),
    kind=KINDS,
    precision=st.sampled_from([q4.Precision.W4A32, q4.Precision.W4I16, q4.Precision.W4A8]),
    tier=st.sampled_from([0, 10, 20, 30, 40]),
)
OFFERS = st.one_of(st.just(()), st.lists(PATHS, min_size=1, max_size=3))


@given(
    offers=st.lists(OFFERS, min_size=1, max_size=4),
    compute_path=st.sampled_from(list(q4.ComputePath)),
    override=st.one_of(st.none(), st.integers(0, 4)),
    precision=st.sampled_from(list(q4.ActivationPrecision)),
    low=st.integers(1, 6),
    high=st.one_of(st.none(), st.integers(6, 12)),
)
def test_every_mix_of_options_is_answered_correctly(  # one argument per axis
    offers: list[list[q4.KernelPath]],
    compute_path: q4.ComputePath,
    override: int | None,
    precision: q4.ActivationPrecision,
    low: int,
    high: int | None,
) -> None:
    """In every mix of policies the answer obeys them all, or an error says which backend lacks what."""
    backends = {}
    for number, paths in enumerate(offers):
        named = tuple(attrs.evolve(path, name=f"p{index}") for index, path in enumerate(paths))
        backends[f"b{number}"] = FakeBackend(f"b{number}", paths=named, reasons=() if named else (MISSING,))
    name = None if override is None else f"b{override}"
    request = attrs.evolve(REQUEST, m=(low, high), precision=precision)
    try:
        selection = select_backend(request, backends, compute_path=compute_path, override=name)
    except q4.Q4Error as error:
        _check_refusal(error, backends, name, is_default=compute_path is q4.ComputePath.AUTO and precision is AUTO)
    else:
        _check_record(selection, backends, request)
        _check_obedience(selection, compute_path, precision, name)


AUTO = q4.ActivationPrecision.AUTO
WANTED = {
    AUTO: {q4.Precision.W4A32, q4.Precision.W4I16},
    q4.ActivationPrecision.EXACT: {q4.Precision.W4A32},
    q4.ActivationPrecision.INT16: {q4.Precision.W4I16},
    q4.ActivationPrecision.INT8: {q4.Precision.W4A8},
}


def _check_refusal(error: q4.Q4Error, backends: dict[str, FakeBackend], name: str | None, *, is_default: bool) -> None:
    """An error is of the right kind, and reports every backend that was concerned."""
    if isinstance(error, q4.UnknownBackendError):
        assert name not in backends
    elif isinstance(error, q4.PolicyConflictError):
        assert name in backends
        assert not is_default or any(path.precision is q4.Precision.W4A8 for path in backends[name].paths)
    else:
        assert isinstance(error, q4.BackendUnavailableError)
        assert {item.backend for item in error.rejections} == ({name} if name else set(backends))
        assert all(item.reasons for item in error.rejections)


def _check_record(selection: q4.Selection, backends: dict[str, FakeBackend], request: q4.Request) -> None:
    """Every loser is reported with a reason; the segments are the range asked for, each inside its path's own range."""
    assert {item.backend for item in selection.rejections} == set(backends) - {selection.backend}
    assert all(item.reasons for item in selection.rejections)
    assert selection.segments[0].low == request.m[0]
    assert selection.segments[-1].high == request.m[1]
    for before, after in itertools.pairwise(selection.segments):
        assert before.high is not None
        assert after.low == before.high + 1
    for segment in selection.segments:
        assert segment.path in backends[selection.backend].paths
        assert segment.path.covers(segment.low)
        assert segment.path.m[1] is None if segment.high is None else segment.path.covers(segment.high)


def _check_obedience(
    selection: q4.Selection, compute_path: q4.ComputePath, precision: q4.ActivationPrecision, name: str | None
) -> None:
    """The answer obeys compute path, precision and override, or says that it fell back where it may."""
    kinds = {segment.path.kind for segment in selection.segments}
    if selection.fallback_reason is not None:
        assert compute_path is q4.ComputePath.KERNEL_OR_FALLBACK
        assert kinds == {q4.PathKind.REFERENCE}
        return
    assert name in {None, selection.backend}
    if compute_path in {q4.ComputePath.KERNEL_ONLY, q4.ComputePath.KERNEL_OR_FALLBACK}:
        assert kinds == {q4.PathKind.KERNEL}
    if compute_path is q4.ComputePath.DEQUANT_MATMUL_ONLY:
        assert kinds == {q4.PathKind.REFERENCE}
    elif precision in WANTED:
        assert {segment.path.precision for segment in selection.segments} <= WANTED[precision]


def test_warm_selection_comes_from_the_cache() -> None:
    """The same request under the same options asks no backend twice."""
    backend = FakeBackend()
    plugins = registry(backend)
    first = q4.select(REQUEST, registry=plugins)
    assert q4.select(REQUEST, registry=plugins) is first
    assert len(backend.requests) == 1
