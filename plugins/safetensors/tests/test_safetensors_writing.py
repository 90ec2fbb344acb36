"""Writing checkpoints: what is saved is read again, by us and by others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import safetensors
import safetensors.torch
import torch

import q4core as q4
from q4_safetensors import SafetensorsReader, SafetensorsWriter
from q4_safetensors.mapped import MappedFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

from tests.support.checkpoints import is_same, packed, save, visible


def test_saved_file_is_read_by_us_and_by_the_package(tmp_path: Path) -> None:
    """What is saved opens to the same weights, and the safetensors package reads the same tensors."""
    weights = packed()
    dense = {"norm.weight": torch.rand(5).to(torch.bfloat16), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2)}
    path = q4.save_checkpoint(
        tmp_path / "x.safetensors", weights, dialect="simple-nf4", dense=dense, metadata={"k": "v"}
    )
    checkpoint = q4.open(path)
    assert list(checkpoint) == list(weights)
    assert all(is_same(checkpoint[module], weights[module]) for module in weights)
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
    assert visible(tmp_path) == ["x.safetensors"]


def test_saved_tensors_are_aligned(tmp_path: Path) -> None:
    """Every tensor lies at a multiple of its dtype's size, however odd the ones before it are."""
    dense = {
        f"{index}": torch.ones(2 * index + 1).to(dtype)
        for index, dtype in enumerate([torch.uint8, torch.float64, torch.float16, torch.float32, torch.uint8])
    }
    path = q4.save_checkpoint(tmp_path / "x.safetensors", {}, dialect="simple-nf4", dense=dense)
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
        q4.save_checkpoint(tmp_path / "x.safetensors", {}, dialect="simple-nf4", dense=dense)
    )
    for name, tensor in dense.items():
        assert (theirs[name].dtype, theirs[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(theirs[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_layers_are_taken_one_at_a_time(tmp_path: Path) -> None:
    """A lazy mapping is asked for one weight after another, once each, and none is retained."""
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
    q4.save_checkpoint(tmp_path / "x.safetensors", Lazy.fromkeys(names), dialect="simple-nf4")  # type: ignore[arg-type]
    assert asked == names
    assert most <= 2


def test_folder_gets_one_file_or_shards(tmp_path: Path) -> None:
    """A folder is made where it is missing; shards begin when a limit is reached, and a layer stays in one of them."""
    weights = packed(4)
    single = q4.save_checkpoint(tmp_path / "one", weights, dialect="simple-nf4")
    assert visible(tmp_path / "one") == ["model.safetensors"]
    per_layer = sum(item.nbytes for item in MappedFile(single).infos.values()) // 4
    index = q4.save_checkpoint(tmp_path / "many", weights, dialect="simple-nf4", max_shard_bytes=2 * per_layer)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert visible(tmp_path / "many") == [*names, "model.safetensors.index.json"]
    text = json.loads(index.read_text(encoding="utf-8"))
    assert text["metadata"]["total_size"] == 4 * per_layer
    for module in weights:
        assert len({shard for name, shard in text["weight_map"].items() if name.startswith(f"{module}.")}) == 1
    for path in (tmp_path / "one", tmp_path / "many", single, index):
        checkpoint = q4.open(path)
        assert all(is_same(checkpoint[module], weights[module]) for module in weights)


def test_layer_larger_than_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    """The limit bends for a single layer, as nothing can be cut."""
    q4.save_checkpoint(tmp_path / "x", packed(3), dialect="simple-nf4", max_shard_bytes=1)
    assert len(visible(tmp_path / "x")) == 4
    assert len(q4.open(tmp_path / "x")) == 3


@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("second", [None, 1])
def test_saving_again_replaces_the_old_checkpoint(first: int | None, second: int | None, tmp_path: Path) -> None:
    """A folder that held one file or shards holds the new checkpoint alone afterwards; other files stay."""
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    q4.save_checkpoint(tmp_path, packed(3), dialect="simple-nf4", max_shard_bytes=first)
    old = set(visible(tmp_path))
    weights = packed(2, 4)
    q4.save_checkpoint(tmp_path, weights, dialect="simple-nf4", max_shard_bytes=second)
    assert list(q4.open(tmp_path)) == list(weights)
    left = old & set(visible(tmp_path)) - {"model.safetensors", "model.safetensors.index.json"}
    assert left == {"tokenizer.json"}
    assert len(visible(tmp_path)) == (2 if second is None else 4)


def test_saving_over_the_file_that_is_read(tmp_path: Path) -> None:
    """A checkpoint may be saved over itself while it is open: the old file lives until it is no longer used."""
    path = tmp_path / "x.safetensors"
    weights = packed()
    q4.save_checkpoint(path, weights, dialect="simple-nf4")
    with q4.open(path) as checkpoint:
        q4.save_checkpoint(path, checkpoint, dialect="simple-nf4", dense=checkpoint.dense)
    again = q4.open(path)
    assert all(is_same(again[module], weights[module]) for module in weights)


def test_config_keeps_what_is_there(tmp_path: Path) -> None:
    """config.json is preserved but for quantisation, which is the new dialect's to say; a given config replaces it."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "quantization_config": {"quant_method": "old"}}', encoding="utf-8")
    q4.save_checkpoint(tmp_path, packed(1), dialect="simple-nf4")
    assert json.loads(path.read_text(encoding="utf-8")) == {"model_type": "llama"}
    q4.save_checkpoint(tmp_path, packed(1), dialect="simple-nf4", config={"model_type": "other"})
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
    dialects = (*(item for item in q4.dialects() if item.name == "simple-nf4"), Marked())
    request = q4.SaveRequest(dialect="marked", dialects=dialects)
    path = SafetensorsWriter().write(tmp_path / "x.safetensors", packed(1), request)
    reader = SafetensorsReader()
    source = reader.open(path, q4.OpenRequest(dialects=dialects))
    assert source.metadata["q4core.dialect"] == "marked"
    assert source.schema.dialects == ("marked",)
    save(path, safetensors.torch.load_file(path))
    with pytest.raises(q4.SchemaError, match="ambiguous"):
        reader.open(path, q4.OpenRequest(dialects=dialects))
    assert reader.open(path, q4.OpenRequest(dialects=dialects, dialect="marked")).schema.dialects == ("marked",)
