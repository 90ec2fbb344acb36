"""Streams of text: tokens in, whole characters out."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from q4_lm.tokenizers.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Gives the text of tokens piece by piece, and never half of a character.

    The pieces joined, with ``close()`` last, are exactly ``tokenizer.decode`` of the tokens.

    Args:
        tokenizer: Knows the bytes of each token.
        skip_special: Whether control tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, number: int) -> str:
        """Return the characters that a token completes; often none."""
        return self._decoder.decode(self._tokenizer.token_bytes(number, skip_special=self._skip_special))

    def close(self) -> str:
        """Return U+FFFD if the tokens stop inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
