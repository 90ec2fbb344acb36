"""Initializers: dtype, shape and place of each, checked before use; views of a mapped file, read on first access.

Reference:
    onnx.proto of ONNX 1.23 (TensorProto), and its page "External Data".
"""

from __future__ import annotations

import math
import mmap
import os
import re
from typing import TYPE_CHECKING

import attrs
import torch

from q4core import CheckpointError
from q4core.plugin_api import map_privately, open_regular, unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from q4_onnx.wire import Field, Wire

__all__ = ["DTYPES", "NARROW", "Tensor", "map_file", "read_tensor", "view_of"]

DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 14: torch.complex64,
    15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz, 24: torch.float8_e8m0fnu,
}  # fmt: skip
"""Numbers of types → dtypes."""
_PARTS = {21: ("uint4", 4), 22: ("int4", 4), 23: ("float4e2m1", 4), 25: ("uint2", 2), 26: ("int2", 2)}
"""Types of less than a byte → name and bits."""
_STRING = 8
NARROW = frozenset({2, 3, 17, 18, 19, 20, 24, *_PARTS})
"""Types whose matrices are quantised weights, as no model computes with them."""
_TYPED = {4: (1, 14), 5: (2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20, 24, *_PARTS), 7: (7,), 10: (11, 15), 11: (12, 13)}
"""Fields of numbers in place of raw bytes → the types that they are for."""
_PLAIN = (4, 9, 10)
"""Fields that are stored as they are in memory; others are varints."""
_MOST_RANK = 64
_MOST_ELEMENTS = 2**62
_MOST_VARINTS = 1 << 24
_DIMS, _TYPE, _NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 8, 9, 13, 14
_UNSAFE = re.compile(r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)|\x00")


@attrs.frozen
class Tensor:
    """One initializer.

    Args:
        name: Its name.
        type_number: ONNX's number of its type.
        shape: Its sizes.
        location: The file that holds it, next to the model; None for the model itself.
        position: First byte in that file.
        nbytes: How many bytes it takes there.
        varints: Whether these are varints, which are decoded.
    """

    name: str
    type_number: int
    shape: tuple[int, ...]
    location: str | None
    position: int
    nbytes: int
    varints: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype, or None where torch has none that is stored so."""
        return DTYPES.get(self.type_number)

    @property
    def type_name(self) -> str:
        """The name of its type."""
        known = {number: str(dtype).removeprefix("torch.") for number, dtype in DTYPES.items()}
        known |= {number: name for number, (name, _) in _PARTS.items()} | {_STRING: "string"}
        return known.get(self.type_number, f"type {self.type_number}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class _Stated:
    """The fields of a ``TensorProto``: facts, and the places of elements by field."""

    def __init__(self, wire: Wire, start: int, end: int) -> None:
        self._wire = wire
        self.name, self.type_number, self.is_external = "", 0, False
        self.shape: list[int] = []
        self.held: dict[int, tuple[int, int]] = {}
        self.external: dict[str, str] = {}
        for field in wire.fields(start, end, "initializer"):
            if field.number in _TYPED or field.number == _RAW:
                if field.number in self.held:
                    wire.fail(self.what, "of elements in one piece", "several")
                self.held[field.number] = wire.span(field, f"elements of {self.what}")
            else:
                self._note(field)

    @property
    def what(self) -> str:
        """The tensor, for messages."""
        return f"initializer {self.name!r}"

    def _note(self, field: Field) -> None:
        wire = self._wire
        if field.number == _DIMS:
            self.shape += wire.wholes(field, f"dims of {self.what}")
            if len(self.shape) > _MOST_RANK:
                wire.fail(self.what, f"of at most {_MOST_RANK} dimensions", len(self.shape))
        elif field.number == _TYPE:
            self.type_number = wire.whole(field, f"data_type of {self.what}")
        elif field.number == _NAME:
            self.name = wire.text(field, "initializer name")
        elif field.number == _EXTERNAL:
            self.external |= _pair(wire, *wire.span(field, f"external_data of {self.what}"))
        elif field.number == _LOCATION:
            self.is_external = wire.whole(field, f"data_location of {self.what}") == 1


def read_tensor(wire: Wire, start: int, end: int) -> Tensor:
    """Return what a ``TensorProto`` says, without its elements.

    Raises:
        CheckpointError: It has no elements, or another number of bytes than its shape and type make.
    """
    stated = _Stated(wire, start, end)
    shape = stated.shape
    if any(size < 0 for size in shape) or math.prod(shape) > _MOST_ELEMENTS:
        wire.fail(stated.what, f"of sizes from 0, and of at most {_MOST_ELEMENTS} elements", shape)
    tensor = Tensor(stated.name, stated.type_number, tuple(shape), None, 0, 0)
    wanted = _bytes_of(tensor)
    if wanted is None:  # texts, and types that came later
        return tensor
    if stated.is_external:
        return _placed(wire, tensor, stated.external, wanted)
    for number, (first, last) in stated.held.items():
        if number == _RAW or tensor.type_number in _TYPED[number]:
            is_plain = number in _PLAIN
            if is_plain and last - first != wanted:
                wire.fail(stated.what, f"of {wanted} bytes, as {tensor.type_name} {shape} takes", last - first)
            return attrs.evolve(tensor, position=first, nbytes=last - first, varints=not is_plain)
    if wanted:
        wire.fail(stated.what, f"of {wanted} bytes, as {tensor.type_name} {shape} takes", "none")
    return tensor


def _bytes_of(tensor: Tensor) -> int | None:
    """Return how many bytes the elements take, or None where that is not known."""
    if tensor.dtype is not None:
        return tensor.numel * tensor.dtype.itemsize
    return -(-tensor.numel * _PARTS[tensor.type_number][1] // 8) if tensor.type_number in _PARTS else None


def _pair(wire: Wire, start: int, end: int) -> dict[str, str]:
    """Return the key and the text of an entry."""
    found = {1: "", 2: ""}
    for field in wire.fields(start, end, "external_data"):
        if field.number in found:
            found[field.number] = wire.text(field, "external_data")
    return {found[1]: found[2]}


def _placed(wire: Wire, tensor: Tensor, external: Mapping[str, str], wanted: int) -> Tensor:
    """Return a tensor that lies in another file."""
    what = f"initializer {tensor.name!r} external_data"
    location = external.get("location", "")
    if not location or _UNSAFE.search(location):
        rule = "the name of a file in the model's folder, or below it"
        wire.fail(f"{what}.location", rule, location, "It leads elsewhere, which no model needs: nothing was opened.")
    places = {}
    for key, default in (("offset", 0), ("length", wanted)):
        stated = external.get(key, str(default))
        if not (stated.isascii() and stated.isdigit() and len(stated) < 20):  # noqa: PLR2004  # digits of 64 bits
            wire.fail(f"{what}.{key}", "a whole number from 0", stated)
        places[key] = int(stated)
    if places["length"] != wanted:
        rule = f"{wanted}, as {tensor.type_name} {[*tensor.shape]} takes"
        wire.fail(f"{what}.length", rule, places["length"])
    return attrs.evolve(tensor, location=location, position=places["offset"], nbytes=wanted)


def map_file(path: Path, *, copy: bool = False) -> mmap.mmap | bytes:
    """Map a file privately: reading costs page cache alone, and writing into a view never reaches the file.

    Args:
        path: The file.
        copy: Read the file into memory instead.

    Raises:
        CheckpointError: The file can't be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return b""
            if not copy:
                return map_privately(file)
            memory = mmap.mmap(-1, size)
            if file.readinto(memory) != size:  # type: ignore[attr-defined]  # a buffered file has it
                rule = "the same while it is read"
                raise CheckpointError("ONNX file", name="size", rule=rule, value="less", where=str(path))
            return memory
    except OSError as error:
        raise unreadable(path, error) from error


