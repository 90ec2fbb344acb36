"""The parts of the benchmarks that decide what is reported: checks, samples, peers, files and pictures."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch
from matplotlib.text import Text

import q4core as q4
from benchmarks import __main__ as command
from benchmarks import embeddings, generate, overhead, record, style
from benchmarks.candidate import OURS, PEER, Calls, Candidate, WrongAnswerError
from benchmarks.cpu import command as cpu_command
from benchmarks.cpu import (
    decode_picture,
    ours,
    peers,
    plan,
    prefill_picture,
    roofline_picture,
    small_layers,
    yardsticks,
)
from benchmarks.cpu.sampling import Budget, Timed, sample_us
from benchmarks.problem import Problem, last_level_cache_bytes, rotation_bytes
from tests.support.benchmark_results import SHAPE, decode_stage, prefill_stage
from tools.examples import read_figures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _product(weight: torch.Tensor, reference: torch.Tensor) -> Candidate:
    """Return a candidate that multiplies with one weight and claims to hold another."""

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:
        return Calls([lambda: None], lambda: x @ weight.T)

    return Candidate("a", "torch", PEER, "fp32", "fp32", 64, make, reference=reference.double())


def test_a_wrong_answer_is_refused() -> None:
    """The pattern is checked against every row that repeats it, and NaN is wrong too."""
    pattern, x = torch.randn(4, 32), torch.randn(3, 32)
    whole = pattern.repeat(2, 1)
    candidate = _product(whole, pattern)
    error = candidate.nmse(candidate.make(x, 1, False), x)
    assert error is not None
    assert error < 1e-12
    wrong = whole.clone()
    wrong[7] *= -1
    for bad in (wrong, whole * float("nan")):
        candidate = _product(bad, pattern)
        with pytest.raises(WrongAnswerError):
            candidate.nmse(candidate.make(x, 1, False), x)


def test_copies_exceed_the_cache() -> None:
    """Copies of a weight take three last-level caches, or what there is memory for."""
    problem = Problem(64, 64)
    assert problem.copies(1 << 20) * (1 << 20) >= rotation_bytes() >= 96 << 20
    assert problem.copies(1 << 40) == 1
    cache = last_level_cache_bytes()
    assert cache is None or rotation_bytes() >= min(3 * cache, 144 << 20)


def test_readers_go_round_more_memory_than_a_cache_keeps_parts_of() -> None:
    """Each turn of a reader reads memory of its own."""
    windows = yardsticks._windows()
    assert len({window.data_ptr() for window in windows}) == len(windows) >= 4
    assert {window.numel() * 8 for window in windows} == {rotation_bytes()}
    reader = yardsticks.candidates()[0]
    assert len(reader.make(torch.zeros(1, 1), 1, False).turns) == len(windows)


def _timed(seconds: float, order: list[str], name: str) -> Timed:
    import time  # noqa: PLC0415  # only slow calls need it

    def turn() -> None:
        order.append(name)
        time.sleep(seconds)

    candidate = Candidate(name, name, PEER, "fp32", "fp32", 64, lambda *_: Calls([turn]))
    return Timed(candidate, Calls([turn], products=2))


def test_samples_are_interleaved_and_slow_ones_fewer() -> None:
    """Each candidate gets its samples in rounds; what exceeds its seconds gets fewer, spread over the rounds."""
    order: list[str] = []
    fast, slow = _timed(0.004, order, "fast"), _timed(0.02, order, "slow")
    sample_us([fast, slow], 1, Budget(samples=6, seconds=0.06, least=2))
    assert (len(fast.us), len(slow.us)) == (6, 2)
    assert min(slow.us) >= 10_000  # two products to a turn
    assert order[-1] == "slow" or "slow" in order[-3:]
    assert order.index("slow") < len(order) - 1 - order[::-1].index("fast")


def test_only_and_stages_choose() -> None:
    """``--only`` takes roles and parts of names; yardsticks stay, and a slow peer is left out of prefill."""
    assert plan.is_wanted(None, PEER, "ggml Q4_0")
    assert plan.is_wanted("ours", OURS, "nf4 int8")
    assert not plan.is_wanted("ours", PEER, "ggml Q4_0")
    assert plan.is_wanted("peers", PEER, "ggml Q4_0")
    assert not plan.is_wanted("peers", OURS, "nf4 int8")
    assert plan.is_wanted("q4_0", PEER, "ggml Q4_0")
    assert not plan.is_wanted("q4_0", PEER, "ggml Q4_1")
    assert plan.is_wanted("q4_0", "yardstick", "read: a")
    slow = Candidate("a", "torchao", PEER, "nvfp4", "bf16", 64, lambda *_: Calls([]), most_rows=1)
    assert plan.Stage(SHAPE, 1, 2).takes(slow)
    assert not plan.Stage(SHAPE, 4, 2).takes(slow)


def test_peers_are_named_whether_they_are_installed_or_not() -> None:
    """Every peer has an entry, with its version or a note that it is not installed."""
    found = peers.facts()
    assert set(found) == set(peers.PEERS)
    for peer in found.values():
        assert peer["version"] if peer["installed"] else peer["why"]


def test_a_peer_that_breaks_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that can't be loaded is left out and marked with the reason; the others stay."""

    def broken(_: Problem) -> list[Candidate]:
        raise OSError("no such library")

    monkeypatch.setattr(
        peers, "PEERS", {"a": ("a", broken), "b": ("b", lambda _: [_product(torch.eye(2), torch.eye(2))])}
    )
    found: dict[str, dict[str, Any]] = {"a": {"installed": True}, "b": {"installed": True}}
    assert len(peers.load(Problem(64, 64), found)) == 1
    assert found == {"a": {"installed": False, "why": "OSError: no such library"}, "b": {"installed": True}}


