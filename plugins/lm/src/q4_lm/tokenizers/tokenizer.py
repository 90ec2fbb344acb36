"""``Tokenizer``: texts to token numbers and back, over the package ``tokenizers`` or scored pieces."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tokenizers import AddedToken

__all__ = ["Tokenizer"]


class Tokenizer:
    """Texts to token numbers and back.

    Args:
        engine: Makes the vocabulary, when it is first needed. Added tokens stand for their own text; special ones among
            them are no part of a text.
        bos: Number of the token that starts a text, or None.
        add_bos: Whether ``encode`` puts it first.
        stops: Numbers of the tokens that end a text.
    """

    def __init__(self, engine: Callable[[], Any], *, bos: int | None, add_bos: bool, stops: Iterable[int]) -> None:
        self._make_engine = engine
        self.bos = bos
        self.add_bos = add_bos
        self.stops = frozenset(stops)

    @property
    def ends(self) -> dict[str, Any]:
        """Its arguments other than the engine, as what JSON holds."""
        return {"bos": self.bos, "add_bos": self.add_bos, "stops": sorted(self.stops)}

    @functools.cached_property
    def _engine(self) -> Any:
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
        numbers: list[int] = self._engine.encode_batch_fast([text], add_special_tokens=True)[0].ids  # without offsets
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


def _byte_writing(engine: Any) -> Callable[[str], bytes]:
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
