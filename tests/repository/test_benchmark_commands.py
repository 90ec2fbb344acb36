"""Each benchmark's command runs to its end in its quick form, and leaves the stored results alone."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import problem, record, spiking, spiking_torch, threads, weights
from benchmarks.cpu import ours, peers, plan, small_layers, yardsticks
from benchmarks.cpu.sampling import Budget
from benchmarks.memory import actors, ray_objects
from benchmarks.memory import command as memory_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return ``python -m benchmarks NAME --quick``, whose result is read back from a folder of the test's own."""
    monkeypatch.setattr(record, "BUILD", tmp_path / "build")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")

    def quick(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benchmarks", words[0], "--quick", *words[1:]])
        assert command.main() == 0
        assert not (tmp_path / "results").exists()
        (written,) = (tmp_path / "build").glob("*.json")
        result: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        assert result["environment"]["commit"]
        return result

    return quick


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_each_benchmark_has_a_quick_form(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What takes minutes can be tried in seconds, by the same option everywhere."""
    with pytest.raises(SystemExit, match="0"):
        command.BENCHMARKS[name](["--help"])
    assert "--quick" in capsys.readouterr().out


def test_overhead(run: Run) -> None:
    """Every call is timed, and its picture drawn."""
    assert len(run("overhead")["calls"]["forward"]["samples"]) == 5


def test_scaling(run: Run) -> None:
    """One and two actors leave the same bits on threads and processes, and count what a step writes."""
    found = run("scaling")
    rows = {(row["form"], row["runtime"], row["actors"]): row for row in found["rows"]}
    assert len(rows) == 8
    for form in ("strong", "weak"):
        for count in (1, 2):
            assert rows[form, "threads", count]["digest"] == rows[form, "processes", count]["digest"]
            assert rows[form, "threads", count]["spikes_per_s"] > 0
    strong = rows["strong", "threads", 1]
    moved = strong["bytes_per_step"]
    assert moved["spikes_as_bits_bytes"] == 3 * 8  # a word for each of three populations of 32
    states = 3 * 8 + 2 * (4 * 32 + 8)  # clocks; membranes and the last row
    assert moved["written_bytes"] == pytest.approx(3 * 8 + states / 3)  # a chunk of three steps
    assert strong["digest"] == rows["strong", "processes", 2]["digest"]
    assert set(found["costs"]) == {"threads", "processes"}


@pytest.mark.slow
def test_certify(run: Run) -> None:
    """One case of each subject is certified by its id, and ``import torch`` is timed with them."""
    assert len(run("certify", "--rounds", "1")["seconds"]) == 3


@pytest.mark.slow
def test_the_microcircuit(run: Run) -> None:
    """A small circuit runs as a program, with its memory; what was not measured has no verdict."""
    result = run("microcircuit")
    (found,) = result["runs"]["q4"]
    assert (found["backend"], found["neurons"], len(found["rates"])) == ("cpu-native", 767, 8)
    assert 0 < found["imported_bytes"] < found["peak_bytes"]
    assert result["full"] is None
    assert {item["verdict"] for item in result["verdicts"]} == {"not measured"}


@pytest.mark.slow
def test_snn(run: Run) -> None:
    """The layer and a circuit run with q4-snn, with its memory; missing simulators are listed with the reason."""
    result = run("snn", "--simulators", sys.executable)
    assert {row["rate"] for row in result["layer"]["rows"] if row["who"] == "q4-snn"} == {0.01, 0.03, 0.1, 0.3}
    assert result["layer"]["bytes_per_synapse"]["q4-snn"] > 0.5
    assert result["circuits"][0]["runs"]["q4-snn"]["rate_hz"] > 0
    assert result["long_run"]["steps"] == 2000
    for name in ("Norse", "NEST", "Brian2"):
        assert (name in result["missing"]) != (name in result["layer"]["versions"])


def test_snn_times_no_other_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator that gives other spikes is listed with the reason, and has no row and no verdict of a speed."""
    ours = spiking_torch.SIMULATORS[spiking_torch.OURS]
    wrong = ours[0], lambda _weight: torch.ones_like
    monkeypatch.setattr(spiking, "SIMULATORS", {spiking_torch.OURS: ours, "same": ours, "wrong": wrong})
    monkeypatch.setattr(spiking, "run_child", lambda *_, **__: {"held_bytes": 1})
    missing: dict[str, str] = {}
    with torch.no_grad():
        result, verdicts = spiking._layer(64, 5, 2, missing)
    assert "other spikes" in missing["wrong"]
    assert {row["who"] for row in result["rows"]} == {"q4-snn", "same"}
    assert {item.against for item in verdicts if item.ratio is not None} == {"same"}
    assert [item.word for item in verdicts if item.against == "wrong"] == ["not measured"]


@pytest.mark.slow
def test_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way shares a small tensor between a writer and a reader."""
    monkeypatch.setattr(memory_command, "SCENES", (actors.Scene("small", 1 << 10, 1),))
    monkeypatch.setattr(ray_objects, "facts", lambda: {"installed": False, "why": "left out"})
    assert set(run("memory")["scenes"]) == {"small"}


def test_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and the yardsticks are measured, judged and drawn; other libraries have tests of their own."""
    if ours.isa() == "none":
        pytest.skip("cpu-native is not built here")
    stages = tuple(plan.Stage((256, 256), rows, 1) for rows in (1, 64))
    short = plan.Plan(stages, Budget(3, 0.01, 2), Budget(3, 0.01, 2))
    monkeypatch.setattr(plan, "QUICK", short)
    monkeypatch.setattr(plan, "QUICK_TYPES", short)
    monkeypatch.setattr(plan, "TYPES", {"K-quants": weights.TYPES["K-quants"]})
    for name in ("_LEAST_ROTATION", "_MOST_ROTATION"):  # copies of 1 MB, not of three caches
        monkeypatch.setattr(problem, name, 1 << 20)
    monkeypatch.setattr(yardsticks, "_windows", yardsticks._windows.__wrapped__)
    monkeypatch.setattr(yardsticks, "_SIDE", 64)
    monkeypatch.setattr(small_layers, "_SHAPES", ((64, 64),))
    monkeypatch.setattr(peers, "facts", dict)
    result = run("cpu", "--only", "ours")
    assert [stage["rows"] for stage in result["stages"]] == [1, 64]
    assert [(stage["group"], stage["rows"]) for stage in result["type_stages"]] == [("K-quants", 1), ("K-quants", 64)]
    assert {"Q4_K int8", "Q2_K int16", "Q6_K exact"} <= set(result["type_stages"][0]["calls"])


@pytest.mark.skipif(os.name != "posix", reason="compilers elsewhere have other flags")
def test_ggml_is_built_without_amx_and_for_avx2_where_asked() -> None:
    """Arm's compilers, which know no AMX, get no flag of it."""
    pytest.importorskip("nox")
    build = importlib.import_module("tools.environments").ggml_build
    assert build("avx2") == {"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}
    assert build(machine="x86_64")["CFLAGS"].split() == ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]
    assert build(machine="aarch64") == {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}


@pytest.mark.soak  # it builds the kernels twice
def test_threads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to share work run in each scene, however busy the machine is."""
    monkeypatch.setattr(threads, "QUIET", math.inf)
    assert len(run("threads")["scenes"]) == 6
