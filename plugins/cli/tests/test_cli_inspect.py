"""``q4 inspect``: what a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

import q4core as q4
from q4_cli.app import run
from q4_cli.inspect import dense_totals
from tests.support.checkpoints import write_iq2_s
from tests.support.commands import AMBIGUOUS, MODEL, NF4, answer, say

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_directory")


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


def test_inspect_shows_problems_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose keys fit two dialects is shown with its problem, as text and as one document, and ends with 2."""
    record = answer(capsys, "inspect", AMBIGUOUS, status=2)
    assert record["error"]["code"] == "schema"
    assert [problem["code"] for problem in record["problems"]] == ["ambiguous"]
    assert record["layers"][0]["shape"] == [128, 64]
    assert "modelopt-nvfp4" in record["layers"][0]["dialect"]
    assert run(["inspect", str(AMBIGUOUS)]) == 2
    captured = capsys.readouterr()
    assert "128×64" in captured.out
    assert captured.err.startswith("error [schema]")
    assert answer(capsys, "inspect", AMBIGUOUS, "--dialect", "modelopt-nvfp4")["problems"] == []


@pytest.mark.parametrize("command", ["inspect", "explain"])
def test_layers_that_nothing_reads_are_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GGUF file of IQ2_S alone ends with 2, naming dialect, layers and what is missing."""
    path = tmp_path / "iq2_s.gguf"
    write_iq2_s(path, layers=2)
    error = answer(capsys, command, path, status=2)["error"]
    assert error["code"] == "schema"
    assert run([command, str(path)]) == 2
    for text in (error["message"], capsys.readouterr().err):
        assert "2 layers (blk.0.attn_q, blk.1.attn_q) must be of a type that has packed kernels" in text
        assert "got 'IQ2_S'" in text


@pytest.mark.parametrize("command", ["inspect", "explain"])
def test_a_dense_file_says_what_packs_it(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all tensors are dense there is nothing to run, which is no fault, and the way to pack them is named."""
    save_file({"a.weight": torch.ones(64, 64)}, tmp_path / "dense.safetensors")
    assert "no 4-bit layer; `q4 quantize IN OUT --format nf4` packs" in say(
        capsys, command, tmp_path / "dense.safetensors"
    )


def test_dense_totals_count_by_dtype() -> None:
    """Dense tensors are counted by dtype, the most bytes first."""
    infos = [
        q4.TensorInfo(torch.float32, (4,)),
        q4.TensorInfo(torch.bfloat16, (100,)),
        q4.TensorInfo(torch.float32, (2, 3)),
    ]
    assert [(row["dtype"], row["count"], row["nbytes"]) for row in dense_totals(infos)] == [
        ("bfloat16", 1, 200),
        ("float32", 2, 40),
    ]
