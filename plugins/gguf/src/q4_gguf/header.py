"""The header of a GGUF file: metadata and tensor directory, checked completely before anything is used.

Reference:
    The GGUF specification of ggml, versions 2 and 3.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import attrs

from q4_gguf.cursor import Cursor
from q4_gguf.ggml import GgmlType, find_type, name_of
from q4_gguf.values import read_value
from q4core import CheckpointError
from q4core.plugin_api import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from mmap import mmap

__all__ = ["Header", "TensorEntry", "read_header"]

_MAGIC = int.from_bytes(b"GGUF", "little")
_VERSIONS = (2, 3)
_NAME_LIMIT_BYTES = 65535
_MAX_DIMENSIONS = 4
_MOST_SHOWN = 20
_MAX_ELEMENTS = 2**63 - 1
_DEFAULT_ALIGNMENT = 32
_ENTRY_BYTES = 24  # the smallest directory entry: name length, number of dimensions, type, offset
_PAIR_BYTES = 13  # the smallest metadata pair: key length, type, one byte


@attrs.frozen
class TensorEntry:
    """One line of the tensor directory.

    Args:
        name: The tensor's name.
        shape: Sizes, slowest first (rows before in-features; the file has them the other way round).
        type_number: ggml's number of the type.
        type: The type, or None where the number is not known.
        position: First byte in the file.
        nbytes: Size in the file, or None where the type is not known.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    type: GgmlType | None
    position: int
    nbytes: int | None

    @property
    def type_name(self) -> str:
        """ggml's name of the type, or what else is known of its number."""
        return name_of(self.type_number)


@attrs.frozen
class Header:
    """A checked header.

    Args:
        version: The file's version.
        alignment: Bytes to which tensors are aligned.
        data_start: First byte of the tensors' part.
        metadata: Key → int, float, bool, str or ``ArrayValue``.
        tensors: Name → entry, in the file's order.
    """

    version: int
    alignment: int
    data_start: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


def read_header(data: mmap | bytes, where: str) -> Header:
    """Read and check a header.

    Args:
        data: The whole file's bytes (mapped). Arrays of the metadata keep it alive.
        where: The file's name, for messages.

    Raises:
        CheckpointError: Something is malformed; the message names file, field, rule and value.
    """
    cursor = Cursor(data, where=where, what="GGUF header")
    magic = cursor.u32("magic")
    if magic != _MAGIC:
        cursor.fail("magic", "b'GGUF'", magic.to_bytes(4, "little"), "This is not a GGUF file.")
    version = cursor.u32("version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        hint = "The file is big-endian; convert it to little-endian." if swapped else None
        cursor.fail("version", f"one of {list(_VERSIONS)}", version, hint)
    tensor_count = _count(cursor, "tensor count", _ENTRY_BYTES)
    pair_count = _count(cursor, "metadata count", _PAIR_BYTES)
    metadata: dict[str, Any] = {}
    for index in range(pair_count):
        key = cursor.text(f"metadata key {index}", _NAME_LIMIT_BYTES)
        if key in metadata:
            cursor.fail("metadata key", "unique", key)
        metadata[key] = read_value(cursor, f"metadata {key!r}")
    alignment = _alignment(cursor, metadata)
    found = [_read_entry(cursor, index) for index in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    problems: list[CheckpointError] = []
    for entry in found:
        try:
            if entry.name in tensors:
                cursor.fail("tensor name", "unique", entry.name)
            tensors[entry.name] = entry
            tensors[entry.name] = _place(cursor, entry, data_start, alignment)
        except CheckpointError as error:
            problems.append(error)
    problems += _overlaps(cursor, tensors.values())
    if len(problems) > 1:
        shown = [f"{error.name} must be {error.rule}, got {error.value!r}" for error in problems[:_MOST_SHOWN]]
        more = [f"{len(problems) - _MOST_SHOWN} more"] * (len(problems) > _MOST_SHOWN)
        rule = f"valid; {'; '.join((*shown, *more))}"
        cursor.fail("tensor directory", rule, counted(len(problems), "problem"), problems[0].hint)
    if problems:
        raise problems[0]
    return Header(version, alignment, data_start, metadata, tensors)


def _count(cursor: Cursor, name: str, smallest: int) -> int:
    count = cursor.u64(name)
    if count > cursor.left // smallest:
        rule = f"at most {cursor.left // smallest} (what fits into the file)"
        cursor.fail(name, rule, count, "Copy or download it again: the file is truncated or damaged.")
    return count


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        cursor.fail("metadata 'general.alignment'", "a power of two", value)
    return value


def _read_entry(cursor: Cursor, index: int) -> TensorEntry:
    """Return an unchecked entry; ``position`` is still relative and ``nbytes`` unknown."""
    name = cursor.text(f"name of tensor {index}", _NAME_LIMIT_BYTES)
    dimensions = cursor.u32(f"number of dimensions of tensor {name!r}")
    if dimensions > _MAX_DIMENSIONS:
        cursor.fail(f"number of dimensions of tensor {name!r}", f"at most {_MAX_DIMENSIONS}", dimensions)
    sizes = [cursor.u64(f"shape of tensor {name!r}") for _ in range(dimensions)]
    type_number = cursor.u32(f"type of tensor {name!r}")
    offset = cursor.u64(f"offset of tensor {name!r}")
    return TensorEntry(name, tuple(reversed(sizes)), type_number, find_type(type_number), offset, None)


def _place(cursor: Cursor, entry: TensorEntry, data_start: int, alignment: int) -> TensorEntry:
    """Check an entry's sizes against its type and the file, and return it with its place in the file."""
    label = f"of tensor {entry.name!r}"
    elements = math.prod(entry.shape)
    if not 0 < elements <= _MAX_ELEMENTS:
        cursor.fail(f"shape {label}", "positive sizes with a product below 2^63", entry.shape)
    if entry.position % alignment:
        cursor.fail(f"offset {label}", f"a multiple of the alignment {alignment}", entry.position)
    position = data_start + entry.position
    if entry.type is None:
        return attrs.evolve(entry, position=position)
    row = entry.shape[-1] if entry.shape else 1
    if row % entry.type.block_size:
        rule = f"whole blocks of {entry.type.block_size} elements in each row ({entry.type_name})"
        cursor.fail(f"shape {label}", rule, entry.shape)
    nbytes = elements // entry.type.block_size * entry.type.block_bytes
    if position + nbytes > cursor.size:
        cursor.fail(
            f"end {label}",
            f"inside the file of {cursor.size} bytes",
            position + nbytes,
            "Copy or download it again: the file is truncated or damaged.",
        )
    return attrs.evolve(entry, position=position, nbytes=nbytes)


def _overlaps(cursor: Cursor, entries: Iterable[TensorEntry]) -> Iterator[CheckpointError]:
    placed = sorted((entry for entry in entries if entry.nbytes is not None), key=lambda entry: entry.position)
    for before, after in itertools.pairwise(placed):
        end = before.position + (before.nbytes or 0)
        if after.position < end:
            name, rule = f"position of tensor {after.name!r}", f"at least {end}, where tensor {before.name!r} ends"
            yield CheckpointError(cursor.what, name=name, rule=rule, value=after.position, where=cursor.where)
