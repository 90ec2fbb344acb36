"""GGUF files that are written here, in llama.cpp: it loads them, with the same tokens and nearly the same logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import q4core as q4
from q4_gguf import GgufWriter
from q4_lm import LanguageModel, Metadata, load_model
from q4_lm.exchange.hf_to_gguf import to_gguf
from q4_lm.exchange.vocabulary_to_hf import tokenizer_files
from tests.support.commands import answer
from tests.support.hf_folders import FAMILIES, write_folder
from tests.support.pages import ROOT
from tests.support.snippets import run_page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer
llama_cpp = pytest.importorskip("llama_cpp")
EXACT = q4.SessionConfig(device="cpu", activation_precision="exact", compute_dtype=torch.float32)
NUMBERS = [place * 7 % 270 for place in range(12)]
TEXT = "the thing in 12 <|endoftext|>a"
CLOSE = 0.1
"""Share of the largest logit: llama.cpp rounds activations to eight bits."""


def vocabulary() -> dict[str, Any]:
    """Return a byte-level vocabulary of 272 tokens."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    letters = [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]
    words = {"th": "t h", "the": "th e", "in": "i n", "ing": "in g", "12": "1 2"}
    tokens = ["<|endoftext|>", "<unk>", "<s>", *letters, *words]
    tokens += [f"<spare{number}>" for number in range(272 - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (256 + len(words)) + [4] * (272 - 259 - len(words)),
        "tokenizer.ggml.merges": [*words.values()],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def folder_of(path: Path, family: str, **sizes: Any) -> Path:
    """Write a random model with a vocabulary."""
    folder = write_folder(path, FAMILIES[family], vocab_size=272, **sizes)
    for name, text in tokenizer_files(Metadata(vocabulary(), "here")).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def judge(path: Path) -> None:
    """Compare logits and tokens of a file in both libraries."""
    theirs = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, flash_attn=False)
    theirs.eval(NUMBERS)
    found = np.array(theirs.scores[: len(NUMBERS)])
    with q4.Session(EXACT) as session, torch.no_grad():
        wanted = load_model(path, session)(torch.tensor([NUMBERS]))[0].numpy()
    assert np.abs(found - wanted).max() <= CLOSE * np.abs(wanted).max()
    with LanguageModel.open(path, EXACT, cache="off") as ours:
        assert theirs.tokenize(TEXT.encode(), add_bos=False, special=True) == ours.tokenizer.encode(TEXT, add_bos=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_reads_every_family(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that became a file is the same model there."""
    folder = folder_of(tmp_path / "model", family)
    answer(capsys, "convert", folder, tmp_path / "out.gguf", "--dialect", "gguf")
    judge(tmp_path / "out.gguf")


def test_the_page_for_users_of_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/from/llama-cpp.md: both programs run; the tokens of a text and a dequantised tensor are equal."""
    folder = folder_of(tmp_path / "model", "llama")
    answer(capsys, "convert", folder, tmp_path / "model.gguf", "--dialect", "gguf")
    page = (ROOT / "docs/from/llama-cpp.md").read_text(encoding="utf-8")
    theirs, ours = run_page(page, tmp_path, theirs=True), run_page(page, tmp_path)
    assert theirs["tokens"] == ours["tokens"]
    assert torch.equal(torch.tensor(theirs["dense"]), ours["dense"])


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", GgufWriter.dialect.recipes)
def test_llama_cpp_reads_every_type(name: str, is_split: bool, tmp_path: Path) -> None:
    """All matrices of a model in one type, in one file or in parts."""
    folder = folder_of(tmp_path / "model", "llama", is_dense=True, hidden_size=256, intermediate_size=512)
    weights, dense = {}, {}
    with q4.open(folder) as opened:
        contents = to_gguf(opened, folder)
        for key in contents.dense:
            tensor = contents.dense[key]
            if tensor.dim() > 1:
                weights[key.removesuffix(".weight")] = q4.quantize(tensor, **GgufWriter.dialect.recipes[name])
            else:
                dense[key] = tensor
    limit = 300_000 if is_split else None
    facts: dict[str, Any] = {"dense": dense, "metadata": contents.metadata, "max_shard_bytes": limit}
    judge(q4.save_checkpoint(tmp_path / "out.gguf", weights, dialect="gguf", **facts))
