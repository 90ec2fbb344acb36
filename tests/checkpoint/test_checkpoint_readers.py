"""Readers of other kinds of files, which plugins bring."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4core.checkpoint import open_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class FakeReader:
    """Reads files that start with FAKE; facts are adjustable."""

    def __init__(self, name: str = "fake", *, error: Exception | None = None, knows: Exception | None = None) -> None:
        self.name = name
        self.error = error
        self.knows = knows
        self.seen: list[q4.OpenRequest] = []
        self.closed = 0

    def recognises(self, path: Path) -> bool:
        """Look at the first bytes."""
        if self.knows is not None:
            raise self.knows
        return path.is_file() and path.read_bytes()[:4] == b"FAKE"

    def open(self, path: Path, request: q4.OpenRequest) -> FakeSource:
        """Open, or fail as configured."""
        if self.error is not None:
            raise self.error
        self.seen.append(request)
        return FakeSource(path, self)


@attrs.frozen
class FakeSource:
    """Has one layer and one dense tensor."""

    path: Path
    reader: FakeReader
    metadata: Mapping[str, Any] = attrs.field(factory=lambda: {"kind": 7})
    schema: q4.Schema = attrs.field(
        factory=lambda: q4.Schema(
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


def open_checkpoint(
    path: Path, readers: Sequence[Any] = (), *, plugins: Mapping[str, str] | None = None, **request: Any
) -> q4.Checkpoint:
    """Open a file by readers that are given."""
    return open_by(readers, path, q4.OpenRequest(**request), plugins or {})


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
        assert [request.options for request in reader.seen] == [{"depth": 2}]
        assert checkpoint.reader == "fake"
        assert (list(checkpoint), list(checkpoint.dense), checkpoint.metadata) == (["a"], ["x"], {"kind": 7})
        assert checkpoint.dense["x"].tolist() == [1.0, 1.0]
        with pytest.raises(q4.CheckpointError, match=re.escape("a.q[")):
            checkpoint["a"]
    assert reader.closed == 1


def test_file_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """The error names the readers that were asked, and no package: none would read the file."""
    path = tmp_path / "x.other"
    path.write_bytes(b"OTHER...")
    with pytest.raises(q4.CheckpointError, match="got 'one unknown to fake'") as caught:
        open_checkpoint(path, readers=[FakeReader()])
    assert caught.value.hint is None


@pytest.mark.parametrize(
    ("name", "plugin"), [("x.safetensors", "safetensors"), ("x", "safetensors"), ("y", "gguf"), ("z.onnx", "onnx")]
)
@pytest.mark.parametrize("state", [None, "unknown", "disabled", "failed", "loaded"])
def test_missing_reader_is_named_with_the_way_to_it(name: str, plugin: str, state: str | None, tmp_path: Path) -> None:
    """A file of a kind that a plugin reads: install it, let it in, or see why it does not work, as is true."""
    content = {"safetensors": b"\2\0\0\0\0\0\0\0{}", "gguf": b"GGUF....", "onnx": b"\x08\x0a\x12\x00"}
    (tmp_path / name).write_bytes(content[plugin])
    with pytest.raises(q4.CheckpointError) as caught:
        open_checkpoint(tmp_path / name, plugins={} if state is None else {plugin: state})
    assert caught.value.hint is not None
    told = {
        None: f"Install the package that brings it: pip install q4-{plugin}.",
        "unknown": f"Install the package that brings it: pip install q4-{plugin}.",
        "disabled": "to Q4_PLUGINS, or take it out of Q4_DISABLE_PLUGINS",
        "failed": "See `q4 doctor`: the plugin",
        "loaded": "See `q4 doctor`: the plugin",
    }
    assert told[state] in caught.value.hint


def test_allow_list_without_the_plugin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Q4_PLUGINS`` that leaves readers and writers out is what both errors blame."""
    monkeypatch.setenv("Q4_PLUGINS", "dialects")
    q4.reset_registry()
    try:
        (tmp_path / "x.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        with pytest.raises(q4.CheckpointError, match="Q4_PLUGINS"):
            q4.open(tmp_path / "x.safetensors")
        with pytest.raises(q4.CheckpointError, match="Q4_PLUGINS"):
            q4.save_checkpoint(tmp_path / "y.safetensors", {}, dialect="simple-nf4")
    finally:
        q4.reset_registry()


def test_layer_that_memory_can_not_hold_is_a_checkpoint_error(fake_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch or the system raises as a layer or tensor is read gets the name of the layer and the file."""

    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(FakeSource, "read", full)
    monkeypatch.setattr(FakeSource, "load", full)
    checkpoint = open_checkpoint(fake_file, readers=[FakeReader()])
    for ask, what in ((lambda: checkpoint["a"], "layer 'a'"), (lambda: checkpoint.dense["x"], "tensor 'x'")):
        with pytest.raises(q4.CheckpointError, match="can't allocate memory") as caught:
            ask()
        assert (caught.value.what, caught.value.where) == (what, str(fake_file))


def test_file_that_two_readers_know_is_refused(fake_file: Path) -> None:
    """No order of readers decides."""
    with pytest.raises(q4.CheckpointError, match="one, two"):
        open_checkpoint(fake_file, readers=[FakeReader("one"), FakeReader("two")])


def test_reader_that_raises_does_not_lose_the_others(fake_file: Path) -> None:
    """A reader that fails to recognise is left out with a warning."""
    with pytest.warns(q4.Q4PluginWarning, match="'bad' is left out: it raised ZeroDivisionError"):
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
