"""``Tokenizer``, over the package ``tokenizers``, and the tokenizer of a GGUF file.

Of GGUF vocabularies byte-level BPE is supported (``tokenizer.ggml.model`` = ``gpt2``): texts are bytes, each byte is
written as one visible character, and merges join them.

Reference:
    ``tokenizer.ggml.*`` keys of the GGUF specification; the pre-tokenisers by name are those of llama.cpp.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import attrs
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from q4_lm.models.metadata import Metadata

__all__ = ["Tokenizer", "Vocabulary", "build_tokenizer", "read_vocabulary"]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_TYPES = range(1, 7)
_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_END_TEXTS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"})
"""Control tokens that end a text or a turn in every model that has them, independent of ``eos_token_id``."""


@attrs.frozen
class _Recipe:
    """The rules that cut a text into words before merges apply.

    Args:
        words: Regular expression of a word; None for GPT-2's own.
        single_digits: Whether each digit is a word of its own.
        nfc: Whether texts are normalised to NFC first.
        ignore_merges: Whether a word that is in the vocabulary stays whole.
        add_bos: Whether a text starts with BOS where the file does not say.
    """

    words: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_RECIPES = {
    "gpt-2": _Recipe(),
    "smollm": _Recipe(single_digits=True),
    "starcoder": _Recipe(single_digits=True),
    "llama-bpe": _Recipe(words=_WORDS_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": _Recipe(words=_WORDS_LLAMA3.replace("{1,3}", ""), nfc=True),
}


class Tokenizer:
    """Texts to token numbers and back.

    Args:
        engine: Makes the vocabulary, when it is first needed. Added tokens stand for their own text; special ones among
            them are no part of a text.
        bos: Number of the token that starts a text, or None.
        add_bos: Whether ``encode`` puts it first.
        stops: Numbers of the tokens that end a text.
    """

    def __init__(self, engine: Callable[[], Engine], *, bos: int | None, add_bos: bool, stops: Iterable[int]) -> None:
        self._make_engine = engine
        self.bos = bos
        self.add_bos = add_bos
        self.stops = frozenset(stops)

    @property
    def ends(self) -> dict[str, Any]:
        """Its arguments other than the engine, as what JSON holds."""
        return {"bos": self.bos, "add_bos": self.add_bos, "stops": sorted(self.stops)}

    @functools.cached_property
    def _engine(self) -> Engine:
        return self._make_engine()

    @functools.cached_property
    def _added(self) -> dict[int, AddedToken]:
        found: dict[int, AddedToken] = self._engine.get_added_tokens_decoder()
        return found

    @functools.cached_property
    def _to_bytes(self) -> Callable[[str], bytes]:
        return _byte_writing(self._engine)

    def token_text(self, number: int) -> str | None:
        """Return a token's text in the vocabulary's own writing; None where there is no such token."""
        text: str | None = self._engine.id_to_token(number)
        return text

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return the token numbers of a text; control tokens in it are recognised.

        Args:
            text: Any text.
            add_bos: Whether to put BOS first; None does as the file says.

        Raises:
            InputError: The text holds half of a surrogate pair, as arguments that are no UTF-8 do.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            rule = "valid Unicode without lone surrogates"
            raise InputError("tokenizer", name="text", rule=rule, value=text[error.start : error.end]) from None
        numbers: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        wanted = self.add_bos if add_bos is None else add_bos
        return [self.bos, *numbers] if wanted and self.bos is not None else numbers

    def encode_whole(self, text: str) -> list[int]:
        """Return the token numbers of a text, with those that the tokenizer adds, such as [CLS] and [SEP]."""
        numbers: list[int] = self._engine.encode(text, add_special_tokens=True).ids
        return numbers

    def token_bytes(self, number: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes that a token adds to a text; none for a control token, unless asked for."""
        if (added := self._added.get(number)) is not None:
            return b"" if added.special and skip_special else added.content.encode()
        return self._to_bytes(self.token_text(number) or "")

    def decode(self, numbers: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token numbers; bytes that are no UTF-8 become U+FFFD."""
        found = b"".join(self.token_bytes(number, skip_special=skip_special) for number in numbers)
        return found.decode(errors="replace")


def _byte_writing(engine: Engine) -> Callable[[str], bytes]:
    """Return what turns a token's text into the bytes that it stands for."""
    kind = str(engine.decoder)
    if "ByteLevel" in kind:
        table = _byte_of_character()
        return lambda token: bytes(table[letter] for letter in token) if table.keys() >= set(token) else token.encode()
    if "WordPiece" in kind:
        return lambda token: token[2:].encode() if token.startswith("##") else b" " + token.encode()

    def piece(token: str) -> bytes:
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    return piece


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes from U+0100 on."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    visible = {letter: ord(letter) for letter in letters if letter < "\u0100"}
    hidden = sorted(set(range(256)).difference(visible.values()))
    return visible | dict(zip(letters[len(visible) :], hidden, strict=True))


@attrs.frozen
class Vocabulary:
    """A checked byte-level BPE vocabulary: plain values, from which the tokenizer is built at once.

    Args:
        pre: Name of the pre-tokeniser.
        tokens: Texts by number.
        merges: Numbers of the two tokens of each merge, one after another: [left, right, left, right, …].
        added: Numbers of the tokens that stand for their own text.
        control: Those of them that are no part of a text.
        bos: Number of the token that starts a text, or None.
        add_bos: Whether ``encode`` puts it first.
        stops: Numbers of the tokens that end a text.
    """

    pre: str
    tokens: Sequence[str]
    merges: Sequence[int]
    added: Sequence[int]
    control: Sequence[int]
    bos: int | None
    add_bos: bool
    stops: Sequence[int]

    def build(self) -> Tokenizer:
        """Return the tokenizer."""
        engine = self.engine()
        return Tokenizer(lambda: engine, bos=self.bos, add_bos=self.add_bos, stops=self.stops)

    def engine(self) -> Engine:
        """Return what cuts texts."""
        recipe, tokens = _RECIPES[self.pre], self.tokens
        vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
        texts = map(tokens.__getitem__, self.merges)
        merges = list(zip(texts, texts, strict=True))
        engine = Engine(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=recipe.ignore_merges))
        if recipe.nfc:
            engine.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if recipe.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if recipe.words is not None:
            steps.append(pre_tokenizers.Split(Regex(recipe.words), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=recipe.words is None))
        engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
        engine.decoder = decoders.ByteLevel()
        special = frozenset(self.control)
        engine.add_tokens(
            [AddedToken(tokens[number], special=number in special, normalized=False) for number in self.added]
        )
        return engine


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that a model file's metadata describes; errors as in ``read_vocabulary``."""
    return read_vocabulary(metadata).build()


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Return the vocabulary that a model file's metadata describes.

    Raises:
        CheckpointError: The kind of vocabulary or the pre-tokeniser is not supported, a key is missing, or the tokens,
            types, merges and numbers contradict each other.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        hint = (
            "q4_lm.load_model opens the model alone; its Hugging Face folder has a tokenizer.json, which is supported."
        )
        metadata.fail("tokenizer.ggml.model", "'gpt2' (byte-level BPE), the only kind that is supported", model, hint)
    pre = metadata.text("tokenizer.ggml.pre", default="gpt-2")
    if pre not in _RECIPES:
        metadata.fail("tokenizer.ggml.pre", f"one of {', '.join(sorted(_RECIPES))}", pre)
    numbers, types = _read_tokens(metadata)
    tokens = [*numbers]
    added = [number for number, kind in enumerate(types) if kind in {_CONTROL, _USER_DEFINED} and tokens[number]]
    ends = {numbers[text] for text in _END_TEXTS & numbers.keys() if types[numbers[text]] == _CONTROL}
    bos, eos, eot = (
        metadata.integer(f"tokenizer.ggml.{name}_token_id", low=0, high=len(types) - 1, default=None)
        for name in ("bos", "eos", "eot")
    )
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        merges=_read_merges(metadata, numbers),
        added=added,
        control=[number for number in added if types[number] == _CONTROL],
        bos=bos,
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", default=_RECIPES[pre].add_bos),
        stops=sorted(ends | ({eos, eot} - {None})),
    )


def _read_tokens(metadata: Metadata) -> tuple[dict[str, int], list[int]]:
    """Return each token's number and, by number, its type."""
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    if not tokens:
        metadata.fail("tokenizer.ggml.tokens", "at least one token", 0)
    vocabulary = {text: number for number, text in enumerate(tokens)}
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
