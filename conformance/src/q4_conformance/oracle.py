"""The oracle: what a packed weight stands for, in float64, read from its stored bytes alone.

It shares no code with the core's codec: codes are found by arithmetic on positions, float8 scales by arithmetic on
their bits, and everything is numpy. The exact value of a weight is

    CODEBOOK:  scale[n, b] * codebook[q[n, k]] + offset[n, b]
    INTEGER:   (q[n, k] - zero[n, b]) * scale[n, b]

computed in float64, where ``scale`` is the *resolved* float32 scale: the one that the dialect's own library computes
from the stored levels, each operation rounded to float32 once. Then come the permutation of the in-features and the
scale of the input channels.

A product of a float32 scale and a float32 code has 48 significant bits and is exact in float64; the sums that follow
are rounded at 2^-53, which is 2^-29 of a float32 rounding and is lost in the judge's bound.

Reference:
    OCP OFP8 (E4M3), OCP Microscaling Formats v1.0 (E8M0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4core import BlockOrder, Form, NibbleOrder, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from q4core import PackedWeight, Packing

__all__ = [
    "Reference",
    "code_positions",
    "decode_codes",
    "decode_scales",
    "exact_input_gradient",
    "exact_linear",
    "exact_weight",
    "term_sizes",
]

_SYMMETRIC_ZERO = 8
_EXTRA_STEPS = 8
"""Roundings beside the K products and sums: at most two levels of the scale, zero, scale, offset, channel, bias."""


@attrs.frozen(eq=False, kw_only=True)
class Reference:
    """The exact result of a linear layer, with what bounds the error of one computed in float32.

    Args:
        value: float64 [..., N].
        size: float64 [..., N]: the sum of the magnitudes of all terms, of which ``value`` is the sum with signs.
        underflow: float64 [..., 1]: the sum over k of (1 + |x|) (1 + |channel scale|), which bounds underflow.
        is_zero: bool [..., N]: every term is exactly zero, so that zero is the only right result.
        steps: Float32 roundings on the way of any term.
    """

    value: NDArray[np.float64]
    size: NDArray[np.float64]
    underflow: NDArray[np.float64]
    is_zero: NDArray[np.bool_]
    steps: int


def _as_float64(tensor: torch.Tensor) -> NDArray[np.float64]:
    return tensor.detach().to("cpu", torch.float64).numpy()


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
    value = _as_float64(weight.global_scale).astype(np.float32).reshape(-1)
    return value.reshape(-1, 1) if value.size > 1 else value


def _double_quant(weight: PackedWeight) -> NDArray[np.float32]:
    if weight.nested_codebook is None or weight.nested_scale is None or weight.nested_offset is None:
        raise LookupError("nested levels")
    stored = _as_bytes(weight.scale)
    table = _as_float64(weight.nested_codebook).astype(np.float32)
    second = _as_float64(weight.nested_scale).astype(np.float32).reshape(-1)
    mean = _as_float64(weight.nested_offset).astype(np.float32).reshape(-1)[0]
    owner = np.arange(stored.size) // weight.nested_block_size
    product = table[stored.reshape(-1)] * second[owner]  # rounded once here, and once more below
    result: NDArray[np.float32] = (product + mean).reshape(stored.shape)
    return result


_RESOLVERS: dict[ScaleKind, Callable[[Any], NDArray[np.float32]]] = {
    ScaleKind.PLAIN: lambda weight: _as_float64(weight.scale).astype(np.float32),
    ScaleKind.E8M0: lambda weight: _e8m0(_as_bytes(weight.scale)),
    ScaleKind.E4M3: lambda weight: _e4m3(_as_bytes(weight.scale)),
    ScaleKind.E4M3_MUL: lambda weight: _e4m3(_as_bytes(weight.scale)) * _global(weight),
    ScaleKind.E4M3_DIV: lambda weight: _e4m3(_as_bytes(weight.scale)) / _global(weight),
    ScaleKind.DOUBLE_QUANT: _double_quant,
}


def decode_scales(weight: PackedWeight) -> NDArray[np.float32]:
    """Return the resolved scales, float32, shaped as ``weight.scale``."""
    with np.errstate(over="ignore", under="ignore"):
        return _RESOLVERS[weight.scale_kind](weight)


def _per_element(values: NDArray[Any], weight: PackedWeight) -> NDArray[np.float64]:
    """Spread one number per block over [N, K]."""
    rows, columns = weight.shape
    if weight.blocks is BlockOrder.FLAT:
        owner = np.arange(rows * columns) // weight.block_size
        return values.astype(np.float64)[owner].reshape(rows, columns)
    return values.astype(np.float64)[:, np.arange(columns) // weight.block_size]


def _codebook(weight: PackedWeight, codebook: Sequence[float] | None) -> NDArray[np.float64]:
    if codebook is not None:
        return np.asarray(codebook, dtype=np.float32).astype(np.float64)
    if weight.codebook is not None:
        return _as_float64(weight.codebook).astype(np.float32).astype(np.float64)
    return np.asarray(weight.format.codebook, dtype=np.float32).astype(np.float64)


def _terms(weight: PackedWeight, codebook: Sequence[float] | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the two terms of each stored weight: the product, and what is added to it."""
    codes = decode_codes(weight)
    scale = _per_element(decode_scales(weight), weight)
    if weight.format.form is Form.CODEBOOK:
        product = scale * _codebook(weight, codebook)[codes]
        added = np.zeros_like(product) if weight.offset is None else _per_element(_as_float64(weight.offset), weight)
        return product, added
    if weight.zero is None:
        zero = np.full_like(scale, _SYMMETRIC_ZERO)
    else:
        zero = _per_element(_as_float64(weight.zero), weight)
    return codes * scale, -zero * scale


