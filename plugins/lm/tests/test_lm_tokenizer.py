"""The tokenizer that a model file describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q4_lm.models.metadata import Metadata
from q4_lm.tokenizers.vocabulary import build_tokenizer
from q4core import CheckpointError, InputError

if TYPE_CHECKING:
    from q4_lm.tokenizers.tokenizer import Tokenizer


def texts(tokenizer: Tokenizer, numbers: list[int]) -> list[str | None]:
    """Return the tokens' texts."""
    return [tokenizer.token_text(number) for number in numbers]


@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Any text comes back exactly from its token numbers, the texts of control tokens too."""
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@given(data=st.binary(max_size=40))
def test_decode_is_the_bytes(tokenizer: Tokenizer, data: bytes) -> None:
    """The tokens of single bytes decode to those bytes, with U+FFFD where they are no UTF-8."""
    numbers = [3 + byte for byte in data]
    assert tokenizer.decode(numbers) == data.decode(errors="replace")


def test_merges_and_words(tokenizer: Tokenizer) -> None:
    """Merges join characters inside words, the first one first; a space belongs to the word behind it."""
    assert texts(tokenizer, tokenizer.encode("the thing")) == ["the", "Ġ", "th", "ing"]
    assert texts(tokenizer, tokenizer.encode("a the")) == ["a", "Ġthe"]


def test_smollm_keeps_digits_apart(tokenizer: Tokenizer, vocabulary: dict[str, Any]) -> None:
    """Under ``smollm`` no merge joins digits; under ``gpt-2`` the same vocabulary does."""
    assert texts(tokenizer, tokenizer.encode("x12")) == ["x", "1", "2"]
    other = build_tokenizer(Metadata({**vocabulary, "tokenizer.ggml.pre": "gpt-2"}, "tiny"))
    assert texts(other, other.encode("x12")) == ["x", "12"]


def test_llama3_words(vocabulary: dict[str, Any]) -> None:
    """``llama-bpe`` cuts numbers after three digits, keeps a word that is a token whole, and starts with BOS."""
    vocabulary["tokenizer.ggml.pre"] = "llama-bpe"
    del vocabulary["tokenizer.ggml.add_bos_token"]
    vocabulary["tokenizer.ggml.tokens"] += ["1212", "whole"]
    vocabulary["tokenizer.ggml.token_type"] += [1, 1]
    vocabulary["tokenizer.ggml.merges"] = [*vocabulary["tokenizer.ggml.merges"], "12 12"]
    tokenizer = build_tokenizer(Metadata(vocabulary, "tiny"))
    assert texts(tokenizer, tokenizer.encode("whole")) == ["<|im_start|>", "whole"]
    assert texts(tokenizer, tokenizer.encode("1212", add_bos=False)) == ["12", "1", "2"]


def test_special_and_added_tokens(tokenizer: Tokenizer) -> None:
    """Control and user-defined tokens are recognised inside a text; only control tokens are left out when decoding."""
    numbers = tokenizer.encode("<|im_start|>a<added>b<|im_end|>")
    assert texts(tokenizer, numbers) == ["<|im_start|>", "a", "<added>", "b", "<|im_end|>"]
    assert tokenizer.decode(numbers) == "a<added>b"
    assert tokenizer.decode(numbers, skip_special=False) == "<|im_start|>a<added>b<|im_end|>"


def test_lone_surrogates(tokenizer: Tokenizer) -> None:
    """A text that is no Unicode, such as an argument in another encoding, is refused with what is wrong in it."""
    with pytest.raises(InputError, match="without lone surrogates") as caught:
        tokenizer.encode("a\udcffb")
    assert caught.value.value == "\udcff"


def test_bos_as_the_file_says(vocabulary: dict[str, Any]) -> None:
    """BOS comes first if the file or the caller says so; the caller wins."""
    with_bos = build_tokenizer(Metadata({**vocabulary, "tokenizer.ggml.add_bos_token": True}, "tiny"))
    assert with_bos.encode("a")[0] == 1
    assert with_bos.encode("a", add_bos=False) == with_bos.encode("a")[1:]
    without = build_tokenizer(Metadata(vocabulary, "tiny"))
    assert without.encode("a", add_bos=True) == with_bos.encode("a")


def test_stops(tokenizer: Tokenizer, vocabulary: dict[str, Any]) -> None:
    """EOS, EOT and the control tokens that always end a text stop a generation."""
    assert tokenizer.stops == {0, 2}
    vocabulary["tokenizer.ggml.eot_token_id"] = 7
    assert build_tokenizer(Metadata(vocabulary, "tiny")).stops == {0, 2, 7}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model"),
    "pre-tokeniser": ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre"),
    "tokens missing": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    "tokens empty": ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
    "token empty": ({"tokenizer.ggml.tokens": ["a", ""]}, "tokenizer.ggml.tokens[1]"),
    "no bos to add": (
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
        "tokenizer.ggml.bos_token_id",
    ),
    "token not text": ({"tokenizer.ggml.tokens": ["a", 1]}, "tokenizer.ggml.tokens[1]"),
    "token twice": ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens"),
    "types too few": ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type"),
    "merge of three": ({"tokenizer.ggml.merges": ["t h e"]}, "tokenizer.ggml.merges[0]"),
    "merge of one": ({"tokenizer.ggml.merges": ["t h", "the"]}, "tokenizer.ggml.merges[1]"),
    "merge to no token": ({"tokenizer.ggml.merges": ["q q"]}, "tokenizer.ggml.merges[0]"),
    "eos outside": ({"tokenizer.ggml.eos_token_id": 268}, "tokenizer.ggml.eos_token_id"),
    "bos negative": ({"tokenizer.ggml.bos_token_id": -1}, "tokenizer.ggml.bos_token_id"),
    "flag": ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_vocabulary(case: str, vocabulary: dict[str, Any]) -> None:
    """A vocabulary that is not supported or contradicts itself is refused by key, rule and value."""
    changes, key = BAD[case]
    vocabulary.update(changes)
    values = {name: value for name, value in vocabulary.items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        build_tokenizer(Metadata(values, "bad.gguf"))
    assert caught.value.name == f"metadata {key!r}"
    assert caught.value.where == "bad.gguf"
    assert caught.value.rule


def test_bad_type_number(vocabulary: dict[str, Any]) -> None:
    """A token type that does not exist is refused."""
    vocabulary["tokenizer.ggml.token_type"][5] = 9
    with pytest.raises(CheckpointError, match="numbers from 1 to 6, got 9"):
        build_tokenizer(Metadata(vocabulary, "bad.gguf"))
