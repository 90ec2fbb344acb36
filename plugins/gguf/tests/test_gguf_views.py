"""Tensors of a mapped file: bit-equal to the package ``gguf``, without a copy."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch

import q4core as q4
from q4_gguf.ggml import DENSE_TYPES, PACKED_TYPES
from q4_gguf.header import read_header
from q4_gguf.views import dense_tensor, map_file, packed_weight

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("fixture", ["small_gguf", "oddly_aligned_gguf"])
def test_packed_values_are_ggufs_own(fixture: str, request: pytest.FixtureRequest) -> None:
    """Dequantised Q4_0, Q4_1 and Q8_0 tensors equal the package's own result bit for bit, expert by expert."""
    path = request.getfixturevalue(fixture)
    data = map_file(path)
    header = read_header(data, str(path))
    seen = set()
    for tensor in gguf.GGUFReader(path).tensors:
        entry = header.tensors[tensor.name]
        if entry.type_name not in PACKED_TYPES:
            continue
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        for index, matrix in enumerate(expected.reshape(-1, *entry.shape[-2:])):
            weight = packed_weight(data, entry, name=tensor.name, expert=index)
            result = q4.dequantize(weight, torch.float32)
            assert result.numpy().tobytes() == np.ascontiguousarray(matrix).tobytes(), tensor.name
            seen.add(weight.format.name)
    assert seen == {"q4_0", "q4_1", "q8_0"}


@pytest.mark.parametrize("fixture", ["small_gguf", "oddly_aligned_gguf"])
def test_dense_values_are_the_files(fixture: str, request: pytest.FixtureRequest) -> None:
    """Dense tensors keep the file's dtype, shape and bytes."""
    path = request.getfixturevalue(fixture)
    data = map_file(path)
    header = read_header(data, str(path))
    seen = set()
    for tensor in gguf.GGUFReader(path).tensors:
        entry = header.tensors[tensor.name]
        if entry.type_name not in DENSE_TYPES:
            continue
        result = dense_tensor(data, entry)
        assert tuple(result.shape) == tuple(int(size) for size in reversed(tensor.shape))
        assert result.contiguous().view(torch.uint8).numpy().tobytes() == tensor.data.tobytes()
        seen.add(result.dtype)
    assert seen == {torch.float32, torch.float16, torch.bfloat16, torch.int32}


def test_weight_is_a_view_of_the_file(small_gguf: Path) -> None:
    """Codes, scales and offsets of a weight share one storage, which is exactly the tensor's part of the file."""
    data = map_file(small_gguf)
    entry = read_header(data, str(small_gguf)).tensors["blk.0.attn_k.weight"]
    weight = packed_weight(data, entry, name="k")
    assert weight.offset is not None
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in weight.tensors()}
    again = packed_weight(data, entry, name="k")
    assert len(storages) == 1
    assert again.qdata.data_ptr() == weight.qdata.data_ptr()
    assert weight.qdata.untyped_storage().nbytes() == entry.nbytes
    assert weight.nbytes == entry.nbytes


def test_view_outlives_everything_else(small_gguf: Path, tmp_path: Path) -> None:
    """A weight stays readable after the mapping's other owners are gone and the file is unlinked; a copy is its own."""
    path = tmp_path / "gone.gguf"
    path.write_bytes(small_gguf.read_bytes())
    data = map_file(path)
    weight = packed_weight(data, read_header(data, str(path)).tensors["token_embd.weight"], name="e")
    expected = q4.dequantize(weight, torch.float32)
    del data
    path.unlink()
    assert torch.equal(q4.dequantize(weight, torch.float32), expected)
    assert torch.equal(q4.dequantize(copy.deepcopy(weight), torch.float32), expected)


def test_writing_never_reaches_the_file(small_gguf: Path) -> None:
    """The mapping is private: what is written into a view stays in this process."""
    before = small_gguf.read_bytes()
    data = map_file(small_gguf)
    entry = read_header(data, str(small_gguf)).tensors["blk.0.attn_norm.weight"]
    dense_tensor(data, entry).fill_(3.0)
    assert small_gguf.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"GGUF\3\0\0\0"])
def test_file_shorter_than_a_header(content: bytes, tmp_path: Path) -> None:
    """An empty or tiny file is refused before it is mapped."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(q4.CheckpointError, match="size must be at least 24 bytes") as caught:
        map_file(path)
    assert caught.value.where == str(path)


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is a typed error with its name."""
    with pytest.raises(q4.CheckpointError, match="No such file") as caught:
        map_file(tmp_path / "none.gguf")
    assert caught.value.where == str(tmp_path / "none.gguf")
