"""Checkpoints that are recognised and not read: named, never opened as if they held nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import q4core as q4

if TYPE_CHECKING:
    from pathlib import Path

MARLIN = {
    f"model.layers.{index}.{name}": tensor
    for index in range(3)
    for name, tensor in {
        "q_proj.qweight": torch.zeros(4, 128, dtype=torch.int32),
        "q_proj.scales": torch.ones(1, 64, dtype=torch.float16),
        "norm.weight": torch.ones(64),
    }.items()
}
BITSANDBYTES = {"proj.weight": torch.zeros(2048, 1, dtype=torch.uint8), "proj.weight.absmax": torch.ones(64)}


def model(folder: Path, tensors: dict[str, torch.Tensor], method: str | None) -> Path:
    """Write a model folder whose config names a quantisation method, or none."""
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {} if method is None else {"quantization_config": {"quant_method": method, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["gptq", "awq", None])
def test_recognised_layers_that_nothing_reads_are_an_error(
    method: str | None, has_dialects: bool, tmp_path: Path
) -> None:
    """The error names file, dialect, number of layers and what is missing, by config or by keys alone."""
    folder = model(tmp_path, MARLIN, method)
    with pytest.raises(q4.SchemaError) as caught:
        q4.open(folder)
    text = str(caught.value)
    assert ("marlin" if has_dialects else method or "gptq or awq") in text
    assert "3 layers" in text
    assert "nothing here reads it yet" in text
    assert str(folder) in text
    assert len(caught.value.schema.unsupported) == 3
    assert set(caught.value.schema.dense) == {name for name in MARLIN if "norm" in name}


def test_a_method_of_a_missing_plugin_is_reported_with_it(has_dialects: bool, tmp_path: Path) -> None:
    """The core alone says which package reads a file that bitsandbytes wrote; with that package, it is not named."""
    with pytest.raises(q4.SchemaError) as caught:
        q4.open(model(tmp_path, BITSANDBYTES, "bitsandbytes"))
    assert ("the package q4-dialects" in str(caught.value)) is not has_dialects


@pytest.mark.usefixtures("has_dialects")
def test_dense_weights_stay_dense(tmp_path: Path) -> None:
    """Floats are no packed layers, whatever config and names say, and integers are none without a method."""
    tensors = {"attention.qweight": torch.ones(8, 8), "a.weight": torch.ones(8, 8), "a.mask": torch.ones(8, 8).byte()}
    (tmp_path / "a").mkdir()
    assert len(q4.open(model(tmp_path / "a", tensors, None)).dense) == 3
    del tensors["a.mask"]
    assert len(q4.open(model(tmp_path, tensors, "gptq")).dense) == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: None, "does not exist"),
        (lambda path: (path.mkdir(), (path / "pytorch_model.bin").write_bytes(b"PK")), "pickles"),
        (lambda path: path.with_suffix(".bin").write_bytes(b"PK"), "does not exist"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{}")), "no weights"),
    ],
    ids=["empty file", "nothing", "folder of pickles", "another name", "folder without weights"],
)
def test_what_is_no_checkpoint_is_named(make: Any, said: str, tmp_path: Path) -> None:
    """The error says what the path is, and what to do about it."""
    path = tmp_path / "model.safetensors"
    make(path)
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(path)
    assert said in str(caught.value)
    assert caught.value.where == str(path)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["model.gguf", "model"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_file_cut_in_its_first_bytes(name: str, size: int, tmp_path: Path) -> None:
    """A file that ends before it says what it is is called cut, and not one that no reader knows."""
    path = tmp_path / name
    path.write_bytes((b"GGUF" + bytes([3, 0, 0, 0, 12]) + bytes(60))[:size])
    with pytest.raises(q4.CheckpointError, match=f"got '{size} bytes' .*download it again"):
        q4.open(path)


def test_a_pickle_is_named(tmp_path: Path) -> None:
    """A file of pickles is never opened; the error says how to write another one."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(q4.CheckpointError, match=r"pickle.*safetensors"):
        q4.open(path)
