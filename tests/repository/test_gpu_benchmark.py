"""The GPU benchmark without a GPU: verdicts, files, pictures and page, and a tiny run of every stage."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from benchmarks import record
from benchmarks.candidate import PEER, Calls, Candidate
from benchmarks.gpu import (
    command,
    dense,
    merged,
    ours,
    page,
    pictures,
    place,
    probe_time,
    products,
    report,
    stages,
    tree_tests,
    verdicts,
)
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.timing import Budget, Timed, sample_us
from benchmarks.verdict import lines
from benchmarks.weights import exact_value
from q4_conformance import run_cases
from q4_dequant_fallback import DequantFallback
from tests.support.gpu_results import LARGE, gpu_result

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "gpu" / "run.py"
HERE = place.Place(torch.device("cpu"), "interpreter", "interpreted")
TINY = Budget(2, 1.0)


def _missed(result: dict[str, Any]) -> set[str]:
    return {one.target.split(":")[0] for one in verdicts.judge(result) if not one.is_met}


def test_numbers_that_meet_every_target_are_said_to() -> None:
    """No verdict is missed, and each stage that has a target has one."""
    judged = verdicts.judge(gpu_result())
    assert {one.word for one in judged} == {"met"}
    assert len({one.target for one in judged}) == 8
    assert any("met" in line for line in lines(judged))


@pytest.mark.parametrize(
    ("changed", "target"),
    [
        ({"large": 12.0, "dense": 50.0}, "gemv, weights of 32 MB and more"),
        ({"dense": 32.0}, "gemv, large layers"),
        ({"small": 2.3}, "gemv, smaller weights"),
        ({"gemm": 126.0}, "gemm, M >= 512"),
        ({"quantiser": 61.0}, "quantiser"),
        ({"host": 12.1}, "host overhead per forward, outside graphs"),
        ({"probe": 151.0}, "self-probe, warm cache"),
        ({"failed": 1}, "contract cases"),
        ({"left": 1}, "contract cases"),
    ],
)
def test_one_number_flips_its_verdict(changed: dict[str, float], target: str) -> None:
    """A number just beyond a target misses that target and no other."""
    assert _missed(gpu_result(**changed)) == {target}


def test_ratios_are_those_of_the_stages_own_run() -> None:
    """A stage is judged by the yardsticks of the run that measured it, also in a file that was joined."""
    first, second = gpu_result(), gpu_result()
    slower = copy.deepcopy(second["runs"].popitem()[1])
    slower["limits"]["copy_gb_per_s"] = 8000.0
    second["runs"] = {"later": slower}
    second["stages"] = {"quantiser": second["stages"]["quantiser"] | {"run": "later"}}
    result = merged.merge([first, second])
    assert set(result["runs"]) == {"later", *first["runs"]}
    assert _missed(result) == {"quantiser"}
    assert merged.merge([first])["stages"] == first["stages"]


def test_a_tiny_run_meets_and_misses_nothing_but_cases() -> None:
    """Times of an interpreter are no times: only whether the cases passed is judged."""
    judged = verdicts.judge(gpu_result(host=99.0) | {"is_tiny": True})
    assert {one.target.split(":")[0] for one in judged} == {"contract cases"}


def test_a_stage_that_broke_is_not_judged() -> None:
    """What a stage did not come to is no verdict; the error is told apart."""
    result = gpu_result()
    result["stages"]["gemv"] = {"run": result["stages"]["gemm"]["run"], "seconds": 1.0, "error": "RuntimeError: no"}
    result["stages"]["cases"] = {"run": result["stages"]["gemm"]["run"], "seconds": 1.0, "error": "RuntimeError: no"}
    assert not {one.target for one in verdicts.judge(result) if one.target.startswith(("gemv", "contract"))}
    assert "RuntimeError: no" in "\n".join(report.lines(result, verdicts.judge(result)))


def test_results_of_two_devices_are_not_joined() -> None:
    """Numbers of one device say nothing of another."""
    other = gpu_result()
    other["device"]["name"] = "NVIDIA GB10"
    with pytest.raises(merged.DeviceMismatchError, match="GB10"):
        merged.merge([gpu_result(), other])


def test_without_yardsticks_nothing_is_met() -> None:
    """Where cuBLAS or the empty kernel was not measured, the verdict says so."""
    result = gpu_result()
    next(iter(result["runs"].values()))["limits"]["empty_us"] = None
    for one in result["stages"]["gemm"]["tables"]:
        del one["calls"][dense.NAME]
    words = {one.target.split(":")[0]: one.word for one in verdicts.judge(result)}
    assert words["gemv, smaller weights"] == words["gemm, M >= 512"] == "not measured"


def test_crossovers_name_the_fastest_path_at_each_m() -> None:
    """Paths that were measured alone are compared by rows."""
    found = verdicts.crossovers(gpu_result())
    assert found == [{"shape": [*LARGE], "format": "nf4", "fastest_by_rows": {"64": "gemm", "512": "dense"}}]


def test_the_report_has_everything() -> None:
    """Refusals, what was left out, failures and paths that don't run are printed."""
    result = gpu_result(failed=2)
    result["stages"]["gemm"]["tables"][0]["does_not_run"] = {"nf4 exact, path gemv": "too many rows"}
    result["stages"]["probe"]["error"] = "RuntimeError: it broke"
    text = "\n".join(report.lines(result, verdicts.judge(result)))
    for words in ("it says why", "28672x8192", "TC-09/a", "too many rows", "it broke", "4,000.0 GB/s", "3 passed"):
        assert words in text, words


