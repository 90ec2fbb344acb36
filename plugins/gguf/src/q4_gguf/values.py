"""The values of a GGUF file's metadata: numbers, truth values, texts, and arrays that are decoded on demand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from q4_gguf.cursor import Cursor

__all__ = ["KINDS", "ArrayValue", "TypedFloat", "TypedInt", "kind_of", "read_value"]

TEXT_LIMIT_BYTES = 64 * 2**20
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_NUMBERS = {
    0: ("uint8", struct.Struct("<B")),
    1: ("int8", struct.Struct("<b")),
    2: ("uint16", struct.Struct("<H")),
    3: ("int16", struct.Struct("<h")),
    4: ("uint32", struct.Struct("<I")),
    5: ("int32", struct.Struct("<i")),
    6: ("float32", struct.Struct("<f")),
    _BOOL: ("bool", struct.Struct("<B")),
    10: ("uint64", struct.Struct("<Q")),
    11: ("int64", struct.Struct("<q")),
    12: ("float64", struct.Struct("<d")),
}
_LENGTH = struct.Struct("<Q")


KINDS = {**{number: name for number, (name, _) in _NUMBERS.items()}, _TEXT: "string", _ARRAY: "array"}
"""Number of a type of value → its name."""
_WHOLE = {
    name: range(-(2 ** (bits - 1)) if name[0] == "i" else 0, 2 ** (bits - (name[0] == "i")))
    for bits in (32, 64, 16, 8)
    for name in (f"uint{bits}", f"int{bits}")
}
"""Types of whole numbers, those that a number without a type gets first, with their ranges."""


class TypedInt(int):
    """A whole number whose type in the file is not the one that its size would get.

    Args:
        value: The number.
        kind: The type's name, such as ``"uint16"``.
    """

    kind: str

    def __new__(cls, value: int, kind: str) -> TypedInt:  # noqa: PYI034  # Self needs Python 3.11
        """Check the range.

        Raises:
            ValueError: There is no such type, or it does not reach the number.
        """
        if kind not in _WHOLE or value not in _WHOLE[kind]:
            raise ValueError(f"{value} of type {kind!r}")
        number = super().__new__(cls, value)
        number.kind = kind
        return number

    def __reduce__(self) -> tuple[type[TypedInt], tuple[int, str]]:
        """Pickle and copy it with its type."""
        return TypedInt, (int(self), self.kind)


class TypedFloat(float):
    """A number of type float64; others are float32."""

    kind = "float64"


def kind_of(value: object) -> str | None:
    """Return the name of the type of a number, truth value or text in a file; None where there is none.

    A whole number without a type has 32 bits where they suffice, and no sign where it needs none; a float has 32 bits.
    """
    if isinstance(value, (TypedInt, TypedFloat)):
        return value.kind
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return next((name for name, legal in _WHOLE.items() if value in legal), None)
    return "float32" if isinstance(value, float) else "string" if isinstance(value, str) else None


class ArrayValue(Sequence[Any]):
    """An array in the metadata; its bounds were checked when the header was read, its items are decoded on first use.

    Args:
        cursor: At the first item; it is moved past the last one.
        kind: Number of the item type.
        count: Number of items.
        name: The metadata key, for messages.

    Raises:
        CheckpointError: The file ends before the last item.
    """

    def __init__(self, cursor: Cursor, kind: int, count: int, name: str) -> None:
        self._cursor = cursor
        self._kind = kind
        self._count = count
        self._name = name
        self._start = cursor.position
        self._items: list[Any] | None = None
        self.item_type = "string" if kind == _TEXT else _NUMBERS[kind][0]
        if kind == _TEXT:
            self._step_over_texts()
        else:
            cursor.skip(count * _NUMBERS[kind][1].size, name)
        self._end = cursor.position

    @property
    def raw(self) -> memoryview:
        """The items' bytes, as they are in the file."""
        return memoryview(self._cursor.data)[self._start : self._end]

    def _step_over_texts(self) -> None:
        cursor = self._cursor
        # Each text needs eight bytes for its length, so an absurd count ends here and not in a long loop.
        if self._count > cursor.left // _LENGTH.size:
            cursor.fail(
                f"number of items of {self._name}", f"at most {cursor.left // _LENGTH.size} (what fits)", self._count
            )
        data, size, position, unpack = cursor.data, cursor.size, cursor.position, _LENGTH.unpack_from
        for index in range(self._count):
            if position + _LENGTH.size > size:
                cursor.fail(f"{self._name}[{index}]", "inside the file", position)
            position += _LENGTH.size + unpack(data, position)[0]
            if position > size:
                cursor.fail(f"{self._name}[{index}]", f"inside the file of {size} bytes", position)
        cursor.position = position

    def _decode(self) -> list[Any]:
        data = self._cursor.data
        if self._kind != _TEXT:
            code = _NUMBERS[self._kind][1].format[1:]
            items: list[Any] = list(struct.unpack_from(f"<{self._count}{code}", data, self._start))
            if self._kind == _BOOL:
                items = [_truth(self._cursor, item, f"{self._name}[{index}]") for index, item in enumerate(items)]
            return items
        items, position = [], self._start
        for index in range(self._count):
            position += _LENGTH.size
            end = position + _LENGTH.unpack_from(data, position - _LENGTH.size)[0]
            raw = bytes(data[position:end])
            try:
                items.append(raw.decode())
            except UnicodeDecodeError:
                self._cursor.fail(f"{self._name}[{index}]", "UTF-8", raw[:64])
            position = end
        return items

    def tolist(self) -> list[Any]:
        """Return all items.

        Raises:
            CheckpointError: A text is not UTF-8, or a truth value is neither 0 nor 1.
        """
        if self._items is None:
            self._items = self._decode()
        return list(self._items)

    def __len__(self) -> int:
        """Return the number of items; decodes nothing."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return an item, or a list of them."""
        if self._items is None:
            self._items = self._decode()
        return self._items[index]

    def __repr__(self) -> str:
        """Return item type and count; decodes nothing."""
        return f"ArrayValue({self._name!r}, {self.item_type} × {self._count})"


