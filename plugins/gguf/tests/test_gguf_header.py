"""The header parser: equal to the package ``gguf`` on good files, and typed errors on bad ones."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from q4_gguf.header import read_header
from q4_gguf.values import ArrayValue
from q4core import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_TEXT, _ARRAY = 8, 9


def text(value: bytes) -> bytes:
    """Return a GGUF text."""
    return struct.pack("<Q", len(value)) + value


def header(
    *pairs: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    """Return a header, with 4 KiB behind it for tensors."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    start = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    return start + b"".join(pairs) + b"".join(tensors) + bytes(4096)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """Return a metadata pair."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: bytes = b"t", sizes: tuple[int, ...] = (32, 2), kind: int = 2, offset: int = 0, dimensions: int | None = None
) -> bytes:
    """Return a tensor's directory entry."""
    count = len(sizes) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def plain(value: Any) -> Any:
    """Return lists for arrays."""
    return value.tolist() if isinstance(value, ArrayValue) else value


def test_metadata_is_what_gguf_reads(small_gguf: Path) -> None:
    """Every kind of value, and arrays of them, come out as the package's own reader gives them."""
    ours = read_header(small_gguf.read_bytes(), "small").metadata
    theirs = gguf.GGUFReader(small_gguf).fields
    assert list(ours) == [name for name in theirs if not name.startswith("GGUF.")]
    for key, value in ours.items():
        assert plain(value) == theirs[key].contents(), key


@pytest.mark.parametrize("fixture", ["small_gguf", "oddly_aligned_gguf"])
def test_directory_is_what_gguf_reads(fixture: str, request: pytest.FixtureRequest) -> None:
    """Names, types, shapes, places and sizes of tensors are those of the package's own reader."""
    path = request.getfixturevalue(fixture)
    ours = read_header(path.read_bytes(), "small").tensors
    theirs = gguf.GGUFReader(path).tensors
    assert [(entry.name, entry.type_number, entry.shape, entry.position, entry.nbytes) for entry in ours.values()] == [
        (t.name, int(t.tensor_type), tuple(int(n) for n in reversed(t.shape)), t.data_offset, t.n_bytes) for t in theirs
    ]


def test_array_decodes_on_demand(small_gguf: Path) -> None:
    """An array knows its length and item type before it has decoded anything, and indexes and slices like a list."""
    array = read_header(small_gguf.read_bytes(), "small").metadata["array.text"]
    assert (len(array), array.item_type) == (4, "string")
    assert "ü" not in repr(array)
    assert array[2] == "ü€"
    assert array[1:] == ["", "ü€", "<|end|>"]


def test_unknown_tensor_type_is_listed() -> None:
    """An unknown type number is no error of the header: its tensor is listed without a size."""
    entry = read_header(header(tensors=(tensor(kind=1000),)), "f").tensors["t"]
    assert (entry.type, entry.nbytes, entry.type_name) == (None, None, "type 1000")