def test_pictures_are_drawn_from_the_result(tmp_path: Path) -> None:
    """Each picture is made from a result alone, and none where its stage is missing."""
    draws: dict[str, Callable[[dict[str, Any], Path], Path | None]] = {
        "gemv": pictures.draw_gemv,
        "gemm": pictures.draw_gemm,
    }
    for name, draw in draws.items():
        path = draw(gpu_result(), tmp_path / f"{name}.png")
        assert path is not None
        assert path.stat().st_size > 10_000
        assert draw(gpu_result() | {"stages": {}}, tmp_path / "none.png") is None


def test_the_page_is_that_of_the_results() -> None:
    """docs/gpu.md says what the stored result files say, and nothing else."""
    assert page.PAGE.read_text(encoding="utf-8") == page.text_of(record.RESULTS)


def test_the_page_says_when_nothing_ran(tmp_path: Path) -> None:
    """Without a result file it says so; with one it names the device, each target and the cases."""
    assert "Not yet run on hardware" in page.text_of(tmp_path)
    result = gpu_result(gemm=126.0)
    result["verdicts"] = [one.to_json() for one in verdicts.judge(result)]
    (tmp_path / "gpu-nvidia-h200.json").write_text(json.dumps(result), encoding="utf-8")
    (tmp_path / "gpu-nvidia-h200-gemv.png").write_bytes(b"")
    text = page.text_of(tmp_path)
    assert "Not yet run" not in text
    assert "NVIDIA H200 (sm_90)" in text
    assert "| gemm, M >= 512: 0.80 of bf16 cuBLAS | 0 of 1 | 0.794 |" in text
    assert "| nf4-cuda, nf4 | 100 | 90 | 0 | 10 | 0 | 0 |" in text
    assert "gpu-nvidia-h200-gemv.png" in text


def test_samples_are_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate gets its samples, each over all turns and the products in one turn."""
    calls: list[str] = []
    timed = []
    for name in ("a", "b"):
        turns = Calls([lambda name=name: calls.append(name)] * 3, products=2)  # type: ignore[misc]  # bound
        candidate = Candidate(name, "torch", PEER, "bf16", "bf16", 64, lambda *_, turns=turns: turns)
        timed.append(Timed(candidate, turns, HERE))
    monkeypatch.setattr("benchmarks.gpu.timing.elapsed_us", lambda call, count, _: (call(), 60.0 * count)[1])
    sample_us(timed, Budget(5, 1.0))
    assert [one.us for one in timed] == [[10.0] * 5] * 2
    assert calls.count("a") == calls.count("b") == 3 * 5


@pytest.fixture
def reference_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference stand for the backends that need a GPU."""
    monkeypatch.setenv("Q4_BENCH_BACKENDS", "dequant-fallback")
    ours.registry.cache_clear()


