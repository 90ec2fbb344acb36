"""The oracle: what a packed weight stands for, in float64, read from its stored bytes alone.

It shares no code with the core's codec; ``decoding`` reads codes and scales. The exact value of a weight is

    CODEBOOK:  scale[n, b] * codebook[q[n, k]] + offset[n, b]
    INTEGER:   (q[n, k] - zero[n, b]) * scale[n, b]

computed in float64, where ``scale`` is the *resolved* float32 scale: the one that the dialect's own library computes
from the stored levels, each operation rounded to float32 once. Then come the permutation of the in-features and the
scale of the input channels.

A product of a float32 scale and a float32 code has 48 significant bits and is exact in float64; the sums that follow
are rounded at 2^-53, which is 2^-29 of a float32 rounding and is lost in the judge's bound.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.oracle.decoding import as_float64, decode_codes, decode_offsets, decode_scales
from q4core import BlockOrder, Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from q4core import PackedWeight

_EXTRA_STEPS = 8
"""Roundings besides the K products and sums: at most two levels of the scale, zero, scale, offset, channel, bias."""
_ROUNDING = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
}
"""What one rounding to a dtype may change: relative to the number, and absolute, where it is subnormal."""


_twins: weakref.WeakKeyDictionary[PackedWeight, PackedWeight] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[PackedWeight, dict[Any, _Exact]] = weakref.WeakKeyDictionary()


def judge_by(weight: PackedWeight, twin: PackedWeight) -> None:
    """Let ``weight``, which a subject is given, be judged by ``twin``: the same bytes, which nothing writes to.

    A subject that writes to its weight can't move its own target.
    """
    _twins[weight] = twin
    _known.setdefault(twin, {})


def as_given(weight: PackedWeight) -> PackedWeight:
    """Return the weight as it was before a subject held it: its twin, where ``judge_by`` named one."""
    return _twins.get(weight, weight)


@attrs.frozen(eq=False, kw_only=True)
class Reference:
    """The exact result of a linear layer, with what bounds the error of one computed in float32.

    Args:
        value: float64 [..., N].
        size: float64 [..., N]: the sum of the magnitudes of all terms, of which ``value`` is the sum with signs.
        underflow: float64 [..., 1]: the sum over k of (1 + |x|) (1 + |channel scale|), which bounds underflow.
        is_zero: bool [..., N]: every term is exactly zero, so that zero is the only right result.
        steps: Float32 roundings on the way of any term.
        slack: float64 [..., N]: what weights that are rounded to fewer bits may add to the error; 0 where none are.
    """

    value: NDArray[np.float64]
    size: NDArray[np.float64]
    underflow: NDArray[np.float64]
    is_zero: NDArray[np.bool_]
    steps: int
    slack: NDArray[np.float64] | float = 0.0


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
        return as_float64(weight.codebook).astype(np.float32).astype(np.float64)
    return np.asarray(weight.format.codebook, dtype=np.float32).astype(np.float64)


def _channels(weight: PackedWeight) -> NDArray[np.float64]:
    if weight.input_channel_scale is None:
        return np.ones(weight.in_features)
    return as_float64(weight.input_channel_scale)


def _to_input_order(stored: NDArray[np.float64], weight: PackedWeight) -> NDArray[np.float64]:
    """Put stored column j in the place of in-feature ``input_permutation[j]``."""
    if weight.input_permutation is None:
        return stored
    result = np.empty_like(stored)
    result[:, weight.input_permutation.cpu().numpy()] = stored
    return result


@attrs.frozen(eq=False)
class _Exact:
    """float64 [N, K]: the dense weight, and the magnitudes of the two terms of each of its elements, added.

    Where offset or zero point nearly cancel the code, these are much larger than the weight itself, and a kernel that
    sums the two terms apart (``scale Σ q x - zero scale Σ x``) is right to within roundings of them.
    """

    dense: NDArray[np.float64]
    terms: NDArray[np.float64]


def _exact(weight: PackedWeight, codebook: Sequence[float] | None = None) -> _Exact:
    """Return what a weight stands for; computed once where its bytes can't change."""
    given = as_given(weight)
    key = None if codebook is None else tuple(codebook)
    known: dict[Any, _Exact] = _known.get(given, {})
    if key not in known:
        known[key] = _computed(given, codebook)
    return known[key]


