"""Codes and the bytes that hold them, packed by the package that each order comes from."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as bnb
import gguf
import numpy as np
import torch
from case import versions_of
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torchao.prototype.mx_formats.kernels import pack_uint4


def _entry(order: str, group: int, library: str, codes: torch.Tensor, packed: bytes, notes: str) -> dict[str, Any]:
    return {
        "bytes": packed.hex(),
        "codes": "".join(f"{code:x}" for code in codes.reshape(-1).tolist()),
        "group": group,
        "library": library,
        "notes": notes,
        "order": order,
        "version": versions_of(library),
    }


def _codes(count: int) -> torch.Tensor:
    """Return codes 0 … 15 in an order that no swap of nibbles or halves leaves alone."""
    index = torch.arange(count)
    return ((index * 7 + index // 16 + 3) % 16).to(torch.uint8)


def _bitsandbytes(count: int) -> bytes:
    """Pack through the quantiser: values that are the code book's own come back as their codes."""
    levels = bnb.get_4bit_type("nf4", device="cpu")
    weight = levels[_codes(count).long()].reshape(1, count)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    if not bool((state.absmax == 1).all()):
        raise RuntimeError("each block must hold -1 or 1")
    return packed.numpy().tobytes()


def _q4_0() -> bytes:
    values = _codes(64).float() - 8  # each block holds -8, so that its scale is 1 and the codes stay the same
    rows = gguf.quants.quantize(values.reshape(1, 64).numpy(), gguf.GGMLQuantizationType.Q4_0).reshape(2, 18)
    return rows[:, 2:].tobytes()


def _nvfp4() -> tuple[torch.Tensor, bytes]:
    """Unpack bytes whose values show their codes (ggml decodes 0 and 8 alike, so 8 is left out)."""
    index = np.arange(32)
    low, high = 1 + (index * 3) % 7, 9 + (index * 5) % 7
    packed = (low | (high << 4)).astype(np.uint8)
    one = np.full(4, 0x38, np.uint8)  # e4m3's 1.0
    values = gguf.quants.dequantize(np.concatenate((one, packed)).reshape(1, 36), gguf.GGMLQuantizationType.NVFP4)
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = [levels.index(abs(value)) + (8 if value < 0 else 0) for value in values.reshape(-1).tolist()]
    return torch.tensor(codes, dtype=torch.uint8), packed.tobytes()


def vectors() -> dict[str, Any]:
    """Return name → codes (one hexadecimal digit each) and bytes (two), with the order and where it comes from."""
    nvfp4_codes, nvfp4_bytes = _nvfp4()
    words = pack_to_int32((_codes(64).to(torch.int8) - 8).reshape(1, 64), 4)
    return {
        "low_first": _entry(
            "low_first", 0, "torchao", _codes(64), pack_uint4(_codes(64)).numpy().tobytes(), "pack_uint4"
        ),
        "low_first_words": _entry(
            "low_first", 0, "compressed-tensors", _codes(64), words.numpy().tobytes(), "int32 words, little-endian"
        ),
        "high_first": _entry("high_first", 0, "bitsandbytes", _codes(64), _bitsandbytes(64), "quantize_4bit"),
        "high_first_odd": _entry(
            "high_first", 0, "bitsandbytes", _codes(33), _bitsandbytes(33), "33 codes: the last low nibble is padding"
        ),
        "half_split_32": _entry("half_split", 32, "gguf", _codes(64), _q4_0(), "Q4_0 blocks without their scales"),
        "half_split_16": _entry(
            "half_split", 16, "gguf", nvfp4_codes, nvfp4_bytes, "NVFP4 blocks without their scales"
        ),
    }
