"""What a manifest says of scales holds for each precision: the core refuses, or resolves, by the one asked for."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import FakeBackend, registry
from tests.support.samples import random_weight

BYTES = frozenset({q4.ScaleKind.E4M3, q4.ScaleKind.E4M3_MUL, q4.ScaleKind.E8M0})
PLAIN = frozenset({q4.ScaleKind.PLAIN})
FP4 = q4.KernelPath("fp4", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A4, 30)
EXACT = q4.KernelPath("exact", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20)
INT16 = q4.KernelPath("int16", (1, None), q4.PathKind.KERNEL, q4.Precision.W4I16, 30)


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), "nvfp4")


def _backend(own: Any, paths: tuple[q4.KernelPath, ...] = (FP4, EXACT), plain: Any = BYTES | PLAIN) -> FakeBackend:
    precisions = {path.precision for path in paths}
    return FakeBackend(paths=paths, precisions=precisions, scale_kinds=plain, precision_scale_kinds=own)


def _select(backend: FakeBackend, weight: q4.PackedWeight, wish: str, **config: Any) -> q4.Selection:
    given = q4.SessionConfig(backend="fake", activation_precision=wish, **config)
    return q4.select(q4.Request.for_weight(weight), given, registry=registry(backend))


def test_each_precision_has_the_plain_set_by_default() -> None:
    """Kinds of one precision replace the plain set for it alone; a manifest with them is a value like any other."""
    manifest = _backend({q4.Precision.W4A4: BYTES}).capabilities
    assert manifest.scale_kinds_of(q4.Precision.W4A4) == BYTES
    assert manifest.scale_kinds_of(q4.Precision.W4A32) == BYTES | PLAIN
    assert attrs.evolve(manifest) == manifest
    assert hash(manifest) == hash(attrs.evolve(manifest))
    assert manifest != attrs.evolve(manifest, precision_scale_kinds={})
    given = {q4.Precision.W4A4: BYTES}
    kept = attrs.evolve(manifest, precision_scale_kinds=given)
    given.clear()
    assert kept.scale_kinds_of(q4.Precision.W4A4) == BYTES


def test_kinds_of_an_undeclared_precision_are_an_error() -> None:
    """What is said of a precision that the manifest does not declare can't be meant."""
    with pytest.raises(q4.ConfigError, match="precision_scale_kinds"):
        _backend({q4.Precision.W4A8: BYTES})


def test_an_undeclared_kind_is_refused_by_the_manifest() -> None:
    """A precision that takes no float scales refuses them with a `format` reason, without being asked."""
    backend = _backend({q4.Precision.W4A4: BYTES})
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _select(backend, _weight().with_plain_scale(), "fp4")
    (rejection,) = caught.value.rejections
    assert [reason.code for reason in rejection.reasons] == [q4.ReasonCode.FORMAT]
    assert "w4a4" in rejection.reasons[0].message
    assert rejection.native_state == "not asked"
    assert backend.requests == []
    assert _select(backend, _weight(), "fp4").path == FP4
    assert _select(backend, _weight().with_plain_scale(), "exact").path == EXACT


def test_scales_become_plain_only_where_that_precision_declares_plain() -> None:
    """The precision that was asked for decides whether levels are preserved, resolved or refused."""
    kinds = {q4.Precision.W4A4: {q4.ScaleKind.E8M0}, q4.Precision.W4A32: PLAIN}
    backend = _backend(kinds)
    assert _select(backend, _weight(), "exact").backend_request.scale_kind is q4.ScaleKind.PLAIN
    with pytest.raises(q4.BackendUnavailableError, match="e4m3_mul"):
        _select(backend, _weight(), "fp4")


def test_a_path_never_sees_a_kind_that_its_precision_does_not_declare() -> None:
    """Where several precisions may serve, those that read the scales do, and the others are passed over."""
    backend = _backend({q4.Precision.W4I16: PLAIN}, (INT16, EXACT))
    selection = _select(backend, _weight(), "auto")
    assert selection.path == EXACT
    assert selection.backend_request.scale_kind is q4.ScaleKind.E4M3_MUL
    assert _select(backend, _weight().with_plain_scale(), "auto").path == INT16


def test_the_reference_serves_whatever_precision_is_asked_for() -> None:
    """The reference answers a request for FP4 by its own precision, so its own scale kinds count."""
    path = q4.KernelPath("slow", (1, None), q4.PathKind.REFERENCE, q4.Precision.W4A32, 0)
    backend = _backend({q4.Precision.W4A4: BYTES}, (path, FP4))
    for weight in (_weight(), _weight().with_plain_scale()):
        selection = _select(backend, weight, "fp4", compute_path="dequant_matmul_only")
        assert (selection.path, selection.backend_request.scale_kind) == (path, weight.scale_kind)


def test_offsets_of_super_blocks_become_plain_with_the_scales() -> None:
    """A backend that reads plain numbers alone is asked for float32 ones, and given them."""
    path = q4.KernelPath("exact", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20)
    backend = _backend({}, (path,), PLAIN)
    weight = random_weight("q4_1", 8, 256, q4.ScaleKind.SUPER_BLOCK)
    request = _select(backend, weight, "exact").backend_request
    assert (request.scale_kind, request.scale_dtype, request.second_dtype) == (
        q4.ScaleKind.PLAIN,
        torch.float32,
        torch.float32,
    )
    session = q4.Session(q4.SessionConfig(backend="fake"), registry=registry(backend))
    layer, x = session.linear(weight), torch.randn(3, 256)
    assert torch.equal(layer(x), q4.Session(q4.SessionConfig(backend="dequant-fallback")).linear(weight)(x))