@pytest.mark.usefixtures("reference_measured")
def test_a_wrong_answer_ends_its_stage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are off are never timed: the stage reports the fault, and the next stage runs."""
    monkeypatch.setattr(ours, "exact_value", lambda weight: exact_value(weight) * 1.01)
    work = stages.Work(HERE, Deadline(60), is_tiny=True)
    broken, sound = stages.STAGES["gemv"].guarded(work), stages.STAGES["overhead"].guarded(work)
    assert "WrongAnswerError" in broken["error"]
    assert "NMSE" in broken["error"]
    assert len(sound["layers"]) == 4


@pytest.mark.usefixtures("reference_measured")
def test_overhead_and_probe_are_measured_with_fp4_activations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend has FP4 paths, what the host adds and what a first layer costs are measured for these as well."""
    monkeypatch.setattr(ours, "precisions_of", lambda backend: [ours.EXACT, ours.FP4])
    asked: list[str] = []
    own = ours.session

    def noted(backend: str, there: place.Place, precision: str = ours.EXACT, **named: Any) -> q4.Session:
        asked.append(precision)
        return own(backend, there, ours.EXACT, **named)

    monkeypatch.setattr(ours, "session", noted)
    found = stages.STAGES["overhead"].guarded(stages.Work(HERE, Deadline(60), is_tiny=True))
    assert {"nvfp4 64x128", "nvfp4 64x128 fp4"} <= {layer["name"] for layer in found["layers"]}
    assert asked.count(ours.FP4) == asked.count(ours.EXACT) == 4
    layers = probe_time.first_layers(HERE)["layers"]
    assert layers["nvfp4 fp4"]["probe_ms"] > 0
    assert len(layers) == 2 * len([name for name in layers if name.endswith(" fp4")])


def _gradients(monkeypatch: pytest.MonkeyPatch, factor: float) -> dict[str, Any]:
    """Run the stage of input gradients by a backend that computes them, wrong by a factor."""

    def computes(self: DequantFallback, prepared: q4.Prepared, grad: Any, out: Any, *, path: str) -> None:
        out.copy_(factor * grad.double() @ q4.dequantize(self.export(prepared), torch.float64))

    own = DequantFallback.check

    def check(self: DequantFallback, request: q4.Request) -> q4.Support:
        precision = q4.Precision.W4A16
        path = q4.KernelPath("own", (1, None), q4.PathKind.KERNEL, precision, q4.Tier.GENERIC)
        return q4.Support.yes([path], native_state="") if request.op == "input_gradient" else own(self, request)

    declared = attrs.evolve(DequantFallback().capabilities, ops={"linear", "input_gradient"})
    monkeypatch.setattr(DequantFallback, "capabilities", declared)
    monkeypatch.setattr(DequantFallback, "check", check)
    monkeypatch.setattr(DequantFallback, "input_gradient", computes, raising=False)
    if factor != 1.0:
        monkeypatch.setattr("q4core.probes.runner.probe_path", lambda *_: q4.ProbeResult(None, 0.0, 0.0))
    return stages.STAGES["gradient"].guarded(stages.Work(HERE, Deadline(60), is_tiny=True))


@pytest.mark.usefixtures("reference_measured")
def test_input_gradients_are_measured_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends' own gradients are timed with cuBLAS, those without one reported, and no wrong one is timed."""
    nothing = stages.STAGES["gradient"].guarded(stages.Work(HERE, Deadline(60), is_tiny=True))
    assert [set(table["calls"]) for table in nothing["tables"]] == [{dense.NAME}] * 2
    assert all("input_gradient" in why for why in nothing["refused"].values())
    assert len(nothing["refused"]) == 2
    ours.registry.cache_clear()
    found = _gradients(monkeypatch, 1.0)
    assert [table["rows"] for table in found["tables"]] == [1, 17]
    for table in found["tables"]:
        assert set(table["calls"]) == {dense.NAME, "nf4 exact", "nvfp4 exact"}
        assert all(call["median"] > 0 for call in table["calls"].values())


