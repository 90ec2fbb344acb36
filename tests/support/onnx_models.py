"""ONNX files for tests, written here field by field, and the values that their operators mean, in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["MICROSOFT", "Packed", "attribute", "field", "graph", "initializer", "model", "node", "packed", "write"]

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "float16": 10, "float64": 11, "bfloat16": 16}


def varint(number: int) -> bytes:
    """Return a number of 64 bits as protobuf writes it; negative ones in two's complement."""
    number, out = number % 2**64, bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | bytes | str) -> bytes:
    """Return one field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def initializer(name: str, array: Array, *, kind: str | None = None, place: dict[str, str] | None = None) -> bytes:
    """Return a tensor: its bytes, or their place in another file.

    Args:
        name: Its name.
        array: Its elements; bfloat16 as uint16.
        kind: ONNX's name of its type, where numpy has another.
        place: Keys of external data.
    """
    parts = [field(1, size) for size in array.shape]
    parts += [field(2, TYPES[kind or array.dtype.name]), field(8, name)]
    if place is None:
        return b"".join([*parts, field(9, array.tobytes())])
    pairs = [field(13, field(1, key) + field(2, text)) for key, text in place.items()]
    return b"".join([*parts, *pairs, field(14, 1)])


def attribute(name: str, number: int) -> bytes:
    """Return a whole number of a node."""
    return field(1, name) + field(3, number) + field(20, 2)


def node(
    operator: str,
    inputs: tuple[str, ...],
    name: str = "",
    *,
    domain: str = MICROSOFT,
    numbers: Mapping[str, int] | None = None,
) -> bytes:
    """Return an operator with one output, ``<name>_out``."""
    parts = [field(1, item) for item in inputs]
    parts += [field(2, f"{name}_out"), field(3, name), field(4, operator)]
    parts += [field(5, attribute(key, number)) for key, number in (numbers or {}).items()]
    return b"".join([*parts, field(7, domain)])


def graph(nodes: list[bytes], tensors: list[bytes]) -> bytes:
    """Return a graph."""
    return b"".join([*(field(1, item) for item in nodes), field(2, "main"), *(field(5, item) for item in tensors)])


def model(nodes: list[bytes], tensors: list[bytes]) -> bytes:
    """Return a whole file."""
    opset = field(8, field(1, MICROSOFT) + field(2, 1))
    return b"".join([field(1, 10), field(2, "q4-tests"), field(7, graph(nodes, tensors)), opset])


@attrs.frozen(kw_only=True)
class Packed:
    """One packed matrix: its parts as they are stored, and its values as float32 [N, K]."""

    parts: dict[str, Array]
    kinds: dict[str, str]
    numbers: dict[str, int]
    value: Array

    def tensors(self, stem: str) -> list[bytes]:
        """Return the initializers."""
        return [initializer(stem + part, array, kind=self.kinds.get(part)) for part, array in self.parts.items()]

    def names(self, stem: str) -> tuple[str, ...]:
        """Return the names of ``MatMulNBits``'s inputs."""
        return ("x", *(stem + part if part in self.parts else "" for part in ("_Q4", "_scales", "_zero_points")))


def bits_along(codes: Array, bits: int) -> Array:
    """Return codes along the last axis in bytes, the lowest bits first."""
    if bits == 8:
        return codes.astype(np.uint8)
    codes = np.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, codes.shape[-1] % 2)])
    return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def rounded(numbers: Array, kind: str) -> tuple[Array, Array]:
    """Return numbers as they are stored in a dtype, and their values as float32."""
    if kind != "bfloat16":
        stored = numbers.astype(kind)
        return stored, stored.astype(np.float32)
    words = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return words, (words.astype(np.uint32) << 16).view(np.float32)


def packed(
    seed: int, *, bits: int = 4, zero: str = "bytes", flat: bool = False, kind: str = "float32", modest: bool = False
) -> Packed:
    """Return a random matrix: blocks of 16 to 256, some of zeros, some scales negative, huge, tiny or zero.

    Args:
        seed: What it depends on.
        bits: Width of its codes.
        zero: ``"none"``, ``"bytes"``, ``"floats"`` or ``"middle"``.
        flat: Whether scales and zero points are vectors.
        kind: dtype of its scales.
        modest: Whether all scales are near one, so that every value is a number of each dtype.
    """
    random = np.random.default_rng(seed)
    rows, block = int(random.integers(1, 24)), 1 << int(random.integers(4, 9))
    columns = int(random.integers(1, 3 * block + 1))
    blocks = -(-columns // block)
    codes = random.integers(0, 1 << bits, (rows, blocks, block), dtype=np.uint8)
    numbers = random.standard_normal((rows, blocks)) * 10.0 ** random.integers(-4, 4, (rows, blocks))
    numbers = random.standard_normal((rows, blocks)) if modest else numbers
    numbers[random.random((rows, blocks)) < 0.1] = 0
    scales, factor = rounded(numbers, kind)
    middle = 1 << (bits - 1)
    codes[random.random((rows, blocks)) < 0.1] = middle
    points = np.full((rows, blocks), middle, np.float32)
    parts, kinds = {"_Q4": bits_along(codes, bits), "_scales": scales}, {"_scales": kind}
    if zero in {"bytes", "middle"}:
        whole = random.integers(0, 1 << bits, (rows, blocks)) if zero == "bytes" else points
        points = whole.astype(np.float32)
        parts["_zero_points"] = bits_along(whole.astype(np.uint8), bits)
    elif zero == "floats":
        parts["_zero_points"], points = rounded(random.uniform(0, 1 << bits, (rows, blocks)), kind)
        kinds["_zero_points"] = kind
    if flat:
        parts |= {part: array.reshape(-1) for part, array in parts.items() if part != "_Q4"}
    with np.errstate(over="ignore"):
        value = (codes.astype(np.float32) - points[..., None]) * factor[..., None]
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    value = value.reshape(rows, -1)[:, :columns]
    return Packed(parts=parts, kinds=kinds, numbers=attributes, value=value)


def write(path: Path, matrix: Packed, stem: str = "proj.MatMul.weight", *more: bytes) -> Path:
    """Write a model of one ``MatMulNBits`` and other nodes."""
    nodes = [node("MatMulNBits", matrix.names(stem), "/proj/MatMul_Q4", numbers=matrix.numbers), *more]
    path.write_bytes(model(nodes, matrix.tensors(stem)))
    return path
