"""Checkpoints: lazy, mapped reading; shards; readers from plugins; atomic writing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import safetensors
import safetensors.torch
import torch

import q4core as q4
from q4core.checkpoint import open_checkpoint, save_checkpoint
from q4core.checkpoint.mapped import MappedFile
from q4core.schema import MARKER, Schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NF4 = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook)


def _trio(module: str = "proj", n: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        f"{module}.weight": torch.randint(0, 256, (n, 64), dtype=torch.uint8, generator=random),
        f"{module}.absmax": torch.rand(n * 2, generator=random),
        f"{module}.quant_map": NF4.clone(),
    }


def _tensors() -> dict[str, torch.Tensor]:
    return {
        **_trio("a"),
        **_trio("b", 4, 1),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "a.bias": torch.ones(6),
    }


def _weights(count: int = 3, n: int = 8) -> dict[str, q4.PackedWeight]:
    random = torch.Generator().manual_seed(3)
    return {f"m.{index}": q4.quantize(torch.randn(n, 128, generator=random), "nf4") for index in range(count)}


def _save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    safetensors.torch.save_file(dict(tensors), path, metadata)
    return path


def _shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int = 2) -> Path:
    """Write neighbouring tensors to different shards, and an index."""
    names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
    homes = {name: names[index % count] for index, name in enumerate(sorted(tensors))}
    for shard in names:
        _save(folder / shard, {name: tensors[name] for name in tensors if homes[name] == shard})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": homes}), encoding="utf-8")
    return index


def _is_same(one: q4.PackedWeight, two: q4.PackedWeight) -> bool:
    return torch.equal(q4.dequantize(one, torch.float32), q4.dequantize(two, torch.float32))


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Reading


@pytest.mark.parametrize("how", ["file", "folder", "index", "folder of shards", "lone file of a folder"])
def test_every_way_to_name_a_checkpoint(how: str, tmp_path: Path) -> None:
    """A file, an index, and a folder with one or the other open to the same layers and tensors."""
    tensors = _tensors()
    path = tmp_path
    if how in {"file", "folder"}:
        path = _save(tmp_path / "model.safetensors", tensors)
    elif how == "lone file of a folder":
        _save(tmp_path / "weights.safetensors", tensors)
    else:
        path = _shards(tmp_path, tensors, 3)
    with open_checkpoint(str(path) if how in {"file", "index"} else tmp_path) as checkpoint:
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
    checkpoint = open_checkpoint(_save(tmp_path / "x.safetensors", {"a.weight": torch.ones(2, 2)}))
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
    checkpoint = open_checkpoint(_save(tmp_path / "x.safetensors", _tensors()))
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
    path = _save(tmp_path / "mapped.safetensors", _tensors())
    checkpoint = open_checkpoint(path)
    pieces = [*(tensor for _, tensor in checkpoint["a"].tensors()), checkpoint.dense["norm.weight"]]
    lines = [line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if str(path) in line]
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines]
    for tensor in pieces:
        assert any(start <= tensor.data_ptr() < end for start, end in ranges)


def test_writing_into_a_view_does_not_reach_the_file(tmp_path: Path) -> None:
    """Views are private: whoever writes into one changes no file and no other view that is read later."""
    path = _save(tmp_path / "x.safetensors", _tensors())
    before = path.read_bytes()
    open_checkpoint(path)["a"].qdata.zero_()
    assert path.read_bytes() == before
    assert torch.equal(open_checkpoint(path)["a"].qdata, _tensors()["a.weight"])


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    """A tensor that a file put at an odd address for its dtype is copied, and is right."""
    body = b"\x07" + torch.arange(3, dtype=torch.float32).numpy().tobytes()
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
    }
    checkpoint = open_checkpoint(_raw(tmp_path / "x.safetensors", header, body))
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
    path = _save(tmp_path / "x.safetensors", tensors)
    dense = open_checkpoint(path).dense
    for name, theirs in safetensors.torch.load_file(path).items():
        ours = dense[name]
        assert (ours.dtype, ours.shape, dense.infos[name].shape) == (theirs.dtype, theirs.shape, tuple(theirs.shape))
        assert ours.reshape(-1).view(torch.uint8).tolist() == theirs.reshape(-1).view(torch.uint8).tolist()


def test_a_weight_that_is_alive_is_given_again(tmp_path: Path) -> None:
    """The same layer asked for twice is the same object while somebody holds it, so that it is prepared once."""
    checkpoint = open_checkpoint(_save(tmp_path / "x.safetensors", _tensors()))
    weight = checkpoint["a"]
    assert checkpoint["a"] is weight
    assert (weight.name, weight.dialect) == ("a", "simple-nf4")


def test_closing(tmp_path: Path) -> None:
    """After ``close`` nothing more is given, what was given stays valid, and closing twice is fine."""
    with open_checkpoint(_save(tmp_path / "x.safetensors", _tensors())) as checkpoint:
        weight, dense = checkpoint["a"], checkpoint.dense["norm.weight"]
    checkpoint.close()
    for ask in (lambda: checkpoint["a"], lambda: checkpoint["b"], lambda: checkpoint.dense["norm.weight"]):
        with pytest.raises(q4.LifecycleError):
            ask()
    assert torch.equal(weight.qdata, _tensors()["a.weight"])
    assert dense.tolist() == [1.0] * 4
    assert "closed" in repr(checkpoint)


def test_missing_names_are_key_errors(tmp_path: Path) -> None:
    """An unknown layer or tensor is a KeyError, as of any mapping, that names the closest layer."""
    checkpoint = open_checkpoint(_save(tmp_path / "x.safetensors", {**_trio("layers.0.up_proj")}))
    with pytest.raises(KeyError, match=r"did you mean 'layers\.0\.up_proj'"):
        checkpoint["layers.0.up_prj"]
    with pytest.raises(KeyError):
        checkpoint.dense["layers.0.up_proj.weight"]
    assert checkpoint.get("x") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_illegal_scale_is_named_by_file_key_rule_and_value(value: float, tmp_path: Path) -> None:
    """A NaN, infinite or negative scale is found when the layer is read, and never before; other layers are fine."""
    tensors = _tensors()
    tensors["a.absmax"][5] = value
    path = _save(tmp_path / "x.safetensors", tensors)
    checkpoint = open_checkpoint(path)
    assert _is_same(checkpoint["b"], open_checkpoint(path)["b"])
    with pytest.raises(q4.CheckpointError) as caught:
        checkpoint["a"]
    error = caught.value
    assert error.name is not None
    assert error.name.startswith("a.absmax[")
    assert error.where == str(path)
    assert error.rule == "finite and not negative"
    assert str(error.value) == str(value)
    assert isinstance(error.__cause__, q4.WeightError)


def test_wrong_layers_are_all_reported_when_opening(tmp_path: Path) -> None:
    """``open`` refuses a file with broken layers, with every problem and the file's name."""
    tensors = _tensors()
    del tensors["a.absmax"]
    tensors["b.absmax"] = torch.zeros(3)
    path = _save(tmp_path / "x.safetensors", tensors)
    with pytest.raises(q4.SchemaError) as caught:
        open_checkpoint(path)
    assert {problem.key for problem in caught.value.problems} == {"a.absmax", "b.absmax"}
    assert caught.value.where == str(path)


