"""The benchmark of a busy core, with all that it measures, in its quick form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from benchmarks import batches, busy, generate, record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.samples, pytest.mark.soak]


@pytest.fixture(autouse=True)
def _all_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose among all plugins, as who runs the benchmark does; other tests of this folder read by the reference."""
    monkeypatch.delenv("Q4_PLUGINS")
    q4.reset_registry()
    yield
    q4.reset_registry()


def test_each_kind_of_work_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, in transformers, too, a long context, batches and sentences have rates and verdicts."""
    monkeypatch.setattr(record, "BUILD", tmp_path)
    for module, name, value in ((generate, "STEPS", 4), (batches, "STEPS", 4), (busy, "CONTEXT", 256)):
        monkeypatch.setattr(module, name, value)
    busy.main(["--quick"])
    (written,) = tmp_path.glob("busy-*.json")
    result = json.loads(written.read_text(encoding="utf-8"))
    assert len(result["subjects"]) == 9
    assert len(result["verdicts"]) == 14
    assert all(own["ratio"]["median"] > 0 for rates in result["subjects"].values() for own in rates.values())