@pytest.mark.usefixtures("reference_measured")
def test_a_wrong_input_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is off by a hundredth ends its stage."""
    assert "NMSE" in _gradients(monkeypatch, 1.01).get("error", "nothing")


@pytest.mark.usefixtures("reference_measured")
def test_what_there_is_no_time_for_is_reported() -> None:
    """After the deadline nothing is begun, and the result says what was left out."""
    work = stages.Work(HERE, Deadline(0), is_tiny=True)
    for name in ("gemv", "gemm", "gradient", "overhead", "probe"):
        assert stages.STAGES[name].guarded(work)["left_out"], name
    found = stages.STAGES["cases"].guarded(work)
    assert not any(one["passed"] for one in found["reports"].values())


@pytest.mark.usefixtures("reference_measured")
def test_single_paths_are_measured_where_they_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is measured in its rows alone, a dense path in all; one that does not run is reported with these."""
    kinds = {"dequant_matmul": (1, q4.PathKind.KERNEL), "another": (99, q4.PathKind.DEQUANT)}
    kinds["narrow"] = (99, q4.PathKind.KERNEL)
    offered = [
        q4.KernelPath(name, (low, None), kind, q4.Precision.W4A16, q4.Tier.GENERIC)
        for name, (low, kind) in kinds.items()
    ]
    monkeypatch.setattr(ours.Made, "paths", lambda _: offered)
    linear = DequantFallback.linear

    def picky(self: DequantFallback, *args: Any, path: str, **named: Any) -> None:
        if path == "another":
            raise ValueError("not for so many rows")
        linear(self, *args, path=path, **named)

    monkeypatch.setattr(DequantFallback, "linear", picky)
    shape = products.Table((64, 128), (17,), frozenset({"nf4"}), has_paths=True)
    found = products.measure((shape,), HERE, TINY, Deadline(60))["tables"][0]
    assert set(found["calls"]) == {dense.NAME, "nf4 exact", "nf4 exact, path dequant_matmul"}
    assert found["does_not_run"] == {"nf4 exact, path another": "ValueError: not for so many rows"}


def test_nothing_runs_without_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU the command ends with 2 and says what to do; a dry run shows what there is; unknown stages too."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert command.main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all((f"stage {name}" in shown) is stage.is_default for name, stage in stages.STAGES.items())
    assert "backend nf4-cuda" in shown
    assert command.main(["gemvs"]) == 2
    assert "gemvs" in capsys.readouterr().err


def test_a_broken_stage_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage is written when it ends; one that raises is reported, by the exit status as well."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen: list[set[str]] = []

    def breaks(work: stages.Work) -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    def looks(work: stages.Work) -> dict[str, Any]:
        seen.append(set(json.loads((tmp_path / "gpu-interpreter.json").read_text())["stages"]))
        return {"left_out": []}

    monkeypatch.setattr(stages, "STAGES", {"a": stages.Stage("breaks", breaks), "b": stages.Stage("looks", looks)})
    monkeypatch.setattr(stages, "native_states", lambda _: {})
    assert command.main(["--out", str(tmp_path)]) == 1
    assert seen == [{"a"}]
    result = json.loads((tmp_path / "gpu-interpreter.json").read_text())
    assert result["stages"]["a"]["error"] == "RuntimeError: no such kernel"
    assert "no such kernel" in capsys.readouterr().out
    assert command.main(["--out", str(tmp_path / "again"), "--from", str(tmp_path / "gpu-interpreter.json")]) == 1


def test_tests_that_need_a_gpu_are_run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files without such a test are not even imported; a failure is reported in the stage's result."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_other.py").write_text("import a_package_that_is_not_there\n")
    (folder / "test_gpu.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_a():\n    pass\n@pytest.mark.gpu\ndef test_b():\n    assert 0\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: a"]\n')
    monkeypatch.setattr(tree_tests, "_ROOT", tmp_path)
    found = tree_tests.run(Deadline(60))["folders"]["tests"]
    assert (found["passed"], found["exit_status"]) == (False, 1)
    assert "1 failed, 1 passed" in found["output"]
    assert tree_tests.run(Deadline(0))["left_out"] == ["tests"]


def test_a_report_is_summed_up() -> None:
    """Counts, failures and what did not run are stored."""
    from benchmarks.gpu.cases import summary  # noqa: PLC0415  # next to its test

    stored = summary(run_cases("dequant-fallback", ["nf4"], only=["TC-09/bias"]), 1.0)
    assert (stored["passed"], stored["cases"], stored["counts"], stored["not_run"]) == (
        True,
        6,
        {"pass": 6},
        0,
    )
    assert stored["passed_by_fallback"] == 6