def test_summary_and_file(tmp_path: Path) -> None:
    """Median and deciles of the samples, which the file holds on one line."""
    values = record.summary([float(number) for number in range(1, 12)])
    assert (values["median"], values["p10"], values["p90"]) == (6.0, 2.0, 10.0)
    written = record.write("a", {"calls": values}, folder=tmp_path)
    assert json.loads(written.read_text())["calls"] == values
    assert '"samples": [ 1.0, 2.0,' in written.read_text()


def test_uncommitted_source_gives_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed or new source file sends a run to the build folder; changed results and pages do not."""
    source, results = tmp_path / "benchmarks" / "record.py", tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("build\n")
    source.write_text("")
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)  # noqa: S607  # found on the path, as everywhere
    monkeypatch.delenv("Q4_BENCH_COMMIT", raising=False)
    monkeypatch.setattr(record, "__file__", str(source))
    monkeypatch.setattr(record, "RESULTS", results)
    monkeypatch.setattr(record, "BUILD", tmp_path / "build")
    (tmp_path / "docs").mkdir()
    for page in (tmp_path / "docs" / "a.svg", tmp_path / "README.md", results / "other.json"):
        page.write_text("changed")
    assert record.write("a", {}, folder=results) == results / "a.json"
    for changed in (source, tmp_path / "new.py"):
        before = changed.read_text() if changed.exists() else None
        changed.write_text("x = 1")
        assert record.write("a", {}, folder=results) == tmp_path / "build" / "a.json"
        changed.unlink() if before is None else changed.write_text(before)
    assert record.write("a", {}, folder=results) == results / "a.json"


def test_stored_results_name_their_commit() -> None:
    """No stored result is of uncommitted source."""
    names = re.compile(r'"commit": "[^"]*-dirty"')
    found = {path.stem for path in record.RESULTS.glob("*.json") if names.search(path.read_text(encoding="utf-8"))}
    assert found == set()


def test_pictures_are_drawn_from_the_result(tmp_path: Path) -> None:
    """Each picture is made from a result alone, and none where its stages are missing."""
    stages = [decode_stage(), prefill_stage(4), prefill_stage(64)]
    result = {"stages": stages, "isa": "avx2", "environment": record.environment()}
    draws: dict[str, Callable[[dict[str, Any], Path], Path | None]] = {
        "decode": lambda given, path: decode_picture.draw(given, 2, path),
        "prefill": prefill_picture.draw,
        "roofline": roofline_picture.draw,
    }
    for name, draw in draws.items():
        path = draw(result, tmp_path / f"{name}.png")
        assert path is not None
        assert path.stat().st_size > 10_000
        assert draw(result | {"stages": []}, tmp_path / "none.png") is None


def test_a_measured_run_writes_its_file_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m benchmarks cpu`` ends with a file, its pictures and the verdicts, measured again or read again."""
    stages = [decode_stage(), prefill_stage(4), prefill_stage(64)]
    monkeypatch.setattr(plan, "measure", lambda *_: stages)
    monkeypatch.setattr(plan, "measure_types", lambda *_: [])
    monkeypatch.setattr(peers, "facts", dict)
    monkeypatch.setattr(record, "BUILD", tmp_path)
    cpu_command.main(["--quick", "--only", "peers"])
    assert len(list(tmp_path.glob("*.png"))) == 3
    (written,) = tmp_path.glob("*.json")
    before = json.loads(written.read_text())
    cpu_command.main(["--from", str(written)])
    assert json.loads(written.read_text()) == before
    assert "written: " in capsys.readouterr().out


STORED: dict[str, tuple[str, Callable[[dict[str, Any], Path], Path | None]]] = {
    "decode-2": ("cpu-avx512", lambda result, path: decode_picture.draw(result, 2, path)),
    "decode-1": ("cpu-avx2", lambda result, path: decode_picture.draw(result, 1, path)),
    "prefill": ("cpu-avx512", prefill_picture.draw),
    "roofline": ("cpu-avx512", roofline_picture.draw),
    "generate": ("generate-avx512", generate.draw),
    "overhead": ("overhead", overhead.draw),
}


