"""The tokenizer that a GGUF file describes, built with the package ``tokenizers``.

Served are byte-level BPE vocabularies (``tokenizer.ggml.model`` = ``gpt2``): texts are bytes, each byte is written as
one visible character, and merges join them.

Reference:
    ``tokenizer.ggml.*`` keys of the GGUF specification; the pre-tokenisers by name are those of llama.cpp.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from q4_nn.models.metadata import Metadata

__all__ = ["Tokenizer", "build_tokenizer", "byte_of_character"]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_TYPES = range(1, 7)
_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_END_TEXTS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"})
"""Control tokens that end a text or a turn in every model that has them, whatever ``eos_token_id`` says."""


@attrs.frozen
class _Recipe:
    """How a text is cut into words before merges apply.

    Args:
        words: Regular expression of a word; None for GPT-2's own.
        single_digits: Whether each digit stands alone.
        normalizer: Unicode normal form, or None.
        ignore_merges: Whether a word that is in the vocabulary stays whole.
        add_bos: Whether a text starts with BOS where the file does not say.
    """

    words: str | None = None
    single_digits: bool = False
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_RECIPES = {
    "gpt-2": _Recipe(),
    "smollm": _Recipe(single_digits=True),
    "starcoder": _Recipe(single_digits=True),
    "llama-bpe": _Recipe(words=_WORDS_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": _Recipe(words=_WORDS_LLAMA3.replace("{1,3}", ""), normalizer="NFC"),
}


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in set(visible))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return table


def _from_byte_writing(token: str) -> bytes:
    table = byte_of_character()
    return bytes(table[character] for character in token)


class Tokenizer:
    """Texts to token numbers and back.

    Args:
        engine: The encoder.
        tokens: Token texts by number, in the file's own writing.
        special: Numbers of control tokens, which are not part of a text.
        verbatim: Numbers of added tokens, whose text is not in byte writing.
        bos: Number of the token that starts a text, or None.
        add_bos: Whether ``encode`` puts it first.
        stops: Numbers of the tokens that end a text.
        to_bytes: A token's text, in the file's writing, to the bytes that it stands for; GPT-2's writing unless told.
    """

    def __init__(  # noqa: PLR0913  # one argument per fact of the file
        self,
        engine: Engine,
        *,
        tokens: Sequence[str],
        special: frozenset[int],
        verbatim: frozenset[int],
        bos: int | None,
        add_bos: bool,
        stops: frozenset[int],
        to_bytes: Callable[[str], bytes] | None = None,
    ) -> None:
        self._engine = engine
        self._tokens = tokens
        self._special = special
        self._verbatim = verbatim
        self.bos = bos
        self.add_bos = add_bos
        self.stops = stops
        self._to_bytes = _from_byte_writing if to_bytes is None else to_bytes

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return len(self._tokens)

    def token_text(self, number: int | None) -> str | None:
        """Return a token's text in the file's own writing; None for None."""
        return None if number is None else self._tokens[number]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return the token numbers of a text; control tokens that stand in it are recognised.

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
        """Return the token numbers of a text with whatever the tokenizer puts round it, such as [CLS] and [SEP]."""
        numbers: list[int] = self._engine.encode(text, add_special_tokens=True).ids
        return numbers

    def token_bytes(self, number: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes that a token adds to a text; none for a control token, unless asked for."""
        if number in self._special:
            return b"" if skip_special else self._tokens[number].encode()
        if number in self._verbatim:
            return self._tokens[number].encode()
        return self._to_bytes(self._tokens[number])

    def decode(self, numbers: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token numbers; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(number, skip_special=skip_special) for number in numbers).decode(
            errors="replace"
        )


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that a model file's metadata describes.

    Raises:
        CheckpointError: The kind of vocabulary or the pre-tokeniser is not served, a key is missing, or the tokens,
            types, merges and numbers contradict each other.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        metadata.fail("tokenizer.ggml.model", "'gpt2' (byte-level BPE), the only kind that is served", model)
    pre = metadata.text("tokenizer.ggml.pre", default="gpt-2")
    if pre not in _RECIPES:
        metadata.fail("tokenizer.ggml.pre", f"one of {', '.join(sorted(_RECIPES))}", pre)
    recipe = _RECIPES[pre]
    tokens, types = _read_tokens(metadata)
    merges = _read_merges(metadata, set(tokens))
    engine = Engine(
        models.BPE(
            vocab={text: number for number, text in enumerate(tokens)},
            merges=merges,
            ignore_merges=recipe.ignore_merges,
        )
    )
    _set_up(engine, recipe)
    added = [number for number, kind in enumerate(types) if kind in {_CONTROL, _USER_DEFINED}]
    engine.add_tokens(
        [AddedToken(tokens[n], special=types[n] == _CONTROL, normalized=False) for n in added if tokens[n]]
    )
    special = frozenset(number for number, kind in enumerate(types) if kind == _CONTROL)
    ends: set[int | None] = {number for number in special if tokens[number] in _END_TEXTS}
    for key in ("eos", "eot"):
        ends.add(_token_number(metadata, key, len(tokens)))
    return Tokenizer(
        engine,
        tokens=tokens,
        special=special,
        verbatim=frozenset(added) | _foreign(tokens),
        bos=_token_number(metadata, "bos", len(tokens)),
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", default=recipe.add_bos),
        stops=frozenset(number for number in ends if number is not None),
    )


def _set_up(engine: Engine, recipe: _Recipe) -> None:
    steps: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Digits(individual_digits=True)] if recipe.single_digits else []
    )
    if recipe.words is not None:
        steps.append(pre_tokenizers.Split(Regex(recipe.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=recipe.words is None))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    engine.decoder = decoders.ByteLevel()
    if recipe.normalizer == "NFC":
        engine.normalizer = normalizers.NFC()


def _read_tokens(metadata: Metadata) -> tuple[list[str], list[int]]:
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    if not tokens:
        metadata.fail("tokenizer.ggml.tokens", "at least one token", 0)
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(text for text in tokens if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        metadata.fail("tokenizer.ggml.tokens", "unique", twice)
    if "tokenizer.ggml.token_type" not in metadata:
        return tokens, [_NORMAL] * len(tokens)
    types = metadata.items("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        metadata.fail("tokenizer.ggml.token_type", f"{len(tokens)} items long, as many as tokens", len(types))
    bad = next((kind for kind in types if kind not in _TYPES), None)
    if bad is not None:
        metadata.fail("tokenizer.ggml.token_type", "numbers from 1 to 6", bad)
    return tokens, types


def _read_merges(metadata: Metadata, vocabulary: set[str]) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(metadata.items("tokenizer.ggml.merges", str)):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary or not (left and right):
            metadata.fail(
                f"tokenizer.ggml.merges[{index}]", "two tokens with a space between them that join to a token", line
            )
        merges.append((left, right))
    return merges


def _foreign(tokens: Sequence[str]) -> frozenset[int]:
    """Return the tokens that are not in byte writing, although the file does not mark them as added."""
    letters = byte_of_character().keys()
    return frozenset(number for number, text in enumerate(tokens) if not letters >= set(text))


def _token_number(metadata: Metadata, name: str, size: int) -> int | None:
    number: int | None = metadata.integer(f"tokenizer.ggml.{name}_token_id", low=0, high=size - 1, default=None)
    return number
