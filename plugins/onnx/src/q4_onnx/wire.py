"""``Wire``: the fields of protobuf messages in a mapped file, each checked against the message's end first.

Nothing is decoded before it is asked for: the bytes of a field are given by their place.

Reference:
    Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from mmap import mmap

__all__ = ["DAMAGED", "Field", "Wire"]

DAMAGED = "Copy or download it again: the file is truncated or damaged."
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_WIDTHS = {_FIXED_64: 8, _FIXED_32: 4}
_MOST_TEXT = 65535
_MOST_VARINT = 10
_MOST_U64 = 2**64 - 1
_SIGN = 2**63


class Field(NamedTuple):
    """One field of a message: a tuple, as a model has hundreds of thousands.

    Args:
        number: Its number in the message.
        kind: How it is encoded.
        start: First byte of what it holds; of a varint the number itself.
        end: The byte after; 0 for a varint.
    """

    number: int
    kind: int
    start: int
    end: int


class Wire:
    """The messages of one file.

    Args:
        data: The file's bytes.
        where: The file's name, for messages.
    """

    def __init__(self, data: mmap | bytes, where: str) -> None:
        self.data: Any = data
        self.size = len(self.data)
        self.where = where

    def fail(self, name: str, rule: str, value: object, hint: str | None = DAMAGED) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file, the field, the rule and the value."""
        raise CheckpointError("ONNX file", name=name, rule=rule, value=value, where=self.where, hint=hint)

    def fields(self, start: int, end: int, what: str) -> Iterator[Field]:
        """Yield the fields of a message.

        Args:
            start: Its first byte.
            end: The byte after it.
            what: Its name, for messages.

        Raises:
            CheckpointError: A field does not end within the message, or is none of protobuf's kinds.
        """
        at = start
        while at < end:
            tag, at = self._varint(at, end, what)
            number, kind = tag >> 3, tag & 7
            if not number:
                self.fail(what, "of fields numbered from 1", number)
            if kind == _VARINT:
                value, at = self._varint(at, end, what)
                yield Field(number, kind, value, 0)
                continue
            if kind == _BYTES:
                length, at = self._varint(at, end, what)
            elif kind in _WIDTHS:
                length = _WIDTHS[kind]
            else:
                self.fail(what, "of fields of kind 0, 1, 2 or 5", kind)
            if length > end - at:
                self.fail(f"{what}, field {number}", f"at most {end - at} bytes long", length)
            yield Field(number, kind, at, at + length)
            at += length

    def _varint(self, at: int, end: int, what: str) -> tuple[int, int]:
        """Return an unsigned number and the byte after it."""
        value, data = 0, self.data
        if at < end and (byte := data[at]) < 128:  # noqa: PLR2004  # most have one byte
            return byte, at + 1
        for place in range(min(_MOST_VARINT, end - at)):
            byte = data[at + place]
            value |= (byte & 127) << (7 * place)
            if byte < 128:  # noqa: PLR2004  # the last byte
                if value > _MOST_U64:
                    self.fail(what, "of numbers of 64 bits", value)
                return value, at + place + 1
        return self.fail(what, "of numbers that end within it", "one that does not")

    def span(self, field: Field, what: str) -> tuple[int, int]:
        """Return the place of a field that must hold bytes: a text, a message or packed numbers."""
        if field.kind != _BYTES:
            self.fail(what, "bytes", f"a number (kind {field.kind})")
        return field.start, field.end

    def whole(self, field: Field, what: str) -> int:
        """Return a field that must hold a signed whole number."""
        if field.kind != _VARINT:
            self.fail(what, "a whole number", f"bytes (kind {field.kind})")
        return field.start - 2 * _SIGN if field.start >= _SIGN else field.start

    def text(self, field: Field, what: str) -> str:
        """Return a field that must hold a UTF-8 text of at most 65535 bytes."""
        start, end = self.span(field, what)
        if end - start > _MOST_TEXT:
            self.fail(what, f"at most {_MOST_TEXT} bytes long", end - start)
        raw = bytes(self.data[start:end])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(what, "UTF-8", raw[:64])

    def wholes(self, field: Field, what: str) -> Iterator[int]:
        """Yield the numbers of a repeated field: one, or several that are packed."""
        if field.kind != _BYTES:
            yield self.whole(field, what)
            return
        at = field.start
        while at < field.end:
            value, at = self._varint(at, field.end, what)
            yield value - 2 * _SIGN if value >= _SIGN else value
