"""Prepared models on disk: opened without their source, made anew when anything changed, never wrong or in the way."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import q4core as q4
from q4_nn import LanguageModel
from q4_nn.models.architecture import build_decoder
from q4_nn.prepared.command import add_cache
from q4_nn.prepared.container import Container, write_container
from q4_nn.prepared.opening import CacheWarning
from q4_nn.prepared.store import Store, open_store
from tests.support.events import forget_warnings, heard
from tests.support.footprint import run_child

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer.testing import Result

TOKENS = torch.tensor([[3, 7, 260, 11]])


@pytest.fixture(name="told")
def told_fixture() -> Iterator[Any]:
    """Return a function that gives the states that the cache's events told; every warning may be given again."""
    forget_warnings()
    with heard("q4.cache") as events:
        yield lambda: [event["state"] for event in events]


def logits(path: Path, cache: Any, **options: Any) -> torch.Tensor:
    """Open a model through a cache and return what it computes of a few tokens."""
    with LanguageModel.open(path, q4.SessionConfig(**options), cache=cache) as model, torch.inference_mode():
        found: torch.Tensor = model.decoder(TOKENS)
        return found


def only_file(cache: Path) -> Path:
    """Return the one file of a cache."""
    (found,) = [path for path in cache.iterdir() if path.suffix == ".q4prep"]
    return found


def edited(path: Path, **header: Any) -> None:
    """Write a container again with parts of its header replaced, and right digests."""
    found = Container(path)
    tensors = [found.tensor(index).clone() for index in range(len(found))]
    write_container(path, {**found.header, **header}, tensors)


# -- what is opened is the same model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"backend": "dequant-fallback"}, {"compute_dtype": "bfloat16"}])
def test_a_cached_model_gives_the_same_bits(
    write_llama: Any, tmp_path: Path, told: Any, options: dict[str, Any], *, tied: bool
) -> None:
    """Logits, texts and the report are those of the first opening; dense parts, biases and joined layers among them."""
    path, cache = write_llama(tied=tied), tmp_path / "cache"
    plain = logits(path, "off", **options)
    assert torch.equal(logits(path, cache, **options), plain)
    if "backend" in options:  # which keeps views of the file, and so nothing of its own
        assert told()[-1].startswith("not cached: layer")
        assert not cache.exists()
        return
    assert torch.equal(logits(path, cache, **options), plain)
    assert told() == ["written", "opened"]
    config = q4.SessionConfig(**options)
    with LanguageModel.open(path, config, cache="off") as one, LanguageModel.open(path, config, cache=cache) as two:
        for text in ("the thing <|im_start|> in <added> 12", "", "é🙂"):
            assert one.tokenizer.encode(text) == two.tokenizer.encode(text)
        assert one.tokenizer.stops == two.tokenizer.stops
        said = [{"role": "user", "content": "the"}]
        assert one.chat(said) == two.chat(said)
        reports = [model.session.report().to_dict() for model in (one, two)]
        names = [
            [(layer["layer"], layer["format"], layer["paths"]) for layer in report["layers"]] for report in reports
        ]
        assert sorted(names[0], key=str) == sorted(names[1], key=str)
        assert [type(module) for module in one.decoder.modules()] == [type(module) for module in two.decoder.modules()]


def test_the_source_is_not_read(write_llama: Any, tmp_path: Path, told: Any) -> None:
    """Weights that have changed under the same size, time, inode and first 256 KiB are never seen."""
    path, cache = write_llama(hidden=256, head_dim=64, feed_forward=768, layers=4), tmp_path / "cache"
    plain = logits(path, cache)
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(1 << 18)
        file.write(b"\xff" * (facts.st_size - (1 << 18)))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert torch.equal(logits(path, cache), plain)
    assert told() == ["written", "opened"]


def test_the_vocabulary_is_built_when_it_is_needed(write_llama: Any, tmp_path: Path, told: Any) -> None:
    """Opening checks the vocabulary's bytes and builds nothing of them; damaged ones are made anew."""
    path, cache = write_llama(), tmp_path / "cache"
    logits(path, cache)
    with LanguageModel.open(path, cache=cache) as model:
        assert "_engine" not in vars(model.tokenizer)
        assert model.tokenizer.decode(model.tokenizer.encode("the thing")) == "the thing"
        assert "_engine" in vars(model.tokenizer)
    data = only_file(cache).read_bytes()
    only_file(cache).write_bytes(data.replace(b'"pre": "', b'"pre": x'))
    with pytest.warns(CacheWarning, match="digest"):
        logits(path, cache)
    assert told()[-1] == "written"


