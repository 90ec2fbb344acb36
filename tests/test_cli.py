"""The ``q4`` command: what each of its commands answers, in text and as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
import typer
from fakes import FakeBackend, plugin, registry
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import q4core as q4
from q4core.cli import main
from q4core.cli.app import build_app
from q4core.cli.contents import dense_totals
from q4core.cli.output import clean, to_plain
from q4core.cli.packing_plan import make_recipe, split_tensors
from q4core.cli.survey import environment_facts, survey_backends
from q4core.cli.table import Column, bytes_text, elide, print_table
from q4core.cli.timing import Timing, copies_for, require_right, time_calls
from q4core.dialect import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
NF4 = ROOT / "tests/golden/bitsandbytes/nf4-b64-double.safetensors"
MODEL = ROOT / "tests/golden/models/compressed-tensors-nvfp4"
AMBIGUOUS = ROOT / "tests/golden/modelopt/nvfp4-whole-tiles.safetensors"


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test run in a folder of its own, with the plugins that are installed."""
    monkeypatch.chdir(tmp_path)
    yield
    q4.reset_registry()


@pytest.fixture
def dense_file(tmp_path: Path) -> Path:
    """Return a small dense model: two layers that can be packed, one that can't, and what always stays dense."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": random(32, 64),
        "model.layers.0.q_proj.weight": random(64, 128).to(torch.bfloat16),
        "model.layers.0.q_proj.bias": random(64),
        "model.layers.0.norm.weight": random(64),
        "model.layers.1.q_proj.weight": random(48, 128),
        "model.layers.1.odd.weight": random(16, 40),
        "lm_head.weight": random(32, 64),
        "positions": torch.arange(10),
    }
    path = tmp_path / "dense.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    """Run a command with ``--json`` and return the one document that it printed."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == status
    document = capsys.readouterr().out
    return json.loads(document)


