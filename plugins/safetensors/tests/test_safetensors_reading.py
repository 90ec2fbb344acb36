"""Reading checkpoints: lazily, as views of the mapped file, and with every number checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import q4core as q4
from q4_safetensors.mapped import MappedFile
from tests.support.checkpoints import is_same, save, save_shards, tensors_of_two, trio


@pytest.mark.parametrize("how", ["file", "folder", "index", "folder of shards", "lone file of a folder"])
def test_every_way_to_name_a_checkpoint(how: str, tmp_path: Path) -> None:
    """A file, an index, and a folder with one or the other open to the same layers and tensors."""
    tensors = tensors_of_two()
    path = tmp_path
    if how in {"file", "folder"}:
        path = save(tmp_path / "model.safetensors", tensors)
    elif how == "lone file of a folder":
        save(tmp_path / "weights.safetensors", tensors)
    else:
        path = save_shards(tmp_path, tensors, 3)
    with q4.open(str(path) if how in {"file", "index"} else tmp_path) as checkpoint:
        assert sorted(checkpoint) == ["a", "b"]
        assert sorted(checkpoint.dense) == ["a.bias", "norm.weight"]
        for module in checkpoint:
            assert torch.equal(checkpoint[module].qdata, tensors[f"{module}.weight"])
            assert torch.equal(checkpoint[module].scale.reshape(-1), tensors[f"{module}.absmax"])
        for name, tensor in checkpoint.dense.items():
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name])


def test_dense_checkpoint_opens_empty(tmp_path: Path) -> None:
    """A file without a 4-bit layer is a checkpoint without layers, whose tensors are all dense."""
    checkpoint = q4.open(save(tmp_path / "x.safetensors", {"a.weight": torch.ones(2, 2)}))
    assert len(checkpoint) == 0
    assert list(checkpoint.dense) == ["a.weight"]


def test_opening_reads_side_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening, iterating, ``in`` and the infos load code books at most; a layer is loaded when asked for."""
    loaded: list[str] = []
    load = MappedFile.load

    def note(self: MappedFile, name: str) -> torch.Tensor:
        loaded.append(name)
        return load(self, name)

    monkeypatch.setattr(MappedFile, "load", note)
    checkpoint = q4.open(save(tmp_path / "x.safetensors", tensors_of_two()))
    assert "a" in checkpoint
    assert "c" not in checkpoint
    assert "norm.weight" in checkpoint.dense
    assert checkpoint.dense.infos["norm.weight"] == q4.TensorInfo(torch.bfloat16, (4,))
    assert (len(checkpoint), list(checkpoint), len(checkpoint.dense)) == (2, ["a", "b"], 2)
    assert set(loaded) <= {"a.quant_map", "b.quant_map"}
    loaded.clear()
    checkpoint["b"]
    assert set(loaded) == {"b.weight", "b.absmax", "b.quant_map"}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings can be listed on Linux only")
def test_weights_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    """Codes, scales and dense tensors lie inside the mapping of the file: nothing is copied."""
    path = save(tmp_path / "mapped.safetensors", tensors_of_two())
    checkpoint = q4.open(path)
    pieces = [*(tensor for _, tensor in checkpoint["a"].tensors()), checkpoint.dense["norm.weight"]]
    lines = [line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if str(path) in line]
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines]
    for tensor in pieces:
        assert any(start <= tensor.data_ptr() < end for start, end in ranges)


def test_writing_into_a_view_does_not_reach_the_file(tmp_path: Path) -> None:
    """Views are private: writes into one change no file and no other view that is read later."""
    path = save(tmp_path / "x.safetensors", tensors_of_two())
    before = path.read_bytes()
    q4.open(path)["a"].qdata.zero_()
    assert path.read_bytes() == before
    assert torch.equal(q4.open(path)["a"].qdata, tensors_of_two()["a.weight"])


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    """A tensor that a file put at an odd address for its dtype is copied, and is right."""
    body = b"\x07" + torch.arange(3, dtype=torch.float32).numpy().tobytes()
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
    }
    checkpoint = q4.open(_raw(tmp_path / "x.safetensors", header, body))
    assert checkpoint.dense["x"].tolist() == [0.0, 1.0, 2.0]


def _raw(path: Path, header: Any, body: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def test_every_dtype_of_the_format_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    """Whatever the safetensors package can write is read with the same dtype, shape and bytes; empty tensors too."""
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16]
    kinds += [torch.int32, torch.uint32, torch.float32, torch.int64, torch.uint64, torch.float64, torch.complex64]
    kinds += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
    random = torch.Generator().manual_seed(0)
    tensors = {
        str(kind): torch.randint(0, 2, (3, 2 * kind.itemsize), dtype=torch.uint8, generator=random).view(kind)
        for kind in kinds
    }
    tensors |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(2.0)}
    tensors["fp4"] = torch.randint(0, 256, (3, 4), dtype=torch.uint8, generator=random).view(torch.float4_e2m1fn_x2)
    path = save(tmp_path / "x.safetensors", tensors)
    dense = q4.open(path).dense
    for name, theirs in safetensors.torch.load_file(path).items():
        ours = dense[name]
        assert (ours.dtype, ours.shape, dense.infos[name].shape) == (theirs.dtype, theirs.shape, tuple(theirs.shape))
        assert ours.reshape(-1).view(torch.uint8).tolist() == theirs.reshape(-1).view(torch.uint8).tolist()


def test_a_weight_that_is_alive_is_given_again(tmp_path: Path) -> None:
    """The same layer asked for twice is the same object while it is referenced, so that it is prepared once."""
    checkpoint = q4.open(save(tmp_path / "x.safetensors", tensors_of_two()))
    weight = checkpoint["a"]
    assert checkpoint["a"] is weight
    assert (weight.name, weight.dialect) == ("a", "simple-nf4")


