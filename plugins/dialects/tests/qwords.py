"""Layers of GPTQ and AWQ made code by code, by the layouts' definitions, with the weights that they stand for."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

Tensors = dict[str, torch.Tensor]
Codes = NDArray[np.int64]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each nibble of AWQ's words, the lowest first."""
_UNSIGNED = {torch.int8: np.uint8, torch.int16: np.uint16, torch.int32: np.uint32, torch.int64: np.uint64}
_SIGNED = {torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}


@attrs.frozen(kw_only=True)
class Layer:
    """What is stored: codes [N, K], zero points [N, G], scales [N, G], and the group of each in-feature."""

    codes: Codes
    zeros: Codes
    scales: torch.Tensor
    groups: Codes

    @property
    def weight(self) -> torch.Tensor:
        """(q - z) * s in float32, [N, K]."""
        whole = torch.from_numpy((self.codes - self.zeros[:, self.groups]).astype(np.float32))
        return whole * self.scales.float()[:, torch.from_numpy(self.groups)]


def make_layer(
    n: int,
    k: int,
    group: int,
    *,
    bits: int = 4,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = False,
    scattered: bool = False,
    seed: int = 0,
) -> Layer:
    """Return a random layer, with a group of zeros, negative and extreme scales, and zero points of 0 and the most."""
    random = np.random.default_rng([n, k, group, bits, seed])
    count = -(-k // group)
    codes = random.integers(0, 1 << bits, (n, k))
    zeros = random.integers(0, 1 << bits, (n, count))
    zeros[:: max(1, n // 3)] = 0
    zeros[1 :: max(2, n // 3)] = (1 << bits) - 1
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = torch.from_numpy(random.normal(0, 0.02, (n, count))).to(dtype)
    scales[0, 0], scales[-1, -1] = 0.0, torch.finfo(torch.float16).max
    groups = np.arange(k) // group
    return Layer(codes=codes, zeros=zeros, scales=scales, groups=random.permutation(groups) if scattered else groups)


def pack(codes: Codes, bits: int, dtype: torch.dtype, axis: int) -> torch.Tensor:
    """Return codes in words along an axis, the first code of a word in its lowest bits."""
    moved = np.moveaxis(codes, axis, 0)
    per_word = 8 * dtype.itemsize // bits
    unsigned = _UNSIGNED[dtype]
    words = np.zeros((-(-len(moved) // per_word), moved.shape[1]), np.uint64)
    for place, line in enumerate(moved):
        words[place // per_word] |= line.astype(np.uint64) << np.uint64(bits * (place % per_word))
    return torch.from_numpy(np.moveaxis(words.astype(unsigned).view(_SIGNED[dtype]), 0, axis).copy())


def gptq_layer(
    layer: Layer,
    *,
    version: int,
    bits: int = 4,
    pack_dtype: torch.dtype = torch.int32,
    has_groups: bool = True,
    module: str = "proj",
) -> Tensors:
    """Return the tensors of a layer as GPTQ stores it; version 1 has 1 in each code subtracted from the word."""
    zeros = pack(layer.zeros.T, bits, pack_dtype, 1)
    if version == 1:
        ones = sum(1 << place for place in range(0, 8 * pack_dtype.itemsize, bits))
        lowered = [(int(word) - ones) % (1 << 8 * pack_dtype.itemsize) for word in zeros.flatten()]
        unsigned = np.array(lowered, np.uint64).astype(_UNSIGNED[pack_dtype])
        zeros = torch.from_numpy(unsigned.view(_SIGNED[pack_dtype]).copy()).view(zeros.shape)
    tensors = {
        f"{module}.qweight": pack(layer.codes.T, bits, pack_dtype, 0),
        f"{module}.qzeros": zeros,
        f"{module}.scales": layer.scales.T.contiguous(),
    }
    if has_groups:
        tensors[f"{module}.g_idx"] = torch.from_numpy(layer.groups.astype(np.int32))
    return tensors


def awq_layer(layer: Layer, module: str = "proj") -> Tensors:
    """Return the tensors of a layer as AWQ's GEMM layout stores it."""

    def interleaved(codes: Codes) -> torch.Tensor:
        words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
        for nibble, column in enumerate(AWQ_COLUMNS):
            words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return torch.from_numpy(words.view(np.int32).copy())

    return {
        f"{module}.qweight": interleaved(layer.codes.T),
        f"{module}.qzeros": interleaved(layer.zeros.T),
        f"{module}.scales": layer.scales.T.contiguous(),
    }


def gemv_layer(layer: Layer, group: int, module: str = "proj") -> Tensors:
    """Return the tensors of a layer as AWQ's GEMV layout stores it, padded as AutoAWQ pads for a group size."""
    count = layer.zeros.shape[1]
    multiple = {64: 2, 32: 4}.get(group, 1)
    words = (count + 7) // 8
    words += -words % multiple
    padding = ((0, 0), (0, 8 * words - count))
    return {
        f"{module}.qweight": pack(layer.codes, 4, torch.int32, 1),
        f"{module}.qzeros": pack(np.pad(layer.zeros, padding), 4, torch.int32, 1),
        f"{module}.scales": torch.nn.functional.pad(layer.scales, padding[1]),
    }


def config(method: str, **facts: Any) -> dict[str, Any]:
    """Return a model's config with an entry of a method."""
    return {"quantization_config": {"quant_method": method, **facts}}
