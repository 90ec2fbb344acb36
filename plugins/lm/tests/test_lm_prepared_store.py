"""Prepared files on full disks, between processes, and damaged; the container itself."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import q4core as q4
from q4_lm.prepared.container import Container, write_container
from q4_lm.prepared.opening import CacheWarning
from q4_lm.prepared.store import Store
from tests.support.footprint import run_child
from tests.support.prepared import logits, only_file


def test_a_full_disk_leaves_nothing_behind(
    tiny_llama: Path, tmp_path: Path, cache_states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails half-way is one warning; no part of the file stays, and the model is there."""
    plain = logits(tiny_llama, "off")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(CacheWarning, match="No space left"):
        assert torch.equal(logits(tiny_llama, tmp_path / "cache"), plain)
    assert not any((tmp_path / "cache").iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        logits(tiny_llama, tmp_path / "cache")
    assert len(cache_states()) == 2


def test_a_folder_that_may_not_be_written(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No permission is one warning, and the model is there; root, as which tests may run, has every permission."""
    plain, really_open = logits(tiny_llama, "off"), os.open

    def refused(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    with pytest.warns(CacheWarning, match="Permission denied"):
        assert torch.equal(logits(tiny_llama, tmp_path / "cache"), plain)


def test_a_file_in_the_place_of_the_folder(tiny_llama: Path, tmp_path: Path) -> None:
    """A cache that is no folder is one warning."""
    (tmp_path / "cache").touch()
    with pytest.warns(CacheWarning, match="can't be"):
        logits(tiny_llama, tmp_path / "cache")


def test_the_least_recently_used_gives_way(tmp_path: Path) -> None:
    """Over the limit the file that was used longest ago goes first; what is opened counts as used."""
    store = Store(tmp_path, limit_bytes=4500)
    paths = [store.path_of({"number": number}) for number in range(4)]
    for age, path in zip((3, 2, 1), paths, strict=False):
        store.write(path, {}, [torch.zeros(1000, dtype=torch.uint8)])
        os.utime(path, (path.stat().st_mtime - 1000 * age,) * 2)
    store.open(paths[0])
    store.write(paths[3], {}, [torch.zeros(1000, dtype=torch.uint8)])
    assert [path.exists() for path in paths] == [True, False, True, True]
    with pytest.raises(OSError, match="more than the cache's limit"):
        store.write(paths[1], {}, [torch.zeros(5000, dtype=torch.uint8)])
    assert [path.exists() for path in paths] == [True, False, True, True]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """A temporary file goes once it is an hour old; a fresh one may be somebody's."""
    old, fresh = tmp_path / "a.tmp", tmp_path / "b.tmp"
    for path in (old, fresh):
        path.touch()
    os.utime(old, (0, 0))
    store = Store(tmp_path)
    store.write(store.path_of({}), {}, [torch.zeros(8)])
    assert not old.exists()
    assert fresh.exists()


def test_unfinished_files_are_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed writer left is listed and goes at the next pruning; what is being written is listed and stays."""
    store, really_replace = Store(tmp_path), Path.replace
    path, seen = store.path_of({}), list[object]()

    def replace(self: Path, target: Path) -> Path:
        (tmp_path / "killed.tmp").write_bytes(b"half")
        seen.append({entry.path == self: entry.unfinished for entry in store.entries()})
        seen.append([entry.path.name for entry in store.prune(10**9)])
        return really_replace(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    store.write(path, {}, [torch.zeros(8)])
    assert seen == [{True: "being written", False: "its writer was killed"}, ["killed.tmp"]]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_the_limit_holds_for_whole_files(tmp_path: Path) -> None:
    """Headers count: files never take more than the limit, and one that is too large with its header is refused."""
    store = Store(tmp_path, limit_bytes=9000)
    for number in range(4):
        store.write(store.path_of({"number": number}), {"text": "x" * 4000}, [torch.zeros(10)])
        assert sum(entry.nbytes for entry in store.entries()) <= 9000
    assert len(store.entries()) == 2
    with pytest.raises(OSError, match="more than the cache's limit"):
        store.write(store.path_of({}), {"text": "x" * 9000}, [torch.zeros(10)])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20, 47])
def test_a_file_cut_in_its_first_bytes(size: int, tmp_path: Path) -> None:
    """A file that is cut before its header is called cut, and not one of another kind."""
    write_container(tmp_path / "whole", {}, [torch.zeros(8)])
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:size])
    with pytest.raises(q4.CheckpointError, match=f"at least 48 bytes; the file was cut short, got {size}"):
        Container(tmp_path / "cut")
    (tmp_path / "other").write_bytes(b"GGUF")
    with pytest.raises(q4.CheckpointError, match="start must be"):
        Container(tmp_path / "other")


def test_writers_and_readers_at_once_see_whole_files(tmp_path: Path) -> None:
    """Each reader finds one writer's file, whole, however many write the same one."""
    store = Store(tmp_path)
    path = store.path_of({})
    faults: list[BaseException] = []
    store.write(path, {"value": 0}, [torch.full((5000,), 0.0)])

    def write(value: int) -> None:
        for _ in range(20):
            store.write(path, {"value": value}, [torch.full((5000,), float(value))])

    def read() -> None:
        try:
            for _ in range(60):
                found = store.open(path)
                assert bool((found.tensor(0) == found.header["value"]).all())
        except BaseException as error:  # noqa: BLE001  # reported below
            faults.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in (1, 2)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


CHILDREN = """
import json, os, pathlib, signal, sys
import torch
import q4core as q4
from q4_lm import LanguageModel
signal.alarm(120)  # should a child fail
torch.set_num_threads(1)
source, cache, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

def mapped():
    rows, inside = {}, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            inside = line.endswith(".q4prep")
        elif inside and name in {"Rss", "Pss", "Private_Dirty", "Anonymous"}:
            rows[name] = rows.get(name, 0) + int(rest.split()[0]) * 1024
    return rows

ready, go, end, back = os.pipe(), os.pipe(), os.pipe(), os.pipe()
for _ in range(count):
    if not os.fork():
        signal.alarm(120)  # should the others fail
        with LanguageModel.open(source, cache=cache) as model, torch.inference_mode():
            model.decoder(torch.tensor([list(range(40))]))
            for layer in model.session.layers():
                for buffer in layer.buffers():
                    buffer.sum()
            os.write(ready[1], b"1")
            os.read(go[0], 1)
            os.write(back[1], (json.dumps({**mapped(), "state": model.cached.state}) + "\\n").encode())
            os.read(end[0], 1)
        os._exit(0)
for _ in range(count):
    os.read(ready[0], 1)
os.write(go[1], b"1" * count)
found = []
with os.fdopen(back[0]) as lines:
    for _ in range(count):
        found.append(json.loads(lines.readline()))
os.write(end[1], b"1" * count)
for _ in range(count):
    os.wait()
print(json.dumps({"found": found}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="memory is read from Linux's smaps")  # noqa: PTH110
def test_ten_processes_have_one_copy(write_llama: Any, tmp_path: Path) -> None:
    """Ten processes that use a model share the pages of its file, and none has one of its own.

    The proportional share (Pss) of a page that ten processes have mapped is a tenth of it in each.
    """
    path, cache = write_llama(hidden=256, head_dim=64, feed_forward=768, layers=4), tmp_path / "cache"
    logits(path, cache)
    size = only_file(cache).stat().st_size
    found = run_child(CHILDREN, path, cache, 10)["found"]
    assert [item["state"] for item in found] == ["opened"] * 10
    for item in found:
        assert item["Private_Dirty"] == item["Anonymous"] == 0
        assert item["Rss"] > 0.8 * size
    assert sum(item["Pss"] for item in found) <= size + (1 << 16)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_a_container_gives_tensors_back(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every dtype and shape comes back bit for bit, aligned to 64 bytes."""
    tensors = [torch.ones(7, dtype=torch.uint8), torch.randn(shape).to(dtype)]
    write_container(tmp_path / "file", {"a": "ü"}, tensors)
    found = Container(tmp_path / "file")
    assert found.header["a"] == "ü"
    assert found.nbytes == (tmp_path / "file").stat().st_size
    back = found.tensor(1)
    assert back.dtype is dtype
    assert back.shape == shape
    assert torch.equal(back.view(-1).view(torch.uint8), tensors[1].view(-1).view(torch.uint8))
    assert back.data_ptr() % 64 == 0
    assert not found.verify()


def test_entries_that_leave_the_file_are_errors(tmp_path: Path) -> None:
    """A position or shape outside the file is a typed error, whatever the digest says."""
    path = tmp_path / "file"
    write_container(path, {}, [torch.zeros(64)])
    for change in ({"at": 64}, {"at": -64}, {"at": 1}, {"shape": [65]}, {"shape": [-1]}):
        found = Container(path)
        found.header["tensors"][0].update(change)
        with pytest.raises(q4.CheckpointError, match="tensor 0"):
            found.tensor(0)


def test_any_damaged_byte_of_the_data_is_found_by_verify(tmp_path: Path) -> None:
    """Opening reads no tensor; verify reads all, and names the one that changed."""
    path = tmp_path / "file"
    write_container(path, {}, [torch.zeros(64), torch.ones(64)])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert Container(path).verify() == [1]
