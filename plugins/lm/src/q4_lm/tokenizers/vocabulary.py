"""Vocabularies of GGUF files: byte-level BPE, scored pieces (SentencePiece) and WordPiece.

Reference:
    ``tokenizer.ggml.*`` keys of the GGUF specification; defaults of absent keys are llama.cpp's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from q4_lm.tokenizers.pieces import SPACE, Pieces, byte_numbers
from q4_lm.tokenizers.tokenizer import Tokenizer
from q4_lm.tokenizers.words import RECIPES
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_lm.models.metadata import Metadata

__all__ = ["Vocabulary", "build_tokenizer", "read_vocabulary"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_TYPES = range(1, 7)
_END_TEXTS = frozenset(
    {
        *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"),
        *("<|return|>", "<|call|>"),
    }
)
"""Control tokens that end a text or a turn in every model that has them, independent of ``eos_token_id``."""
_END_OF_PHI = "<|end|>"
"""Ends a turn of Phi; of GPT-OSS, which has ``<|return|>``, a part of one."""
_KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece with scores", "bert": "WordPiece"}
_DEFAULTS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "sep": 102},
}
"""Numbers of tokens by their role, where a file names none."""
_KEY = {"sep": "seperator"}  # as the format spells it


@attrs.frozen(kw_only=True)
class Vocabulary:
    """A checked vocabulary: plain values, from which the tokenizer is built at once.

    Args:
        kind: ``gpt2``, ``llama`` or ``bert``.
        tokens: Texts by number.
        added: Numbers of the tokens that stand for their own text.
        control: Those of them that are no part of a text.
        bos: Number of the token that starts a text, or None.
        add_bos: Whether ``encode`` puts it first.
        stops: Numbers of the tokens that end a text.
        eats_spaces: Those of ``added`` behind which spaces are dropped.
        pre: Name of the pre-tokeniser (``gpt2``).
        merges: Numbers of the two tokens of each merge, one after another: [left, right, left, right, …] (``gpt2``).
        scores: By number (``llama``).
        unknown: Number of the token of what has no other (``llama``, ``bert``).
        sep: Number of the token that ends a text (``bert``).
        add_prefix: Whether a text begins with a space (``llama``).
        squeeze: Whether runs of spaces become one (``llama``).
        lower: Whether texts are written in lower case (``bert``).
        strip_accents: Whether accents are dropped (``bert``).
    """

    kind: str
    tokens: Sequence[str]
    added: Sequence[int]
    control: Sequence[int]
    bos: int | None
    add_bos: bool
    stops: Sequence[int]
    eats_spaces: Sequence[int] = ()
    pre: str = ""
    merges: Sequence[int] = ()
    scores: Sequence[float] = ()
    unknown: int | None = None
    sep: int | None = None
    add_prefix: bool = False
    squeeze: bool = False
    lower: bool = False
    strip_accents: bool = False

    def build(self) -> Tokenizer:
        """Return the tokenizer."""
        engine = self.engine()
        return Tokenizer(lambda: engine, bos=self.bos, add_bos=self.add_bos, stops=self.stops)

    def engine(self) -> Any:
        """Return what cuts texts."""
        if self.kind == "llama":
            return Pieces(
                self.tokens,
                self.scores,
                added=self.added,
                control=self.control,
                unknown=self.unknown,
                add_prefix=self.add_prefix,
                squeeze=self.squeeze,
                eats_spaces=self.eats_spaces,
            )
        engine = self._words() if self.kind == "gpt2" else self._word_pieces()
        special, eats = frozenset(self.control), frozenset(self.eats_spaces)
        engine.add_tokens(
            [
                AddedToken(self.tokens[number], special=number in special, rstrip=number in eats, normalized=False)
                for number in self.added
            ]
        )
        return engine

    def _words(self) -> Engine:
        recipe, tokens = RECIPES[self.pre], self.tokens
        vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
        texts = map(tokens.__getitem__, self.merges)
        merges = list(zip(texts, texts, strict=True))
        engine = Engine(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=recipe.ignore_merges))
        if recipe.nfc:
            engine.normalizer = normalizers.NFC()
        engine.pre_tokenizer = recipe.pre_tokenizer()
        engine.decoder = decoders.ByteLevel()
        return engine

    def _word_pieces(self) -> Engine:
        """Return the engine of words whose further pieces the file writes bare, and first ones behind a space."""
        special = frozenset(self.added)
        texts = {
            (token if number in special else token[1:] if token.startswith(SPACE) else f"##{token}"): number
            for number, token in enumerate(self.tokens)
        }
        first, last = ([] if number is None else [self.tokens[number]] for number in (self.bos, self.sep))
        unknown = self.tokens[self.unknown or 0]
        engine = Engine(models.WordPiece(vocab=texts, unk_token=unknown))
        engine.normalizer = normalizers.BertNormalizer(lowercase=self.lower, strip_accents=self.strip_accents)
        engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        engine.decoder = decoders.WordPiece()
        engine.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[(text, texts[text]) for text in {*first, *last}]
        )
        return engine


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that a model file's metadata describes; errors as in ``read_vocabulary``."""
    return read_vocabulary(metadata).build()


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Return the vocabulary that a model file's metadata describes.

    Raises:
        CheckpointError: The kind of vocabulary or the pre-tokeniser is not supported, a key is missing, or the tokens,
            types, scores, merges and numbers contradict each other.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        known = ", ".join(f"{name!r} ({what})" for name, what in _KINDS.items())
        hint = (
            "q4_lm.load_model opens the model alone; its Hugging Face folder has a tokenizer.json, which is supported."
        )
        metadata.fail("tokenizer.ggml.model", f"one of {known}", kind, hint)
    pre = _read_pre(metadata) if kind == "gpt2" else ""
    numbers, types = _read_tokens(metadata)
    own = {_CONTROL, _USER_DEFINED, *([_UNKNOWN] if kind != "gpt2" else [])}
    added = [number for number, of in enumerate(types) if of in own]
    texts = _END_TEXTS if "<|return|>" in numbers else _END_TEXTS | {_END_OF_PHI}
    ends = {numbers[text] for text in texts & numbers.keys() if types[numbers[text]] == _CONTROL}
    bos, eos, eot, unknown, sep = (
        _read_number(metadata, kind, role, types) for role in ("bos", "eos", "eot", "unknown", "sep")
    )
    default = RECIPES[pre].add_bos if pre else kind == "llama"
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token", default=default)
    if add_bos and bos is None and "tokenizer.ggml.add_bos_token" in metadata:
        metadata.fail("tokenizer.ggml.bos_token_id", "present, as add_bos_token is true")
    facts: dict[str, Any] = {"pre": pre} if pre else {"unknown": unknown}
    if kind == "gpt2":
        facts["merges"] = _read_merges(metadata, numbers)
    elif kind == "llama":
        facts |= _read_pieces(metadata, numbers, unknown)
    else:
        facts |= _read_word_pieces(metadata, numbers, types, unknown)
        facts["sep"], add_bos = sep, False  # encode_whole adds both ends
    return Vocabulary(
        kind=kind,
        tokens=[*numbers],
        added=added,
        control=[number for number in added if types[number] != _USER_DEFINED],
        bos=bos,
        add_bos=add_bos,
        stops=sorted(ends | {number for number in (eos, eot) if number is not None}),
        eats_spaces=_read_eaters(metadata, added, [*numbers]),
        **facts,
    )


