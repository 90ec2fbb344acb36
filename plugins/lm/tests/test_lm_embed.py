"""``q4 embed``: vectors of a file's lines, whole or absent, and what is wrong with lines, files and folders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import typer
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers
from typer.testing import CliRunner

import q4core as q4
from q4_lm import SentenceEncoder, build_transformer, save_model
from q4_lm.commands import embed as module
from q4_lm.commands.declared import embed
from q4_nn import convert_linears_

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a tiny encoder in four bits, next to a file of texts."""
    monkeypatch.setenv("Q4_CACHE", "off")
    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    options: Any = {"vocab_size": 4, "norm": "layer", "norm_position": "post", "positions": "learned"}
    torch.manual_seed(1)
    encoder = build_transformer(**sizes, **options, type_vocab_size=2, causal=False)
    convert_linears_(encoder, format="nf4")
    save_model(encoder, tmp_path / "folder")
    words = Engine(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))  # noqa: S106  # a word
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "folder" / "tokenizer.json"))
    (tmp_path / "lines.txt").write_text("a b\nb\r\nc c c a\nb\n", encoding="utf-8")
    return tmp_path / "folder"


def invoke(folder: Path, *arguments: object) -> str:
    """Run the command on an application of its own; an error comes through as it is."""
    app = typer.Typer()
    app.command()(embed)
    result = CliRunner().invoke(app, [*map(str, arguments), "--model", str(folder)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def expected(folder: Path, texts: list[str]) -> torch.Tensor:
    """Return the vectors that the library gives."""
    with SentenceEncoder.open(folder, q4.SessionConfig(backend="dequant-fallback")) as model:
        return model.encode(texts)


def test_a_row_for_each_line_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is NumPy's, float32, a row for each line, whatever the pieces; line ends are no part of a text."""
    monkeypatch.setattr(module, "_PIECE", 3)
    source = folder.parent / "lines.txt"
    said = invoke(folder, source, "--backend", "dequant-fallback", "--batch", 2)
    assert said.startswith("4 vectors of 64 features in ")
    found = np.load(folder.parent / "lines.npy", allow_pickle=False)
    assert (found.shape, found.dtype) == ((4, 64), np.float32)
    assert np.allclose(found[1], found[3], atol=1e-6)
    assert np.allclose(found, expected(folder, ["a b", "b", "c c c a", "b"]).numpy(), atol=1e-6)
    assert not [path for path in folder.parent.iterdir() if path.suffix == ".tmp"]


def test_lines_of_json_go_in_and_out(folder: Path) -> None:
    """Strings and objects with a text are read; each line that is written has the text and its vector."""
    source, out = folder.parent / "in.jsonl", folder.parent / "out.jsonl"
    source.write_text('"a b"\n{"text": "c", "id": 7}\n', encoding="utf-8")
    record = json.loads(invoke(folder, source, "--out", out, "--json", "--backend", "dequant-fallback"))
    assert list(record) == ["file", "model", "out", "sentences", "features", "seconds"]
    assert (record["sentences"], record["features"], record["out"]) == (2, 64, str(out))
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == ["a b", "c"]
    assert np.allclose([row["vector"] for row in rows], expected(folder, ["a b", "c"]).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "words", "match"),
    [
        ("none.txt", None, [], r"can't be read: No such file.*Did you mean '.*lines\.txt'|can't be read: No such file"),
        ("empty.txt", b"", [], r"FILE must be a file of at least one line, got 'none'"),
        ("bytes.txt", b"\xff\xfe\n", [], r"can't be read: .*utf-8"),
        ("bad.jsonl", b'"a"\n{"txt": "b"}\n', [], r"line 2 must be a string, or an object with the string \"text\""),
        ("bad.jsonl", b'"a"\n\n', [], r"line 2 must be a string"),
        ("good.txt", b"a\n", ["--out", "vectors.csv"], r"--out must be a file named \*\.npy or \*\.jsonl, got '\.csv'"),
        ("good.txt", b"a\n", ["--out", "no/such/v.npy"], r"--out must be in a folder that is there"),
        ("good.txt", b"a\n", ["--out", "there.npy"], r"--out must be new.*--force"),
        ("good.jsonl", b'"a"\n', ["--out", "good.jsonl", "--force"], r"--out must be another file than FILE"),
        ("good.txt", b"a\n", ["--prompt", "qery"], r"prompt must be one of the folder's"),
        ("good.txt", b"a\n", ["--batch", "0"], r"batch must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(  # one for each part of a case
    name: str, content: bytes | None, words: list[str], match: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a typed error, and no file is made or changed."""
    monkeypatch.chdir(folder.parent)
    (folder.parent / "there.npy").write_bytes(b"old")
    if content is not None:
        (folder.parent / name).write_bytes(content)
    before = {path: path.read_bytes() for path in folder.parent.iterdir() if path.is_file()}
    with pytest.raises(q4.InputError, match=match):
        invoke(folder, name, *words)
    assert {path: path.read_bytes() for path in folder.parent.iterdir() if path.is_file()} == before


def test_a_model_that_is_almost_there_is_named(folder: Path) -> None:
    """A folder that is not there is answered by the one that was meant."""
    with pytest.raises(q4.CheckpointError, match=r"--model must be a folder or a file.*Did you mean '.*folder'"):
        invoke(folder.with_name("foldr"), folder.parent / "lines.txt")


def test_a_vector_that_is_not_finite_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is named, and the file that was there stays as it was."""
    out = folder.parent / "lines.npy"
    out.write_bytes(b"old")
    encode = SentenceEncoder.encode

    def broken(self: SentenceEncoder, *arguments: Any, **options: Any) -> torch.Tensor:
        vectors = encode(self, *arguments, **options)
        vectors[2, 5] = float("nan")
        return vectors

    monkeypatch.setattr(SentenceEncoder, "encode", broken)
    with pytest.raises(q4.InputError, match=r"the vector of line 3 must be finite"):
        invoke(folder, folder.parent / "lines.txt", "--force")
    assert out.read_bytes() == b"old"
    assert not [path for path in folder.parent.iterdir() if path.suffix == ".tmp"]