def _truth(cursor: Cursor, value: int, name: str) -> bool:
    if value > 1:
        cursor.fail(name, "0 or 1 (a truth value)", value)
    return bool(value)


def read_value(cursor: Cursor, name: str) -> Any:
    """Return the value at the cursor, which is stored after the number of its type.

    Args:
        cursor: At the type; it is moved past the value.
        name: The metadata key, for messages.

    Returns:
        int, float, bool, str or ``ArrayValue``; a number of a rarer type is a ``TypedInt`` or ``TypedFloat``.

    Raises:
        CheckpointError: The type is not known, the value does not fit into the file, or it is not legal.
    """
    kind = cursor.u32(f"type of {name}")
    if kind == _TEXT:
        return cursor.text(name, TEXT_LIMIT_BYTES)
    if kind in _NUMBERS:
        type_name, number = _NUMBERS[kind]
        value = cursor.unpack(number, name)
        if kind == _BOOL:
            return _truth(cursor, value, name)
        if isinstance(value, float):
            return TypedFloat(value) if type_name == TypedFloat.kind else value
        return value if type_name == kind_of(value) else TypedInt(value, type_name)
    if kind != _ARRAY:
        cursor.fail(f"type of {name}", f"one of {sorted({*_NUMBERS, _TEXT, _ARRAY})}", kind)
    item_kind = cursor.u32(f"item type of {name}")
    if item_kind != _TEXT and item_kind not in _NUMBERS:
        legal = sorted({*_NUMBERS, _TEXT})
        cursor.fail(f"item type of {name}", f"one of {legal} (arrays of arrays are not supported)", item_kind)
    return ArrayValue(cursor, item_kind, cursor.u64(f"number of items of {name}"), name)
