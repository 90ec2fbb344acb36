"""Vocabularies in GGUF files: the token numbers of the libraries that train and read them."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from q4_lm.models.metadata import Metadata
from q4_lm.tokenizers.vocabulary import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

WORDS = "the of and to in is that for it was on are as with his they at be this have from or one had by hot but some"
TEXTS = (
    *("", " ", "the", "  two  spaces ", "tab\there\n\nnext", "3.14159 and 27", "don't WON'T", "naïve café Straße"),
    *("日本語のテキスト", "😀 and 👩\u200d👩", "a\u0301", "onandonandonon", "thethethe of of", "\u00a0x", "x" * 200),
)


def sample(seed: int, count: int) -> list[str]:
    """Return random texts of common words, characters and spaces."""
    rng = random.Random(seed)  # texts, no secrets
    parts = [*WORDS.split(), *"abehinot   \n.,'19éß語"]
    return [
        "".join(rng.choice(parts) + rng.choice(("", " ")) for _ in range(rng.randrange(1, 25))) for _ in range(count)
    ]


def train(spm: ModuleType, folder: Path, **options: Any) -> Any:
    """Return a small BPE model that SentencePiece trains."""
    (folder / "corpus.txt").write_text("\n".join(sample(1, 3000)), encoding="utf-8")
    facts = {"vocab_size": 420, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2, "num_threads": 1}
    facts |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.99}
    facts |= options
    spm.SentencePieceTrainer.train(input=str(folder / "corpus.txt"), model_prefix=str(folder / "spm"), **facts)
    return spm.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def kind_of(model: Any, number: int) -> int:
    """Return a piece's type as GGUF numbers it."""
    is_user = number < 10 and model.id_to_piece(number).startswith("<u")  # which come first
    facts = (model.is_unknown(number), model.is_control(number), model.is_unused(number), model.is_byte(number))
    found = [kind for kind, fact in zip((2, 3, 5, 6), facts, strict=True) if fact]
    return found[0] if found else 4 if is_user else 1


def metadata_of(model: Any, **changes: Any) -> dict[str, Any]:
    """Return what the converter of llama.cpp writes of a model of SentencePiece."""
    numbers = range(model.vocab_size())
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": [model.id_to_piece(number) for number in numbers],
        "scores": [model.get_score(number) for number in numbers],
        "token_type": [kind_of(model, number) for number in numbers],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def write(path: Path, values: dict[str, Any]) -> None:
    """Write a GGUF file of a vocabulary and the sizes of a model of none."""
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_head_count, writer.add_context_length):
        add(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(values["tokenizer.ggml.tokens"]), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "without a prefix": ({"add_dummy_prefix": False}, {"add_space_prefix": False}),
    "single spaces": ({"remove_extra_whitespaces": True}, {"remove_extra_whitespaces": True}),
    "without bytes": ({"byte_fallback": False, "vocab_size": 180}, {}),
    "user-defined": (
        {"user_defined_symbols": ["<u1>", "<u1><u1>"], "add_dummy_prefix": False},
        {"add_space_prefix": False},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece(name: str, tmp_path: Path, peer: Callable[[str], ModuleType]) -> None:
    """Numbers and texts are those of SentencePiece, over the model that it trained."""
    options, changes = MODELS[name]
    model = train(peer("sentencepiece"), tmp_path, **options)
    ours = build_tokenizer(Metadata(metadata_of(model, **changes), name))
    user = ["a<u1>b", "<u1><u1><u1> the <u1>", "<u1 >"] if name == "user-defined" else []
    for text in (*TEXTS, *sample(2, 400), *user):
        expected = model.encode(text)
        assert ours.encode(text, add_bos=False) == expected, text
        if model.unk_id() not in expected:
            decoded = ours.decode(expected)
            prefix = "" if "add_space_prefix" in changes else " "
            assert decoded.removeprefix(prefix) == model.decode(expected), text


def test_transformers(tmp_path: Path, peer: Callable[[str], ModuleType]) -> None:
    """transformers' reading of the same file gives the same numbers.

    It puts no space before a text that begins with one, which SentencePiece and llama.cpp do.
    """
    model = train(peer("sentencepiece"), tmp_path)
    values = metadata_of(model)
    write(tmp_path / "model.gguf", values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer("transformers").AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = build_tokenizer(Metadata(values, "model.gguf"))
    different = [
        text
        for text in (*TEXTS, *sample(3, 200))
        if text[:1].strip() and ours.encode(text, add_bos=False) != theirs(text, add_special_tokens=False)["input_ids"]
    ]
    assert different == []
