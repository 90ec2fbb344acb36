"""Small checkpoints, and what tests of checkpoints compare them by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
import numpy as np
import safetensors.torch
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["is_same", "packed", "retype", "save", "save_shards", "tensors_of_two", "trio", "visible", "write_iq2_s"]

NF4 = torch.tensor(q4.BUILTIN_FORMATS["nf4"].codebook)


def trio(module: str = "proj", n: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of one layer [n, 64] in the simplified NF4 dialect."""
    random = torch.Generator().manual_seed(seed)
    return {
        f"{module}.weight": torch.randint(0, 256, (n, 64), dtype=torch.uint8, generator=random),
        f"{module}.absmax": torch.rand(n * 2, generator=random),
        f"{module}.quant_map": NF4.clone(),
    }


def tensors_of_two() -> dict[str, torch.Tensor]:
    """Return the tensors of the layers ``a`` and ``b``, and two dense ones."""
    return {
        **trio("a"),
        **trio("b", 4, 1),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "a.bias": torch.ones(6),
    }


def packed(count: int = 3, n: int = 8) -> dict[str, q4.PackedWeight]:
    """Return layers [n, 128] by name."""
    random = torch.Generator().manual_seed(3)
    return {f"m.{index}": q4.quantize(torch.randn(n, 128, generator=random), "nf4") for index in range(count)}


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Write a file with the safetensors package, and return its path."""
    safetensors.torch.save_file(dict(tensors), path, metadata)
    return path


def save_shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int = 2) -> Path:
    """Write neighbouring tensors to different shards, and an index."""
    names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
    homes = {name: names[index % count] for index, name in enumerate(sorted(tensors))}
    for shard in names:
        save(folder / shard, {name: tensors[name] for name in tensors if homes[name] == shard})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": homes}), encoding="utf-8")
    return index


def is_same(one: q4.PackedWeight, two: q4.PackedWeight) -> bool:
    """Return whether two weights have the same values."""
    return torch.equal(q4.dequantize(one, torch.float32), q4.dequantize(two, torch.float32))


def visible(folder: Path) -> list[str]:
    """Return the names of what a folder holds."""
    return sorted(path.name for path in folder.iterdir())


def retype(path: Path, names: Mapping[str, int]) -> None:
    """Write another type number into a GGUF file's directory, for each of some tensors."""
    data = bytearray(path.read_bytes())
    for name, number in names.items():
        place = data.index(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name)
        place += 4 + 8 * int.from_bytes(data[place : place + 4], "little")
        data[place : place + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)


def write_iq2_s(path: Path, layers: int) -> None:
    """Write a GGUF file whose matrices ``blk.<index>.attn_q`` [8, 256] are all IQ2_S, of which nothing is packed."""
    writer = gguf.GGUFWriter(path, "llama")
    for index in range(layers):
        blocks = np.zeros((8, 82), dtype=np.uint8)
        writer.add_tensor(f"blk.{index}.attn_q.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ2_S)
    writer.add_tensor("output_norm.weight", np.ones(256, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
