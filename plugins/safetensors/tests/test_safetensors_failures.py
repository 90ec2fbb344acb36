"""Saving that fails, or is refused: nothing changes, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from tests.support.checkpoints import is_same, packed, trio, visible

if TYPE_CHECKING:
    from q4core.plugin_api import Staging


def _unlock_only(staging: Staging) -> None:
    """Let go of a writer's lock, as the end of the process does, and remove nothing."""
    if staging._lock is not None:  # a crash before the lock has nothing to release
        os.close(staging._lock)


class Crash(BaseException):
    """Stands for the end of the process: nothing cleans up after it."""


@pytest.mark.parametrize("old", [None, 1])
@pytest.mark.parametrize("new", [None, 1])
def test_a_crash_leaves_the_old_or_the_new_checkpoint(
    old: int | None, new: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a process ends while it saves, the folder opens as old, as new, or not at all; never as a mixture."""
    first, second = packed(2), {name: q4.quantize(torch.randn(16, 128), "nf4") for name in ("m.0", "m.1")}
    seen: set[str] = set()
    for step in range(40):
        folder = tmp_path / str(step)
        q4.save_checkpoint(folder, first, dialect="simple-nf4", max_shard_bytes=old, config={"version": 1})
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
            patch.setattr("q4core.plugin_api.Staging.discard", _unlock_only)
            try:
                q4.save_checkpoint(folder, second, dialect="simple-nf4", max_shard_bytes=new, config={"version": 2})
            except Crash:
                pass
            else:
                break
        try:
            checkpoint = q4.open(folder)
        except q4.CheckpointError:
            seen.add("refused")
            continue
        weights = next(item for item in (first, second) if item["m.0"].shape == checkpoint["m.0"].shape)
        assert all(is_same(checkpoint[module], weights[module]) for module in weights)
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
    weights = packed()
    q4.save_checkpoint(path, weights, dialect="simple-nf4")
    before = {item: item.read_bytes() for item in tmp_path.rglob("*.*") if item.is_file()}
    second = dict(packed(2, 4))
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
        q4.save_checkpoint(path, second, dialect="simple-nf4")
    if failing != "layer":
        assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    assert {item: item.read_bytes() for item in tmp_path.rglob("*.*") if item.is_file()} == before


def test_failure_in_a_new_folder_leaves_no_folder(tmp_path: Path) -> None:
    """A folder that was made for a checkpoint which then fails is removed again."""
    with pytest.raises(q4.DialectError):
        q4.save_checkpoint(tmp_path / "x", {"a": q4.quantize(torch.ones(4, 64), "nvfp4")}, dialect="simple-nf4")
    assert visible(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_illegal_scale_is_not_written(value: float, tmp_path: Path) -> None:
    """A NaN or infinite scale is refused before anything is written, by layer, field and value."""
    weight = q4.quantize(torch.ones(4, 64), "nf4")
    weight.scale[1] = value
    with pytest.raises(q4.WeightError) as caught:
        q4.save_checkpoint(tmp_path / "x.safetensors", {"good": packed(1)["m.0"], "bad": weight}, dialect="simple-nf4")
    assert "'bad'" in caught.value.what
    assert caught.value.name is not None
    assert caught.value.name.startswith("scale")
    assert visible(tmp_path) == []


@pytest.mark.parametrize("name", ["m.0.weight", "m.0.absmax"])
def test_name_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    """A dense tensor may not have the name of a layer's tensor."""
    with pytest.raises(q4.CheckpointError) as caught:
        q4.save_checkpoint(tmp_path / "x.safetensors", packed(1), dialect="simple-nf4", dense={name: torch.ones(1)})
    assert caught.value.value == name
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()],
    ids=["meta", "complex128", "sparse"],
)
def test_tensor_that_the_format_can_not_hold_is_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    """No data, no name for the dtype, or no strides: an error that names the tensor."""
    with pytest.raises(q4.CheckpointError) as caught:
        q4.save_checkpoint(tmp_path / "x.safetensors", {}, dialect="simple-nf4", dense={"x": tensor})
    assert caught.value.name == "x"


