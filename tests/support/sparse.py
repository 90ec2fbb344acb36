"""Checkpoints as large as their headers say, whose data is one hole in each file and takes no room on the disk."""

from __future__ import annotations

import json
import math
import os
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    Entry = tuple[str, str, tuple[int, ...], bytes | None]
    """Name, dtype, shape, and what is stored, where that matters."""

__all__ = ["make_sparse", "make_sparse_gguf", "make_sparse_model"]

_ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8}


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
    entries: list[Entry] = []
    for module, (n, k) in layers.items():
        entries += [
            (f"{module}._weight_qdata", "U8", (n, k // 2), None),
            (f"{module}._weight_scale", "F8_E4M3", (n, k // 16), None),
            (f"{module}._weight_per_tensor_scale", "F32", (), None),
        ]
    entries += [(name, "BF16", shape, None) for name, shape in (dense or {}).items()]
    # The codes of one layer after another go round the shards, its scales one place ahead.
    return _write(folder, entries, [(number // 3 + number % 3) % shards for number in range(len(entries))])


def make_sparse_model(folder: Path, kind: str, layers: Mapping[str, tuple[int, int]], shards: int) -> int:
    """Make an index, shards and a config of layers (N, K) as GPTQ, AWQ, ModelOpt, compressed-tensors or MLX has them.

    What a reader looks at to open the file (the group of each in-feature, a stored shape) is there.

    Returns:
        The size of all tensors in bytes.
    """
    stored, config = _KINDS[kind]
    own = [[(f"{module}.{entry[0]}", *entry[1:]) for entry in stored(n, k)] for module, (n, k) in layers.items()]
    homes = [number * shards // len(own) for number, entries in enumerate(own) for _ in entries]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return _write(folder, [entry for entries in own for entry in entries], homes)


def make_sparse_gguf(folder: Path, layers: Mapping[str, tuple[int, int]], parts: int) -> int:
    """Make a model of Q4_K tensors (N, K) in parts, as llama.cpp splits files.

    Returns:
        The size of all tensors in bytes.
    """
    names, total = list(layers), 0
    for part in range(parts):
        own = names[part * len(names) // parts : (part + 1) * len(names) // parts]
        facts = [("split.no", 2, "<H", part), ("split.count", 2, "<H", parts)]
        facts.append(("split.tensors.count", 5, "<i", len(names)))
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(own), len(facts) + 1)
        head += _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
        for key, kind, form, value in facts:
            head += _text(key) + struct.pack("<I", kind) + struct.pack(form, value)
        end = 0
        for name in own:
            n, k = layers[name]
            head += _text(f"{name}.weight") + struct.pack("<IQQIQ", 2, k, n, 12, end)
            end += n * k // 256 * 144
        path = folder / f"model-{part + 1:05}-of-{parts:05}.gguf"
        path.write_bytes(head + b"\0" * (-len(head) % 32))
        os.truncate(path, path.stat().st_size + end)
        total += end
    return total


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gptq(n: int, k: int) -> list[Entry]:
    groups = b"".join(struct.pack("<i", place // 128) for place in range(k))
    return [
        ("qweight", "I32", (k // 8, n), None),
        ("qzeros", "I32", (k // 128, n // 8), None),
        ("scales", "F16", (k // 128, n), None),
        ("g_idx", "I32", (k,), groups),
    ]


def _awq(n: int, k: int) -> list[Entry]:
    return [
        ("qweight", "I32", (k, n // 8), None),
        ("qzeros", "I32", (k // 128, n // 8), None),
        ("scales", "F16", (k // 128, n), None),
    ]


def _modelopt(n: int, k: int) -> list[Entry]:
    return [
        ("weight", "U8", (n, k // 2), None),
        ("weight_scale", "F8_E4M3", (n, k // 16), None),
        ("weight_scale_2", "F32", (), None),
        ("input_scale", "F32", (), None),
    ]


def _compressed_tensors(n: int, k: int) -> list[Entry]:
    return [
        ("weight_packed", "I32", (n, k // 8), None),
        ("weight_scale", "BF16", (n, k // 128), None),
        ("weight_shape", "I64", (2,), struct.pack("<qq", n, k)),
    ]


def _mlx(n: int, k: int) -> list[Entry]:
    sides = [(suffix, "BF16", (n, k // 64), None) for suffix in ("scales", "biases")]
    return [("weight", "U32", (n, k // 8), None), *sides]


_GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}
_KINDS: dict[str, tuple[Callable[[int, int], list[Entry]], dict[str, Any]]] = {
    "gptq": (_gptq, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}),
    "awq": (_awq, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}),
    "modelopt-nvfp4": (_modelopt, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}),
    "compressed-tensors-int4": (
        _compressed_tensors,
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": _GROUPS,
            }
        },
    ),
    "mlx": (_mlx, {"quantization": {"group_size": 64, "bits": 4}}),
}


def _write(folder: Path, entries: Sequence[Entry], homes: Sequence[int]) -> int:
    """Write each tensor to its shard, and the index; return the size of all tensors."""
    headers: list[dict[str, Any]] = [{} for _ in range(max(homes) + 1)]
    ends = [0] * len(headers)
    for (name, dtype, shape, _), shard in zip(entries, homes, strict=True):
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        headers[shard][name] = {"dtype": dtype, "shape": shape, "data_offsets": [ends[shard], ends[shard] + nbytes]}
        ends[shard] += nbytes
    given = {name: data for name, _, _, data in entries if data is not None}
    for shard, header in enumerate(headers):
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{shard}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + ends[shard])
        with path.open("r+b") as file:
            for name in header.keys() & given.keys():
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(given[name])
    names = {name: f"model-{shard}.safetensors" for (name, *_), shard in zip(entries, homes, strict=True)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    return sum(ends)
