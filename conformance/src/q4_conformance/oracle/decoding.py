"""The stored bytes of a packed weight, decoded: codes by arithmetic on positions, scales by arithmetic on bits.

It shares no code with the core's codec, and everything is numpy.

Reference:
    OCP OFP8 (E4M3), OCP Microscaling Formats v1.0 (E8M0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4core import BlockOrder, NibbleOrder, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from q4core import PackedWeight, Packing


def as_float64(tensor: torch.Tensor) -> NDArray[np.float64]:
    """Return the tensor's values."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def stored_bytes(tensor: torch.Tensor) -> bytes:
    """Return the tensor's bytes, in the order of its elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    plain = tensor.detach().cpu()
    return (plain if plain.dtype == torch.uint8 else plain.view(torch.uint8)).contiguous().numpy()


def code_positions(count: int, packing: Packing) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for codes 0 … count - 1, the byte that holds each one and by how much to shift it right."""
    index = np.arange(count)
    if packing.order is NibbleOrder.BYTES:
        return index, np.zeros_like(index)
    if packing.order is NibbleOrder.LOW_FIRST:
        return index // 2, 4 * (index % 2)
    if packing.order is NibbleOrder.HIGH_FIRST:
        return index // 2, 4 - 4 * (index % 2)
    half = packing.group // 2
    group, place = index // packing.group, index % packing.group
    return group * half + place % half, 4 * (place // half)


def decode_codes(weight: PackedWeight) -> NDArray[np.uint8]:
    """Return the codes, uint8 [N, K]."""
    rows, columns = weight.shape
    flat = weight.blocks is BlockOrder.FLAT
    lines = _as_bytes(weight.qdata).reshape(1 if flat else rows, -1)
    byte, shift = code_positions(rows * columns if flat else columns, weight.packing)
    mask = 2**weight.format.bits - 1
    codes: NDArray[np.uint8] = ((lines[:, byte] >> shift) & mask).astype(np.uint8)
    return codes.reshape(rows, columns)


def _e8m0(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = np.ldexp(1.0, stored.astype(np.int64) - 127)
    return np.where(stored == 255, np.nan, values).astype(np.float32)  # noqa: PLR2004  # the one NaN


def _e4m3(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    bits = stored.astype(np.int64)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = np.ldexp((8 + mantissa).astype(np.float64), exponent - 10)
    subnormal = np.ldexp(mantissa.astype(np.float64), -9)
    values = np.where(exponent == 0, subnormal, normal)
    values = np.where(bits & 127 == 127, np.nan, values)  # noqa: PLR2004  # S.1111.111
    return np.where(bits & 128, -values, values).astype(np.float32)


def _global(weight: PackedWeight) -> NDArray[np.float32]:
    if weight.global_scale is None:
        raise LookupError("global_scale")
    value = as_float64(weight.global_scale).astype(np.float32).reshape(-1)
    return value.reshape(-1, 1) if value.size > 1 else value


def _double_quant(weight: PackedWeight) -> NDArray[np.float32]:
    if weight.nested_codebook is None or weight.nested_scale is None or weight.nested_offset is None:
        raise LookupError("nested levels")
    stored = _as_bytes(weight.scale)
    table = as_float64(weight.nested_codebook).astype(np.float32)
    second = as_float64(weight.nested_scale).astype(np.float32).reshape(-1)
    mean = as_float64(weight.nested_offset).astype(np.float32).reshape(-1)[0]
    owner = np.arange(stored.size) // weight.nested_block_size
    product = table[stored.reshape(-1)] * second[owner]  # rounded once here, and once more below
    result: NDArray[np.float32] = (product + mean).reshape(stored.shape)
    return result


def _super_block(weight: PackedWeight, stored: torch.Tensor, level: torch.Tensor | None) -> NDArray[np.float32]:
    """Return one byte for each block times one float for each super-block, rounded once."""
    if level is None:
        raise LookupError("nested levels")
    numbers = as_float64(level).astype(np.float32).reshape(-1)
    owner = np.arange(stored.numel()).reshape(tuple(stored.shape)) // weight.nested_block_size
    result: NDArray[np.float32] = as_float64(stored).astype(np.float32) * numbers[owner]
    return result


_RESOLVERS: dict[ScaleKind, Callable[[Any], NDArray[np.float32]]] = {
    ScaleKind.PLAIN: lambda weight: as_float64(weight.scale).astype(np.float32),
    ScaleKind.E8M0: lambda weight: _e8m0(_as_bytes(weight.scale)),
    ScaleKind.E4M3: lambda weight: _e4m3(_as_bytes(weight.scale)),
    ScaleKind.E4M3_MUL: lambda weight: _e4m3(_as_bytes(weight.scale)) * _global(weight),
    ScaleKind.E4M3_DIV: lambda weight: _e4m3(_as_bytes(weight.scale)) / _global(weight),
    ScaleKind.DOUBLE_QUANT: _double_quant,
    ScaleKind.SUPER_BLOCK: lambda weight: _super_block(weight, weight.scale, weight.nested_scale),
}


def decode_scales(weight: PackedWeight) -> NDArray[np.float32]:
    """Return the resolved scales, float32, shaped as ``weight.scale``."""
    with np.errstate(over="ignore", under="ignore"):
        return _RESOLVERS[weight.scale_kind](weight)


def decode_offsets(weight: PackedWeight) -> NDArray[np.float64] | None:
    """Return the resolved offsets, shaped as ``weight.offset``; None where there are none."""
    if weight.offset is None:
        return None
    if weight.scale_kind is ScaleKind.SUPER_BLOCK:
        return _super_block(weight, weight.offset, weight.nested_offset).astype(np.float64)
    return as_float64(weight.offset)
