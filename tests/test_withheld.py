"""A backend that offers some paths says of others why not: the record has it, and so has a refusal that it led to."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import torch
from commands import NF4, answer, say
from fakes import KERNEL_PATH, FakeBackend, registry

import q4core as q4
from q4_cli.doctor_report import survey_backends
from q4core.selection.select import select_backend

CODE = q4.ReasonCode
TOO_OLD = q4.Reason(CODE.ARCH, "the device is too old")
NO_COMPILER = q4.Reason(CODE.TOOLCHAIN, "no compiler")
FP4 = q4.Withheld("native-fp4", q4.Precision.W4A4, [TOO_OLD, NO_COMPILER])
EXACT = q4.Withheld("gemv_fast", q4.Precision.W4A32, [NO_COMPILER])
A4_PATH = attrs.evolve(KERNEL_PATH, name="a4", precision=q4.Precision.W4A4)
WEIGHT = q4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "nf4")
REQUEST = q4.Request.for_weight(WEIGHT)


def _select(*backends: FakeBackend, request: q4.Request = REQUEST, **wishes: Any) -> q4.Selection:
    return select_backend(request, {item.name: item for item in backends}, **wishes)


def _codes(rejections: tuple[Any, ...], backend: str) -> list[q4.ReasonCode]:
    return [reason.code for item in rejections if item.backend == backend for reason in item.reasons]


def test_a_verdict_holds_what_it_withholds() -> None:
    """Reasons may be given as any sequence; nothing is withheld unless told."""
    verdict = q4.Verdict.offer([KERNEL_PATH], native_state="x", withheld=[FP4, EXACT])
    assert verdict.withheld == (FP4, EXACT)
    assert verdict.withheld[0].reasons == (TOO_OLD, NO_COMPILER)
    assert q4.Verdict.offer([KERNEL_PATH], native_state="x").withheld == ()
    assert q4.Verdict.refuse([TOO_OLD], native_state="x").withheld == ()
    assert str(FP4) == "native-fp4 (w4a4): arch: the device is too old; toolchain: no compiler"


def test_the_winner_tells_what_it_withholds() -> None:
    """Selection, diagnostics and report name each withheld path with all its reasons, whatever was asked for."""
    backend = FakeBackend("some", withheld=(FP4,))
    assert _select(backend).withheld == (FP4,)
    layer = q4.Session(registry=registry(backend)).linear(WEIGHT)
    record = layer.diagnostics()
    assert (record.backend, record.withheld) == ("some", (FP4,))
    assert "withheld: native-fp4 (w4a4): arch: the device is too old; toolchain: no compiler" in str(record)
    (plain,) = record.to_dict()["withheld"]
    assert (plain["name"], plain["precision"]) == ("native-fp4", "w4a4")
    assert plain["reasons"][0] == {"code": "arch", "domain": "hardware", "message": "the device is too old"}


def test_withheld_reasons_stand_beside_those_of_the_policy() -> None:
    """Where the policy leaves nothing of what is offered, the path that it asks for is told with its own reasons."""
    backend = FakeBackend("some", withheld=(FP4, EXACT))
    request = attrs.evolve(REQUEST, precision=q4.ActivationPrecision.FP4)
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _select(backend, request=request)
    assert _codes(caught.value.rejections, "some") == [CODE.POLICY, CODE.ARCH, CODE.TOOLCHAIN]
    assert "path native-fp4 (w4a4) is withheld: the device is too old" in str(caught.value)
    assert "gemv_fast" not in str(caught.value)


def test_withheld_reasons_stand_beside_a_gap() -> None:
    """A range that only a withheld path would fill is told with that path's reasons."""
    short = attrs.evolve(KERNEL_PATH, m=(1, 8))
    selection = _select(FakeBackend("short", paths=(short,), withheld=(EXACT, FP4)), FakeBackend("good"))
    assert selection.backend == "good"
    assert _codes(selection.rejections, "short") == [CODE.SHAPE, CODE.TOOLCHAIN]


def test_an_outranked_backend_tells_which_path_might_have_won() -> None:
    """A loser's withheld path of an allowed precision is told; one of another precision is no reason."""
    slow = FakeBackend("slow", paths=(attrs.evolve(KERNEL_PATH, tier=0),), withheld=(EXACT, FP4))
    selection = _select(slow, FakeBackend("fast"))
    assert selection.withheld == ()
    assert _codes(selection.rejections, "slow") == [CODE.TOOLCHAIN, CODE.OUTRANKED]