BAD = {
    "magic": (b"GGML" + bytes(60), "magic"),
    "version 1": (header(version=1), "version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(60), "version"),
    "tensor count": (header(counts=(2**63, 0)), "tensor count"),
    "metadata count": (header(counts=(0, 2**64 - 1)), "metadata count"),
    "key length": (header(struct.pack("<Q", 2**40) + bytes(20)), "length of metadata key 0"),
    "key not UTF-8": (header(pair(b"\xff\xfe", 0, b"\1")), "metadata key 0"),
    "key twice": (header(pair(b"k", 0, b"\1"), pair(b"k", 0, b"\1")), "metadata key"),
    "value type": (header(pair(b"k", 13, b"")), "type of metadata 'k'"),
    "truth value": (header(pair(b"k", 7, b"\2")), "metadata 'k'"),
    "text length": (header(pair(b"k", _TEXT, struct.pack("<Q", 5000))), "metadata 'k'"),
    "text absurdly long": (header(pair(b"k", _TEXT, struct.pack("<Q", 2**62))), "length of metadata 'k'"),
    "text not UTF-8": (header(pair(b"k", _TEXT, text(b"\xc3"))), "metadata 'k'"),
    "array of arrays": (header(pair(b"k", _ARRAY, struct.pack("<IQ", _ARRAY, 1))), "item type of metadata 'k'"),
    "array item type": (header(pair(b"k", _ARRAY, struct.pack("<IQ", 77, 1))), "item type of metadata 'k'"),
    "array of numbers too long": (header(pair(b"k", _ARRAY, struct.pack("<IQ", 4, 2**61))), "metadata 'k'"),
    "array of texts too long": (
        header(pair(b"k", _ARRAY, struct.pack("<IQ", _TEXT, 2**64 - 1))),
        "number of items of metadata 'k'",
    ),
    "text in an array too long": (
        header(pair(b"k", _ARRAY, struct.pack("<IQ", _TEXT, 2) + text(b"a") + struct.pack("<Q", 2**63))),
        "metadata 'k'[1]",
    ),
    "alignment 0": (header(pair(b"general.alignment", 4, struct.pack("<I", 0))), "metadata 'general.alignment'"),
    "alignment 24": (header(pair(b"general.alignment", 4, struct.pack("<I", 24))), "metadata 'general.alignment'"),
    "alignment is a text": (header(pair(b"general.alignment", _TEXT, text(b"32"))), "metadata 'general.alignment'"),
    "tensor twice": (header(tensors=(tensor(), tensor(offset=64))), "tensor name"),
    "five dimensions": (header(tensors=(tensor(sizes=(32, 1, 1, 1, 1)),)), "number of dimensions of tensor 't'"),
    "absurd dimensions": (header(tensors=(tensor(dimensions=2**32 - 1),)), "number of dimensions of tensor 't'"),
    "size 0": (header(tensors=(tensor(sizes=(32, 0)),)), "shape of tensor 't'"),
    "product too large": (header(tensors=(tensor(sizes=(2**40, 2**40)),)), "shape of tensor 't'"),
    "broken block": (header(tensors=(tensor(sizes=(33, 2)),)), "shape of tensor 't'"),
    "odd offset": (header(tensors=(tensor(offset=16),)), "offset of tensor 't'"),
    "offset outside": (header(tensors=(tensor(offset=2**62),)), "end of tensor 't'"),
    "end outside": (header(tensors=(tensor(sizes=(32, 300)),)), "end of tensor 't'"),
    "overlap": (header(tensors=(tensor(), tensor(b"u", offset=32))), "position of tensor 'u'"),
    "truncated": (header(tensors=(tensor(),))[:54], "type of tensor 't'"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_header(case: str) -> None:
    """A malformed header is refused with the file, the field, the rule and the value."""
    data, name = BAD[case]
    with pytest.raises(CheckpointError) as caught:
        read_header(data, "bad.gguf")
    error = caught.value
    assert (error.name, error.where) == (name, "bad.gguf")
    assert error.rule
    assert error.has_value


def test_array_items_are_checked_when_decoded() -> None:
    """A text that is not UTF-8 inside an array is an error as soon as the array is read, and names its index."""
    data = header(pair(b"k", _ARRAY, struct.pack("<IQ", _TEXT, 2) + text(b"a") + text(b"\xff")))
    array = read_header(data, "f").metadata["k"]
    with pytest.raises(CheckpointError, match=r"metadata 'k'\[1\] must be UTF-8"):
        array.tolist()


def test_unaligned_file_end_needs_no_padding() -> None:
    """A file without tensors may end right after its header."""
    assert read_header(header(pair(b"k", 0, b"\5"))[:-4096], "f").metadata == {"k": 5}


def test_every_problem_of_the_directory_is_in_one_error() -> None:
    """Tensors out of place, twice there or over another are all named at once, with the rule of each."""
    entries = (tensor(b"a"), tensor(b"b", offset=32), tensor(b"a", offset=64), tensor(b"c", offset=2**62))
    with pytest.raises(CheckpointError, match="3 problems") as caught:
        read_header(header(tensors=entries), "bad.gguf")
    assert caught.value.where == "bad.gguf"
    for text_ in ("unique, got 'a'", "end of tensor 'c'", "position of tensor 'b'"):
        assert text_ in str(caught.value)
