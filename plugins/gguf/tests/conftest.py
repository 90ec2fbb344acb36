"""A small GGUF file, made by the package ``gguf``, that has every kind of value and tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from tests.support.ggml_blocks import write_every_type

if TYPE_CHECKING:
    from pathlib import Path

QUANTISED = {
    "blk.0.attn_q.weight": (Type.Q4_0, (6, 64)),
    "blk.0.attn_k.weight": (Type.Q4_1, (4, 96)),
    "token_embd.weight": (Type.Q8_0, (10, 32)),
    "blk.0.ffn_gate_exps.weight": (Type.Q4_1, (3, 4, 64)),
}


def write_small_gguf(path: Path, *, alignment: int | None = None) -> Path:
    """Write the file; the same bytes every time."""
    generator = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(1)
    writer.add_name("kleine Prüfung")
    writer.add_uint8("value.uint8", 200)
    writer.add_int8("value.int8", -100)
    writer.add_uint16("value.uint16", 60000)
    writer.add_int16("value.int16", -30000)
    writer.add_int32("value.int32", -(2**31))
    writer.add_uint64("value.uint64", 2**64 - 1)
    writer.add_int64("value.int64", -(2**63))
    writer.add_float32("value.float32", 0.1)
    writer.add_float64("value.float64", 0.1)
    writer.add_bool("value.bool", val=True)
    writer.add_array("array.text", ["a", "", "ü€", "<|end|>"])
    writer.add_array("array.int32", [1, -2, 3])
    writer.add_array("array.float32", [0.5, -1.5])
    writer.add_array("array.bool", [True, False, True])
    for name, (kind, shape) in QUANTISED.items():
        dense = generator.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(dense, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 110), np.uint8), raw_dtype=Type.IQ3_S)
    norm = generator.standard_normal(8).astype(np.float32)
    writer.add_tensor("blk.0.attn_norm.weight", norm)
    writer.add_tensor("output_norm.weight", norm.astype(np.float16))
    writer.add_tensor("blk.0.ffn_down.weight", gguf.quantize(norm.reshape(2, 4), Type.BF16), raw_dtype=Type.BF16)
    writer.add_tensor("positions", np.arange(5, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the small file."""
    return write_small_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="session")
def every_type_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a file with a tensor of each packed type."""
    return write_every_type(tmp_path_factory.mktemp("gguf") / "types.gguf")


@pytest.fixture(scope="session")
def oddly_aligned_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the same file with an alignment of one byte."""
    return write_small_gguf(tmp_path_factory.mktemp("gguf") / "odd.gguf", alignment=1)
