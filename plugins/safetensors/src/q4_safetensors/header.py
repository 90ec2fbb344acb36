"""The header of a safetensors file: the library decides whether it is valid; duplicate names are rejected.

Reference:
    https://github.com/huggingface/safetensors (format), version 0.8.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
from safetensors import SafetensorError, TensorSpec, safe_open

from q4core import CheckpointError, TensorInfo
from q4core.plugin_api import counted, open_regular, parse_json, unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["DTYPES", "Header", "StoredTensor", "read_header"]

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 64
_MOST_SHOWN = 20
_MAX_NUMEL = 2**56  # also of shapes that a size of 0 makes empty: torch multiplies the sizes into strides
_HALF_BYTES = "F4"
_PLAIN = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "float4_e2m1fn_x2", "float8_e4m3fn")
_FLOAT8 = ("float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
DTYPES: dict[str, torch.dtype] = {
    TensorSpec(dtype=name, shape=(0,), data_ptr=0, data_len=0).dtype: getattr(torch, name)
    for name in (*_PLAIN, *_FLOATS, *_FLOAT8)
}
"""The format's names of the dtypes that torch has."""


@attrs.frozen
class StoredTensor:
    """dtype and shape as torch loads the tensor, and the first of its bytes counted from the start of the file."""

    info: TensorInfo
    position: int


@attrs.frozen
class Header:
    """The tensors of a file, in the order of their bytes, and its metadata.

    ``file`` is the library's open file, which reads tensors into memory without a mapping.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    file: Any


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file.

    Raises:
        CheckpointError: The library refuses the file, a name occurs twice, or torch can't represent a tensor.
    """
    where = str(path)
    try:
        with open_regular(path) as file:
            # "pread" reads the header alone. The library's mapping for torch is counted against memory, whole.
            library = safe_open(path, "pt", backend="pread")
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            text = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        problems = _problems(path)
        raise CheckpointError(
            "safetensors file",
            name="header",
            rule="valid for the safetensors library",
            value=str(error),
            where=where,
            hint=f"{problems}Copy or download it again: it is truncated, damaged, or no safetensors file.",
        ) from error
    entries = parse_json(text, what="safetensors header", where=where)
    metadata = entries.pop("__metadata__", None) or {}
    start = _LENGTH_BYTES + length
    found = [(name, *_entry(name, entry, where)) for name, entry in entries.items()]
    found.sort(key=lambda item: item[2:])
    return Header({name: StoredTensor(info, start + begin) for name, info, begin, _ in found}, metadata, library)


def _problems(path: Path) -> str:
    """Return what is wrong with each tensor of a header that the library refuses at its first problem.

    Raises:
        CheckpointError: Names occur twice; all of them are in the message.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    try:
        entries = parse_json(text, what="safetensors header", where=str(path))
    except CheckpointError as error:
        if str(error.name).startswith("key "):
            raise
        return ""
    end, found, placed = size - _LENGTH_BYTES - length, [], []
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            info, first, last = _entry(name, entry, str(path)) if name != "__metadata__" else (None, 0, 0)
            if info is not None and not 0 <= first <= last <= end:
                found.append(f"{name!r} lies outside of the file's {end} bytes")
            elif info is not None and info.nbytes != last - first:
                found.append(f"{name!r} has {last - first} bytes for {info.nbytes}")
            placed += [(first, last, name)] if info is not None else []
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            found.append(f"{name!r}: {error}")
    found += [f"{two[2]!r} overlaps {one[2]!r}" for one, two in itertools.pairwise(sorted(placed)) if two[0] < one[1]]
    return f"{counted(len(found), 'problem')}: {'; '.join(found[:_MOST_SHOWN])}. " if found else ""


def _fail(name: str, field: str, rule: str, value: object, where: str) -> NoReturn:
    raise CheckpointError(f"tensor {name!r}", name=field, rule=rule, value=value, where=where)


def _entry(name: str, entry: Any, where: str) -> tuple[TensorInfo, int, int]:
    """Return dtype and shape, and the range of bytes counted from the end of the header."""
    if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):
        _fail(name, "entry", "an object with dtype, shape and data_offsets", entry, where)
    kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in DTYPES:
        _fail(name, "dtype", f"one that torch has ({', '.join(DTYPES)})", kind, where)
    if len(shape) > _MAX_RANK or math.prod(size or 1 for size in shape) > _MAX_NUMEL:
        _fail(name, "shape", f"a list of at most {_MAX_RANK} whole numbers, of product ≤ 2^56", shape, where)
    if kind == _HALF_BYTES:
        # The header counts values, two to a byte; torch loads a tensor half as wide.
        if not shape or shape[-1] % 2:
            _fail(name, "shape", "of an even last size for F4", shape, where)
        shape = [*shape[:-1], shape[-1] // 2]
    return _info(DTYPES[kind], tuple(shape)), begin, end


@functools.lru_cache(maxsize=1024)
def _info(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    """Return dtype and shape; layers by the thousand have them in common."""
    return TensorInfo(dtype, shape)
