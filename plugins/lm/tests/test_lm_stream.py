"""Streaming texts never show half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from q4_lm.generation.stream import TextStream

if TYPE_CHECKING:
    from q4_lm.tokenizers.tokenizer import Tokenizer


@given(numbers=st.lists(st.integers(0, 267), max_size=40))
def test_pieces_join_to_the_text(tokenizer: Tokenizer, numbers: list[int]) -> None:
    """For any tokens, valid UTF-8 or not, the joined pieces are what ``decode`` gives."""
    stream = TextStream(tokenizer)
    pieces = [stream.push(number) for number in numbers]
    assert "".join(pieces) + stream.close() == tokenizer.decode(numbers)


@given(text=st.text(max_size=30))
def test_whole_characters_only(tokenizer: Tokenizer, text: str) -> None:
    """Byte by byte, every piece is a run of whole characters of the text, and nothing is left at the end."""
    stream = TextStream(tokenizer)
    shown = ""
    for byte in text.encode():
        shown += stream.push(3 + byte)
        assert text.startswith(shown)
    assert shown == text
    assert stream.close() == ""


def test_cut_character(tokenizer: Tokenizer) -> None:
    """Tokens that stop inside a character show it as U+FFFD, and only at the end."""
    stream = TextStream(tokenizer)
    assert [stream.push(3 + byte) for byte in "🙂".encode()[:3]] == ["", "", ""]
    assert stream.close() == "\ufffd"


def test_control_tokens(tokenizer: Tokenizer) -> None:
    """Control tokens are left out unless asked for."""
    assert TextStream(tokenizer).push(2) == ""
    assert TextStream(tokenizer, skip_special=False).push(2) == "<|im_end|>"