def test_opening_leaves_the_garbage_collector_as_it_was(write_llama: Any, tmp_path: Path) -> None:
    """The collector, which pauses while a file is opened, goes on or stays off."""
    path, cache = write_llama(), tmp_path / "cache"
    logits(path, cache)
    assert gc.isenabled()
    gc.disable()
    try:
        logits(path, cache)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_folder_is_cached_too(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hugging Face folder takes its tokenizer from its own files, and its weights from the cache."""
    from q4_nn.generation import language_model as module  # noqa: PLC0415  # whose readers are replaced

    with LanguageModel.open(tiny_llama, cache="off") as model:
        decoder, tokenizer = model.decoder, model.tokenizer
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "config.json").write_text("{}", encoding="utf-8")
        monkeypatch.setattr(module, "tokenizer_from_hf", lambda _: tokenizer)
        monkeypatch.setattr(module, "load_model", lambda *_: decoder)
        first = logits(tmp_path / "folder", tmp_path / "cache")
        monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("the weights were loaded again"))
        assert torch.equal(logits(tmp_path / "folder", tmp_path / "cache"), first)
        (tmp_path / "folder" / "config.json").write_text('{"a": 1}', encoding="utf-8")
        forget_warnings()
        with pytest.warns(CacheWarning, match="source changed"), pytest.raises(pytest.fail.Exception):
            logits(tmp_path / "folder", tmp_path / "cache")


def test_off_means_off(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """``off`` as argument or as Q4_CACHE touches no folder; Q4_CACHE names one for ``auto``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("Q4_CACHE", raising=False)
    logits(tiny_llama, "off")
    monkeypatch.setenv("Q4_CACHE", "off")
    logits(tiny_llama, "auto")
    assert not told()
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("Q4_CACHE", str(tmp_path / "named"))
    logits(tiny_llama, "auto")
    assert only_file(tmp_path / "named").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "named").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("Q4_CACHE", "")
    store = open_store()
    assert store is not None
    assert store.folder == tmp_path / ".cache" / "q4core"


@pytest.mark.parametrize("bad", ["", 3, None])
def test_a_cache_that_is_none(tiny_llama: Path, bad: Any) -> None:
    """What is neither 'auto', 'off' nor a folder is a typed error, and so is a limit that is no size."""
    with pytest.raises(q4.ConfigError, match="'auto', 'off' or a folder"):
        LanguageModel.open(tiny_llama, cache=bad)