def view_of(data: mmap.mmap | bytes, tensor: Tensor, where: str) -> torch.Tensor:
    """Return a tensor's elements: a view of the file, copied only where they are not aligned, or stored as varints.

    Raises:
        CheckpointError: Varints are another number than the shape says, or too many.
    """
    dtype = tensor.dtype or torch.uint8
    if not tensor.nbytes:
        return torch.empty(tensor.shape if tensor.dtype is not None else (0,), dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.position)
    if tensor.varints:
        return _decoded(flat, tensor, where)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(tensor.shape if tensor.dtype is not None else (-1,))


def _decoded(stored: torch.Tensor, tensor: Tensor, where: str) -> torch.Tensor:
    """Return the numbers that varints hold, in the tensor's dtype; floats of 16 or 8 bits are stored as their bits."""
    what, dtype = f"initializer {tensor.name!r}", tensor.dtype or torch.uint8
    if len(stored) > _MOST_VARINTS:
        rule = f"of at most {_MOST_VARINTS} bytes, as it is stored number by number"
        raise CheckpointError("ONNX file", name=what, rule=rule, value=len(stored), where=where)
    ends = (stored < 128).nonzero().flatten()  # noqa: PLR2004  # the last byte of a number has its high bit clear
    sizes = torch.diff(ends, prepend=torch.tensor([-1]))
    is_whole = len(ends) == tensor.numel and bool(ends[-1:] == len(stored) - 1) and bool((sizes <= 10).all())  # noqa: PLR2004
    if not is_whole:
        raise CheckpointError("ONNX file", name=what, rule=f"of {tensor.numel} numbers", value=len(ends), where=where)
    starts, numbers = ends - sizes + 1, torch.zeros(len(ends), dtype=torch.int64)
    for place in range(int(sizes.max())):
        inside = place < sizes
        numbers[inside] |= (stored[starts[inside] + place].to(torch.int64) & 127) << (7 * place)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    narrow = numbers != 0 if dtype is torch.bool else numbers.to(bits).view(dtype)
    return narrow.view(tensor.shape)
