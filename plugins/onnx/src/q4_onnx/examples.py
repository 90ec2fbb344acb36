"""Files of dense initializers, by which q4-conformance judges the reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_onnx.tensors import DTYPES
from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

__all__ = ["make_file"]

_ALIGNMENT = 64
_LENGTH = 10
"""Bytes of a length, as varints may have them."""
_HEAD, _GRAPH, _INITIALIZER = b"\x08\x0a", b"\x3a", b"\x2a"
"""``ir_version`` 10; the tags of the graph and of an initializer."""
_SIZE, _TYPE, _NAME, _RAW, _TEXT = b"\x08", b"\x10", b"\x42", b"\x4a", b"\x62"
"""Tags of an initializer's fields."""
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def make_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a model of initializers alone, their elements aligned, so that they are views when they are read.

    Raises:
        CheckpointError: It can't be written.
    """
    place, parts = len(_HEAD) + _LENGTH + 1, []
    for name, tensor in tensors.items():
        facts = b"".join(_SIZE + _varint(size) for size in tensor.shape) + _TYPE + _varint(_NUMBERS[tensor.dtype])
        facts += _bytes(_NAME, name.encode())
        start = place + 1 + _LENGTH + len(facts) + 2 + 1 + _LENGTH
        facts += _bytes(_TEXT, b" " * (-start % _ALIGNMENT)) + _RAW + _padded(tensor.nbytes)
        parts.append((_INITIALIZER + _padded(len(facts) + tensor.nbytes) + facts, tensor))
        place += len(parts[-1][0]) + tensor.nbytes
    try:
        with path.open("wb") as file:
            file.write(_HEAD + _GRAPH + _padded(place - len(_HEAD) - _LENGTH - 1))
            for head, tensor in parts:
                file.write(head)
                file.write(tensor.contiguous().numpy().tobytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("ONNX file", name="file", rule="writable", value=reason, where=str(path)) from error


def _varint(number: int) -> bytes:
    """Return a number as a varint."""
    out = bytearray()
    while number > 127:  # noqa: PLR2004  # seven bits a byte
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _padded(number: int) -> bytes:
    """Return a number as a varint of ``_LENGTH`` bytes, so that the place behind it is known before it is."""
    return bytes([*(number >> 7 * place & 127 | 128 for place in range(_LENGTH - 1)), 0])


def _bytes(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content
