"""Files that the system won't give, that change while they are open, that are huge, or that killed writers left."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from q4core.plugin_api import Staging
from tests.support.checkpoints import is_same, packed, save, tensors_of_two, visible
from tests.support.footprint import run_child

if TYPE_CHECKING:
    from collections.abc import Callable

UNIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks, users or truncation")
LONG = "x" * 300

AS_NOBODY = """
import json, os, sys
import q4core as q4, torch

q4.dialects()
weights = {"a": q4.quantize(torch.ones(4, 64), "nf4")}
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
found = {}
for name in sys.argv[1:]:
    for what, do in (
        ("open", lambda: q4.open(name)),
        ("save", lambda: q4.save_checkpoint(name, weights, dialect="simple-nf4")),
    ):
        try:
            do()
            found[f"{what} {name}"] = "done"
        except BaseException as error:
            found[f"{what} {name}"] = f"{type(error).__name__}: {getattr(error, 'value', None)}"
print(json.dumps(found))
"""


@UNIX
def test_what_the_user_may_not_touch_is_a_checkpoint_error() -> None:
    """A file, folder or folder's file without permission is named, as it is read and as it is written."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users altogether
        Path(name).chmod(0o755)
        _check_permissions(Path(name))


def _check_permissions(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    save(closed / "model.safetensors", tensors_of_two())
    file = save(tmp_path / "x.safetensors", tensors_of_two())
    file.chmod(0)
    closed.chmod(0)
    names = [file, closed, closed / "model.safetensors", closed / "new.safetensors", closed / "new"]
    found = run_child(AS_NOBODY, *names)
    del found["printed"]
    closed.chmod(0o700)
    # A user who may write into a folder may replace a file in it without read access.
    wrong = {what: told for what, told in found.items() if told != "CheckpointError: Permission denied"}
    assert set(wrong) <= {f"save {file}"}, wrong


@pytest.mark.parametrize("name", [LONG, f"{LONG}.safetensors", f"{LONG}/model.safetensors"])
def test_name_that_is_too_long_is_a_checkpoint_error(name: str, tmp_path: Path) -> None:
    """A name that the system can't have is named, as it is read and as it is written."""
    with pytest.raises(q4.CheckpointError):
        q4.open(tmp_path / name)
    with pytest.raises(q4.CheckpointError):
        q4.save_checkpoint(tmp_path / name, packed(1), dialect="simple-nf4")
    assert visible(tmp_path) == []


@pytest.mark.parametrize("copy", [False, True])
def test_layer_larger_than_the_memory_is_a_checkpoint_error(copy: bool, tmp_path: Path) -> None:
    """A sparse file with a layer of 300 GB opens; what can't be read of it says so."""
    rows, columns = 300_000, 2_000_000
    sizes = {"a.weight": ("U8", [rows, columns // 2]), "a.absmax": ("F32", [rows * columns // 64])}
    header, end = {}, 0
    for name, (dtype, shape) in sizes.items():
        nbytes = shape[0] * (shape[1] if len(shape) > 1 else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    header["a.quant_map"] = {"dtype": "F32", "shape": [16], "data_offsets": [end, end + 64]}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        file.seek(0, os.SEEK_END)
        file.write(bytes(torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook).view(torch.uint8).tolist()))
    with q4.open(path, copy=copy) as checkpoint:
        assert list(checkpoint) == ["a"]
        if copy:
            with pytest.raises(q4.CheckpointError) as caught:
                checkpoint["a"]
            assert caught.value.where == str(path)


def test_copied_tensors_outlive_the_file(tmp_path: Path) -> None:
    """``copy=True`` reads the same numbers, and no mapping of the file is there: cutting it short harms no reader."""
    path = save(tmp_path / "x.safetensors", tensors_of_two())
    mapped = q4.open(path)
    expected = {module: mapped[module].contiguous() for module in mapped}
    norm = mapped.dense["norm.weight"].clone()
    mapped.close()
    del mapped
    with q4.open(path, copy=True) as checkpoint:
        weight, dense = checkpoint["a"], checkpoint.dense["norm.weight"]
        os.truncate(path, 100)
        assert is_same(weight, expected["a"])
        assert torch.equal(dense, norm)
        with pytest.raises(q4.CheckpointError) as caught:
            checkpoint["b"]
        assert caught.value.where == str(path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings can be listed on Linux only")
@pytest.mark.parametrize("copy", [False, True])
def test_copy_keeps_no_mapping(copy: bool, tmp_path: Path) -> None:
    """The file is mapped without ``copy``, and is not with it."""
    path = save(tmp_path / "x.safetensors", tensors_of_two())
    checkpoint = q4.open(path, copy=copy)
    pieces = [checkpoint["a"], checkpoint.dense["norm.weight"]]
    assert (str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")) is not copy
    assert len(pieces) == 2


WRITER = """
import sys, time
import q4core as q4, torch

class Slow(dict):
    def __getitem__(self, name):
        if name == "second":
            print("half", flush=True)
            time.sleep(60)
        return q4.quantize(torch.ones(4, 64), "nf4")

q4.save_checkpoint(sys.argv[1], Slow.fromkeys(["first", "second"]), dialect="simple-nf4")
"""


@pytest.fixture
def writer(tmp_path: Path) -> Callable[[Path], subprocess.Popen[str]]:
    """Return a function that starts a process which has saved half a checkpoint, and waits."""

    def start(target: Path) -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        return child

    return start


@UNIX
@pytest.mark.parametrize("target", ["x.safetensors", "folder"])
def test_next_writer_removes_what_a_killed_one_left(
    target: str, writer: Callable[[Path], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Temporary files of a writer that lives are left alone; those of one that was killed go with the next save."""
    path = tmp_path / target
    folder = path if target == "folder" else tmp_path
    child = writer(path)
    try:
        (left,) = folder.glob(".q4core-*.tmp")
        q4.save_checkpoint(path, packed(1), dialect="simple-nf4")
        assert left.is_dir()
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert left.is_dir()
    q4.save_checkpoint(path, packed(2), dialect="simple-nf4")
    assert not left.exists()
    assert list(folder.glob(".q4core-*")) == []
    assert len(q4.open(path)) == 2


@UNIX
def test_folder_of_a_writer_that_has_just_begun_is_left_alone(tmp_path: Path) -> None:
    """An empty folder may be one that its writer is about to lock."""
    young = tmp_path / ".q4core-1-abc.tmp"
    young.mkdir()
    Staging(tmp_path).discard()
    assert young.is_dir()


@UNIX
def test_saved_files_have_the_users_permissions(tmp_path: Path) -> None:
    """Files may be read by whom the umask allows."""
    old = os.umask(0o027)
    try:
        q4.save_checkpoint(tmp_path / "x", packed(1), dialect="bitsandbytes")
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "x").iterdir()}
    assert modes == {"model.safetensors": 0o640, "config.json": 0o640}


def test_many_empty_tensors_take_time_in_proportion(tmp_path: Path) -> None:
    """Four times the tensors take at most about four times the calls of Python, broken layers too."""

    def calls(count: int) -> int:
        empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        names = [f"m{index}.{part}" for index in range(count) for part in ("weight", "absmax", "quant_map", "x")]
        text = json.dumps(dict.fromkeys(names, empty)).encode()
        path = tmp_path / f"{count}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        profile = cProfile.Profile()
        with profile, pytest.raises(q4.SchemaError) as caught:
            q4.open(path)
        assert len(str(caught.value)) < 10_000
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]  # typeshed lacks it

    calls(100)
    assert calls(2000) < 5 * calls(500)


def test_a_config_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    """A sparse file of a terabyte next to the weights is refused by its size, before memory runs out."""
    q4.save_checkpoint(tmp_path / "x", packed(1), dialect="bitsandbytes")
    with (tmp_path / "x" / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(q4.CheckpointError, match="size must be at most 200000000 bytes"):
        q4.open(tmp_path / "x")