def say(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Run a command and return what it printed on stdout."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == status
    return capsys.readouterr().out


def process(*arguments: object, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("Q4_")}
    given = dict(variables or {})
    path = os.pathsep.join(filter(None, [str(ROOT), given.pop("PYTHONPATH", ""), environment.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "q4core.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**environment, "PYTHONPATH": path, **given},
    )


# -- the command itself


def test_version_names_what_matters() -> None:
    """``--version`` says the versions of q4core, torch and Python on one line."""
    result = CliRunner().invoke(build_app(q4.Registry([])), ["--version"])
    assert result.exit_code == 0
    assert result.output.count("\n") == 1
    for version in (q4.__version__, torch.__version__, ".".join(map(str, sys.version_info[:3]))):
        assert version in result.output


def test_help_lists_every_command() -> None:
    """``--help`` lists our commands and those that plugins bring."""
    result = CliRunner().invoke(build_app(), ["--help"])
    assert result.exit_code == 0
    for command in ("doctor", "inspect", "explain", "quantize", "convert", "bench", "generate"):
        assert command in result.output


@pytest.mark.parametrize("command", ["doctor", "inspect", "explain", "quantize", "convert", "bench"])
def test_every_command_takes_json_and_has_help(command: str) -> None:
    """Every command has a help text and the option ``--json``."""
    result = CliRunner().invoke(build_app(q4.Registry([])), [command, "--help"], env={"TERMINAL_WIDTH": "120"})
    assert result.exit_code == 0
    assert "--json" in result.output


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """``q4`` alone is ``q4 --help``."""
    assert "doctor" in say(capsys)


@pytest.mark.slow
def test_importing_the_package_imports_neither_typer_nor_rich() -> None:
    """The command line's libraries are imported when the command runs, not before."""
    code = "import sys, q4core.cli; print(sorted({'typer', 'rich', 'q4core.cli.app'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without typer or rich the command says what to install, and ends with 2."""
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["doctor"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert missing in captured.err
    assert "pip install 'q4core[cli]'" in captured.err


@pytest.mark.slow
def test_module_is_the_command() -> None:
    """``python -m q4core.cli`` is the same command, in a process of its own too."""
    done = process("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "q4")


def test_plugins_add_commands_and_can_take_none_away(capsys: pytest.CaptureFixture[str]) -> None:
    """A plugin's command joins ours; one that takes our name, or that can't be built, is left out with a word."""

    def q4_commands(app: typer.Typer) -> None:
        def hello() -> None:
            typer.echo("hello")

        def doctor() -> None:
            typer.echo("an impostor")

        def broken(value: int) -> None:
            del value

        broken.__annotations__["value"] = "NoSuchType"
        for command in (hello, doctor, broken):
            app.command()(command)

    app = build_app(q4.Registry([("noisy", plugin(q4_commands=q4_commands))]))
    told = capsys.readouterr().err
    assert "'doctor'" in told
    assert "'broken'" in told
    runner = CliRunner()
    assert runner.invoke(app, ["hello"]).output == "hello\n"
    assert "impostor" not in runner.invoke(app, ["doctor", "--help"]).output
    assert runner.invoke(app, ["broken"]).exit_code != 0


# -- doctor


def test_doctor_tells_machine_plugins_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    """``doctor --json`` has versions, machine, plugins, and the reference's verdict on each format."""
    record = answer(capsys, "doctor")
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["cpu_count"] == os.cpu_count()
    assert {"dequant-fallback", "gguf", "nn"} <= {item["name"] for item in record["plugins"]}
    verdicts = {item["format"]: item for item in record["verdicts"] if item["backend"] == "dequant-fallback"}
    assert verdicts.keys() >= q4.BUILTIN_FORMATS.keys()
    assert all(item["serves"] == "all" for item in verdicts.values())
    assert verdicts["nf4"]["paths"][0]["m"] == [1, None]
    assert record["problems"] == []


def test_doctor_text_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 60 columns no line is longer than the terminal, and no format's name is cut."""
    monkeypatch.setenv("COLUMNS", "60")
    text = say(capsys, "doctor")
    assert max(map(len, text.splitlines())) <= 60
    assert "dequant-fallback" in text
    assert "mxfp4" in text


@pytest.mark.slow
def test_doctor_survives_broken_plugins(tmp_path: Path) -> None:
    """Plugins that raise at import, print, or write to the descriptor are shown; the document stays alone and whole."""
    (tmp_path / "q4_broken.py").write_text("raise RuntimeError('boom at import')")
    (tmp_path / "q4_noisy.py").write_text(
        "import os, sys\nprint('printed')\nsys.stdout.flush()\n"
        "import q4core\n"
        "@q4core.hookimpl\ndef q4_backends():\n    os.write(1, b'written')\n    raise ValueError('no backends')\n"
    )
    variables = {"Q4_PLUGIN_MODULES": "q4_broken,q4_noisy", "PYTHONPATH": str(tmp_path)}
    done = process("doctor", "--json", variables=variables)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    plugins = {item["name"]: item for item in record["plugins"]}
    assert plugins["q4_broken"]["state"] == "failed"
    assert "boom at import" in plugins["q4_broken"]["errors"][0]
    assert "no backends" in plugins["q4_noisy"]["errors"][0]
    assert any("boom at import" in problem for problem in record["problems"])
    assert "Traceback" not in done.stderr
    strict = process("doctor", "--strict", variables=variables)
    assert strict.returncode == 1
    assert "boom at import" in strict.stdout


def test_doctor_tells_variables_and_what_is_wrong_with_them() -> None:
    """Illegal values are told by name and rule, and names that nothing reads with the closest one that is read."""
    variables, problems = environment_facts({"Q4_COMPUTE_PATH": "fastest", "Q4_BACKND": "x", "HOME": "/"})
    assert variables == {"Q4_BACKND": "x", "Q4_COMPUTE_PATH": "fastest"}
    assert any("Q4_BACKND" in problem and "Q4_BACKEND" in problem for problem in problems)
    assert any("Q4_COMPUTE_PATH" in problem and "kernel_only" in problem for problem in problems)
    assert environment_facts({"Q4_COMPUTE_PATH": "kernel-only"}) == ({"Q4_COMPUTE_PATH": "kernel-only"}, [])


def test_survey_gives_paths_or_every_reason() -> None:
    """A backend serves all M, some M with the reason, or none with all the reasons."""
    short = attrs.evolve(
        q4.KernelPath("short", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, q4.Tier.GENERIC), m=(1, 8)
    )
    refusing = [q4.Reason(q4.ReasonCode.ARCH, "too old"), q4.Reason(q4.ReasonCode.NOT_BUILT, "no code")]
    found = survey_backends(
        registry(
            FakeBackend("all"),
            FakeBackend("some", paths=(short,)),
            FakeBackend("none", reasons=tuple(refusing)),
            FakeBackend("nf4-only", formats={"nf4"}),
            reference=False,
        ),
        [torch.device("cpu")],
        None,
    )
    verdicts = {(item.backend, item.format): item for item in found}
    assert verdicts["all", "int4"].serves == "all"
    some = verdicts["some", "q4_1"]
    assert (some.serves, some.paths[0]["m"], some.reasons[0]["code"]) == ("some", [1, 8], "shape")
    none = verdicts["none", "nvfp4"]
    assert (none.serves, [reason["code"] for reason in none.reasons]) == ("none", ["arch", "not_built"])
    assert verdicts["nf4-only", "nf4"].serves == "all"
    assert [reason["code"] for reason in verdicts["nf4-only", "fp4"].reasons] == ["format"]


# -- inspect


def test_inspect_agrees_with_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    """Names, formats, shapes, scale kinds and bytes are those of the weights themselves."""
    record = answer(capsys, "inspect", NF4)
    with q4.open(NF4) as checkpoint:
        weight = checkpoint["proj"]
        (layer,) = record["layers"]
        assert layer["name"] == "proj"
        assert (layer["format"], layer["dialect"]) == ("nf4", "bitsandbytes")
        assert tuple(layer["shape"]) == weight.shape
        assert layer["block_size"] == weight.block_size
        assert layer["scale_kind"] == weight.scale_kind.value == "double_quant"
        assert layer["bits_per_weight"] == round(8 * layer["nbytes"] / (weight.out_features * weight.in_features), 4)
        assert set(layer["keys"].values()) <= set(load_file(NF4))
        dense = {item["name"]: item for item in record["dense"]["tensors"]}
        assert dense.keys() == set(checkpoint.dense)
    assert record["totals"]["layers"] == 1
    whole = sum(item.numel() * item.element_size() for item in load_file(NF4).values())
    assert layer["nbytes"] + sum(item["nbytes"] for item in dense.values()) == whole


def test_inspect_opens_folders_and_shows_one_row_per_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """A model folder is opened by its config; each layer has its row, and the totals come last."""
    text = say(capsys, "inspect", MODEL)
    names = answer(capsys, "inspect", MODEL)["layers"]
    assert names
    for item in names:
        assert sum(line.startswith(item["name"] + " ") for line in text.splitlines()) == 1
    assert text.splitlines()[-2].startswith(f"{len(names)} packed layers")


def test_inspect_shows_what_is_wrong_beside_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose keys fit two dialects is shown with its problem, as text and as one document, and ends with 2."""
    record = answer(capsys, "inspect", AMBIGUOUS, status=2)
    assert record["error"]["code"] == "schema"
    assert [problem["code"] for problem in record["problems"]] == ["ambiguous"]
    assert record["layers"][0]["shape"] == [128, 64]
    assert "modelopt-nvfp4" in record["layers"][0]["dialect"]
    assert main(["inspect", str(AMBIGUOUS)]) == 2
    captured = capsys.readouterr()
    assert "128×64" in captured.out
    assert captured.err.startswith("error [schema]")
    assert answer(capsys, "inspect", AMBIGUOUS, "--dialect", "modelopt-nvfp4")["problems"] == []


def test_dense_totals_count_by_dtype() -> None:
    """Dense tensors are counted by dtype, the most bytes first."""
    infos = [TensorInfo(torch.float32, (4,)), TensorInfo(torch.bfloat16, (100,)), TensorInfo(torch.float32, (2, 3))]
    assert [(row.dtype, row.count, row.nbytes) for row in dense_totals(infos)] == [
        ("bfloat16", 1, 200),
        ("float32", 2, 40),
    ]


# -- explain


def test_explain_groups_equal_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers with one answer share one block, ``--all`` repeats it, and JSON always has every layer."""
    record = answer(capsys, "explain", MODEL, "--device", "cpu")
    names = [item["layer"] for item in record["layers"]]
    assert len(names) > 2
    grouped, repeated = say(capsys, "explain", MODEL), say(capsys, "explain", MODEL, "--all")
    assert grouped.count("dequant_matmul") == 1
    assert repeated.count("dequant_matmul") == len(names)
    assert all(name in repeated for name in names)
    first = record["layers"][0]
    assert (first["backend"], first["path_name"], first["proven"]) == ("dequant-fallback", "dequant_matmul", False)
    assert first["paths"][0]["m"] == [1, None]


def test_explain_proves_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """``--prove`` prepares a layer of each kind, so that every answer is proven."""
    record = answer(capsys, "explain", MODEL, "--prove", "--m", "1:4")
    assert record["m"] == [1, 4]
    assert all(item["proven"] for item in record["layers"])


def test_explain_tells_why_nobody_may_serve(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no backend may serve, every rejection is told, on one document, and the command ends with 1."""
    record = answer(capsys, "explain", NF4, "--compute-path", "kernel_only", status=1)
    assert record["error"]["code"] == "backend_unavailable"
    (layer,) = record["layers"]
    assert layer["backend"] is None
    reasons = {item["backend"]: item["reasons"] for item in layer["rejections"]}
    assert reasons["dequant-fallback"][0]["code"] == "policy"
    assert "nobody" in say(capsys, "explain", NF4, "--compute-path", "kernel_only", status=1)


def test_explain_lists_rejections_when_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losers and their reasons are shown beside the winner."""
    reasons = (q4.Reason(q4.ReasonCode.DRIVER, "driver 1 is too old"),)
    backends = registry(FakeBackend("fast"), FakeBackend("unlucky", reasons=reasons))
    monkeypatch.setattr("q4core.cli.explain.default_registry", lambda: backends)
    record = answer(capsys, "explain", NF4)
    (layer,) = record["layers"]
    assert (layer["backend"], layer["path_name"]) == ("fast", "fake_gemm")
    codes = {item["backend"]: item["reasons"][0]["code"] for item in layer["rejections"]}
    assert codes == {"dequant-fallback": "outranked", "unlucky": "driver"}
    assert "driver 1 is too old" in say(capsys, "explain", NF4)


# -- quantize and convert


@pytest.mark.parametrize(
    ("format_name", "dialect"),
    [("nf4", "bitsandbytes"), ("fp4", "bitsandbytes"), ("nvfp4", "modelopt-nvfp4"), ("mxfp4", "torchao-mxfp4-linear")],
)
def test_quantize_writes_what_the_codec_makes(
    format_name: str, dialect: str, dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are those of the reference codec, the rest is copied bit for bit, and the table tells the true error."""
    out = tmp_path / "packed.safetensors"
    record = answer(capsys, "quantize", dense_file, out, "--format", format_name)
    assert record["dialect"].startswith(dialect.partition("-")[0])
    before = load_file(dense_file)
    packed = {item["name"]: item for item in record["layers"]}
    assert "model.layers.0.q_proj.weight" in packed
    assert "model.embed_tokens.weight" not in packed
    with q4.open(out, dialect=record["dialect"]) as checkpoint:
        assert set(checkpoint) == {name.removesuffix(".weight") for name in packed}
        assert set(checkpoint.dense) == before.keys() - packed.keys()
        for name, item in packed.items():
            weight = checkpoint[name.removesuffix(".weight")]
            dense = before[name]
            again = q4.quantize(dense, format_name, block_size=record["block_size"])
            values = q4.dequantize(weight, torch.float64)
            assert torch.equal(values, q4.dequantize(again, torch.float64))
            exact = dense.to(torch.float64)
            error = float(torch.linalg.vector_norm(exact - values) / torch.linalg.vector_norm(exact))
            assert item["relative_error"] == pytest.approx(error, rel=1e-5)
        for name in checkpoint.dense:
            assert torch.equal(checkpoint.dense[name], before[name])
            assert checkpoint.dense[name].dtype == before[name].dtype


def test_quantize_keeps_what_it_must_and_says_so(
    dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be packed, or was skipped, stays dense with its reason; ``--strict`` refuses instead."""
    out = tmp_path / "packed.safetensors"
    record = answer(capsys, "quantize", dense_file, out, "--format", "nvfp4", "--skip", "lm_head", "--skip", "nothing*")
    kept = {item["name"]: item["reason"] for item in record["kept"]}
    assert "multiple of" in kept["model.layers.1.odd.weight"]
    assert "--skip" in kept["lm_head.weight"]
    assert "embedding" in kept["model.embed_tokens.weight"]
    assert "model.layers.0.norm.weight" in kept
    strict = tmp_path / "strict.safetensors"
    assert (
        answer(capsys, "quantize", dense_file, strict, "--format", "nvfp4", "--strict", status=2)["error"]["code"]
        == "format"
    )
    assert not strict.exists()


def test_quantize_honours_its_options(dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Block size, scale kind, dialect and ``--include`` reach the file."""
    out = tmp_path / "packed.safetensors"
    options = ["--format", "nf4", "--block-size", "128", "--scale-kind", "double_quant", "--include", "*embed*"]
    record = answer(capsys, "quantize", dense_file, out, *options)
    assert (record["block_size"], record["scale_kind"]) == (128, "double_quant")
    with q4.open(out) as checkpoint:
        weight = checkpoint["model.embed_tokens"]
        assert (weight.block_size, weight.scale_kind) == (128, q4.ScaleKind.DOUBLE_QUANT)


def test_quantize_chooses_the_scale_kind_that_the_dialect_writes(
    dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dialect whose global divides gets dividing globals, without being told."""
    out = tmp_path / "folder"
    record = answer(capsys, "quantize", dense_file, out, "--format", "nvfp4", "--dialect", "compressed-tensors-nvfp4")
    assert record["scale_kind"] == "e4m3_div"
    with q4.open(out) as checkpoint:
        assert checkpoint["lm_head"].scale_kind is q4.ScaleKind.E4M3_DIV


def test_quantize_makes_a_whole_model_folder(
    dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder keeps its tokenizer, gets a config that says how it is packed, and may be split into shards."""
    source = tmp_path / "model"
    source.mkdir()
    dense_file.rename(source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"hidden_size": 64, "torch_dtype": "bfloat16"}))
    (source / "tokenizer.json").write_text("{}")
    (source / ".cache").write_text("not for others")
    out = tmp_path / "packed"
    answer(capsys, "quantize", source, out, "--format", "nf4", "--shard-size", "6KB")
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / ".cache").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"
    assert len(list(out.glob("*.safetensors"))) > 1
    assert answer(capsys, "inspect", out)["totals"]["layers"] == 4


def test_convert_keeps_every_code_and_scale(
    dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another dialect of the format holds the same numbers, and the way back gives the same bytes."""
    first, second, third = (tmp_path / f"{name}.safetensors" for name in ("first", "second", "third"))
    answer(capsys, "quantize", dense_file, first, "--format", "nvfp4", "--dialect", "modelopt-nvfp4")
    record = answer(capsys, "convert", first, second, "--dialect", "torchao-nvfp4-swizzled", "--from", "modelopt-nvfp4")
    assert (record["from"], record["dialect"]) == (["modelopt-nvfp4"], "torchao-nvfp4-swizzled")
    with q4.open(first, dialect="modelopt-nvfp4") as one, q4.open(second) as two:
        assert set(one) == set(two)
        for name in one:
            assert torch.equal(q4.dequantize(one[name], torch.float64), q4.dequantize(two[name], torch.float64))
    answer(capsys, "convert", second, third, "--dialect", "modelopt-nvfp4")
    before, after = load_file(first), load_file(third)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)), name


def test_convert_refuses_what_is_not_exact(
    dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dividing global does not fit a multiplying dialect: refused, and written with ``--lossy``."""
    packed, out = tmp_path / "packed.safetensors", tmp_path / "out.safetensors"
    answer(capsys, "quantize", dense_file, packed, "--format", "nvfp4", "--dialect", "compressed-tensors-nvfp4")
    words = ["convert", packed, out, "--dialect", "modelopt-nvfp4"]
    assert answer(capsys, *words, status=2)["error"]["code"] == "dialect"
    assert not out.exists()
    answer(capsys, *words, "--lossy")
    assert out.exists()


def test_split_follows_names_shapes_and_patterns() -> None:
    """Matrices named ``<module>.weight`` are packed; ``--skip`` wins over ``--include``, which wins over embeddings."""
    matrix, vector = TensorInfo(torch.bfloat16, (8, 64)), TensorInfo(torch.bfloat16, (8,))
    infos = {
        "a.weight": matrix,
        "a.bias": vector,
        "norm.weight": vector,
        "embed_tokens.weight": matrix,
        "wte.weight": matrix,
        "table": matrix,
        "float8.weight": TensorInfo(torch.float8_e4m3fn, (8, 64)),
        "empty.weight": TensorInfo(torch.bfloat16, (0, 64)),
        "model.layers.0.gate.weight": matrix,
    }
    chosen, kept, idle = split_tensors(infos, skip=["gate", "none"], include=["wte", "gate"])
    assert chosen == ["a.weight", "wte.weight"]
    assert idle == ["none"]
    notable = {item.name for item in kept if item.notable}
    assert notable == {"embed_tokens.weight", "float8.weight", "model.layers.0.gate.weight"}
    assert len(kept) + len(chosen) == len(infos)


def test_recipe_takes_a_writing_dialect() -> None:
    """A format gets its usual dialect; one that nothing writes is refused with a reason."""
    formats = q4.BUILTIN_FORMATS
    wishes: dict[str, Any] = {"dialect": None, "block_size": None, "scale_kind": None, "symmetric": False}
    assert make_recipe("nf4", formats=formats, **wishes).dialect.name == "bitsandbytes"
    assert make_recipe("NVFP4", formats=formats, **wishes).dialect.name == "modelopt-nvfp4"
    with pytest.raises(q4.DialectError) as caught:
        make_recipe("q8_0", formats=formats, **wishes)
    assert caught.value.value == "q8_0"


# -- bench


def test_bench_measures_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    """Each M has its samples, and every number that is shown follows from them."""
    words = ["bench", "--shape", "64x128", "--format", "nf4", "--m", "1,4", "--seconds", "0.02", "--device", "cpu"]
    record = answer(capsys, *words)
    assert [item["m"] for item in record["results"]] == [1, 4]
    assert record["machine"]["torch_threads"] == torch.get_num_threads()
    for item in record["results"]:
        samples = sorted(item["samples_us"])
        assert len(samples) >= 5
        assert samples[0] <= item["p10_us"] <= item["median_us"] <= item["p90_us"] <= samples[-1]
        assert item["packed_bytes_per_s"] == pytest.approx(item["packed_bytes"] / (item["median_us"] * 1e-6), rel=1e-6)
        share = item["packed_bytes_per_s"] / record["copy_bytes_per_s"]
        assert item["share_of_copy"] == pytest.approx(share, abs=1e-4)
        assert 0 <= item["error_over_bound"] <= 1
        assert item["backend"] == "dequant-fallback"
    assert "dequant_matmul" in say(capsys, *words)


def test_bench_takes_one_layer_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file, each kind of layer is measured once, with how many are like it; ``--layer`` names one."""
    words = ["bench", MODEL, "--m", "1", "--seconds", "0.01"]
    record = answer(capsys, *words)
    layers = answer(capsys, "inspect", MODEL)["layers"]
    assert sum(item["layers_like_it"] for item in record["results"]) == len(layers)
    name = layers[-1]["name"]
    assert [item["layer"] for item in answer(capsys, *words, "--layer", name)["results"]] == [name]


def test_bench_refuses_wrong_answers() -> None:
    """A path whose numbers are off is not timed; the error is a typed one with the ratio."""
    weight = q4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "nf4")
    with q4.Session(registry=registry()) as session:
        layer = session.linear(weight)
        path = layer.diagnostics().segments[0].path
        assert require_right(layer, weight, path, 3) <= 1
        twice = attrs.evolve(weight, scale=weight.scale * 1.001)
        with pytest.raises(q4.BackendError) as caught:
            require_right(layer, twice, path, 3)
    assert isinstance(caught.value.value, float)
    assert caught.value.value > 1


def test_timing_rotates_through_the_calls() -> None:
    """Every call gets its turn, at least five are measured, and quantiles are samples."""
    turns: list[int] = []
    calls = [lambda index=index: turns.append(index) for index in range(3)]
    timing = time_calls(calls, torch.device("cpu"), 1e-9)
    assert len(timing.samples_us) == 5
    assert turns[-5:] == [0, 1, 2, 0, 1]
    spread = Timing(samples_us=tuple(map(float, range(1, 11))))
    assert (spread.median_us, spread.quantile_us(0.1), spread.quantile_us(0.9)) == (5.5, 2.0, 10.0)


def test_copies_exceed_the_caches_and_fit_the_memory() -> None:
    """A small weight is copied until it exceeds the caches, a huge one is not copied, a warm one never."""
    assert copies_for(1 << 20, cold=True) * (1 << 20) >= 64 << 20
    assert copies_for(1 << 50, cold=True) == 1
    assert copies_for(1 << 20, cold=False) == 1


# -- output


def test_table_drops_columns_and_keeps_the_ends_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    """In a narrow terminal whole columns go, and it is said; then names lose part of their beginning."""
    columns = [Column("layer", elastic=True), Column("extra", drop=1), Column("bytes", "right")]
    rows = [["model.layers.17.self_attn.q_proj", "something long", "123,456"]]
    print_table(Console(width=40, file=sys.stdout), columns, rows)
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 40
    assert "17.self_attn.q_proj" in narrow
    assert "(too narrow for: extra)" in narrow
    print_table(Console(width=30, file=sys.stdout), columns, rows)
    narrower = capsys.readouterr().out
    assert max(map(len, narrower.splitlines())) <= 30
    assert "mod….self_attn.q_proj" in narrower
    print_table(Console(width=80, file=sys.stdout), columns, rows)
    wide = capsys.readouterr().out
    assert "model.layers.17.self_attn.q_proj  something long" in wide


@pytest.mark.parametrize("width", range(2, 40))
def test_elide_keeps_to_its_width(width: int) -> None:
    """A shortened name never exceeds its width, counts wide characters twice, and starts and ends as before."""
    for name in ("model.layers.17.self_attn.q_proj", "模型.层.十七.注意力.投影", "x"):
        short = elide(name, width)
        assert Console().measure(short).maximum <= width
        assert short == name or "…" in short


def test_values_become_plain_json() -> None:
    """Enums, dtypes, sets, paths, attrs classes and NaN become what JSON can say."""
    plain = to_plain(
        {
            "enum": q4.ComputePath.AUTO,
            "dtype": torch.bfloat16,
            "set": {2, 1},
            "path": Path("a"),
            "nan": float("nan"),
            "device": torch.device("cpu"),
            "reason": q4.Reason(q4.ReasonCode.ARCH, "old"),
        }
    )
    assert plain == {
        "enum": "auto",
        "dtype": "bfloat16",
        "set": [1, 2],
        "path": "a",
        "nan": None,
        "device": "cpu",
        "reason": {"code": "arch", "message": "old"},
    }


def test_control_characters_are_written_out() -> None:
    """A name can't steer the terminal."""
    assert clean("a\x1b[31mb\tc\u202e") == "a\\x1b[31mb\\tc\\u202e"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 42, "12.0 TiB")]
)
def test_bytes_are_told_in_binary_units(count: int, text: str) -> None:
    """Sizes are told with one digit after the point."""
    assert bytes_text(count) == text


# -- the documentation


COMMANDS: dict[str, list[str]] = {
    "doctor": [],
    "inspect": [str(NF4)],
    "explain": [str(NF4)],
    "quantize": ["dense.safetensors", "packed.safetensors", "--format", "nf4"],
    "convert": [str(NF4), "converted.safetensors", "--dialect", "bitsandbytes"],
    "bench": ["--shape", "16x64", "--format", "nf4", "--m", "1", "--seconds", "0.001"],
}


def section(command: str) -> str:
    """Return what the documentation says of a command."""
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    found: str = text.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_documentation_has_every_option(command: str) -> None:
    """Each option of each command stands in its section of ``docs/cli.md``, and no other one does."""
    group: Any = typer.main.get_command(build_app(q4.Registry([])))
    options = {name for item in group.commands[command].params for name in item.opts if name.startswith("--")}
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section(command)))
    assert options - {"--help"} <= told
    assert told - options <= {"--prove"}  # doctor points to it


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("dense_file")
def test_documentation_has_every_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The document's keys are those that the command's section lists."""
    record = answer(capsys, command, *COMMANDS[command])
    listed = section(command).partition("\nJSON: ")[2]
    listed = re.sub(r"\([^)]*\)", "", listed)
    assert list(record) == re.findall(r"`(\w+)`", listed)
