"""Checkpoints as large as their headers say, whose data is one hole in each file and takes no room on the disk."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["make_sparse"]


def make_sparse(
    folder: Path,
    layers: Mapping[str, tuple[int, int]],
    shards: int,
    *,
    dense: Mapping[str, tuple[int, ...]] | None = None,
) -> int:
    """Make an index and shards of layers (N, K) under torchao's NVFP4 keys, and of bfloat16 tensors of other shapes.

    A layer's tensors lie in different shards.

    Returns:
        The size of all tensors in bytes.
    """
    homes: dict[str, str] = {}
    headers: list[dict[str, Any]] = [{} for _ in range(shards)]
    ends = [0] * shards
    entries: list[tuple[str, str, list[int], int]] = []
    for module, (n, k) in layers.items():
        entries += [
            (f"{module}._weight_qdata", "U8", [n, k // 2], n * k // 2),
            (f"{module}._weight_scale", "F8_E4M3", [n, k // 16], n * k // 16),
            (f"{module}._weight_per_tensor_scale", "F32", [], 4),
        ]
    entries += [(name, "BF16", list(shape), 2 * math.prod(shape)) for name, shape in (dense or {}).items()]
    for number, (name, dtype, shape, nbytes) in enumerate(entries):
        # The codes of one layer after another go round the shards, its scales one place ahead.
        shard = (number // 3 + number % 3) % shards
        headers[shard][name] = {"dtype": dtype, "shape": shape, "data_offsets": [ends[shard], ends[shard] + nbytes]}
        ends[shard] += nbytes
        homes[name] = f"model-{shard}.safetensors"
    for shard, header in enumerate(headers):
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{shard}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + ends[shard])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}), encoding="utf-8")
    return sum(ends)
