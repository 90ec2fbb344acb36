"""Pre-tokenisers by name: the tokens that llama.cpp gives, over one vocabulary of bytes and their pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import q4core as q4
from q4_lm.models.metadata import Metadata
from q4_lm.tokenizers.vocabulary import build_tokenizer
from q4_lm.tokenizers.words import RECIPES

GOLDEN = json.loads(Path(__file__, "../words.json").resolve().read_text(encoding="utf-8"))
"""Texts, and for each name the token numbers by llama.cpp."""


@pytest.fixture(name="letters")
def letters_fixture(vocabulary: dict[str, Any]) -> list[str]:
    """Return the characters that stand for bytes, in the order of the bytes."""
    return [*vocabulary["tokenizer.ggml.tokens"][3 : 3 + 256]]


def pair_vocabulary(texts: list[str], letters: list[str]) -> dict[str, Any]:
    """Return a vocabulary in which two neighbouring bytes of a word become one token, the first ones first."""
    written = ["".join(letters[byte] for byte in text.encode()) for text in texts]
    pairs = sorted({line[index : index + 2] for line in written for index in range(len(line) - 1)})
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*letters, *pairs],
        "tokenizer.ggml.token_type": [1] * (256 + len(pairs)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("pre", GOLDEN["numbers"])
def test_tokens_by_name(pre: str, letters: list[str]) -> None:
    """Every text is cut where llama.cpp cuts it, and comes back whole."""
    vocabulary = {**pair_vocabulary(GOLDEN["texts"], letters), "tokenizer.ggml.pre": pre}
    tokenizer = build_tokenizer(Metadata(vocabulary, "pairs"))
    for text, numbers in zip(GOLDEN["texts"], GOLDEN["numbers"][pre], strict=True):
        found = tokenizer.encode(text)
        assert found == numbers, text
        assert tokenizer.decode(found) == text


def test_nfc_of_qwen(letters: list[str]) -> None:
    """Qwen's own tokenizer composes characters first, which llama.cpp does not do."""
    vocabulary = {**pair_vocabulary(["á"], letters), "tokenizer.ggml.pre": "qwen2"}
    tokenizer = build_tokenizer(Metadata(vocabulary, "pairs"))
    assert tokenizer.encode("a\u0301") == tokenizer.encode("á") != []


def test_every_rule_is_covered() -> None:
    """Each name has the rules of one whose tokens are compared."""
    compared = {RECIPES[name].splits for name in GOLDEN["numbers"]}
    assert {recipe.splits for recipe in RECIPES.values()} == compared


def test_absent_name(letters: list[str]) -> None:
    """A file that names no pre-tokeniser has llama.cpp's default."""
    vocabulary = pair_vocabulary(GOLDEN["texts"], letters)
    named = build_tokenizer(Metadata({**vocabulary, "tokenizer.ggml.pre": "default"}, "pairs"))
    plain = build_tokenizer(Metadata(vocabulary, "pairs"))
    assert all(plain.encode(text) == named.encode(text) for text in GOLDEN["texts"])


def test_unknown_name(letters: list[str]) -> None:
    """An unknown name is refused with the known ones, the closest one, and the way out."""
    vocabulary = {**pair_vocabulary(["a b"], letters), "tokenizer.ggml.pre": "llama-bqe"}
    with pytest.raises(q4.CheckpointError, match=r"Did you mean 'llama-bpe'\?.*load_model") as caught:
        build_tokenizer(Metadata(vocabulary, "pairs.gguf"))
    assert (caught.value.name, caught.value.where) == ("metadata 'tokenizer.ggml.pre'", "pairs.gguf")