def test_dialect_of_a_dense_file_is_refused(tmp_path: Path) -> None:
    """Asking for a dialect where there is no layer at all is an error, not an empty checkpoint."""
    path = _save(tmp_path / "x.safetensors", {"a.weight": torch.ones(2, 2)})
    with pytest.raises(q4.SchemaError):
        open_checkpoint(path, dialect="simple-nf4")


def test_metadata_is_given(tmp_path: Path) -> None:
    """The header's metadata is there as text by key."""
    path = _save(tmp_path / "x.safetensors", _tensors(), {"format": "pt", "x": "1"})
    assert open_checkpoint(path).metadata == {"format": "pt", "x": "1"}


def test_config_is_found_beside_the_file_unless_given(tmp_path: Path) -> None:
    """config.json beside the file counts, and a config argument counts instead."""
    path = _save(tmp_path / "x.safetensors", _tensors())
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8")
    assert open_checkpoint(path)["a"].dtype == torch.bfloat16
    assert open_checkpoint(path, config={"dtype": "float16"})["a"].dtype == torch.float16


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "\xff"])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_malformed_json_files_are_refused(name: str, text: str, tmp_path: Path) -> None:
    """JSON that is broken, doubled, endless or no object is an error that names the file."""
    if not name.endswith("index.json"):
        _save(tmp_path / "model.safetensors", _tensors())
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(q4.CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.where == str(tmp_path / name)


# Which file


@pytest.mark.parametrize("files", [[], ["a.safetensors", "b.safetensors"], ["a.bin"]])
def test_folder_without_one_checkpoint_is_refused(files: list[str], tmp_path: Path) -> None:
    """A folder must leave no doubt which file is meant."""
    for name in files:
        _save(tmp_path / name, _tensors())
    with pytest.raises(q4.CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.where == str(tmp_path)


def test_folder_with_a_file_and_an_index_is_refused(tmp_path: Path) -> None:
    """One whole file and an index in the same folder may be two versions: the caller must say which."""
    index = _shards(tmp_path, _tensors())
    file = _save(tmp_path / "model.safetensors", _tensors())
    with pytest.raises(q4.CheckpointError, match=re.escape("model.safetensors, model.safetensors.index.json")):
        open_checkpoint(tmp_path)
    assert len(open_checkpoint(index)) == len(open_checkpoint(file)) == 2


def test_missing_path_is_refused(tmp_path: Path) -> None:
    """A path that is not there is a CheckpointError that names it."""
    with pytest.raises(q4.CheckpointError) as caught:
        open_checkpoint(tmp_path / "none.safetensors")
    assert caught.value.where == str(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "a\\x.safetensors", "x.bin", "", 3, None]
)
def test_shard_outside_the_folder_is_refused(shard: object, tmp_path: Path) -> None:
    """An index may name safetensors files beside it, and nothing else."""
    _save(tmp_path / "x.safetensors", _tensors())
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    with pytest.raises(q4.CheckpointError) as caught:
        open_checkpoint(inside)
    assert (caught.value.name, caught.value.value) == ("weight_map['a.weight']", shard)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """A shard that is not there is an error that names it and the tensor that needs it."""
    index = _shards(tmp_path, _tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(q4.CheckpointError) as caught:
        open_checkpoint(index)
    assert caught.value.value == "model-00002-of-00002.safetensors"


def test_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    """The index and the shards' headers must agree."""
    index = _shards(tmp_path, _tensors())
    text = json.loads(index.read_text(encoding="utf-8"))
    text["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(text), encoding="utf-8")
    with pytest.raises(q4.CheckpointError) as caught:
        open_checkpoint(index)
    assert caught.value.name == "weight_map['ghost.weight']"


def test_tensor_in_two_shards_needs_the_index(tmp_path: Path) -> None:
    """A tensor that two shards hold is the one that the index names; without a word there it is an error."""
    one, two = torch.zeros(3), torch.ones(3)
    _save(tmp_path / "1.safetensors", {"x": one, "p": torch.zeros(1)})
    _save(tmp_path / "2.safetensors", {"x": two, "q": torch.zeros(1)})
    index = tmp_path / "model.safetensors.index.json"
    homes = {"p": "1.safetensors", "q": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": {**homes, "x": "2.safetensors"}}), encoding="utf-8")
    assert torch.equal(open_checkpoint(index).dense["x"], two)
    index.write_text(json.dumps({"weight_map": homes}), encoding="utf-8")
    with pytest.raises(q4.CheckpointError, match="tensor 'x'"):
        open_checkpoint(index)


def test_metadata_of_shards_is_united(tmp_path: Path) -> None:
    """Lists and objects of the shards' metadata are joined; objects that contradict each other are refused."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}), encoding="utf-8")
    first = {"list": '["a"]', "object": '{"k": {"a": 1}}', "text": "one", "same": "s"}
    _save(tmp_path / "1.safetensors", {"x": torch.ones(1)}, first)
    second = {"list": '["b", "a"]', "object": '{"k": {"b": 2}}', "text": "two", "same": "s", "own": "o"}
    _save(tmp_path / "2.safetensors", {"y": torch.ones(1)}, second)
    metadata = open_checkpoint(index).metadata
    assert json.loads(metadata["list"]) == ["a", "b"]
    assert json.loads(metadata["object"]) == {"k": {"a": 1, "b": 2}}
    assert (metadata["text"], metadata["same"], metadata["own"]) == ("one", "s", "o")
    _save(tmp_path / "2.safetensors", {"y": torch.ones(1)}, {"object": '{"k": {"a": 2}}'})
    with pytest.raises(q4.CheckpointError, match=r"object\.k\.a"):
        open_checkpoint(index)


# Readers from plugins


class FakeReader:
    """Reads files that start with FAKE; facts are adjustable."""

    def __init__(self, name: str = "fake", *, error: Exception | None = None, knows: Exception | None = None) -> None:
        self.name = name
        self.error = error
        self.knows = knows
        self.seen: list[Mapping[str, Any]] = []
        self.closed = 0

    def recognises(self, path: Path) -> bool:
        """Look at the first bytes."""
        if self.knows is not None:
            raise self.knows
        return path.is_file() and path.read_bytes()[:4] == b"FAKE"

    def open(self, path: Path, *, options: Mapping[str, Any]) -> FakeSource:
        """Open, or fail as told."""
        if self.error is not None:
            raise self.error
        self.seen.append(options)
        return FakeSource(path, self)


@attrs.frozen
class FakeSource:
    """Has one layer and one dense tensor."""

    path: Path
    reader: FakeReader
    metadata: Mapping[str, Any] = attrs.field(factory=lambda: {"kind": 7})
    schema: Schema = attrs.field(
        factory=lambda: Schema(
            layers={
                "a": q4.LayerSchema(module="a", dialect="fake", format="nf4", keys={"qdata": "a.q", "scale": "a.q"})
            },
            dense=["x"],
        )
    )
    dense: Mapping[str, q4.TensorInfo] = attrs.field(factory=lambda: {"x": q4.TensorInfo(torch.float32, (2,))})

    def read(self, module: str) -> q4.PackedWeight:
        """Return a weight with a NaN scale."""
        weight = q4.quantize(torch.ones(2, 64), "nf4", name=module)
        return attrs.evolve(weight, scale=torch.full_like(weight.scale, float("nan")))

    def load(self, name: str) -> torch.Tensor:
        """Return ones."""
        return torch.ones(len(name) + 1)

    def close(self) -> None:
        """Count."""
        self.reader.closed += 1


@pytest.fixture
def fake_file(tmp_path: Path) -> Path:
    """Return a file that only the fake reader knows."""
    path = tmp_path / "x.fake"
    path.write_bytes(b"FAKE....")
    return path


def test_reader_of_a_plugin_serves_its_files(fake_file: Path) -> None:
    """A reader gets the path and the options, and its source is what the checkpoint shows; numbers are checked."""
    reader = FakeReader()
    with open_checkpoint(fake_file, readers=[reader], options={"depth": 2}) as checkpoint:
        assert reader.seen == [{"depth": 2}]
        assert (list(checkpoint), list(checkpoint.dense), checkpoint.metadata) == (["a"], ["x"], {"kind": 7})
        assert checkpoint.dense["x"].tolist() == [1.0, 1.0]
        with pytest.raises(q4.CheckpointError, match=re.escape("a.q[")):
            checkpoint["a"]
    assert reader.closed == 1


def test_file_that_nobody_knows_is_refused(fake_file: Path) -> None:
    """The error names the readers that were asked."""
    with pytest.raises(q4.CheckpointError, match="none of safetensors"):
        open_checkpoint(fake_file)


def test_file_that_two_readers_know_is_refused(fake_file: Path) -> None:
    """No order of readers decides."""
    with pytest.raises(q4.CheckpointError, match="one, two"):
        open_checkpoint(fake_file, readers=[FakeReader("one"), FakeReader("two")])


def test_reader_that_raises_does_not_lose_the_others(fake_file: Path) -> None:
    """A reader that fails to recognise is left out with a warning."""
    with pytest.warns(q4.Q4PluginWarning, match="'bad' raised ZeroDivisionError"):
        checkpoint = open_checkpoint(fake_file, readers=[FakeReader("bad", knows=ZeroDivisionError()), FakeReader()])
    assert list(checkpoint) == ["a"]


def test_reader_that_raises_while_opening_is_a_plugin_error(fake_file: Path) -> None:
    """An error that is not q4core's own is reported with reader and file; our own errors pass as they are."""
    with pytest.raises(q4.PluginError, match="ZeroDivisionError") as caught:
        open_checkpoint(fake_file, readers=[FakeReader(error=ZeroDivisionError())])
    assert caught.value.where == str(fake_file)
    with pytest.raises(q4.CheckpointError, match="mine"):
        open_checkpoint(fake_file, readers=[FakeReader(error=q4.CheckpointError("mine"))])


def test_dialect_that_a_readers_file_has_not_is_refused(fake_file: Path) -> None:
    """``dialect=`` must be the file's own where its kind leaves no choice; the file is closed again."""
    reader = FakeReader()
    assert list(open_checkpoint(fake_file, readers=[reader], dialect="fake")) == ["a"]
    with pytest.raises(q4.DialectError):
        open_checkpoint(fake_file, readers=[reader], dialect="simple-nf4")
    assert reader.closed == 1


# Writing


def test_saved_file_is_read_by_us_and_by_the_package(tmp_path: Path) -> None:
    """What is saved opens to the same weights, and the safetensors package reads the same tensors."""
    weights = _weights()
    dense = {"norm.weight": torch.rand(5).to(torch.bfloat16), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2)}
    path = save_checkpoint(tmp_path / "x.safetensors", weights, dialect="simple-nf4", dense=dense, metadata={"k": "v"})
    checkpoint = open_checkpoint(path)
    assert list(checkpoint) == list(weights)
    assert all(_is_same(checkpoint[module], weights[module]) for module in weights)
    assert checkpoint.metadata == {"format": "pt", "k": "v"}
    theirs = safetensors.torch.load_file(path)
    assert theirs.keys() == {
        *dense,
        *(f"{module}.{part}" for module in weights for part in ("weight", "absmax", "quant_map")),
    }
    for name, tensor in dense.items():
        assert theirs[name].dtype == tensor.dtype
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(checkpoint.dense[name], tensor)
    assert _visible(tmp_path) == ["x.safetensors"]


def test_saved_tensors_are_aligned(tmp_path: Path) -> None:
    """Every tensor lies at a multiple of its dtype's size, however odd the ones before it are."""
    dense = {
        f"{index}": torch.ones(2 * index + 1).to(dtype)
        for index, dtype in enumerate([torch.uint8, torch.float64, torch.float16, torch.float32, torch.uint8])
    }
    path = save_checkpoint(tmp_path / "x.safetensors", {}, dialect="simple-nf4", dense=dense)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in dense.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_every_dtype_is_saved_as_the_package_saves_it(tmp_path: Path) -> None:
    """Dense tensors of any dtype of the format, strided views too, come back from the package bit for bit."""
    base = torch.arange(64, dtype=torch.uint8).reshape(4, 16)
    dense = {
        str(kind): base.view(kind) for kind in (torch.bool, torch.int16, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    }
    dense |= {
        "fp4": base.view(torch.float4_e2m1fn_x2),
        "view": base.t()[::2],
        "complex": torch.ones(2, 2, dtype=torch.complex64),
    }
    dense["torch.bool"] = base % 2 == 0
    theirs = safetensors.torch.load_file(
        save_checkpoint(tmp_path / "x.safetensors", {}, dialect="simple-nf4", dense=dense)
    )
    for name, tensor in dense.items():
        assert (theirs[name].dtype, theirs[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(theirs[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_layers_are_taken_one_at_a_time(tmp_path: Path) -> None:
    """A lazy mapping is asked for one weight after another, once each, and none is kept."""
    import gc  # noqa: PLC0415  # this test's own tool
    import weakref  # noqa: PLC0415

    alive: weakref.WeakSet[q4.PackedWeight] = weakref.WeakSet()
    asked: list[str] = []
    most = 0

    class Lazy(dict[str, q4.PackedWeight]):
        def __getitem__(self, module: str) -> q4.PackedWeight:
            nonlocal most
            asked.append(module)
            weight = q4.quantize(torch.randn(8, 128), "nf4")
            alive.add(weight)
            gc.collect()
            most = max(most, len(alive))
            return weight

    names = [f"m.{index}" for index in range(5)]
    save_checkpoint(tmp_path / "x.safetensors", Lazy.fromkeys(names), dialect="simple-nf4")  # type: ignore[arg-type]
    assert asked == names
    assert most <= 2


def test_folder_gets_one_file_or_shards(tmp_path: Path) -> None:
    """A folder is made where it is missing; shards begin when a limit is reached, and a layer stays in one of them."""
    weights = _weights(4)
    single = save_checkpoint(tmp_path / "one", weights, dialect="simple-nf4")
    assert _visible(tmp_path / "one") == ["model.safetensors"]
    per_layer = sum(item.nbytes for item in MappedFile(single).infos.values()) // 4
    index = save_checkpoint(tmp_path / "many", weights, dialect="simple-nf4", max_shard_bytes=2 * per_layer)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert _visible(tmp_path / "many") == [*names, "model.safetensors.index.json"]
    text = json.loads(index.read_text(encoding="utf-8"))
    assert text["metadata"]["total_size"] == 4 * per_layer
    for module in weights:
        assert len({shard for name, shard in text["weight_map"].items() if name.startswith(f"{module}.")}) == 1
    for path in (tmp_path / "one", tmp_path / "many", single, index):
        checkpoint = open_checkpoint(path)
        assert all(_is_same(checkpoint[module], weights[module]) for module in weights)


def test_layer_larger_than_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    """The limit bends for a single layer, as nothing can be cut."""
    save_checkpoint(tmp_path / "x", _weights(3), dialect="simple-nf4", max_shard_bytes=1)
    assert len(_visible(tmp_path / "x")) == 4
    assert len(open_checkpoint(tmp_path / "x")) == 3


@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("second", [None, 1])
def test_saving_again_replaces_the_old_checkpoint(first: int | None, second: int | None, tmp_path: Path) -> None:
    """A folder that held one file or shards holds the new checkpoint alone afterwards; other files stay."""
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    save_checkpoint(tmp_path, _weights(3), dialect="simple-nf4", max_shard_bytes=first)
    old = set(_visible(tmp_path))
    weights = _weights(2, 4)
    save_checkpoint(tmp_path, weights, dialect="simple-nf4", max_shard_bytes=second)
    assert list(open_checkpoint(tmp_path)) == list(weights)
    left = old & set(_visible(tmp_path)) - {"model.safetensors", "model.safetensors.index.json"}
    assert left == {"tokenizer.json"}
    assert len(_visible(tmp_path)) == (2 if second is None else 4)


def test_saving_over_the_file_that_is_read(tmp_path: Path) -> None:
    """A checkpoint may be saved over itself while it is open: the old file lives until nobody looks at it."""
    path = tmp_path / "x.safetensors"
    weights = _weights()
    save_checkpoint(path, weights, dialect="simple-nf4")
    with open_checkpoint(path) as checkpoint:
        save_checkpoint(path, checkpoint, dialect="simple-nf4", dense=checkpoint.dense)
    again = open_checkpoint(path)
    assert all(_is_same(again[module], weights[module]) for module in weights)


def _close_only(writer: Any) -> None:
    """Close the files of a writer, as the end of the process does, and remove none."""
    for shard, _, _ in writer._shards:
        if shard._data is not None:
            shard._data.close()


class Crash(BaseException):
    """Stands for the end of the process: nothing cleans up after it."""


@pytest.mark.parametrize("old", [None, 1])
@pytest.mark.parametrize("new", [None, 1])
def test_a_crash_leaves_the_old_or_the_new_checkpoint(
    old: int | None, new: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a process ends while it saves, the folder opens as old, as new, or not at all; never as a mixture."""
    first, second = _weights(2), {name: q4.quantize(torch.randn(16, 128), "nf4") for name in ("m.0", "m.1")}
    seen: set[str] = set()
    for step in range(40):
        folder = tmp_path / str(step)
        save_checkpoint(folder, first, dialect="simple-nf4", max_shard_bytes=old, config={"version": 1})
        left = [step]

        def count(real: Any, *, left: list[int] = left) -> Any:
            def run(*arguments: Any, **named: Any) -> Any:
                if left[0] == 0:
                    raise Crash
                left[0] -= 1
                return real(*arguments, **named)

            return run

        with monkeypatch.context() as patch:
            for name in ("replace", "open", "unlink", "mkdir"):
                patch.setattr(Path, name, count(getattr(Path, name)))
            patch.setattr("q4core.checkpoint.writing._Writer.discard", _close_only)
            patch.setattr("q4core.checkpoint.shard.StagedText.discard", lambda _: None)
            try:
                save_checkpoint(folder, second, dialect="simple-nf4", max_shard_bytes=new, config={"version": 2})
            except Crash:
                pass
            else:
                break
        try:
            checkpoint = open_checkpoint(folder)
        except q4.CheckpointError:
            seen.add("refused")
            continue
        weights = next(item for item in (first, second) if item["m.0"].shape == checkpoint["m.0"].shape)
        assert all(_is_same(checkpoint[module], weights[module]) for module in weights)
        seen.add("old" if weights is first else "new")
    else:
        pytest.fail("saving never came to its end")
    assert "old" in seen


@pytest.mark.parametrize("target", ["x.safetensors", "x"])
@pytest.mark.parametrize("failing", ["write", "layer", "publish"])
def test_failure_changes_nothing_and_leaves_nothing(
    failing: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a bad layer or a failing rename leave the old checkpoint and no temporary file."""
    path = tmp_path / target
    weights = _weights()
    save_checkpoint(path, weights, dialect="simple-nf4")
    before = {item: item.read_bytes() for item in tmp_path.rglob("*.*") if item.is_file()}
    second = dict(_weights(2, 4))
    if failing == "layer":
        second["bad"] = q4.quantize(torch.ones(4, 64), "nvfp4")
    elif failing == "write":

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
    else:

        def refuse(self: Path, _: Path) -> Path:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises((q4.CheckpointError, q4.DialectError)) as caught:
        save_checkpoint(path, second, dialect="simple-nf4")
    if failing != "layer":
        assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    assert {item: item.read_bytes() for item in tmp_path.rglob("*.*") if item.is_file()} == before


def test_failure_in_a_new_folder_leaves_no_folder(tmp_path: Path) -> None:
    """A folder that was made for a checkpoint which then fails is removed again."""
    with pytest.raises(q4.DialectError):
        save_checkpoint(tmp_path / "x", {"a": q4.quantize(torch.ones(4, 64), "nvfp4")}, dialect="simple-nf4")
    assert _visible(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_illegal_scale_is_not_written(value: float, tmp_path: Path) -> None:
    """A NaN or negative scale is refused before anything is written, by layer, field and value."""
    weight = q4.quantize(torch.ones(4, 64), "nf4")
    weight.scale[1] = value
    with pytest.raises(q4.WeightError) as caught:
        save_checkpoint(tmp_path / "x.safetensors", {"good": _weights(1)["m.0"], "bad": weight}, dialect="simple-nf4")
    assert "'bad'" in caught.value.what
    assert caught.value.name is not None
    assert caught.value.name.startswith("scale")
    assert _visible(tmp_path) == []


@pytest.mark.parametrize("name", ["m.0.weight", "m.0.absmax"])
def test_name_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    """A dense tensor may not have the name of a layer's tensor."""
    with pytest.raises(q4.CheckpointError) as caught:
        save_checkpoint(tmp_path / "x.safetensors", _weights(1), dialect="simple-nf4", dense={name: torch.ones(1)})
    assert caught.value.value == name
    assert _visible(tmp_path) == []


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()],
    ids=["meta", "complex128", "sparse"],
)
def test_tensor_that_the_format_can_not_hold_is_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    """No data, no name for the dtype, or no strides: an error that names the tensor."""
    with pytest.raises(q4.CheckpointError) as caught:
        save_checkpoint(tmp_path / "x.safetensors", {}, dialect="simple-nf4", dense={"x": tensor})
    assert caught.value.name == "x"


def test_tensors_that_would_change_a_layer_are_refused(tmp_path: Path) -> None:
    """Dense tensors that would be taken for a layer's scales, or for another layer, are refused."""
    for dense in ({"m.0.weight_scale": torch.ones(1)}, _trio("other")):
        with pytest.raises(q4.CheckpointError, match="is read as simple-nf4 again"):
            save_checkpoint(tmp_path / "x.safetensors", _weights(1), dialect="simple-nf4", dense=dense)
    assert _visible(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "arguments", "field"),
    [
        ("x.gguf", {}, "path"),
        ("x.bin", {}, "path"),
        ("x.safetensors", {"max_shard_bytes": 1}, "path"),
        ("x.safetensors", {"config": {}}, "path"),
        ("x", {"max_shard_bytes": 0}, "max_shard_bytes"),
    ],
)
def test_targets_that_make_no_sense_are_refused(
    path: str, arguments: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Only safetensors files and folders are written; shards and config.json need a folder."""
    with pytest.raises(q4.CheckpointError) as caught:
        save_checkpoint(tmp_path / path, {}, dialect="simple-nf4", **arguments)
    assert caught.value.name == field
    assert _visible(tmp_path) == []


def test_unknown_dialect_is_refused_when_saving(tmp_path: Path) -> None:
    """The names that there are, and the closest, stand in the error."""
    with pytest.raises(q4.DialectError, match="simple-nf4"):
        save_checkpoint(tmp_path / "x", _weights(1), dialect="simple-nf")
    assert _visible(tmp_path) == []


def test_config_keeps_what_is_there(tmp_path: Path) -> None:
    """config.json is kept but for quantisation, which is the new dialect's to say; a given config replaces it."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "quantization_config": {"quant_method": "old"}}', encoding="utf-8")
    save_checkpoint(tmp_path, _weights(1), dialect="simple-nf4")
    assert json.loads(path.read_text(encoding="utf-8")) == {"model_type": "llama"}
    save_checkpoint(tmp_path, _weights(1), dialect="simple-nf4", config={"model_type": "other"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"model_type": "other"}


class Marked(q4.Dialect):
    """The trio under a name of its own, which shares its keys with the trio."""

    name = "marked"
    formats = frozenset({"nf4"})
    shares_keys = True

    def __init__(self) -> None:
        self.inner = next(item for item in q4.dialects() if item.name == "simple-nf4")

    def find(self, catalogue: q4.Catalogue) -> Iterator[q4.LayerSchema]:
        """Find what the trio finds."""
        for layer in self.inner.find(catalogue):
            yield attrs.evolve(layer, dialect=self.name)

    def validate(self, layer: q4.LayerSchema, catalogue: q4.Catalogue) -> Any:
        """Check what the trio checks."""
        return self.inner.validate(layer, catalogue)

    def read(self, layer: q4.LayerSchema, load: Any) -> q4.PackedWeight:
        """Read what the trio reads."""
        return self.inner.read(layer, load)

    def write(self, module: str, weight: q4.PackedWeight) -> q4.WrittenLayer:
        """Write what the trio writes."""
        return self.inner.write(module, weight)


def test_file_of_shared_keys_is_marked(tmp_path: Path) -> None:
    """A lone file in a dialect whose keys another one shares says which it is; without the mark it is ambiguous."""
    dialects = [*(item for item in q4.dialects() if item.name == "simple-nf4"), Marked()]
    path = save_checkpoint(tmp_path / "x.safetensors", _weights(1), dialect="marked", dialects=dialects)
    checkpoint = open_checkpoint(path, dialects=dialects)
    assert checkpoint.metadata[MARKER] == "marked"
    assert checkpoint.schema.dialects == ("marked",)
    _save(path, safetensors.torch.load_file(path))
    with pytest.raises(q4.SchemaError, match="ambiguous"):
        open_checkpoint(path, dialects=dialects)
    assert open_checkpoint(path, dialects=dialects, dialect="marked").schema.dialects == ("marked",)
