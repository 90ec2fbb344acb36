"""Prepared models on disk are the same models, opened without their source."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers

import q4core as q4
from q4_lm import LanguageModel, SentenceEncoder, build_transformer, save_model
from q4_lm.prepared.opening import CacheWarning
from q4_lm.prepared.store import open_store
from q4_nn import convert_linears_
from tests.support.events import forget_warnings
from tests.support.prepared import logits, only_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"backend": "dequant-fallback"}, {"compute_dtype": "bfloat16"}])
def test_a_cached_model_gives_the_same_bits(
    write_llama: Any, tmp_path: Path, cache_states: Any, options: dict[str, Any], *, tied: bool
) -> None:
    """Logits, texts and the report are those of the first opening; dense parts, biases and joined layers among them."""
    path, cache = write_llama(tied=tied), tmp_path / "cache"
    plain = logits(path, "off", **options)
    assert torch.equal(logits(path, cache, **options), plain)
    if "backend" in options:  # which keeps views of the file, and so nothing of its own
        assert cache_states()[-1].startswith("not cached: layer")
        assert not cache.exists()
        return
    assert torch.equal(logits(path, cache, **options), plain)
    assert cache_states() == ["written", "opened"]
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


def test_the_source_is_not_read(write_llama: Any, tmp_path: Path, cache_states: Any) -> None:
    """Weights that have changed under the same size, time, inode and first 256 KiB are never seen."""
    path, cache = write_llama(hidden=256, head_dim=64, feed_forward=768, layers=4), tmp_path / "cache"
    plain = logits(path, cache)
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(1 << 18)
        file.write(b"\xff" * (facts.st_size - (1 << 18)))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert torch.equal(logits(path, cache), plain)
    assert cache_states() == ["written", "opened"]


def test_the_vocabulary_is_built_when_it_is_needed(write_llama: Any, tmp_path: Path, cache_states: Any) -> None:
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
    assert cache_states()[-1] == "written"


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
    from q4_lm.prepared import opening  # noqa: PLC0415  # whose readers are replaced

    with LanguageModel.open(tiny_llama, cache="off") as model:
        decoder, tokenizer = model.decoder, model.tokenizer
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "config.json").write_text("{}", encoding="utf-8")
        monkeypatch.setattr(opening, "tokenizer_from_hf", lambda _: tokenizer)
        monkeypatch.setattr(opening, "load_model", lambda *_: decoder)
        first = logits(tmp_path / "folder", tmp_path / "cache")
        monkeypatch.setattr(opening, "load_model", lambda *_: pytest.fail("the weights were loaded again"))
        assert torch.equal(logits(tmp_path / "folder", tmp_path / "cache"), first)
        (tmp_path / "folder" / "config.json").write_text('{"a": 1}', encoding="utf-8")
        forget_warnings()
        with (
            pytest.warns(CacheWarning, match=r"stale: source \(.*config\.json\) changed"),
            pytest.raises(pytest.fail.Exception),
        ):
            logits(tmp_path / "folder", tmp_path / "cache")


def test_a_part_of_a_folder_that_cannot_be_read(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named as a file is no part of the source; a file that can't be read costs the cache, not the model."""
    from q4_lm.prepared import opening  # noqa: PLC0415  # whose readers are replaced

    with LanguageModel.open(tiny_llama, cache="off") as model:
        decoder, tokenizer = model.decoder, model.tokenizer
        (tmp_path / "folder" / "logs.json").mkdir(parents=True)
        (tmp_path / "folder" / "config.json").write_text("{}", encoding="utf-8")
        monkeypatch.setattr(opening, "tokenizer_from_hf", lambda _: tokenizer)
        monkeypatch.setattr(opening, "load_model", lambda *_: decoder)
        first = logits(tmp_path / "folder", tmp_path / "cache")
        assert only_file(tmp_path / "cache").is_file()

        def refuse(path: Path) -> Any:
            raise q4.CheckpointError("checkpoint", name="path", rule="readable", where=str(path))

        monkeypatch.setattr(opening, "open_regular", refuse)
        with pytest.warns(CacheWarning, match="readable"):
            assert torch.equal(logits(tmp_path / "folder", tmp_path / "cache"), first)


def test_an_encoder_is_cached_too(tmp_path: Path, cache_states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of ``save_model``'s with an encoder gives the same vectors from the cache; a decoder is refused."""
    from q4_lm.prepared import opening  # noqa: PLC0415  # whose reader is replaced

    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    options: Any = {"vocab_size": 4, "norm": "layer", "norm_position": "post", "positions": "learned"}
    encoder = build_transformer(**sizes, **options, type_vocab_size=2, causal=False)
    convert_linears_(encoder, format="nf4")
    save_model(encoder, tmp_path / "folder")
    words = Engine(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))  # noqa: S106  # a word
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "folder" / "tokenizer.json"))
    found = []
    for cache in (tmp_path / "cache", tmp_path / "cache"):
        with SentenceEncoder.open(tmp_path / "folder", cache=cache) as model:
            found.append(model.encode(["a b", "c"]))
            assert model.session.layers()
        for name in ("load_model", "tokenizer_from_hf"):
            monkeypatch.setattr(opening, name, lambda *_: pytest.fail("the files were read again"))
    assert cache_states() == ["written", "opened"]
    assert torch.equal(*found)
    with pytest.raises(q4.CheckpointError, match="of a decoder"):
        LanguageModel.open(tmp_path / "folder", cache=tmp_path / "cache")


def test_off_means_off(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_states: Any) -> None:
    """``off`` as argument or as Q4_CACHE touches no folder; Q4_CACHE names one for ``auto``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("Q4_CACHE", raising=False)
    logits(tiny_llama, "off")
    monkeypatch.setenv("Q4_CACHE", "off")
    logits(tiny_llama, "auto")
    assert not cache_states()
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


def test_unified_memory_is_not_cached(tiny_llama: Path, tmp_path: Path) -> None:
    """Memory of a provider is no mapped file; nothing is written, and the state has the reason."""
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


@pytest.mark.parametrize("cache", ["", "a\0b", None])
def test_a_cache_that_is_no_folder(cache: Any) -> None:
    """What no folder can be called is refused, NUL too."""
    with pytest.raises(q4.ConfigError, match="'auto', 'off' or a folder"):
        open_store(cache)
