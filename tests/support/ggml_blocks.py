"""Random blocks of ggml's types, and what the package ``gguf`` makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from q4_gguf.ggml import PACKED_TYPES, find_type
from q4_gguf.header import TensorEntry

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["entry_of", "owners_values", "random_blocks", "write_every_type", "write_parts"]

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q8_1": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,),
    "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_M": (),
}  # fmt: skip
"""Type → where each block has float16 numbers."""


def entry_of(name: str, shape: tuple[int, ...]) -> TensorEntry:
    """Return a directory entry at the beginning of a file."""
    number = int(Type[name])
    kind = find_type(number)
    assert kind is not None
    blocks = int(np.prod(shape)) // kind.block_size
    return TensorEntry("blk.0.proj.weight", shape, number, kind, 0, blocks * kind.block_bytes)


def random_blocks(name: str, count: int, kind: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return blocks of random bits [count, bytes], whose scales are finite."""
    layout = find_type(int(Type[name]))
    assert layout is not None
    random = np.random.default_rng([seed, layout.block_bytes, count])
    blocks = random.integers(0, 256, (count, layout.block_bytes), np.uint8)
    if kind in {"ones", "zeros"}:
        blocks[:] = 255 if kind == "ones" else 0
    for start in HALVES[name]:
        numbers = random.standard_normal((count, 1)).astype(np.float16)
        numbers = {"negative": -abs(numbers), "zero scales": numbers * 0}.get(kind, numbers)
        blocks[:, start : start + 2] = numbers.view(np.uint8)
    if name == "MXFP4":
        blocks[:, :1] = np.minimum(blocks[:, :1], 250)
    if name == "NVFP4":
        blocks[:, :4] &= 0x7F
        blocks[:, :4][blocks[:, :4] == 0x7F] = 0x7E
    return blocks


def owners_values(name: str, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what the owner's code makes of blocks, float32 [count, elements]; Q8_1, which it lacks, by its formula."""
    values: np.ndarray[Any, Any]
    if name == "Q8_1":
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = scale * blocks[:, 4:].view(np.int8).astype(np.float32)
    else:
        values = gguf.quants.dequantize(blocks, Type[name])
    return values


def write_every_type(path: Path) -> Path:
    """Write a file with a matrix of each packed type, of one that is not packed, and experts with a global scale."""
    writer = gguf.GGUFWriter(path, "llama")
    shapes = {name: (4, 2) for name in PACKED_TYPES if name != "Q8_1"}  # whose size the package has otherwise
    for name, (rows, count) in (shapes | {"IQ2_XS": (2, 1)}).items():
        blocks = random_blocks(name, rows * count, "random").reshape(rows, -1)
        writer.add_tensor(f"blk.0.{name.lower()}.weight", blocks, raw_dtype=Type[name])
    experts = random_blocks("NVFP4", 12, "random").reshape(3, 4, -1)
    writer.add_tensor("blk.0.up_exps.weight", experts, raw_dtype=Type.NVFP4)
    writer.add_tensor("blk.0.up_exps.scale", np.array([0.5, 2.0, 1.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(folder: Path) -> list[Path]:
    """Write a model of three tensors, two to a part, as the package ``gguf`` splits files; return the parts."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=2)
    for name in ("token_embd", "output_norm", "output"):
        writer.add_tensor(f"{name}.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))
