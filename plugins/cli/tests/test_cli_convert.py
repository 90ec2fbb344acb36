"""``q4 convert``: refusals before anything is written, losses that are listed, runs that were killed, and memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import q4core as q4
from q4_cli.app import run
from q4_cli.files import Target, identity_of
from tests.support.commands import ROOT, answer, say
from tests.support.footprint import run_child
from tests.support.interpreter import run_interpreter

pytestmark = pytest.mark.usefixtures("own_directory")

KILLING = """
import os, signal, sys
from q4_cli.app import run
from q4_safetensors.shard import Shard

real, left = Shard.add, [int(sys.argv[1])]

def add(self, *arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    return real(self, *arguments)

Shard.add = add
sys.exit(run(sys.argv[3:]))
"""
MEASURE = """
import json, sys
from tests.support.footprint import PeakAnonymous, anonymous
from q4_cli.app import run
assert run(["convert", *sys.argv[3:], "--dialect", "compressed-tensors-int4"]) == 0
before = anonymous()
with PeakAnonymous() as peak:
    status = run(["convert", *sys.argv[1:3], "--dialect", "compressed-tensors-int4", "--shard-size", "200MB"])
print(json.dumps({"status": status, "grown": peak.bytes - before}))
"""


def packed(count: int, format_name: str = "nvfp4", **options: Any) -> dict[str, q4.PackedWeight]:
    """Return layers with random weights."""
    random = torch.Generator().manual_seed(5)
    return {
        f"model.layers.{index}.up": q4.quantize(torch.randn(32, 128, generator=random), format_name, **options)
        for index in range(count)
    }


def folder(path: Path, count: int = 6) -> Path:
    """Write a model folder of NVFP4 layers, with a tokenizer and what says how they are packed."""
    dense = {"model.norm.weight": torch.ones(128), "model.embed_tokens.weight": torch.randn(64, 128)}
    q4.save_checkpoint(path, packed(count), dialect="modelopt-nvfp4", dense=dense, config={"model_type": "llama"})
    (path / "tokenizer.json").write_text("{}")
    (path / "hf_quant_config.json").write_text("{}")
    (path / "quantize_config.json").write_text("{}")
    return path


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a folder."""
    return {item.name: item.read_bytes() for item in path.iterdir()}


def kill(*words: object, after: int, by: str = "SIGKILL") -> int:
    """Run a command that gets a signal before it stores its n-th tensor, and return its status."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_interpreter(["-c", KILLING, str(after), by, *map(str, words)], env=variables).returncode


def test_a_folder_says_how_it_is_packed_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config.json has the target's entry, the tokenizer is copied, and files on the old packing are not."""
    out = tmp_path / "out"
    answer(capsys, "convert", folder(tmp_path / "in"), out, "--dialect", "torchao-nvfp4-swizzled")
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "torchao"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are killed by a signal here")
@pytest.mark.parametrize("by", ["SIGKILL", "SIGTERM"])
def test_a_killed_run_is_continued(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OUT is absent until it is whole; the second run checks nothing again, and the bytes are a first run's."""
    source, out, fresh = folder(tmp_path / "in"), tmp_path / "out", tmp_path / "fresh"
    options = ["--dialect", "torchao-nvfp4-linear", "--shard-size", "9KB"]
    assert kill("convert", source, out, *options, after=9, by=by) in {-9, 143}
    assert not out.exists()
    assert any(tmp_path.glob(".out.q4-partial"))
    assert run(["convert", str(source), str(out), *options]) == 0
    assert "going on where the last run ended" in capsys.readouterr().err
    answer(capsys, "convert", source, fresh, *options)
    assert contents(out) == contents(fresh)
    assert len(contents(out)) > 4
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are killed by a signal here")
def test_another_source_starts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source that changed since, or other options, make another result: nothing of the old run is used."""
    source, out = folder(tmp_path / "in"), tmp_path / "out"
    options = ["--dialect", "torchao-nvfp4-linear", "--shard-size", "9KB"]
    kill("convert", source, out, *options, after=9)
    folder(source, count=5)
    record = answer(capsys, "convert", source, out, *options)
    assert len(record["layers"]) == 5
    with q4.open(out) as found, q4.open(source, dialect="modelopt-nvfp4") as wanted:
        assert all(torch.equal(q4.dequantize(found[name]), q4.dequantize(wanted[name])) for name in wanted)
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle is a message, and neither OUT nor a temporary file is there."""
    source, out = folder(tmp_path / "in"), tmp_path / "out"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("q4_safetensors.shard.Shard.finish", full)
    error = answer(capsys, "convert", source, out, "--dialect", "torchao-nvfp4-linear", status=1)["error"]
    assert "No space" in error["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_all_refused_layers_are_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a byte is written, every layer that does not fit is named with its rule, and both ways out."""
    source = tmp_path / "mixed"
    layers = packed(2, "int4") | {f"other.{name}": item for name, item in packed(3, "int4", symmetric=True).items()}
    q4.save_checkpoint(source, layers, dialect="compressed-tensors-int4", config={})
    monkeypatch.setattr("q4core.save_checkpoint", lambda *_, **__: pytest.fail("written"))
    error = answer(capsys, "convert", source, tmp_path / "out", "--dialect", "modelopt-int4", status=2)["error"]
    assert {*error["details"]["layers"]} == {"model.layers.0.up", "model.layers.1.up"}
    assert "'model.layers.0.up' and 1 other" in error["what"]
    assert "--requantize" in error["hint"]
    assert "--skip GLOB" in error["hint"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [("bitsandbytes", "gptq", "packed again"), ("compressed-tensors-nvfp4", "modelopt-nvfp4", "rounded")],
)
def test_losses_are_listed(
    source: str, target: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--requantize`` writes what does not fit, and says of each layer how far off it is."""
    layers = packed(3, "nf4")
    if how == "rounded":
        layers = packed(3, scale_kind=q4.ScaleKind.E4M3_DIV)
    q4.save_checkpoint(tmp_path / "in", layers, dialect=source, config={})
    words = ["convert", tmp_path / "in", tmp_path / "out", "--dialect", target]
    assert answer(capsys, *words, status=2)["error"]["details"]["layers"].keys() == layers.keys()
    record = answer(capsys, *words, "--requantize")
    with q4.open(tmp_path / "in") as before, q4.open(tmp_path / "out") as after:
        for item in record["layers"]:
            old, new = (q4.dequantize(one[item["name"]], torch.float32).double() for one in (before, after))
            error = float(torch.linalg.vector_norm(new - old) / torch.linalg.vector_norm(old))
            assert item["relative_rms_error"] == pytest.approx(error, rel=1e-5, abs=1e-9)
            assert item["max_error"] == pytest.approx(float((new - old).abs().max()), rel=1e-5, abs=1e-9)
            assert item["how"] == how
            assert item["relative_rms_error"] > 0.01 or how == "rounded"
    shown = say(capsys, *words, "--requantize", "--force")
    assert "model.layers.2.up" in shown
    assert how in shown
    assert "3 layers with a loss" in shown


def test_skipped_layers_are_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--skip`` writes a layer's exact values as a dense matrix; a glob that matches nothing is noted."""
    out = tmp_path / "out.safetensors"
    options = ["--dialect", "torchao-nvfp4-linear", "--skip", "*.2.up"]
    record = answer(capsys, "convert", folder(tmp_path / "in"), out, *options)
    assert [item["name"] for item in record["layers"] if item["how"] == "dense"] == ["model.layers.2.up"]
    assert torch.equal(
        load_file(out)["model.layers.2.up.weight"],
        q4.dequantize(packed(6)["model.layers.2.up"], torch.float32),
    )


def test_integers_of_other_names_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Float zero points that are whole, and signed codes, become the integers that they are, without a loss."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    q4.save_checkpoint(first, packed(2, "int4", symmetric=True), dialect="gptq", config={})
    answer(capsys, "convert", first, second, "--dialect", "hqq")
    record = answer(capsys, "convert", second, third, "--dialect", "modelopt-int4")
    assert {item["how"] for item in record["layers"]} == {"exact"}
    with q4.open(first) as one, q4.open(third) as two:
        assert all(
            torch.equal(q4.dequantize(one[name], torch.float32), q4.dequantize(two[name], torch.float32))
            for name in one
        )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--dialect", "gtpq"), "Did you mean 'gptq'?"),
        (("--dialect", "quark-mxfp4"), "read only"),
        (("--dialect", "gptq", "--format", "int4"), "--requantize"),
    ],
)
def test_options_are_checked_first(
    words: tuple[str, ...], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong names are answered with the closest one, before anything is read or written."""
    message = answer(capsys, "convert", folder(tmp_path / "in"), tmp_path / "out", *words, status=2)["error"]["message"]
    assert shown in message


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted by Linux")
def test_memory_is_bounded(tmp_path: Path) -> None:
    """400 MB in 12 layers and a dense matrix of 134 MB take less than twice the largest and 300 MB more."""
    n, k = 8192, 8192
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int32, generator=random)
    layer = {
        "qweight": codes,
        "qzeros": torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((k // 128, n), 0.01, dtype=torch.float16),
        "g_idx": torch.arange(k, dtype=torch.int32) // 128,
    }
    entry = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    for name, count in (("large", 12), ("small", 1)):
        path = tmp_path / name
        path.mkdir()
        tensors = {f"layers.{index}.up.{key}": item.clone() for index in range(count) for key, item in layer.items()}
        save_file(tensors | {"embed.weight": torch.zeros(n, k, dtype=torch.bfloat16)}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"quantization_config": entry}))
    del tensors, codes, layer
    found = run_child(MEASURE, tmp_path / "large", tmp_path / "out", tmp_path / "small", tmp_path / "warm")
    assert found["status"] == 0
    assert found["grown"] < 2 * (2 * n * k) + 300e6


def test_a_gguf_file_is_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Integers go into a GGUF file's own types, and come back as the layers that they were; the name is checked."""
    source, file, back = tmp_path / "in", tmp_path / "out.gguf", tmp_path / "back.safetensors"
    layers = packed(3, "int4", symmetric=True, block_size=32)
    halves = {
        name: weight.map_tensors(lambda item: item.half() if item.is_floating_point() else item)
        for name, weight in layers.items()
    }
    q4.save_checkpoint(source, halves, dialect="compressed-tensors-int4")
    (source / "config.json").unlink()
    answer(capsys, "convert", source, file, "--dialect", "gguf", "--from", "compressed-tensors-int4")
    assert answer(capsys, "inspect", file)["layers"][0]["type"] == "Q4_0"
    answer(capsys, "convert", file, back, "--dialect", "compressed-tensors-int4")
    before, after = load_file(source / "model.safetensors"), load_file(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    error = answer(capsys, "convert", source, tmp_path / "folder", "--dialect", "gguf", status=2)["error"]
    assert "*.gguf" in error["message"]


def test_layers_that_gguf_can_not_hold_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scales that float16 lacks are refused by layer, rounded on request, and packed into the format that is named."""
    source = tmp_path / "in.safetensors"
    q4.save_checkpoint(source, packed(2, "nf4"), dialect="bitsandbytes")
    words = ["convert", source, tmp_path / "out.gguf", "--dialect", "gguf"]
    error = answer(capsys, *words, status=2)["error"]
    assert len(error["details"]["layers"]) == 2
    assert "`q4 convert --requantize --format Q4_K`" in error["message"]
    for format_name in ("q8_0", "q4_0", "mxfp4", "iq4_nl"):
        record = answer(capsys, *words, "--requantize", "--format", format_name, "--force")
        assert {(item["how"], item["to"]) for item in record["layers"]} == {("packed again", format_name)}
        assert all(item["relative_rms_error"] < {"q8_0": 0.01}.get(format_name, 0.2) for item in record["layers"])


def parts_of(path: Path, rows: int = 32) -> list[Path]:
    """Write a GGUF model in several files."""
    layers = {name: q4.quantize(torch.randn(rows, 64), "q4_0") for name in ("a", "b", "c")}
    q4.save_checkpoint(path, layers, dialect="gguf", max_shard_bytes=1)
    return sorted(path.parent.glob(f"{path.stem}-*"))


def test_parts_of_in_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that OUT would get under the names of IN's are refused, with ``--force`` too, and IN stays whole."""
    first, *others = parts_of(tmp_path / "m.gguf")
    before = contents(tmp_path)
    words = ["convert", first, "m.gguf", "--dialect", "gguf", "--shard-size", "1KB"]
    for more in ([], ["--force"]):
        error = answer(capsys, *words, *more, status=2)["error"]
        assert "IN" in error["message"]
        assert contents(tmp_path) == before
    for part in others:
        answer(capsys, "convert", first, part, "--dialect", "gguf", "--force", status=2)
        assert contents(tmp_path) == before


def test_parts_of_another_model_are_replaced_by_force_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--force`` they are refused; with it, files of the old model that the new one lacks are removed."""
    parts_of(tmp_path / "m.gguf")
    (tmp_path / "m-x.gguf").write_bytes(b"mine")
    before = contents(tmp_path)
    (tmp_path / "in").mkdir()
    source = parts_of(tmp_path / "in" / "n.gguf", rows=16)[0]
    words = ["convert", source, "m.gguf", "--dialect", "gguf", "--shard-size"]
    (tmp_path / "in").rename(tmp_path.parent / f"{tmp_path.name}-in")
    words[1] = tmp_path.parent / f"{tmp_path.name}-in" / source.name
    assert "--force" in answer(capsys, *words, "1B", status=2)["error"]["message"]
    assert contents(tmp_path) == before
    answer(capsys, *words, "1GB", "--force")
    assert {item.name for item in tmp_path.iterdir()} == {"m.gguf", "m-x.gguf"}
    answer(capsys, *words, "1B", "--force")
    assert len([*tmp_path.glob("m-0*.gguf")]) == 3
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_shards_of_in_are_never_replaced(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OUT can't be a shard of IN, by whatever command, and ``--force`` changes nothing about that."""
    source = tmp_path / "in"
    layers = packed(3) if command == "convert" else {}
    dense = {f"layers.{index}.weight": torch.randn(64, 64) for index in range(3)}
    q4.save_checkpoint(source, layers, dialect="modelopt-nvfp4", dense=dense, config={}, max_shard_bytes=20_000)
    shards, before = sorted(source.glob("*.safetensors")), contents(source)
    assert len(shards) > 1
    words = ["--dialect", "torchao-nvfp4-linear"] if command == "convert" else ["--format", "nf4"]
    answer(capsys, command, source, shards[0], *words, "--force", status=2)
    assert contents(source) == before


def test_external_data_of_in_is_never_replaced(tmp_path: Path) -> None:
    """A file that an ONNX model names is one of its own; another file of the same folder is not."""
    (tmp_path / "m.onnx").write_bytes(b"location" + b"w.safetensors")
    for name in ("w.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(q4.CheckpointError, match="another one than IN"):
        Target.check("w.safetensors", tmp_path / "m.onnx", force=True)
    assert Target.check("other.safetensors", tmp_path / "m.onnx", force=True).existed


def test_a_folder_has_nothing_on_the_old_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--force`` into a folder removes small files that say how the model there was packed, and no others."""
    source, out = folder(tmp_path / "in"), folder(tmp_path / "out")
    (out / "notes.md").write_text("mine")
    answer(capsys, "convert", source, out, "--dialect", "torchao-nvfp4-linear", "--force")
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", "notes.md"}


def test_a_folder_name_may_have_a_dot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of ``--help`` names such a folder; the name of a weight file of another kind is refused."""
    source = folder(tmp_path / "Qwen3-0.6B-NVFP4")
    answer(capsys, "convert", source, "Qwen3-0.6B-torchao", "--dialect", "torchao-nvfp4-linear")
    assert (tmp_path / "Qwen3-0.6B-torchao" / "config.json").is_file()
    for name in ("x.gguf", "x.pt"):
        answer(capsys, "convert", source, name, "--dialect", "torchao-nvfp4-linear", status=2)


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "recipe.yaml"])
def test_small_files_belong_to_what_is_continued(name: str, tmp_path: Path) -> None:
    """A run does not go on after a file next to IN changed that says how IN is packed."""
    source = folder(tmp_path / "in") / "model.safetensors"
    (source.parent / name).write_text("{}")
    before = identity_of(source)
    assert identity_of(source) == before
    (source.parent / name).write_text('{"bits": 4}')
    assert identity_of(source) != before


def test_external_data_belong_to_what_is_continued(tmp_path: Path) -> None:
    """A run does not go on after a file of an ONNX model's external data changed."""
    source, data = tmp_path / "model.onnx", tmp_path / "weights"
    source.write_bytes(b"model")
    data.write_bytes(b"first")
    before = identity_of(source)
    data.write_bytes(b"other data")
    assert identity_of(source) != before


@pytest.mark.parametrize("order", [(256, 576), (576, 256)])
def test_a_layer_does_not_decide_on_others(
    order: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K decides which type a layer gets, whatever the layers before it became."""
    layers = {f"l{index}": q4.quantize(torch.randn(8, columns), "nf4") for index, columns in enumerate(order)}
    q4.save_checkpoint(tmp_path / "in.safetensors", layers, dialect="bitsandbytes")
    answer(capsys, "convert", "in.safetensors", "out.gguf", "--dialect", "gguf", "--requantize")
    found = {item["name"]: item["type"] for item in answer(capsys, "inspect", "out.gguf")["layers"]}
    assert found == {f"l{index}": "Q4_K" if columns == 256 else "Q4_1" for index, columns in enumerate(order)}


def test_a_continued_run_packs_as_it_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that a killed run left has each layer's recipe, and nothing else is tried."""
    layers = {f"l{columns}": q4.quantize(torch.randn(8, columns), "nf4") for columns in (256, 576)}
    q4.save_checkpoint(tmp_path / "in.safetensors", layers, dialect="bitsandbytes")
    words = ["convert", "in.safetensors", "out.gguf", "--dialect", "gguf", "--requantize"]

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("q4_gguf.writer._Contents.add_layer", stop)
        run(words)
    path = tmp_path / ".out.gguf.q4-partial" / "plan.json"
    plan = json.loads(path.read_text())
    assert plan["recipes"].keys() == layers.keys()
    plan["recipes"]["l256"] = {"format": "q8_0"}
    path.write_text(json.dumps(plan))
    capsys.readouterr()
    answer(capsys, *words)
    found = {item["name"]: item["type"] for item in answer(capsys, "inspect", "out.gguf")["layers"]}
    assert found == {"l256": "Q8_0", "l576": "Q4_1"}


def test_skipped_experts_are_one_dense_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All experts of a tensor of GGUF become dense, or none; a part of them is refused before anything is written."""
    names = [f"blk.0.ffn_up_exps.{number}" for number in range(12)]
    layers = {name: q4.quantize(torch.randn(8, 64), "q4_0") for name in names}
    q4.save_checkpoint(tmp_path / "in.gguf", layers, dialect="gguf")
    words = ["convert", "in.gguf", "out.gguf", "--dialect", "gguf", "--skip"]
    error = answer(capsys, *words, "*_exps.3", status=2)["error"]["message"]
    assert "--skip" in error
    assert "1 of 12" in error
    assert {item.name for item in tmp_path.iterdir()} == {"in.gguf"}
    answer(capsys, *words, "*_exps.*")
    with q4.open("out.gguf") as opened:
        assert not [*opened]
        wanted = torch.stack([q4.dequantize(layers[name], torch.float32) for name in names])
        assert torch.equal(opened.dense["blk.0.ffn_up_exps.weight"], wanted)


@pytest.mark.parametrize(("dialect", "known"), [("gguf", "Q4_K, Q6_K"), ("gptq", "int4")])
def test_an_unknown_format_is_refused_first(
    dialect: str, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message lists what the target is written in, though every layer would fit as it is."""
    q4.save_checkpoint(tmp_path / "in", packed(1, "int4", symmetric=True), dialect="gptq", config={})
    out = "out.gguf" if dialect == "gguf" else "out"
    words = ["convert", "in", out, "--dialect", dialect, "--requantize", "--format"]
    for name in ("Q4_L", "nf4"):
        error = answer(capsys, *words, name, status=2)["error"]
        assert "--format" in error["message"]
        assert known in error["message"]


def test_the_format_asked_for_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--requantize --format`` changes layers that would fit as they are, but those of that type, and lists losses."""
    layers = {"a": q4.quantize(torch.randn(8, 256), "q4_0"), "b": q4.quantize(torch.randn(8, 256), "q8_0")}
    q4.save_checkpoint(tmp_path / "in.gguf", layers, dialect="gguf")
    words = ["convert", "in.gguf", "out.gguf", "--dialect", "gguf", "--requantize", "--force", "--format"]
    for name in ("Q8_0", "Q6_K", "Q4_K", "q4_0"):
        record = answer(capsys, *words, name)
        assert {item["type"] for item in answer(capsys, "inspect", "out.gguf")["layers"]} == {name.upper()}
        assert [item["how"] for item in record["layers"]] == [
            "exact" if name == "q4_0" else "packed again",
            "exact" if name == "Q8_0" else "packed again",
        ]
        assert record["layers"][0]["relative_rms_error"] > 0 or name == "q4_0"
