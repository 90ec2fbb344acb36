"""Each path says how far it was proven before it came here, and every record shows it."""

from __future__ import annotations

import attrs
import pytest
import torch

import q4core as q4
from q4_cli.doctor_report import survey_backends
from tests.support.commands import NF4, answer, say
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry

WEIGHT = q4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "nf4")
COMPILED = attrs.evolve(KERNEL_PATH, standing=q4.Standing.COMPILED)


def test_a_path_ran_unless_told() -> None:
    """A backend that says nothing claims no measurement, and needs no change."""
    assert KERNEL_PATH.standing is q4.Standing.RAN
    assert [item.value for item in q4.Standing] == ["measured", "ran", "compiled", "interpreted"]
    assert str(COMPILED) == "fake_gemm (M 1…∞, kernel, w4a32, compiled)"


def test_a_standing_that_is_none_is_refused() -> None:
    """A text is not taken for a standing."""
    with pytest.raises(q4.ConfigError) as caught:
        attrs.evolve(KERNEL_PATH, standing="ran")  # type: ignore[arg-type]  # on purpose
    assert caught.value.name == "standing"


@pytest.mark.parametrize("standing", q4.Standing)
def test_records_show_the_standing(standing: q4.Standing) -> None:
    """The diagnostics of a layer tell it as text and as JSON, for each range of M."""
    path = attrs.evolve(KERNEL_PATH, standing=standing)
    record = q4.Session(registry=registry(FakeBackend(paths=(path,)))).linear(WEIGHT).diagnostics()
    assert f"fake_gemm [kernel, w4a32, {standing.value}] ran 0 ×" in str(record)
    assert [item["standing"] for item in record.to_dict()["paths"]] == [standing.value]


def test_a_standing_does_not_rank() -> None:
    """Tiers choose, whatever the standing: a path of a higher tier serves once its probe has passed here."""
    high = FakeBackend("new", paths=(attrs.evolve(COMPILED, tier=q4.Tier.TUNED),))
    layer = q4.Session(registry=registry(high, FakeBackend("old"))).linear(WEIGHT)
    assert layer.diagnostics().backend == "new"


def test_doctor_and_explain_show_the_standing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and JSON of both tell it beside kind, precision and tier."""
    backends = registry(FakeBackend("new", paths=(COMPILED,)))
    monkeypatch.setattr("q4core.default_registry", lambda: backends)
    verdicts = survey_backends(backends, [torch.device("cpu")], None)
    assert {item["paths"][0]["standing"] for item in verdicts if item["backend"] == "new"} == {"compiled"}
    for text in (say(capsys, "doctor"), say(capsys, "explain", NF4)):
        assert "kernel, w4a32, tier 20, compiled" in text
    (layer,) = answer(capsys, "explain", NF4)["layers"]
    assert layer["paths"][0]["standing"] == "compiled"
