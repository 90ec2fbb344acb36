"""Vocabularies of scored pieces (SentencePiece) and of WordPiece in GGUF metadata."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer

import q4core as q4
from q4_lm.models.metadata import Metadata
from q4_lm.tokenizers.vocabulary import build_tokenizer

SPACE = "\u2581"
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SCORED = {
    **dict(zip(("ab", "bc", "abc", "aa", "aaa", "aaaa"), (-1.0, -2.0, -5.0, -3.0, -3.5, -4.0), strict=True)),
    **dict(zip(("ca", "bca", "é", "éa"), (-4.0, -2.5, -9.0, -1.0), strict=True)),
    **dict(zip((f"{SPACE}a", SPACE * 2, f"{SPACE}ab"), (-1.5, -6.0, -0.5), strict=True)),
    **dict.fromkeys(("a", "b", "c", SPACE), -10.0),
}
"""Pieces with ties, and with a join that scores higher than its parts."""


def pieces(**changes: Any) -> dict[str, Any]:
    """Return metadata of a vocabulary of pieces; None takes a key out."""
    user = {"<tool>": 4, f"{SPACE}{SPACE}{SPACE}": 4, "<tool><tool>": 4}
    tokens = {**SPECIAL, **dict.fromkeys(BYTES, 6), **dict.fromkeys(SCORED, 1), **user}
    found = {
        "model": "llama",
        "tokens": [*tokens],
        "scores": [SCORED.get(token, -1000.0 if token in user else 0.0) for token in tokens],
        "token_type": [*tokens.values()],
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None}


def build(**changes: Any) -> Any:
    """Return the tokenizer of ``pieces``."""
    return build_tokenizer(Metadata(pieces(**changes), "pieces.gguf"))


def texts(tokenizer: Any, text: str) -> list[str]:
    """Return the tokens of a text."""
    return [tokenizer.token_text(number) for number in tokenizer.encode(text, add_bos=False)]


def joined(text: str) -> list[str]:
    """Return the pieces of a text without special tokens: again and again the best neighbours, the left ones first."""
    parts = [*text.replace(" ", SPACE)]
    while True:
        found = [
            (SCORED[left + right], -index)
            for index, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in SCORED
        ]
        if not found:
            break
        index = -max(found)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [
        token for part in parts for token in ([part] if part in SCORED else [BYTES[byte] for byte in part.encode()])
    ]


@settings(max_examples=500)
@given(text=st.text("abcé \nß", max_size=40))
def test_joins(text: str) -> None:
    """The best neighbours are joined first, the left ones of equals; characters without a piece are bytes."""
    runs = text.split("   ")
    if len(runs) == 1:
        assert texts(build(add_space_prefix=False), text) == joined(text)


@settings(max_examples=300)
@given(text=st.text(max_size=40).filter(lambda text: SPACE not in text))
def test_round_trip(text: str) -> None:
    """Any text comes back from its numbers, with the space that precedes it."""
    assert build().decode(build().encode(text), skip_special=False).removeprefix("<s>") == (text and f" {text}"), text


def test_special_tokens() -> None:
    """Tokens with their own text are found first, the longest of them; what follows begins with a space again."""
    tokenizer = build()
    assert texts(tokenizer, "a<tool>a</s>b") == [f"{SPACE}a", "<tool>", f"{SPACE}a", "</s>", SPACE, "b"]
    assert texts(tokenizer, "<tool><tool><tool>") == ["<tool><tool>", "<tool>"]
    assert texts(tokenizer, "a   b<") == [f"{SPACE}a", SPACE * 3, SPACE, "b", "<0x3C>"]
    numbers = tokenizer.encode("a<tool>   </s>")
    assert tokenizer.decode(numbers) == " a<tool>   "
    assert tokenizer.decode(numbers, skip_special=False) == "<s> a<tool>   </s>"
    assert tokenizer.encode("") == [1]


def test_defaults_and_flags() -> None:
    """BOS is 1 and precedes a text, EOS is 2 and ends one, unless the keys say otherwise; so with the prefix."""
    assert (build().bos, build().add_bos, build().stops) == (1, True, {2})
    other = build(bos_token_id=3, eos_token_id=4, eot_token_id=5, add_bos_token=False, add_space_prefix=False)
    assert (other.bos, other.add_bos, other.stops) == (3, False, {4, 5})
    assert texts(other, "a") == ["a"]
    assert texts(build(remove_extra_whitespaces=True), "  a  b ") == [f"{SPACE}a", SPACE, "b"]


def test_spaces_behind_tokens_of_phi3() -> None:
    """Phi-3's special tokens take the spaces behind them, but for three of them."""
    metadata = {**pieces(add_space_prefix=False), "general.architecture": "phi3"}
    tokenizer = build_tokenizer(Metadata(metadata, "phi3"))
    assert texts(tokenizer, "</s> \n a<s> a") == ["</s>", "a", "<s>", f"{SPACE}a"]