def _channels(weight: PackedWeight) -> NDArray[np.float64]:
    if weight.input_channel_scale is None:
        return np.ones(weight.in_features)
    return _as_float64(weight.input_channel_scale)


def _to_input_order(stored: NDArray[np.float64], weight: PackedWeight) -> NDArray[np.float64]:
    """Put stored column j where in-feature ``input_permutation[j]`` stands."""
    if weight.input_permutation is None:
        return stored
    result = np.empty_like(stored)
    result[:, weight.input_permutation.cpu().numpy()] = stored
    return result


def exact_weight(weight: PackedWeight, *, codebook: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return the dense weight, float64 [N, K], so that ``y = x @ result.T``.

    Args:
        weight: The weight, on any device; only its public fields are read.
        codebook: 2**bits values to use instead of the format's or the weight's own, for a path that approximates them.

    Returns:
        float64 [N, K]. ``(q - zero) * scale`` is computed with one float64 rounding, not as a difference of products.
    """
    codes, scale = decode_codes(weight), _per_element(decode_scales(weight), weight)
    if weight.format.form is Form.CODEBOOK:
        product, added = _terms(weight, codebook)
        # Without an offset nothing is added: -0 + 0 would be +0.
        dense = product if weight.offset is None else product + added
    elif weight.zero is None:
        dense = (codes.astype(np.float64) - _SYMMETRIC_ZERO) * scale
    else:
        dense = (codes - _per_element(_as_float64(weight.zero), weight)) * scale
    dense = _to_input_order(dense, weight)
    return dense if weight.input_channel_scale is None else dense * _channels(weight)


def term_sizes(weight: PackedWeight, *, codebook: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return float64 [N, K]: the magnitudes of the two terms of each weight, added.

    Where offset or zero point nearly cancel the code, this is much larger than the weight itself, and a kernel that
    sums the two terms apart (``scale Σ q x - zero scale Σ x``) is right to within roundings of these.
    """
    product, added = _terms(weight, codebook)
    return _to_input_order(np.abs(product) + np.abs(added), weight) * np.abs(_channels(weight))


def exact_linear(
    weight: PackedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    codebook: Sequence[float] | None = None,
) -> Reference:
    """Return the exact ``x @ wᵀ + bias``, with what the judge needs to bound a computed one.

    Args:
        weight: The source weight [N, K].
        x: [..., K], any float dtype.
        bias: [N] or None.
        codebook: As in ``exact_weight``.
    """
    values = _as_float64(x)
    dense = exact_weight(weight, codebook=codebook)
    value = values @ dense.T
    is_zero = np.abs(values) @ np.abs(dense).T == 0
    size = np.abs(values) @ term_sizes(weight, codebook=codebook).T
    if bias is not None:
        value = value + _as_float64(bias)
        size = size + np.abs(_as_float64(bias))
        is_zero = is_zero & (_as_float64(bias) == 0)
    underflow = ((1 + np.abs(values)) * (1 + np.abs(_channels(weight)))).sum(axis=-1, keepdims=True)
    steps = weight.in_features + _EXTRA_STEPS
    return Reference(value=value, size=size, underflow=underflow, is_zero=is_zero, steps=steps)


def exact_input_gradient(weight: PackedWeight, grad: torch.Tensor) -> Reference:
    """Return the exact ``grad @ w``, the gradient of a linear layer to its input, ready to be judged.

    Args:
        weight: The source weight [N, K].
        grad: [..., N], any float dtype.
    """
    values = _as_float64(grad)
    dense, largest_channel = exact_weight(weight), np.abs(_channels(weight)).max()
    return Reference(
        value=values @ dense,
        size=np.abs(values) @ term_sizes(weight),
        underflow=((1 + np.abs(values)) * (1 + largest_channel)).sum(axis=-1, keepdims=True),
        is_zero=np.abs(values) @ np.abs(dense) == 0,
        steps=weight.out_features + _EXTRA_STEPS,
    )
