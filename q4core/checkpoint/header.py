"""The header of a safetensors file, every number of it checked before it is used.

Layout: a little-endian u64 (the header's length), that many bytes of JSON (name → dtype, shape, data_offsets, and the
text entries of ``__metadata__``), then the tensors' bytes without a hole. Why not the ``safetensors`` package's own
reader: docs/decisions/0003.

Reference:
    https://github.com/huggingface/safetensors (format), version 0.8.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from q4core.dialect import TensorInfo
from q4core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

__all__ = ["DTYPE_NAMES", "Header", "StoredTensor", "parse_json", "read_header"]

LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors package
_MAX_RANK = 64
_MAX_NUMEL = 2**56  # also of shapes that a size of 0 makes empty: torch multiplies the sizes into strides
_HALF_BYTES = "F4"
_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    _HALF_BYTES: torch.float4_e2m1fn_x2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@attrs.frozen
class StoredTensor:
    """dtype and shape as torch loads the tensor, and the first of its bytes counted from the start of the file."""

    info: TensorInfo
    position: int


@attrs.frozen
class Header:
    """The tensors of a file, in the order of their bytes, and its metadata."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def parse_json(text: bytes, *, what: str, where: str) -> Any:
    """Return JSON, read strictly: no key twice in an object, no NaN, no endless nesting.

    Raises:
        CheckpointError: The text is not such JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(what, name=f"key {twice!r}", rule="there once", value="a duplicate", where=where)
        return found

    def refuse(constant: str) -> NoReturn:
        raise CheckpointError(what, name="JSON", rule="without NaN and Infinity", value=constant, where=where)

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(what, name="JSON", rule="valid UTF-8 JSON", value=str(error), where=where) from error
    return found


def read_header(file: BinaryIO, file_bytes: int, where: str) -> Header:
    """Return the header of an open safetensors file.

    Args:
        file: The file, open for reading bytes, at its start.
        file_bytes: Its size.
        where: Its name, for errors.

    Raises:
        CheckpointError: Anything is not as the format says; the message names file, key, rule and value.
    """
    first = file.read(LENGTH_BYTES)
    length = int.from_bytes(first, "little")
    left = file_bytes - LENGTH_BYTES
    if len(first) < LENGTH_BYTES or not 2 <= length <= min(_MAX_HEADER_BYTES, left):  # noqa: PLR2004  # "{}"
        raise CheckpointError(
            "safetensors header",
            name="length",
            rule=f"between 2 and {max(2, min(_MAX_HEADER_BYTES, left))} bytes in a file of {file_bytes}",
            value=length,
            where=where,
            hint="The file is truncated, or it is not a safetensors file.",
        )
    text = file.read(length)
    if len(text) < length or text[:1] != b"{":
        raise CheckpointError(
            "safetensors header", name="first byte", rule="'{'", value=text[:1].decode("latin-1"), where=where
        )
    entries = parse_json(text, what="safetensors header", where=where)
    metadata = _metadata(entries.pop("__metadata__", {}), where)
    start = LENGTH_BYTES + length
    found = [(name, *_entry(name, entry, where)) for name, entry in entries.items()]
    found.sort(key=lambda item: (item[2], item[3]))
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, info, begin, finish in found:
        if begin != end:
            _fail(name, "data_offsets", f"from {end}, where the tensor before it ends", begin, where)
        tensors[name] = StoredTensor(info, start + begin)
        end = finish
    if start + end != file_bytes:
        raise CheckpointError(
            "safetensors file",
            name="size",
            rule=f"{start + end} bytes, as its header says",
            value=file_bytes,
            where=where,
            hint="The file is truncated, or bytes were added to it.",
        )
    return Header(tensors, metadata)


def _fail(name: str, field: str, rule: str, value: object, where: str) -> NoReturn:
    raise CheckpointError(f"tensor {name!r}", name=field, rule=rule, value=value, where=where)


def _metadata(found: object, where: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(item, str) for item in found.values()):
        raise CheckpointError(
            "safetensors header", name="__metadata__", rule="an object of texts", value=found, where=where
        )
    return found


def _entry(name: str, entry: object, where: str) -> tuple[TensorInfo, int, int]:
    """Return dtype and shape, and the range of bytes counted from the end of the header."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        _fail(name, "name", "valid Unicode", name, where)
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        _fail(name, "entry", "an object with dtype, shape and data_offsets", entry, where)
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _DTYPES:
        _fail(name, "dtype", f"one of {', '.join(_DTYPES)}", kind, where)
    if not _is_sizes(shape) or len(shape) > _MAX_RANK or math.prod(size or 1 for size in shape) > _MAX_NUMEL:
        _fail(name, "shape", f"a list of at most {_MAX_RANK} whole numbers, of product ≤ 2^56", shape, where)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:  # noqa: PLR2004  # from, to
        _fail(name, "data_offsets", "two whole numbers from 0 that do not descend", offsets, where)
    if kind == _HALF_BYTES:
        # The header counts values, two to a byte; torch loads a tensor half as wide.
        if not shape or shape[-1] % 2:
            _fail(name, "shape", "of an even last size for F4", shape, where)
        shape = [*shape[:-1], shape[-1] // 2]
    info = TensorInfo(_DTYPES[kind], shape)
    if info.nbytes != offsets[1] - offsets[0]:
        _fail(name, "data_offsets", f"{info.nbytes} bytes apart for {kind} {entry['shape']}", offsets, where)
    return info, offsets[0], offsets[1]


def _is_sizes(found: object) -> bool:
    return isinstance(found, list) and all(type(item) is int and item >= 0 for item in found)
