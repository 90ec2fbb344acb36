"""Which files make up a checkpoint: folders, indices and their shards."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from tests.support.checkpoints import save, save_shards, tensors_of_two

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("files", [[], ["a.safetensors", "b.safetensors"], ["a.bin"]])
def test_folder_without_one_checkpoint_is_refused(files: list[str], tmp_path: Path) -> None:
    """A folder must leave no doubt which file is meant."""
    for name in files:
        save(tmp_path / name, tensors_of_two())
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(tmp_path)
    assert caught.value.where == str(tmp_path)


def test_folder_with_a_file_and_an_index_is_refused(tmp_path: Path) -> None:
    """One whole file and an index in the same folder may be two versions: the caller must say which."""
    index = save_shards(tmp_path, tensors_of_two())
    file = save(tmp_path / "model.safetensors", tensors_of_two())
    with pytest.raises(q4.CheckpointError, match=re.escape("model.safetensors, model.safetensors.index.json")):
        q4.open(tmp_path)
    assert len(q4.open(index)) == len(q4.open(file)) == 2


def test_missing_path_is_refused(tmp_path: Path) -> None:
    """A path that is not there is a CheckpointError that names it."""
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(tmp_path / "none.safetensors")
    assert caught.value.where == str(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "a\\x.safetensors", "x.bin", "", 3, None]
)
def test_shard_outside_the_folder_is_refused(shard: object, tmp_path: Path) -> None:
    """An index may name safetensors files next to it, and nothing else."""
    save(tmp_path / "x.safetensors", tensors_of_two())
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(inside)
    assert (caught.value.name, caught.value.value) == ("weight_map['a.weight']", shard)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """A shard that is not there is an error that names it and the tensor that needs it."""
    index = save_shards(tmp_path, tensors_of_two())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(index)
    assert caught.value.value == "model-00002-of-00002.safetensors"


def test_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    """The index and the shards' headers must agree."""
    index = save_shards(tmp_path, tensors_of_two())
    text = json.loads(index.read_text(encoding="utf-8"))
    text["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(text), encoding="utf-8")
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(index)
    assert caught.value.name == "weight_map['ghost.weight']"


def test_tensor_in_two_shards_needs_the_index(tmp_path: Path) -> None:
    """A tensor that two shards hold is the one that the index names; if it names neither, that is an error."""
    one, two = torch.zeros(3), torch.ones(3)
    save(tmp_path / "1.safetensors", {"x": one, "p": torch.zeros(1)})
    save(tmp_path / "2.safetensors", {"x": two, "q": torch.zeros(1)})
    index = tmp_path / "model.safetensors.index.json"
    homes = {"p": "1.safetensors", "q": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": {**homes, "x": "2.safetensors"}}), encoding="utf-8")
    assert torch.equal(q4.open(index).dense["x"], two)
    index.write_text(json.dumps({"weight_map": homes}), encoding="utf-8")
    with pytest.raises(q4.CheckpointError, match="tensor 'x'"):
        q4.open(index)


def test_metadata_of_shards_is_united(tmp_path: Path) -> None:
    """Lists and objects of the shards' metadata are joined; objects that contradict each other are refused."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}), encoding="utf-8")
    first = {"list": '["a"]', "object": '{"k": {"a": 1}}', "text": "one", "same": "s"}
    save(tmp_path / "1.safetensors", {"x": torch.ones(1)}, first)
    second = {"list": '["b", "a"]', "object": '{"k": {"b": 2}}', "text": "two", "same": "s", "own": "o"}
    save(tmp_path / "2.safetensors", {"y": torch.ones(1)}, second)
    metadata = q4.open(index).metadata
    assert json.loads(metadata["list"]) == ["a", "b"]
    assert json.loads(metadata["object"]) == {"k": {"a": 1, "b": 2}}
    assert (metadata["text"], metadata["same"], metadata["own"]) == ("one", "s", "o")
    save(tmp_path / "2.safetensors", {"y": torch.ones(1)}, {"object": '{"k": {"a": 2}}'})
    with pytest.raises(q4.CheckpointError, match=r"object\.k\.a"):
        q4.open(index)