def _computed(weight: PackedWeight, codebook: Sequence[float] | None) -> _Exact:
    codes, scale = decode_codes(weight), _per_element(decode_scales(weight), weight)
    if weight.format.form is Form.CODEBOOK:
        dense = scale * _codebook(weight, codebook)[codes]
        terms = np.abs(dense)
        offsets = decode_offsets(weight)
        if offsets is not None:  # without one nothing is added: -0 + 0 would be +0
            offset = _per_element(offsets, weight)
            dense, terms = dense + offset, terms + np.abs(offset)
    else:
        middle = 2.0 ** (weight.format.bits - 1)
        zero = middle if weight.zero is None else _per_element(as_float64(weight.zero), weight)
        dense = (codes - zero) * scale
        terms = np.abs(codes * scale) + np.abs(zero * scale)
    dense, terms = _to_input_order(dense, weight), _to_input_order(terms, weight)
    if weight.input_channel_scale is None:
        return _Exact(dense, terms)
    return _Exact(dense * _channels(weight), terms * np.abs(_channels(weight)))


def exact_weight(weight: PackedWeight, *, codebook: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return the dense weight, float64 [N, K], so that ``y = x @ result.T``.

    Args:
        weight: The weight, on any device; only its public fields are read.
        codebook: 2**bits values to use instead of the format's or the weight's own, for a path that approximates them.

    Returns:
        float64 [N, K]. ``(q - zero) * scale`` is computed with one float64 rounding, not as a difference of products.
    """
    return _exact(weight, codebook).dense


def _slack(
    sizes: NDArray[np.float64], terms: NDArray[np.float64], dtype: torch.dtype, roundings: int
) -> NDArray[np.float64] | float:
    """Return what ``roundings`` of each weight to ``dtype`` may change in ``sizes @ terms``."""
    if not roundings:
        return 0.0
    relative, absolute = _ROUNDING[dtype]
    tiny = roundings * absolute * sizes.sum(axis=-1, keepdims=True)
    slack: NDArray[np.float64] = ((1 + relative) ** roundings - 1) * (sizes @ terms) + tiny
    return slack


def exact_linear(
    weight: PackedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    codebook: Sequence[float] | None = None,
    roundings: int = 0,
) -> Reference:
    """Return the exact ``x @ wᵀ + bias``, with what the judge needs to bound a computed one.

    Args:
        weight: The source weight [N, K].
        x: [..., K], any float dtype.
        bias: [N] or None.
        codebook: As in ``exact_weight``.
        roundings: How often each weight is rounded to x's dtype on its way, where that is claimed.
    """
    values = as_float64(x)
    sizes = np.abs(values)
    weight, exact = as_given(weight), _exact(weight, codebook)
    value = values @ exact.dense.T
    is_zero = sizes @ np.abs(exact.dense).T == 0
    size = sizes @ exact.terms.T
    slack = _slack(sizes, exact.terms.T, x.dtype, roundings)
    if bias is not None:
        value = value + as_float64(bias)
        size = size + np.abs(as_float64(bias))
        is_zero = is_zero & (as_float64(bias) == 0)
    underflow = ((1 + sizes) * (1 + np.abs(_channels(weight)))).sum(axis=-1, keepdims=True)
    steps = weight.in_features + _EXTRA_STEPS
    return Reference(value=value, size=size, underflow=underflow, is_zero=is_zero, steps=steps, slack=slack)


def exact_input_gradient(weight: PackedWeight, grad: torch.Tensor, *, roundings: int = 0) -> Reference:
    """Return the exact ``grad @ w``, the gradient of a linear layer to its input, ready to be judged.

    Args:
        weight: The source weight [N, K].
        grad: [..., N], any float dtype.
        roundings: As in ``exact_linear``.
    """
    values = as_float64(grad)
    sizes = np.abs(values)
    weight, exact = as_given(weight), _exact(weight)
    largest_channel = np.abs(_channels(weight)).max()
    return Reference(
        value=values @ exact.dense,
        size=sizes @ exact.terms,
        underflow=((1 + sizes) * (1 + largest_channel)).sum(axis=-1, keepdims=True),
        is_zero=sizes @ np.abs(exact.dense) == 0,
        steps=weight.out_features + _EXTRA_STEPS,
        slack=_slack(sizes, exact.terms, grad.dtype, roundings),
    )
