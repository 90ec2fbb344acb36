"""The vocabulary of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

Reference:
    The package ``tokenizers``: its BPE with ``byte_fallback`` is SentencePiece's BPE, once merges are sorted by the
    score of what they make.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Engine

from q4_lm.tokenizers.pieces import SPACE
from q4_lm.tokenizers.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from q4_lm.models.metadata import Metadata
    from q4_lm.tokenizers.vocabulary import Vocabulary

__all__ = ["tokenizer_files", "tokenizer_parts"]

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ROLES |= {"sep_token": "seperator", "cls_token": "cls", "mask_token": "mask"}  # as the format spells it


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """Return the files of a model folder's tokenizer, text by name; none where the header has no vocabulary.

    Raises:
        CheckpointError: As ``read_vocabulary``.
    """
    if "tokenizer.ggml.model" not in metadata:
        return {}
    engine, config = tokenizer_parts(metadata)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    return {
        "tokenizer.json": engine.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def tokenizer_parts(metadata: Metadata) -> tuple[Engine, dict[str, Any]]:
    """Return what cuts texts, and what ``tokenizer_config.json`` says of it.

    Raises:
        CheckpointError: As ``read_vocabulary``.
    """
    vocabulary = read_vocabulary(metadata)
    engine = _pieces(vocabulary) if vocabulary.kind == "llama" else vocabulary.engine()
    bos = None if vocabulary.bos is None else vocabulary.tokens[vocabulary.bos]
    if vocabulary.add_bos and bos is not None:
        start = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocabulary.bos)]
        )
        engine.post_processor = start
    config: dict[str, Any] = {"add_bos_token": vocabulary.add_bos, "clean_up_tokenization_spaces": False}
    for name, role in _ROLES.items():
        number = metadata.integer(f"tokenizer.ggml.{role}_token_id", low=0, default=None)
        number = vocabulary.bos if role == "bos" else vocabulary.unknown if role == "unknown" else number
        if number is not None and number < len(vocabulary.tokens):
            config[name] = vocabulary.tokens[number]
    template = metadata.text("tokenizer.chat_template", default=None)
    if template is not None:
        config["chat_template"] = template
    return engine, config


def _pieces(vocabulary: Vocabulary) -> Engine:
    """Return scored pieces as the package's BPE."""
    numbers = {text: number for number, text in enumerate(vocabulary.tokens)}
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown]
    model = models.BPE(
        vocab=numbers, merges=_merges(vocabulary, numbers), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    engine = Engine(model)
    steps: list[Any] = []
    if vocabulary.squeeze:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.add_prefix:
        steps.append(normalizers.Prepend(SPACE))
    engine.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undone: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*undone, *([decoders.Strip(" ", 1, 0)] if vocabulary.add_prefix else [])])
    special, eats = frozenset(vocabulary.control), frozenset(vocabulary.eats_spaces)
    engine.add_tokens(
        [
            AddedToken(vocabulary.tokens[number], special=number in special, rstrip=number in eats, normalized=False)
            for number in vocabulary.added
        ]
    )
    return engine


def _merges(vocabulary: Vocabulary, numbers: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that join to a piece, the highest score first."""
    added = frozenset(vocabulary.added)
    found = []
    for number, text in enumerate(vocabulary.tokens):
        if number in added:
            continue
        pairs = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [(numbers[left], numbers[right]) for left, right in pairs if left in numbers and right in numbers]
        found += [(-vocabulary.scores[number], number, left, right) for left, right in sorted(known)]
    found.sort(key=lambda item: item[:2])
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in found]