def test_a_path_that_is_withheld_here_is_no_conflict_of_wishes() -> None:
    """An override whose path for the wish is withheld is unable to serve; it is not at odds with the policy."""
    request = attrs.evolve(REQUEST, precision=q4.ActivationPrecision.FP4)
    with pytest.raises(q4.PolicyConflictError):
        _select(FakeBackend("some"), request=request, override="some")
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _select(FakeBackend("some", withheld=(FP4,)), request=request, override="some")
    assert CODE.ARCH in _codes(caught.value.rejections, "some")


def test_a_withheld_kernel_is_the_reason_for_a_fallback() -> None:
    """A backend that offers its reference and withholds its kernel says why the reference serves."""
    reference = attrs.evolve(KERNEL_PATH, name="ref", kind=q4.PathKind.REFERENCE, tier=0)
    backend = FakeBackend("both", paths=(reference,), withheld=(EXACT,))
    selection = _select(backend, compute_path=q4.ComputePath.KERNEL_OR_FALLBACK)
    assert selection.backend == "both"
    assert "gemv_fast" in (selection.fallback_reason or "")
    assert selection.withheld == (EXACT,)


def test_the_reference_asked_for_is_not_told_of_kernels() -> None:
    """Under DEQUANT_MATMUL_ONLY a withheld kernel is no reason: it would not serve if it were there."""
    with pytest.raises(q4.BackendUnavailableError) as caught:
        _select(FakeBackend("some", withheld=(EXACT,)), compute_path=q4.ComputePath.DEQUANT_MATMUL_ONLY)
    assert _codes(caught.value.rejections, "some") == [CODE.POLICY]


def test_a_refusal_to_prepare_tells_what_was_withheld() -> None:
    """A backend that refuses in prepare is told with the paths that it had withheld before."""
    backend = FakeBackend("some", withheld=(EXACT,), prepare_error=q4.RefusedError([TOO_OLD]))
    session = q4.Session(registry=registry(backend))
    session.linear(WEIGHT)
    record = session.linear(WEIGHT).diagnostics()
    assert _codes(record.rejections, "some") == [CODE.ARCH, CODE.TOOLCHAIN]


def test_doctor_and_explain_show_what_is_withheld(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and JSON of both name the path, its precision and every reason, beside the paths that serve."""
    backends = registry(FakeBackend("some", withheld=(FP4,)))
    verdicts = {
        (item["backend"], item["format"]): item for item in survey_backends(backends, [torch.device("cpu")], None)
    }
    (withheld,) = verdicts["some", "nf4"]["withheld"]
    assert (withheld["name"], [reason["code"] for reason in withheld["reasons"]]) == (
        "native-fp4",
        ["arch", "toolchain"],
    )
    assert verdicts["dequant-fallback", "nf4"]["withheld"] == []
    monkeypatch.setattr("q4core.default_registry", lambda: backends)
    for text in (say(capsys, "doctor"), say(capsys, "explain", NF4)):
        assert "withheld" in text
        assert "native-fp4 (w4a4)" in text
        assert "the device is too old" in text
        assert "no compiler" in text
    (layer,) = answer(capsys, "explain", NF4)["layers"]
    assert layer["withheld"] == [dict(withheld)]


def test_doctor_shows_it_of_a_backend_that_serves_some_rows_only() -> None:
    """A backend that leaves a gap tells what it withholds as well."""
    short = attrs.evolve(KERNEL_PATH, m=(1, 8))
    found = survey_backends(
        registry(FakeBackend("some", paths=(short,), withheld=(FP4,)), reference=False), [torch.device("cpu")], None
    )
    assert {item["serves"] for item in found} == {"some"}
    assert {item["withheld"][0]["name"] for item in found} == {"native-fp4"}


def test_it_is_told_as_an_event(caplog: pytest.LogCaptureFixture) -> None:
    """``q4.select`` carries the withheld paths of the winner."""
    with caplog.at_level(logging.DEBUG, logger="q4core"):
        q4.Session(registry=registry(FakeBackend("some", withheld=(FP4,)))).linear(WEIGHT)
    told = [record.q4_fields for record in caplog.records if getattr(record, "q4_event", "") == "q4.select"]  # type: ignore[attr-defined]  # our extra
    assert [fields["withheld"] for fields in told] == [[str(FP4)]]