BARE = """
import importlib.abc, importlib.metadata, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"hypothesis", "matplotlib", "sklearn", "typer", "gguf"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
find = importlib.metadata.MetadataPathFinder.find_distributions

def without_ours(*arguments, **options):
    return (found for found in find(*arguments, **options) if not found.metadata["Name"].startswith("q4"))

importlib.metadata.MetadataPathFinder.find_distributions = without_ours
"""
"""Makes a ``sitecustomize`` of a machine with few packages, where none of ours is installed."""


def _bare(folder: Path) -> dict[str, str]:
    """Return the environment of a process on such a machine; our packages are found in the tree alone."""
    (folder / "sitecustomize.py").write_text(BARE)
    left_out = {"TRITON_INTERPRET", "PYTHONPATH", "PYTEST_ADDOPTS", "Q4_PLUGIN_MODULES"}
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    here = os.pathsep.join([str(folder), *(path for path in sys.path if path)])
    return environment | {"PYTHONPATH": here, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.slow
def test_a_source_tree_is_enough(tmp_path: Path) -> None:
    """Every stage runs from the tree, wherever it is started, where none of our packages is installed."""
    environment = _bare(tmp_path)
    environment |= {"TRITON_INTERPRET": "1", "Q4_BENCH_BACKENDS": "dequant-fallback", "Q4_BENCH_COMMIT": "named"}
    names = [name for name, stage in stages.STAGES.items() if stage.is_default and name != "tests"]
    command_line = [sys.executable, str(RUN), *names, "--only", "TC-09/bias/nf4", "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run(command_line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu-interpreter.json").read_text())
    assert set(result["stages"]) == set(names)
    assert not [name for name, stage in result["stages"].items() if "error" in stage]
    assert result["environment"]["commit"] == "named"
    assert result["is_tiny"]
    assert len(result["stages"]["gemv"]["tables"]) == 2
    assert {"nf4 exact", dense.NAME} <= set(result["stages"]["gemv"]["tables"][0]["calls"])
    assert result["stages"]["cases"]["reports"]["dequant-fallback, nf4"]["passed"]
    assert result["stages"]["probe"]["runs"]["warm"]["layers"]["nf4"]["probe_ms"] > 0
    assert "checks the plumbing" in done.stdout


@pytest.mark.soak
@pytest.mark.interpreted
def test_both_plugins_are_measured(tmp_path: Path) -> None:
    """In Triton's interpreter the kernels of both plugins go through the same run, every path of gemm alone as well."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    command_line = [sys.executable, str(RUN), "gemv", "gemm", "quantiser", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command_line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu-interpreter.json").read_text())
    gemv, gemm = result["stages"]["gemv"]["tables"][0], result["stages"]["gemm"]["tables"][0]
    assert {"nf4 exact", "int4 g128 exact", "nvfp4 exact"} <= set(gemv["calls"])
    alone = {name.split(", path ")[1] for name in gemm["calls"] if ", path " in name}
    assert alone == {"gemm_w4a16", "dequant_w4a16"}
    assert not gemm["does_not_run"]
    quantised = {call["format"] for call in result["stages"]["quantiser"]["calls"].values()}
    assert quantised == {"nvfp4", "mxfp4"}
    facts = result["backends"]["nf4-cuda"]["formats"]["nf4"]
    assert all(path.endswith(", interpreted)") for path in facts["paths"])


@pytest.mark.slow
@pytest.mark.soak
def test_few_packages_are_enough(tmp_path: Path) -> None:
    """Without matplotlib, Hypothesis and others a dry run works, and each test that needs a GPU is collected."""
    environment = _bare(tmp_path)

    def output(arguments: list[str]) -> str:
        done = subprocess.run(arguments, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "stage tests" in output([sys.executable, str(RUN), "--dry-run"])
    with_tests = [folder for folder in tree_tests.FOLDERS if tree_tests.files_of(folder)]
    assert set(with_tests) >= {"plugins/triton-kernels/tests", "plugins/nvfp4-native/tests", "tests"}
    for folder in with_tests:
        listed = output([*tree_tests.command(tree_tests.files_of(folder)), "--collect-only"])
        assert "::test_" in listed, listed