@pytest.mark.parametrize("kind", STORED)
def test_pictures_say_where_when_and_which_way_is_better(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored result's picture names machine and date, says which direction is better, and has ten rows at most."""
    figures: list[Any] = []
    monkeypatch.setattr(style.plt, "close", figures.append)
    name, draw = STORED[kind]
    result = json.loads((record.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    draw(result, tmp_path / "a.png")
    (figure,) = figures
    texts = [item.get_text() for item in figure.findobj(Text)]
    facts = result["environment"]
    assert any(facts["machine"]["processor"] in text and facts["date"][:10] in text for text in texts)
    assert any("more is better" in text or "less is better" in text for text in texts)
    for axes in figure.axes:
        bars = [patch for patch in axes.patches if patch.get_height() == 0.8]
        assert len(bars) <= 10
    monkeypatch.undo()
    style.plt.close(figure)


def test_decode_shows_each_librarys_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours the same five everywhere, of each other library its fastest 4-bit one, and dense bf16."""
    figures: list[Any] = []
    monkeypatch.setattr(style.plt, "close", figures.append)
    result = json.loads((record.RESULTS / "cpu-avx512.json").read_text(encoding="utf-8"))
    decode_picture.draw(result, 2, tmp_path / "a.png")
    labels = [item.get_text() for item in figures[0].axes[0].get_yticklabels()]
    assert labels == [
        "NF4", "NVFP4", "Q4_0", "NF4", "NF4",
        "Q4_K (repacked)", "int4 g32", "bf16", "int4pack bf16", "NF4 bf16", "NVFP4 bf16",
    ]  # fmt: skip
    monkeypatch.undo()
    style.plt.close(figures[0])


def test_options_go_to_one_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Words after the first option belong to the benchmark; two benchmarks can't share them, unknown ones are named."""
    given: list[list[str]] = []
    monkeypatch.setattr(command, "BENCHMARKS", {"a": given.append, "b": given.append})
    monkeypatch.setattr("sys.argv", ["benchmarks", "a", "--only", "b"])
    assert command.main() == 0
    assert given == [["--only", "b"]]
    monkeypatch.setattr("sys.argv", ["benchmarks", "--only", "b"])
    assert command.main() == 2
    monkeypatch.setattr("sys.argv", ["benchmarks", "c"])
    assert command.main() == 2
    assert "'c'" in capsys.readouterr().err


def test_small_layers_time_kernel_and_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare kernel and both ways of calling are measured for each shape and format."""
    config = q4.SessionConfig(device="cpu", backend="dequant-fallback")
    monkeypatch.setattr(ours, "session", lambda _: q4.Session(config))
    monkeypatch.setattr(small_layers, "_kernel", lambda backend, _: backend)  # the reference has no native one
    monkeypatch.setattr(small_layers, "_SHAPES", ((64, 64),))
    found = small_layers.measure(is_quick=True)
    assert len(found) == 3
    assert all(
        set(layer["calls"]) == {"kernel", "backend", "forward with out=", "forward without out="} for layer in found
    )


def test_sentences_to_train_choose_and_judge_by_are_others() -> None:
    """No sentence of MiniLM's benchmark is in two of: training, choice of the steps, judgement."""
    choosing, judged = embeddings.halves()
    training = embeddings.training_sentences()
    assert min(len(choosing), len(judged)) >= 100
    assert len({*training, *choosing, *judged}) == len({*training}) + len(choosing) + len(judged)


def test_stored_embeddings_are_those_of_the_page() -> None:
    """The table of sentence embeddings holds each stored row, and training in four bits reaches a cosine of 0.985."""
    result = json.loads((record.RESULTS / "embeddings.json").read_text(encoding="utf-8"))
    page = (record.RESULTS.parents[1] / "docs" / "models-from-files.md").read_text(encoding="utf-8")
    assert result["greatest_difference_to_transformers"] < 1e-5
    assert {row["format"] for row in result["rows"]} == {"nf4", "nvfp4"}
    for row in result["rows"]:
        assert f"| {row['format']} | {row['name']} | {row['mean_cosine']:.4f} | {row['least_cosine']:.4f} |" in page
        assert row["mean_cosine"] >= 0.985 or "trained" not in row["name"]


def test_figures_of_a_report(tmp_path: Path) -> None:
    """Of a report of pytest's, only tests that recorded figures are stored, with their seconds."""
    report = tmp_path / "report.xml"
    case = '<testcase name="{}" time="1.5">{}</testcase>'
    figures = '<properties><property name="loss" value="[1.25, 2]" /></properties>'
    report.write_text(f"<testsuites>{case.format('a', figures)}{case.format('b', '')}</testsuites>", encoding="utf-8")
    assert read_figures(report) == {"a": {"seconds": 1.5, "loss": [1.25, 2]}}
