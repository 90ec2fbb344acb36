"""The bytes of a GGUF file's header: metadata of every type, and the tensor directory.

Reference:
    The GGUF specification of ggml, version 3.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NoReturn

from q4_gguf.values import KINDS, ArrayValue, kind_of
from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["encode_header", "encode_value"]

_VERSION = 3
_CODES = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "float32": "f", "bool": "?",
    "uint64": "Q", "int64": "q", "float64": "d",
}  # fmt: skip
_NUMBERS = {name: number for number, name in KINDS.items()}
_MOST_KEY_BYTES = 65535


def _fail(name: str, rule: str, value: object) -> NoReturn:
    raise CheckpointError("save_checkpoint", name=name, rule=rule, value=value, hint="Nothing was written.")


def _text(value: str, name: str) -> bytes:
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        _fail(name, "a text that UTF-8 has", value)
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: object, name: str) -> bytes:
    """Return a value's bytes, its type before it.

    Args:
        value: A number, truth value or text; an ``ArrayValue``, which keeps its type; or a list or tuple of them.
            Whole numbers in a list become int32, or int64 where that does not suffice, and floats float32.
        name: The metadata key, for messages.

    Raises:
        CheckpointError: The file has no such value.
    """
    if isinstance(value, ArrayValue):
        kind = _NUMBERS[value.item_type]
        return struct.pack("<IIQ", _NUMBERS["array"], kind, len(value)) + bytes(value.raw)
    if isinstance(value, (list, tuple)):
        return _array(value, name)
    type_name = kind_of(value)
    if type_name is None:
        rule = "a whole number of at most 64 bits, a float, a truth value, a text, or a list of these"
        _fail(name, rule, value if isinstance(value, int) else type(value).__name__)
    head = struct.pack("<I", _NUMBERS[type_name])
    return head + (_text(value, name) if isinstance(value, str) else _number(value, type_name, name))


def _number(value: object, type_name: str, name: str) -> bytes:
    try:
        return struct.pack(f"<{_CODES[type_name]}", value)
    except OverflowError:
        _fail(name, f"in reach of {type_name}", value)


def _array(items: Sequence[object], name: str) -> bytes:
    kinds = {kind_of(item) for item in items}
    if not items or None in kinds or (len(kinds) > 1 and kinds & {"bool", "string"}):
        rule = "a list of at least one item, all numbers, all truth values or all texts"
        _fail(name, rule, f"{len(items)} items" if items else "none")
    if kinds == {"string"}:
        type_name, body = "string", b"".join(_text(str(item), f"{name}[{place}]") for place, item in enumerate(items))
    else:
        type_name = "bool" if kinds == {"bool"} else "float32" if kinds & {"float32", "float64"} else "int32"
        try:
            body = struct.pack(f"<{len(items)}{_CODES[type_name]}", *items)
        except (struct.error, OverflowError):
            if type_name == "float32":
                _fail(name, "numbers in reach of float32", "another")
            type_name = "int64"
            try:
                body = struct.pack(f"<{len(items)}q", *items)
            except struct.error:
                _fail(name, "whole numbers of at most 64 bits", "another")
    return struct.pack("<IIQ", _NUMBERS["array"], _NUMBERS[type_name], len(items)) + body


def encode_header(metadata: Mapping[str, object], tensors: Iterable[tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """Return a header without the padding behind it.

    Args:
        metadata: Key → value, as in ``encode_value``.
        tensors: Name, shape (slowest size first), number of the type and offset of each tensor.

    Raises:
        CheckpointError: A key is too long, or a value is none that the file has.
    """
    pairs = []
    for key, value in metadata.items():
        name = f"metadata[{key!r}]"
        if not 0 < len(key.encode()) <= _MOST_KEY_BYTES:
            _fail(name, f"a key of 1 to {_MOST_KEY_BYTES} bytes", len(key.encode()))
        pairs.append(_text(key, name) + encode_value(value, name))
    entries = []
    for name, shape, number, offset in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries.append(_text(name, "tensor name") + sizes + struct.pack("<IQ", number, offset))
    counts = struct.pack("<IQQ", _VERSION, len(entries), len(pairs))
    return b"".join((b"GGUF", counts, *pairs, *entries))