def test_a_user_without_a_home_has_no_cache(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container of an unknown user the model opens; a folder below ``~`` is an error."""

    def unknown(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", unknown)
    monkeypatch.delenv("Q4_CACHE", raising=False)
    with LanguageModel.open(tiny_llama) as model:
        assert model.cached is None
    with pytest.raises(q4.ConfigError, match="unknown here"):
        LanguageModel.open(tiny_llama, cache="~/models")


def test_unified_memory_is_not_kept(tiny_llama: Path, tmp_path: Path) -> None:
    """What lies in memory of its own is no mapped file; nothing is written, and the reason stands there."""
    config = q4.SessionConfig(unified_memory="prefer_unified")
    with LanguageModel.open(tiny_llama, config, cache=tmp_path / "cache") as model:
        assert model.cached is not None
        assert "unified memory" in model.cached.state
    assert not (tmp_path / "cache").exists()


def test_a_limit_that_is_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_CACHE_LIMIT is read strictly."""
    monkeypatch.setenv("Q4_CACHE_LIMIT", "much")
    with pytest.raises(q4.ConfigError, match="Q4_CACHE_LIMIT"):
        open_store("somewhere")


# -- what changed is made anew


def _newer(path: Path, _: Path) -> None:
    os.utime(path, ns=(1, 1))


def _another_inode(path: Path, _: Path) -> None:
    facts = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    copy.replace(path)


def _other_software(_: Path, cache: Path) -> None:
    facts = Container(only_file(cache)).header["facts"]
    edited(only_file(cache), facts={**facts, "software": {**facts["software"], "q4core": "0.0.1"}})


def _other_machine(_: Path, cache: Path) -> None:
    facts = Container(only_file(cache)).header["facts"]
    edited(only_file(cache), facts={**facts, "machine": ["vax"]})


def _other_instructions(_: Path, cache: Path) -> None:
    decoder = Container(only_file(cache)).header["decoder"]
    kinds = [{**kind, "plan": "cpu-native/0123456789abcdef"} for kind in decoder["kinds"]]
    edited(only_file(cache), decoder={**decoder, "kinds": kinds})


def _truncated(_: Path, cache: Path) -> None:
    os.truncate(only_file(cache), only_file(cache).stat().st_size - 64)


def _short(_: Path, cache: Path) -> None:
    only_file(cache).write_bytes(b"q4prep01")


def _empty(_: Path, cache: Path) -> None:
    only_file(cache).write_bytes(b"")


def _foreign(path: Path, cache: Path) -> None:
    only_file(cache).write_bytes(path.read_bytes())


def _header_bit(_: Path, cache: Path) -> None:
    data = bytearray(only_file(cache).read_bytes())
    data[200] ^= 1
    only_file(cache).write_bytes(data)


def _folder(_: Path, cache: Path) -> None:
    path = only_file(cache)
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()


def _link(path: Path, cache: Path) -> None:
    own = only_file(cache)
    own.rename(path.with_name("elsewhere"))
    own.symlink_to(path.with_name("elsewhere"))


def _pipe(_: Path, cache: Path) -> None:
    path = only_file(cache)
    path.unlink()
    os.mkfifo(path)


CHANGES = (
    *(_newer, _another_inode, _other_software, _other_machine, _other_instructions),
    *(_truncated, _short, _empty, _foreign, _header_bit, _link, _pipe),
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_made_anew_and_told_once(write_llama: Any, tmp_path: Path, told: Any, change: Any) -> None:
    """A stale, truncated, foreign or damaged file costs one warning and a new file, and never an answer."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    change(path, cache)
    with pytest.warns(CacheWarning) as caught:
        assert torch.equal(logits(path, cache), plain)
    assert len([item for item in caught if item.category is CacheWarning]) == 1
    assert [state.partition(":")[0] for state in told()] == ["written", "not cached", "written"]
    assert torch.equal(logits(path, cache), plain)
    assert told()[-1] == "opened"


def test_a_folder_in_the_way_is_left_alone(write_llama: Any, tmp_path: Path, told: Any) -> None:
    """Where the file can't be put the model opens without it."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    _folder(path, cache)
    with pytest.warns(CacheWarning):
        assert torch.equal(logits(path, cache), plain)
    assert told()[-1].startswith("not cached: the file can't be written")


HEADERS: dict[str, Any] = {
    "no facts": {"facts": {}},
    "no config": {"decoder": {}},
    "not an object": {"decoder": 3},
    "no vocabulary": {"extra": {}},
}


@pytest.mark.parametrize("damage", HEADERS)
def test_a_header_of_somebody_else_is_made_anew(write_llama: Any, tmp_path: Path, told: Any, damage: str) -> None:
    """A header with the right digest that lacks what is needed is no reason to fail."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    edited(only_file(cache), **HEADERS[damage])
    with pytest.warns(CacheWarning):
        assert torch.equal(logits(path, cache), plain)
    assert told()[-1] == "written"


@pytest.mark.parametrize("part", ["config", "kinds", "layers", "places", "joined", "embeddings", "dense", "factors"])
def test_a_decoder_without_a_part_is_made_anew(write_llama: Any, tmp_path: Path, told: Any, part: str) -> None:
    """Each part of the header is needed, and none is guessed."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    decoder = Container(only_file(cache)).header["decoder"]
    edited(only_file(cache), decoder={key: value for key, value in decoder.items() if key != part})
    with pytest.warns(CacheWarning):
        assert torch.equal(logits(path, cache), plain)
    assert told()[-1] == "written"


def test_a_norm_that_is_missing_is_noticed(write_llama: Any, tmp_path: Path, told: Any) -> None:
    """A parameter that no tensor fills is not left empty."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    decoder = Container(only_file(cache)).header["decoder"]
    decoder["dense"].pop("norm.weight")
    edited(only_file(cache), decoder=decoder)
    with pytest.warns(CacheWarning, match=r"norm\.weight"):
        model = LanguageModel.open(path, cache=cache)
    with model:
        count = len([module for module in model.decoder.modules() if isinstance(module, q4.Q4Linear)])
        assert len(model.session.layers()) == count, "what was taken up before the fault is gone"
    assert torch.equal(logits(path, cache), plain)
    assert told()[-2:] == ["written", "opened"]


def test_a_source_that_changes_while_it_is_read_is_not_kept(
    write_llama: Any, tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the old file never stand under the facts of the new one."""
    path, cache = write_llama(), tmp_path / "cache"

    def slow(*arguments: Any) -> Any:
        decoder = build_decoder(*arguments)
        os.utime(path, ns=(1, 1))
        return decoder

    monkeypatch.setattr("q4_nn.generation.language_model.build_decoder", slow)
    logits(path, cache)
    assert "changed while it was read" in told()[-1]
    assert not cache.exists()


def test_every_wish_has_its_own_file(tiny_llama: Path, tmp_path: Path, told: Any) -> None:
    """Another precision is another file; neither displaces the other."""
    for _ in range(2):
        logits(tiny_llama, tmp_path, activation_precision="exact")
        logits(tiny_llama, tmp_path, activation_precision="int8")
    assert told() == ["written", "written", "opened", "opened"]


def test_what_backends_are_told_by_variables_has_its_own_file(
    tiny_llama: Path, tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another instruction set is another file; logs are no part of the key."""
    for value in ("here", "elsewhere"):
        monkeypatch.setenv("Q4_TEST_ISA", value)
        logits(tiny_llama, tmp_path)
        monkeypatch.setenv("Q4_LOG", "error")
        logits(tiny_llama, tmp_path)
        monkeypatch.delenv("Q4_LOG")
    assert told() == ["written", "opened", "written", "opened"]


# -- disks and other processes


def test_a_full_disk_leaves_nothing_behind(
    tiny_llama: Path, tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
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
        warnings.simplefilter("error")  # told once
        logits(tiny_llama, tmp_path / "cache")
    assert len(told()) == 2


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
        except BaseException as error:  # noqa: BLE001  # told below
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
from q4_nn import LanguageModel
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


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="memory is told by Linux's smaps")  # noqa: PTH110
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


# -- the file itself


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


# -- the command


def invoke(cache: Path | str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """Run the command on an application of its own; an error comes through as it is."""
    monkeypatch.setenv("Q4_CACHE", str(cache))
    app = typer.Typer()
    add_cache(app)
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_prepare_list_verify_prune(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is prepared once, listed with its source, found damaged where it is, and removed."""
    cache = tmp_path / "cache"
    assert "prepared: 0 MB in" in invoke(cache, monkeypatch, "prepare", str(tiny_llama)).stdout
    again = json.loads(invoke(cache, monkeypatch, "prepare", str(tiny_llama), "--json").stdout)
    assert again["state"] == "opened"
    (listed,) = json.loads(invoke(cache, monkeypatch, "cache", "list", "--json").stdout)["files"]
    assert listed["source"] == str(tiny_llama.resolve())
    assert str(tiny_llama.resolve()) in invoke(cache, monkeypatch, "cache", "list").stdout
    assert "1 files, 0 damaged" in invoke(cache, monkeypatch, "cache", "verify").stdout
    data = bytearray(only_file(cache).read_bytes())
    data[-1] ^= 1
    only_file(cache).write_bytes(data)
    verified = invoke(cache, monkeypatch, "cache", "verify")
    assert verified.exit_code == 2
    assert "tensors are damaged" in verified.stdout
    only_file(cache).write_bytes(b"nothing of ours")
    assert json.loads(invoke(cache, monkeypatch, "cache", "verify", "--json").stdout)["files"][0]["fault"]
    assert "start must be" in invoke(cache, monkeypatch, "cache", "list").stdout
    assert "removed 0 files" in invoke(cache, monkeypatch, "cache", "prune", "--limit", "1GB").stdout
    assert "removed 1 files" in invoke(cache, monkeypatch, "cache", "prune").stdout
    assert not any(cache.iterdir())


def test_prepare_says_why_not(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no cache, or a backend keeps nothing, that is an error with the reason."""
    with pytest.raises(q4.ConfigError, match="Q4_CACHE is 'off'"):
        invoke("off", monkeypatch, "prepare", str(tiny_llama))
    with pytest.raises(q4.LifecycleError, match="keeps views of its source"):
        invoke(tmp_path, monkeypatch, "prepare", str(tiny_llama), "--backend", "dequant-fallback")
    with contextlib.suppress(FileNotFoundError):
        assert not any(tmp_path.iterdir())
    with pytest.raises(q4.ConfigError, match="--limit"):
        invoke(tmp_path, monkeypatch, "cache", "prune", "--limit", "some")
