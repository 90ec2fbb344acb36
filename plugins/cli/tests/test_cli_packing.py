"""``q4 quantize`` and ``q4 convert``: what they write, what they keep, and what they refuse."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import q4core as q4
from q4_cli.app import run
from q4_cli.packing import make_recipe, split_tensors
from tests.support.commands import answer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.parametrize(
    ("format_name", "dialect"),
    [("nf4", "bitsandbytes"), ("fp4", "bitsandbytes"), ("nvfp4", "modelopt-nvfp4"), ("mxfp4", "torchao-mxfp4-linear")],
)
def test_quantize_writes_what_the_codec_makes(
    format_name: str, dialect: str, dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are those of the reference codec, the rest is copied bit for bit, and the table has the true error."""
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


def test_quantize_packs_each_tensor_once(
    dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing is the work, so each tensor is packed while it is written, and at no other time."""
    packed: list[tuple[int, ...]] = []
    quantize = q4.quantize

    def counting(dense: torch.Tensor, *words: Any, **options: Any) -> q4.PackedWeight:
        packed.append(tuple(dense.shape))
        return quantize(dense, *words, **options)

    monkeypatch.setattr("q4core.quantize", counting)
    out = tmp_path / "packed.safetensors"
    record = answer(capsys, "quantize", dense_file, out, "--format", "nf4", "--include", "lm_head")
    shapes = [tuple(item["shape"]) for item in record["layers"]]
    assert len(shapes) == 4
    assert [shape for shape in packed if shape in shapes] == shapes


def test_a_run_that_fails_leaves_a_folder_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the weights are in place a folder keeps its tokenizer; afterwards it has the new one, and nothing else."""
    source, out = tmp_path / "model", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
        save_file(
            {"a.weight": torch.ones(8, 64), "b.weight": torch.full((8, 64), torch.nan)}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text(folder.name)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    words = ["quantize", source, out, "--format", "nf4", "--force"]
    answer(capsys, *words, "--strict", status=2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with monkeypatch.context() as patch:
        patch.setattr("q4core.save_checkpoint", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
        assert run([*map(str, words)]) == 143
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    answer(capsys, *words)
    assert {path.name for path in out.iterdir()} == before.keys()
    assert (out / "tokenizer.json").read_text() == "model"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_plugin_is_no_fault_of_it(
    dense_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    """A signal that arrives while a reader opens a file ends the command with its usual status."""
    monkeypatch.setattr("q4_safetensors.reader.SafetensorsReader.open", lambda *_: signal.raise_signal(number))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    try:
        assert run(["inspect", str(dense_file)]) == status
    finally:
        signal.signal(signal.SIGINT, before)
    assert "checkpoint reader" not in capsys.readouterr().err


def test_quantize_keeps_what_it_must_and_says_so(
    dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be packed, or was skipped, stays dense with its reason; ``--strict`` refuses instead."""
    out = tmp_path / "packed.safetensors"
    record = answer(capsys, "quantize", dense_file, out, "--format", "nvfp4", "--skip", "lm_head", "--skip", "nothing*")
    dense = {item["name"]: item["reason"] for item in record["dense"]}
    assert "multiple of" in dense["model.layers.1.odd.weight"]
    assert "--skip" in dense["lm_head.weight"]
    assert "embedding" in dense["model.embed_tokens.weight"]
    assert "model.layers.0.norm.weight" in dense
    strict = tmp_path / "strict.safetensors"
    assert (
        answer(capsys, "quantize", dense_file, strict, "--format", "nvfp4", "--strict", status=2)["error"]["code"]
        == "format"
    )
    assert not strict.exists()


@pytest.mark.parametrize("option", [(), ("--include", "lm_head"), ("--include", "lm_head", "--skip", "lm_head")])
def test_quantize_leaves_the_head_dense(
    option: tuple[str, ...], dense_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output head stays dense, as in ``Q4Config(format=…)``, unless ``--include`` names it."""
    record = answer(capsys, "quantize", dense_file, tmp_path / "packed.safetensors", "--format", "nf4", *option)
    dense = {item["name"]: item["reason"] for item in record["dense"]}
    assert ("lm_head.weight" in dense) is ("--skip" in option or not option)
    assert option or dense["lm_head.weight"] == "the output head (--include packs it)"


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
    """A dialect whose global divides gets dividing globals by default."""
    out = tmp_path / "folder"
    record = answer(capsys, "quantize", dense_file, out, "--format", "nvfp4", "--dialect", "compressed-tensors-nvfp4")
    assert record["scale_kind"] == "e4m3_div"
    with q4.open(out) as checkpoint:
        assert checkpoint["model.layers.1.q_proj"].scale_kind is q4.ScaleKind.E4M3_DIV


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
    assert answer(capsys, "inspect", out)["totals"]["layers"] == 3


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
    """A dividing global does not fit a multiplying dialect: refused, and written with ``--requantize``."""
    packed, out = tmp_path / "packed.safetensors", tmp_path / "out.safetensors"
    answer(capsys, "quantize", dense_file, packed, "--format", "nvfp4", "--dialect", "compressed-tensors-nvfp4")
    words = ["convert", packed, out, "--dialect", "modelopt-nvfp4"]
    assert answer(capsys, *words, status=2)["error"]["code"] == "dialect"
    assert not out.exists()
    answer(capsys, *words, "--requantize")
    assert out.exists()


def test_split_follows_names_shapes_and_patterns() -> None:
    """Matrices named ``<module>.weight`` are packed; ``--skip`` wins over ``--include``, which wins over embeddings."""
    matrix, vector = q4.TensorInfo(torch.bfloat16, (8, 64)), q4.TensorInfo(torch.bfloat16, (8,))
    infos = {
        "a.weight": matrix,
        "a.bias": vector,
        "norm.weight": vector,
        "embed_tokens.weight": matrix,
        "wte.weight": matrix,
        "table": matrix,
        "float8.weight": q4.TensorInfo(torch.float8_e4m3fn, (8, 64)),
        "empty.weight": q4.TensorInfo(torch.bfloat16, (0, 64)),
        "model.layers.0.gate.weight": matrix,
    }
    chosen, dense, idle = split_tensors(infos, skip=["gate", "none"], include=["wte", "gate"])
    assert chosen == ["a.weight", "wte.weight"]
    assert idle == ["none"]
    notable = {item.name for item in dense if item.notable}
    assert notable == {"embed_tokens.weight", "float8.weight", "model.layers.0.gate.weight"}
    assert len(dense) + len(chosen) == len(infos)


def test_recipe_takes_a_writing_dialect() -> None:
    """A format gets its usual dialect; one that nothing writes is refused with a reason."""
    options: dict[str, Any] = {"dialect": None, "scale_kind": None, "options": {"block_size": None}, "module": "a"}
    assert make_recipe("nf4", **options).dialect.name == "bitsandbytes"
    assert make_recipe("NVFP4", **options).dialect.name == "modelopt-nvfp4"
    with pytest.raises(q4.DialectError) as caught:
        make_recipe("q8_0", **options)
    assert caught.value.value == "q8_0"


@pytest.mark.parametrize(
    ("words", "shown", "absent"),
    [
        (("quantize", "dense.safetensors", "x", "--format", "nf4", "--dialect", "modelopt-nvfp4"), "layers.1", "probe"),
        (("quantize", "dense.safetensors", "x", "--format", "nf4", "--block-size", "7"), "layers.1", "probe"),
        (("convert", "divided.safetensors", "x", "--dialect", "modelopt-nvfp4"), "--requantize", "With lossy=True"),
        (("explain", "dense.safetensors", "--m", "1:99999999999"), "2147483648", "LOW <= HIGH,"),
        (("explain", "dense.safetensors", "--m", "3:2"), "LOW <= HIGH", "probe"),
        (
            ("explain", "dense.safetensors", "--precision", "rough"),
            "--precision must be one of 'auto', 'exact'",
            "activation",
        ),
        (
            ("explain", "dense.safetensors", "--compute-path", "fast"),
            "--compute-path must be one of 'auto', 'kernel_only'",
            "compute_path",
        ),
        (("explain", "dense.safetensors", "--device", "toaster"), "--device must be", "configuration"),
        (("generate", "dense.safetensors", "--prompt", "a", "--dtype", "int8"), "--dtype must be", "compute_dtype"),
        (("convert", "missing.safetensors", "x", "--dialect", "wrong"), "missing.safetensors", "wrong"),
    ],
)
@pytest.mark.usefixtures("dense_file")
def test_messages_say_what_the_user_typed_and_has(
    words: tuple[str, ...], shown: str, absent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors name the user's own layers and options, and no word that only the code has."""
    dense = torch.randn(6, 68, generator=torch.Generator().manual_seed(1))
    if words[1] == "divided.safetensors":
        weight = q4.quantize(dense[:, :64], "nvfp4", scale_kind=q4.ScaleKind.E4M3_DIV)
        q4.save_checkpoint(words[1], {"proj": weight}, dialect="compressed-tensors-nvfp4")
    message = answer(capsys, *words, status=2)["error"]["message"]
    assert shown in message
    assert absent not in message