def test_tensors_that_would_change_a_layer_are_refused(tmp_path: Path) -> None:
    """Dense tensors that would be taken for a layer's scales, or for another layer, are refused."""
    for dense in ({"m.0.weight_scale": torch.ones(1)}, trio("other")):
        with pytest.raises(q4.CheckpointError, match="is read as simple-nf4 again"):
            q4.save_checkpoint(tmp_path / "x.safetensors", packed(1), dialect="simple-nf4", dense=dense)
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "arguments", "field"),
    [
        ("x.npz", {}, "path"),
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
        q4.save_checkpoint(tmp_path / path, {}, dialect="simple-nf4", **arguments)
    assert caught.value.name == field
    assert visible(tmp_path) == []


def test_unknown_dialect_is_refused_when_saving(tmp_path: Path) -> None:
    """The names that there are, and the closest, stand in the error."""
    with pytest.raises(q4.DialectError, match="simple-nf4"):
        q4.save_checkpoint(tmp_path / "x", packed(1), dialect="simple-nf")
    assert visible(tmp_path) == []


_BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no weights": ({"weights": None}, "weights"),
    "weights as a list": ({"weights": [1]}, "weights"),
    "a number as weight": ({"weights": {"a": 3}}, "weights['a']"),
    "a tensor as weight": ({"weights": {"a": torch.ones(4, 64)}}, "weights['a']"),
    "a number as name": ({"weights": {3: packed(1)["m.0"]}}, "weights"),
    "a name that UTF-8 lacks": ({"weights": {"a\ud800": packed(1)["m.0"]}}, "weights"),
    "an empty name": ({"weights": {"": packed(1)["m.0"]}}, "weights"),
    "dense as a number": ({"dense": 3}, "dense"),
    "a number as tensor": ({"dense": {"x": 3}}, "dense['x']"),
    "a number as tensor's name": ({"dense": {3: torch.ones(1)}}, "dense"),
    "a tensor's name that UTF-8 lacks": ({"dense": {"\udfff": torch.ones(1)}}, "dense"),
    "metadata as a number": ({"metadata": 3}, "metadata"),
    "a number in metadata": ({"metadata": {"x": 3}}, "metadata['x']"),
    "a number as metadata's name": ({"metadata": {3: "x"}}, "metadata"),
    "metadata that UTF-8 lacks": ({"metadata": {"x": "\ud800"}}, "metadata['x']"),
    "a path as a number": ({"path": 3}, "path"),
    "a path with NUL": ({"path": "a\0.safetensors"}, "path"),
    "a text as shard size": ({"path": "folder", "max_shard_bytes": "1"}, "max_shard_bytes"),
    "config as a list": ({"path": "folder", "config": [1]}, "config"),
    "config that is no JSON": ({"path": "folder", "config": {"x": {1}}}, "config"),
}


@pytest.mark.parametrize("case", _BAD_ARGUMENTS)
def test_arguments_of_a_wrong_kind_are_named(case: str, tmp_path: Path) -> None:
    """Each argument that is not what it must be is an error with its name, rule and value; nothing is written."""
    changes, name = _BAD_ARGUMENTS[case]
    arguments: dict[str, Any] = {"path": "x.safetensors", "weights": packed(1), "dialect": "simple-nf4", **changes}
    path = arguments.pop("path")
    weights = arguments.pop("weights")
    with pytest.raises(q4.CheckpointError) as caught:
        q4.save_checkpoint(tmp_path / path if isinstance(path, str) else path, weights, **arguments)
    assert caught.value.name == name
    assert caught.value.rule is not None
    assert caught.value.has_value
    assert str(caught.value).encode("utf-8", "backslashreplace")
    assert visible(tmp_path) == []


@pytest.mark.parametrize("dialect", [3, None, ["simple-nf4"]])
def test_a_dialect_that_is_no_name_is_refused(dialect: Any, tmp_path: Path) -> None:
    """Something else than a text as the dialect is the error that lists the dialects."""
    with pytest.raises(q4.DialectError, match="simple-nf4"):
        q4.save_checkpoint(tmp_path / "x.safetensors", packed(1), dialect=dialect)
    assert visible(tmp_path) == []
