"""Stale prepared files: replacement, with one warning."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_lm import LanguageModel
from q4_lm.models.architecture import build_decoder
from q4_lm.prepared.container import Container
from q4_lm.prepared.opening import CacheWarning
from tests.support.prepared import edited, logits, only_file

if TYPE_CHECKING:
    from pathlib import Path


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
    decoder = Container(only_file(cache)).header["model"]
    kinds = [{**kind, "plan": "cpu-native/0123456789abcdef"} for kind in decoder["kinds"]]
    edited(only_file(cache), model={**decoder, "kinds": kinds})


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
SAID: dict[Any, str] = {
    _newer: "is stale: source (",
    _other_software: "is stale: software q4core changed from 0.0.1 to ",
    _other_machine: "vax) changed",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_replaced_with_one_warning(
    write_llama: Any, tmp_path: Path, cache_states: Any, change: Any
) -> None:
    """A stale, truncated, foreign or damaged file costs one warning and a new file, and never an answer."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    change(path, cache)
    with pytest.warns(CacheWarning) as caught:
        assert torch.equal(logits(path, cache), plain)
    (warning,) = [item for item in caught if item.category is CacheWarning]
    assert SAID.get(change, "") in str(warning.message)
    assert [state.partition(":")[0] for state in cache_states()] == ["written", "not cached", "written"]
    assert torch.equal(logits(path, cache), plain)
    assert cache_states()[-1] == "opened"


def test_a_folder_in_the_way_is_left_alone(write_llama: Any, tmp_path: Path, cache_states: Any) -> None:
    """Where the file can't be put the model opens without it."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    _folder(path, cache)
    with pytest.warns(CacheWarning):
        assert torch.equal(logits(path, cache), plain)
    assert cache_states()[-1].startswith("not cached: the file can't be written")


HEADERS: dict[str, Any] = {
    "no facts": {"facts": {}},
    "no config": {"model": {}},
    "not an object": {"model": 3},
    "no vocabulary": {"extra": {}},
}


@pytest.mark.parametrize("damage", HEADERS)
def test_a_header_of_somebody_else_is_replaced(
    write_llama: Any, tmp_path: Path, cache_states: Any, damage: str
) -> None:
    """A header with the right digest that lacks what is needed is no reason to fail."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    edited(only_file(cache), **HEADERS[damage])
    with pytest.warns(CacheWarning):
        assert torch.equal(logits(path, cache), plain)
    assert cache_states()[-1] == "written"


@pytest.mark.parametrize("part", ["config", "kinds", "layers", "places", "joined", "embeddings", "dense", "factors"])
def test_a_decoder_without_a_part_is_replaced(write_llama: Any, tmp_path: Path, cache_states: Any, part: str) -> None:
    """Each part of the header is needed, and none is guessed."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    decoder = Container(only_file(cache)).header["model"]
    edited(only_file(cache), model={key: value for key, value in decoder.items() if key != part})
    with pytest.warns(CacheWarning):
        assert torch.equal(logits(path, cache), plain)
    assert cache_states()[-1] == "written"


def test_a_norm_that_is_missing_is_noticed(write_llama: Any, tmp_path: Path, cache_states: Any) -> None:
    """A parameter that no tensor fills is not left empty."""
    path, cache = write_llama(), tmp_path / "cache"
    plain = logits(path, cache)
    decoder = Container(only_file(cache)).header["model"]
    decoder["dense"].pop("norm.weight")
    edited(only_file(cache), model=decoder)
    with pytest.warns(CacheWarning, match=r"norm\.weight"):
        model = LanguageModel.open(path, cache=cache)
    with model:
        count = len([module for module in model.decoder.modules() if isinstance(module, q4.Q4Linear)])
        assert len(model.session.layers()) == count, "layers that were restored before the error are dropped"
    assert torch.equal(logits(path, cache), plain)
    assert cache_states()[-2:] == ["written", "opened"]


def test_a_source_that_changes_while_it_is_read_is_not_cached(
    write_llama: Any, tmp_path: Path, cache_states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the old file never stand under the facts of the new one."""
    path, cache = write_llama(), tmp_path / "cache"

    def slow(*arguments: Any) -> Any:
        decoder = build_decoder(*arguments)
        os.utime(path, ns=(1, 1))
        return decoder

    monkeypatch.setattr("q4_lm.generation.language_model.build_decoder", slow)
    logits(path, cache)
    assert "changed while it was read" in cache_states()[-1]
    assert not cache.exists()


def test_every_option_has_its_own_file(tiny_llama: Path, tmp_path: Path, cache_states: Any) -> None:
    """Another precision is another file; neither displaces the other."""
    for _ in range(2):
        logits(tiny_llama, tmp_path, activation_precision="exact")
        logits(tiny_llama, tmp_path, activation_precision="int8")
    assert cache_states() == ["written", "written", "opened", "opened"]


def test_every_variable_of_a_backend_has_its_own_file(
    tiny_llama: Path, tmp_path: Path, cache_states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another instruction set is another file; logs are no part of the key."""
    for value in ("here", "elsewhere"):
        monkeypatch.setenv("Q4_TEST_ISA", value)
        logits(tiny_llama, tmp_path)
        monkeypatch.setenv("Q4_LOG", "error")
        logits(tiny_llama, tmp_path)
        monkeypatch.delenv("Q4_LOG")
    assert cache_states() == ["written", "opened", "written", "opened"]