def test_unknown_characters() -> None:
    """Without bytes, a run of characters without pieces is one unknown token."""
    kept = {**SPECIAL, **dict.fromkeys(SCORED, 1)}
    changes: dict[str, Any] = {
        "tokens": [*kept],
        "token_type": [*kept.values()],
        "scores": [SCORED.get(token, 0.0) for token in kept],
    }
    assert texts(build(**changes), "aßxb") == [f"{SPACE}a", "<unk>", "b"]
    with pytest.raises(q4.CheckpointError, match="where not all bytes have tokens") as caught:
        build(**{name: value[1:] for name, value in changes.items()})
    assert caught.value.name == "metadata 'tokenizer.ggml.unknown_token_id'"


TOKENS = pieces()["tokenizer.ggml.tokens"]
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no scores": ({"scores": None}, "tokenizer.ggml.scores", "present"),
    "few scores": ({"scores": [0.0]}, "tokenizer.ggml.scores", "as many as tokens"),
    "scores of text": ({"scores": ["0"] * len(TOKENS)}, "tokenizer.ggml.scores[0]", "of type float"),
    "score not finite": ({"scores": [float("nan")] * len(TOKENS)}, "tokenizer.ggml.scores[0]", "finite"),
    "hole": ({"tokens": [*TOKENS[:-1], ""]}, f"tokenizer.ggml.tokens[{len(TOKENS) - 1}]", "convert the model again"),
    "twice": ({"tokens": [*TOKENS[:-1], "a"]}, "tokenizer.ggml.tokens", "unique"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens", "present"),
    "types": ({"token_type": [1]}, "tokenizer.ggml.token_type", "as many as tokens"),
    "unknown outside": ({"unknown_token_id": 10_000}, "tokenizer.ggml.unknown_token_id", "from 0 to"),
    "flag": ({"add_space_prefix": 1}, "tokenizer.ggml.add_space_prefix", "true or false"),
    "charsmap": ({"precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap", "Hugging Face folder"),
    "kind": ({"model": "t5"}, "tokenizer.ggml.model", r"'bert' \(WordPiece\).*load_model"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_pieces(case: str) -> None:
    """What is missing, contradicts itself or is not computed is refused by file, key, rule and value."""
    changes, key, rule = BAD[case]
    with pytest.raises(q4.CheckpointError, match=rule) as caught:
        build(**changes)
    assert (caught.value.name, caught.value.where) == (f"metadata {key!r}", "pieces.gguf")


def test_whole_scores() -> None:
    """Scores may be whole numbers; of equals, the left neighbours are joined first."""
    assert texts(build(scores=[0] * len(TOKENS), add_space_prefix=False), "aab") == ["aa", "b"]


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "the", "##s", "!", "e", "##e", "中"]


def word_pieces(words: list[str], **changes: Any) -> dict[str, Any]:
    """Return metadata of a WordPiece vocabulary as the converter of llama.cpp writes it."""

    def written(word: str) -> str:
        if word.startswith("["):
            return word
        return word[2:] if word.startswith("##") else f"{SPACE}{word}"

    found = {
        "model": "bert",
        "tokens": [*map(written, words)],
        "token_type": [3 if word.startswith("[") else 1 for word in words],
        "bos_token_id": 2,
        "seperator_token_id": 3,
        "unknown_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None}


@settings(max_examples=300)
@given(text=st.text("unafblethsé !E中\n\u0301", max_size=30))
def test_word_pieces(text: str) -> None:
    """Words are cut as BERT's own tokenizer cuts them, between [CLS] and [SEP]."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    expected = BertWordPieceTokenizer(vocab=vocabulary, lowercase=True).encode(text)
    tokenizer = build_tokenizer(Metadata(word_pieces(WORDS), "bert.gguf"))
    assert tokenizer.encode_whole(text) == expected.ids
    assert tokenizer.encode(text) == expected.ids[1:-1]


def test_case_of_word_pieces() -> None:
    """Texts become lower case where no word has capitals, or where the file says so."""
    cased = [*WORDS, "The"]
    assert build_tokenizer(Metadata(word_pieces(WORDS), "uncased")).encode("The é") == [7, 10]
    assert build_tokenizer(Metadata(word_pieces(cased), "cased")).encode("The the é") == [13, 7, 1]
    lower = word_pieces(cased, **{"normalizer.lowercase": True})
    assert build_tokenizer(Metadata(lower, "cased")).encode("The") == [7]


def test_word_pieces_without_unknown() -> None:
    """A vocabulary without a token for the rest is refused."""
    with pytest.raises(q4.CheckpointError, match="becomes this token") as caught:
        build_tokenizer(Metadata(word_pieces(WORDS, unknown_token_id=None), "bert.gguf"))
    assert caught.value.name == "metadata 'tokenizer.ggml.unknown_token_id'"
