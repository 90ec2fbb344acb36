"""A backend that can't offer one of its kernels says why in its native state, which every record shows."""

from __future__ import annotations

import logging

import attrs
import pytest
import torch

import q4core as q4
from q4_cli.doctor_report import survey_backends
from tests.support.commands import NF4, answer, say
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry

STATE = "loaded (avx2); native-fp4: no compiler"
INTERPRETED = (attrs.evolve(KERNEL_PATH, interpreted=True),)
WEIGHT = q4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "nf4")


def test_records_and_the_event_hold_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """Diagnostics and ``q4.select`` show the winner's state; a rejection shows the loser's."""
    slow = FakeBackend("slow", paths=(attrs.evolve(KERNEL_PATH, tier=0),), native_state="slow: no compiler")
    with caplog.at_level(logging.DEBUG, logger="q4core"):
        layer = q4.Session(registry=registry(FakeBackend("some", native_state=STATE), slow)).linear(WEIGHT)
    record = layer.diagnostics()
    assert record.summary()["native_load_state"] == STATE
    assert STATE in str(record)
    assert {item.backend: item.native_state for item in record.rejections}["slow"] == "slow: no compiler"
    told = [item.q4_fields for item in caplog.records if getattr(item, "q4_event", "") == "q4.select"]  # type: ignore[attr-defined]  # our extra
    assert [fields["native_load_state"] for fields in told] == [STATE]


def test_records_show_what_is_interpreted() -> None:
    """The diagnostics of a layer have it as text and as JSON, for each range of M; a text is no answer."""
    path = attrs.evolve(KERNEL_PATH, interpreted=True)
    record = q4.Session(registry=registry(FakeBackend(paths=(path,)))).linear(WEIGHT).diagnostics()
    assert "fake_gemm [kernel, w4a32, interpreted] ran 0 ×" in str(record)
    assert [item["interpreted"] for item in record.to_dict()["paths"]] == [True]
    assert str(path) == "fake_gemm (M 1…∞, kernel, w4a32, interpreted)"
    with pytest.raises(q4.ConfigError) as caught:
        attrs.evolve(KERNEL_PATH, interpreted="yes")  # type: ignore[arg-type]  # on purpose
    assert caught.value.name == "interpreted"


def test_doctor_and_explain_show_the_state(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and JSON of both hold it, also of a backend that serves some rows only."""
    short = FakeBackend(
        "short", paths=(attrs.evolve(KERNEL_PATH, m=(1, 8), tier=0),), native_state="short: no compiler"
    )
    backends = registry(FakeBackend("some", paths=INTERPRETED, native_state=STATE), short)
    found = survey_backends(backends, [torch.device("cpu")], None)
    states = {item["backend"]: item["native_load_state"] for item in found if item["format"] == "nf4"}
    assert (states["some"], states["short"]) == (STATE, "short: no compiler")
    monkeypatch.setattr("q4core.default_registry", lambda: backends)
    for text in (say(capsys, "doctor"), say(capsys, "explain", NF4)):
        assert "interpreted" in text
        assert STATE in " ".join(text.split())
    (layer,) = answer(capsys, "explain", NF4)["layers"]
    assert layer["native_load_state"] == STATE
