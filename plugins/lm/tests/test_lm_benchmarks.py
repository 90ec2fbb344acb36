"""The benchmarks that run a language model, in their quick form on the tiny one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import batches, busy, generate, opening, precision, record, waiting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_llama: Any) -> Callable[..., dict[str, Any]]:
    """Return a command of the benchmarks on a tiny model, whose result is read back from a folder of the test's own."""
    monkeypatch.setattr(record, "BUILD", tmp_path / "build")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    model = write_llama(context=128)

    def quick(module: Any, *words: str) -> dict[str, Any]:
        if hasattr(module, "find_model"):
            monkeypatch.setattr(module, "find_model", lambda _: model)
        module.main(["--quick", *(str(model) if word == "MODEL" else word for word in words)])
        assert not (tmp_path / "results").exists()
        (written,) = (tmp_path / "build").glob("*.json")
        result: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        return result

    return quick


def test_generate(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens per second of prompt and steps, with their picture."""
    for name, value in (("PROMPT", 16), ("STEPS", 4), ("_LEAST_COSINE", -1.0)):  # random weights agree with nothing
        monkeypatch.setattr(generate, name, value)
    result = run(generate)
    assert all(own["decode"]["median"] > 0 for programs in result["threads"].values() for own in programs.values())


def test_batches(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens per second of each batch, and a verdict for each that is judged."""
    for name, value in (("PROMPT", 16), ("STEPS", 4), ("_LEAST_COSINE", -1.0)):  # random weights agree with nothing
        monkeypatch.setattr(batches, name, value)
    result = run(batches)
    for own in result["threads"].values():
        assert [*own] == ["1", "4", "16"]
        assert all(kinds["decode"]["median"] > 0 for programs in own.values() for kinds in programs.values())
    assert len(result["verdicts"]) == 8


def test_precision(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact activations give the reference's next tokens, whatever the weights."""
    monkeypatch.setattr(precision, "WINDOW", 64)
    result = run(precision)
    assert result["programs"][precision.EXACT]["kl_divergence"] < 1e-6


@pytest.mark.soak
def test_opening(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Openings take turns in processes of their own, and several share one prepared file."""
    monkeypatch.setattr(opening, "PROCESSES", 2)
    result = run(opening)
    assert result["ways"]["cached"]["seconds"]["median"] > 0
    assert len(result["shared"]["processes"]) == 2


@pytest.mark.soak
def test_waiting(run: Callable[..., dict[str, Any]]) -> None:
    """Both ways to wait are timed, alone and next to busy cores."""
    result = run(waiting, "--model", "MODEL")
    assert set(result["scenes"]) == {"without burners", "with burners"}


def test_a_busy_core(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads next to a busy core are compared with one, in pairs, and judged."""
    monkeypatch.setattr(busy, "subjects", lambda: iter([("A model", lambda threads: {"decode": 10.0 * threads})]))
    result = run(busy)
    assert result["subjects"]["A model"]["decode"]["ratio"]["median"] == result["threads"]
    assert [item["verdict"] for item in result["verdicts"]] == ["met"]