def _read_number(metadata: Metadata, kind: str, role: str, types: list[int]) -> int | None:
    """Return the number of a token by its role; absent, that of the kind, where there is such a token."""
    default = _DEFAULTS[kind].get(role)
    legal = {_UNKNOWN} if (kind, role) == ("llama", "unknown") else {_UNKNOWN, _CONTROL}
    if default is not None and default < len(types) and "tokenizer.ggml.token_type" in metadata:
        default = default if types[default] in legal else None
    if default is not None and default >= len(types):
        default = None
    name = f"tokenizer.ggml.{_KEY.get(role, role)}_token_id"
    found: int | None = metadata.integer(name, low=0, high=len(types) - 1, default=default)
    return found


def _read_pre(metadata: Metadata) -> str:
    pre: str = metadata.text("tokenizer.ggml.pre", default="default")
    if pre not in RECIPES:
        close = closest_name(pre, RECIPES)
        hint = f"Did you mean {close!r}? " if close else ""
        hint += "q4_lm.load_model opens the model alone; its Hugging Face folder has a tokenizer.json."
        metadata.fail("tokenizer.ggml.pre", f"one of {', '.join(sorted(RECIPES))}", pre, hint)
    return pre


def _read_tokens(metadata: Metadata) -> tuple[dict[str, int], list[int]]:
    """Return each token's number and, by number, its type."""
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    if not tokens:
        metadata.fail("tokenizer.ggml.tokens", "at least one token", 0)
    vocabulary = {text: number for number, text in enumerate(tokens)}
    if "" in vocabulary:
        hint = "The vocabulary has a hole; convert the model again, with a text for each token."
        metadata.fail(f"tokenizer.ggml.tokens[{tokens.index('')}]", "not empty", "", hint)
    if len(vocabulary) != len(tokens):
        twice = next(text for number, text in enumerate(tokens) if vocabulary[text] != number)
        metadata.fail("tokenizer.ggml.tokens", "unique", twice)
    if "tokenizer.ggml.token_type" not in metadata:
        return vocabulary, [_NORMAL] * len(tokens)
    types = metadata.items("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        metadata.fail("tokenizer.ggml.token_type", f"{len(tokens)} items long, as many as tokens", len(types))
    bad = next((kind for kind in types if kind not in _TYPES), None)
    if bad is not None:
        metadata.fail("tokenizer.ggml.token_type", "numbers from 1 to 6", bad)
    return vocabulary, types


def _read_merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[int]:
    merges: list[int] = []
    for index, line in enumerate(metadata.items("tokenizer.ggml.merges", str)):
        left, _, right = line.partition(" ")
        if not (left and right and left in vocabulary and right in vocabulary and left + right in vocabulary):
            rule = "two tokens with a space between them that join to a token"
            metadata.fail(f"tokenizer.ggml.merges[{index}]", rule, line)
        merges += (vocabulary[left], vocabulary[right])
    return merges


def _read_pieces(metadata: Metadata, numbers: dict[str, int], unknown: int | None) -> dict[str, Any]:
    """Return what a vocabulary of scored pieces has more."""
    key = "tokenizer.ggml.scores"
    scores = metadata.numbers(key)
    if len(scores) != len(numbers):
        metadata.fail(key, f"{len(numbers)} items long, as many as tokens", len(scores))
    bad = next((index for index, score in enumerate(scores) if not math.isfinite(score)), None)
    if bad is not None:
        metadata.fail(f"{key}[{bad}]", "finite", scores[bad])
    if "tokenizer.ggml.precompiled_charsmap" in metadata:
        hint = "Its texts are changed before they are cut, which is not computed here. Take the Hugging Face folder."
        metadata.fail("tokenizer.ggml.precompiled_charsmap", "absent for scored pieces", "given", hint)
    if unknown is None and None in byte_numbers(numbers):
        hint = "Without it, a character that the vocabulary lacks has no token."
        metadata.fail("tokenizer.ggml.unknown_token_id", "present where not all bytes have tokens", hint=hint)
    return {
        "scores": scores,
        "add_prefix": metadata.flag("tokenizer.ggml.add_space_prefix", default=True),
        "squeeze": metadata.flag("tokenizer.ggml.remove_extra_whitespaces", default=False),
    }


def _read_word_pieces(
    metadata: Metadata, numbers: dict[str, int], types: list[int], unknown: int | None
) -> dict[str, Any]:
    """Return what a vocabulary of WordPiece has more."""
    if unknown is None:
        metadata.fail("tokenizer.ggml.unknown_token_id", "present", hint="A word without pieces becomes this token.")
    cased = any(types[number] == _NORMAL and text != text.lower() for text, number in numbers.items())
    lower = metadata.flag("tokenizer.ggml.normalizer.lowercase", default=not cased)
    return {
        "lower": lower,
        "strip_accents": metadata.flag("tokenizer.ggml.normalizer.strip_accents", default=lower),
    }


def _read_eaters(metadata: Metadata, added: list[int], tokens: list[str]) -> list[int]:
    """Return the added tokens behind which spaces are dropped: those of Phi-3, but for three."""
    if metadata.text("general.architecture", default="") != "phi3":
        return []
    return [number for number in added if tokens[number] not in {"<unk>", "<s>", "<|endoftext|>"}]