def test_closing(tmp_path: Path) -> None:
    """After ``close`` nothing more is given, what was given stays valid, and closing twice is fine."""
    with q4.open(save(tmp_path / "x.safetensors", tensors_of_two())) as checkpoint:
        weight, dense = checkpoint["a"], checkpoint.dense["norm.weight"]
    checkpoint.close()
    for ask in (lambda: checkpoint["a"], lambda: checkpoint["b"], lambda: checkpoint.dense["norm.weight"]):
        with pytest.raises(q4.LifecycleError):
            ask()
    assert torch.equal(weight.qdata, tensors_of_two()["a.weight"])
    assert dense.tolist() == [1.0] * 4
    assert "closed" in repr(checkpoint)


def test_missing_names_are_key_errors(tmp_path: Path) -> None:
    """An unknown layer or tensor is a KeyError, as of any mapping, that names the closest layer or the place."""
    checkpoint = q4.open(save(tmp_path / "x.safetensors", {**trio("layers.0.up_proj"), "norm.weight": torch.ones(4)}))
    with pytest.raises(KeyError, match=r"did you mean 'layers\.0\.up_proj'"):
        checkpoint["layers.0.up_prj"]
    with pytest.raises(KeyError, match=r"no layer but a dense tensor: checkpoint\.dense\['norm\.weight'\]"):
        checkpoint["norm.weight"]
    with pytest.raises(KeyError):
        checkpoint.dense["layers.0.up_proj.weight"]
    assert checkpoint.get("x") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_illegal_scale_is_named_by_file_key_rule_and_value(value: float, tmp_path: Path) -> None:
    """A NaN or infinite scale is found when the layer is read, and never before; other layers are fine."""
    tensors = tensors_of_two()
    tensors["a.absmax"][5] = value
    path = save(tmp_path / "x.safetensors", tensors)
    checkpoint = q4.open(path)
    assert is_same(checkpoint["b"], q4.open(path)["b"])
    with pytest.raises(q4.CheckpointError) as caught:
        checkpoint["a"]
    error = caught.value
    assert error.name is not None
    assert error.name.startswith("a.absmax[")
    assert error.where == str(path)
    assert error.rule == "finite"
    assert str(error.value) == str(value)
    assert isinstance(error.__cause__, q4.WeightError)


def test_wrong_layers_are_all_reported_when_opening(tmp_path: Path) -> None:
    """``open`` refuses a file with broken layers, with every problem and the file's name."""
    tensors = tensors_of_two()
    del tensors["a.absmax"]
    tensors["b.absmax"] = torch.zeros(3)
    path = save(tmp_path / "x.safetensors", tensors)
    with pytest.raises(q4.SchemaError) as caught:
        q4.open(path)
    assert {problem.key for problem in caught.value.problems} == {"a.absmax", "b.absmax"}
    assert caught.value.where == str(path)


def test_dialect_of_a_dense_file_is_refused(tmp_path: Path) -> None:
    """Asking for a dialect where there is no layer at all is an error, not an empty checkpoint."""
    path = save(tmp_path / "x.safetensors", {"a.weight": torch.ones(2, 2)})
    with pytest.raises(q4.SchemaError):
        q4.open(path, dialect="simple-nf4")


def test_metadata_is_given(tmp_path: Path) -> None:
    """The header's metadata is there as text by key."""
    path = save(tmp_path / "x.safetensors", tensors_of_two(), {"format": "pt", "x": "1"})
    assert q4.open(path).metadata == {"format": "pt", "x": "1"}


def test_config_is_found_next_to_the_file_unless_given(tmp_path: Path) -> None:
    """config.json next to the file counts, and a config argument counts instead."""
    path = save(tmp_path / "x.safetensors", tensors_of_two())
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8")
    assert q4.open(path)["a"].dtype == torch.bfloat16
    assert q4.open(path, config={"dtype": "float16"})["a"].dtype == torch.float16


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "\xff"])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_malformed_json_files_are_refused(name: str, text: str, tmp_path: Path) -> None:
    """JSON that is broken, doubled, endless or no object is an error that names the file."""
    if not name.endswith("index.json"):
        save(tmp_path / "model.safetensors", tensors_of_two())
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(q4.CheckpointError) as caught:
        q4.open(tmp_path)
    assert caught.value.where == str(tmp_path / name)


def test_every_problem_of_a_header_is_in_one_error(tmp_path: Path) -> None:
    """Where the library stops at its first problem, the error names what is wrong with each tensor."""
    entries = {
        "right": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "over": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        "odd": {"dtype": "F99", "shape": [4], "data_offsets": [16, 32]},
        "short": {"dtype": "F32", "shape": [4], "data_offsets": [32, 40]},
        "outside": {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]},
        "bare": {},
    }
    path = _raw(tmp_path / "x.safetensors", entries, bytes(48))
    with pytest.raises(q4.CheckpointError, match="valid for the safetensors library") as caught:
        q4.open(path)
    assert caught.value.where == str(path)
    for text in ("5 problems", "'over' overlaps 'right'", "F99", "'short' has 8 bytes for 16", "'outside'", "'bare'"):
        assert text in str(caught.value)


def test_names_that_are_there_twice_are_all_named(tmp_path: Path) -> None:
    """The library takes the last of a name; the error names each that is there twice."""
    facts = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    rows = [f'"{name}":{facts % (4 * place, 4 * place + 4)}' for place, name in enumerate("abacb")]
    text = f"{{{','.join(rows)}}}".encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(20))
    with pytest.raises(q4.CheckpointError, match="key 'a', 'b' must be there once") as caught:
        q4.open(path)
    assert caught.value.where == str(path)
