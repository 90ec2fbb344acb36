"""SentencePiece vocabularies with scores: the two pieces whose join scores highest are joined, until none do.

Reference:
    Kudo, Richardson, SentencePiece: A simple and language independent subword tokenizer; what happens around special
    tokens is what llama.cpp does for ``tokenizer.ggml.model`` = ``llama``.
"""

from __future__ import annotations

import heapq
import re
from typing import TYPE_CHECKING

import attrs
from tokenizers import AddedToken

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

__all__ = ["SPACE", "Pieces", "byte_numbers"]

SPACE = "\u2581"
"""The visible character that stands for a space in a piece."""


def byte_numbers(numbers: dict[str, int]) -> list[int | None]:
    """Return for each byte the number of its token, such as ``<0x0A>``, or None."""
    return [numbers.get(f"<0x{byte:02X}>") for byte in range(256)]


@attrs.frozen
class _Encoding:
    ids: list[int]


class Pieces:
    """The part of ``tokenizers.Tokenizer`` that ``Tokenizer`` asks for, over a vocabulary of scored pieces.

    Args:
        tokens: Texts by number, each once.
        scores: By number.
        added: Numbers of the tokens that are recognised by their own text.
        control: Those of them that are no part of a text.
        unknown: Number of what stands for a character that has neither a piece nor bytes.
        add_prefix: Whether a text, also behind one of ``added``, begins with a space.
        squeeze: Whether runs of spaces become one, and those at both ends none.
        eats_spaces: Those of ``added`` behind which spaces are dropped.
    """

    decoder = "pieces"

    def __init__(  # noqa: PLR0913  # the facts of a vocabulary
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        *,
        added: Sequence[int],
        control: Collection[int],
        unknown: int | None,
        add_prefix: bool,
        squeeze: bool,
        eats_spaces: Collection[int],
    ) -> None:
        self._tokens = tokens
        self._scores = scores
        self._numbers = dict(zip(tokens, range(len(tokens)), strict=True))
        self._bytes = byte_numbers(self._numbers)
        self._unknown = unknown
        self._add_prefix, self._squeeze = add_prefix, squeeze
        self._eats_spaces = frozenset(eats_spaces)
        texts = {number: tokens[number].replace(SPACE, " ") for number in added}
        special = frozenset(control)
        self._added = {number: AddedToken(text, special=number in special) for number, text in texts.items()}
        self._by_text = {text: number for number, text in texts.items()}
        self._lengths: dict[str, list[int]] = {}  # by first character, the longest first
        for length, first in sorted({(len(text), text[0]) for text in self._by_text}, reverse=True):
            self._lengths.setdefault(first, []).append(length)
        self._openings = re.compile(f"[{re.escape(''.join(self._lengths))}]") if self._lengths else re.compile(r"(?!)")

    def id_to_token(self, number: int) -> str | None:
        """Return a token's text; None where there is no such token."""
        return self._tokens[number] if 0 <= number < len(self._tokens) else None

    def token_to_id(self, text: str) -> int | None:
        """Return a token's number; None where there is no such token."""
        return self._numbers.get(text)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the tokens that are recognised by their own text."""
        return self._added

    def encode(self, text: str, *, add_special_tokens: bool = False) -> _Encoding:  # noqa: ARG002  # it adds none
        """Return an object whose ``ids`` are the token numbers of a text."""
        if self._squeeze:
            text = re.sub(" +", " ", text.strip(" "))
        numbers: list[int] = []
        behind_added = True
        for piece in self._split(text):
            if isinstance(piece, int):
                numbers.append(piece)
            else:
                prefix = SPACE if self._add_prefix and behind_added else ""
                self._join(prefix + piece.replace(" ", SPACE), numbers)
            behind_added = isinstance(piece, int)
        return _Encoding(numbers)

    def _split(self, text: str) -> Iterator[str | int]:
        """Yield a text's parts: the numbers of added tokens, the longest that fits, and what is between them."""
        start = at = 0
        while found := self._openings.search(text, at):
            at = found.start()
            for length in self._lengths[found[0]]:
                number = self._by_text.get(text[at : at + length])
                if number is not None:
                    break
            else:
                at += 1
                continue
            if at > start:
                yield text[start:at]
            yield number
            at += length
            if number in self._eats_spaces:
                while text[at : at + 1].isspace():
                    at += 1
            start = at
        if start < len(text):
            yield text[start:]

    def _join(self, text: str, numbers: list[int]) -> None:
        """Append the numbers of a text without added tokens."""
        parts, count = list(text), len(text)  # a part that was joined to the one before it is empty
        before, after = [*range(-1, count - 1)], [*range(1, count + 1)]
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < count:
                joined = parts[left] + parts[right]
                number = self._numbers.get(joined)
                if number is not None:
                    heapq.heappush(queue, (-self._scores[number], left, right, joined))

        for left in range(count - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != len(joined):
                continue  # one of them is part of another join by now
            parts[left], parts[right] = joined, ""
            after[left] = after[right]
            if after[left] < count:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        for part in parts:
            if part:
                self._append(part, numbers)

    def _append(self, part: str, numbers: list[int]) -> None:
        number = self._numbers.get(part)
        if number is not None:
            numbers.append(number)
            return
        found = [self._bytes[byte] for byte in part.encode()]
        if None not in found:
            numbers += [byte for byte in found if byte is not None]
        elif self._unknown is not None and numbers[-1:] != [self._unknown]:
            numbers.append(self._unknown)  # one for all of a run
