"""Which of the layouts with codes called ``qweight`` a module is stored in: by shapes first, by config where they tie.

=================  ======================  ======================  ===============
layout             qweight                 qzeros                  scales
=================  ======================  ======================  ===============
gptq               int [K / c, N]          int [G, N / c]          [G, N]
awq                int32 [K, N / 8]        int32 [G, N / 8]        [G, N]
awq-gemv           int32 [N, K / 8]        int32 [N, Z]            [N, 8 Z]
=================  ======================  ======================  ===============

G is the number of groups, and c the number of codes in a word. Look-alikes are refused by name: AWQ's GEMV_FAST,
Marlin, BitBLAS, FP-Quant, ParoQuant.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeAlias

import torch

from q4_dialects.layer_keys import CACHE_SCALES
from q4_dialects.qweight_config import PACK_DTYPES, stated_by
from q4core import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4core import Catalogue, TensorInfo

__all__ = ["AWQ", "AWQ_GEMV", "GPTQ", "NIBBLES", "layouts_of", "modules_of", "refused_layers", "side_problems"]

GPTQ, AWQ, AWQ_GEMV = "gptq", "awq", "awq-gemv"
NIBBLES = 8
"""Codes of 4 bits in an int32."""
_MARLIN, _BITBLAS, _GEMV_FAST, _FP_QUANT, _PAROQUANT = "marlin", "bitblas", "awq-gemv-fast", "fp-quant", "paroquant"
_KEYS = ("qweight", "qzeros", "scales")
_KNOWN = (*_KEYS, "g_idx", "bias")
_SIDES = {
    "theta": _PAROQUANT,
    "pairs": _PAROQUANT,
    "forward_hadamard_matrix": _FP_QUANT,
    "backward_hadamard_matrix": _FP_QUANT,
}
"""What another dialect has next to the same keys → its name."""
_WORDS = frozenset(PACK_DTYPES.values())
_WIDTHS = (2, 3, 4, 5, 6, 7, 8)
_WORD = 32
_MATRIX = 2
_Shape: TypeAlias = tuple[int, int]
_FITTING: weakref.WeakKeyDictionary[Catalogue, dict[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()
"""What was found, because every dialect of these keys asks for each module."""


def modules_of(catalogue: Catalogue, layout: str) -> Iterator[str]:
    """Yield each module that may be stored in a layout, and in none that is refused."""
    for module in catalogue.modules_with("qweight", "qzeros"):
        if layout in layouts_of(catalogue, module) and _refused_name(catalogue, module) is None:
            yield module


def layouts_of(catalogue: Catalogue, module: str) -> tuple[str, ...]:
    """Return the layouts that fit a module best: one, or those that its damaged keys leave open; () for none."""
    known = _FITTING.setdefault(catalogue, {})
    if module not in known:
        known[module] = _fitting(catalogue, module)
    return known[module]


def _fitting(catalogue: Catalogue, module: str) -> tuple[str, ...]:
    codes, zeros, scales = (catalogue.get(f"{module}.{suffix}") for suffix in _KEYS)
    there = [info for info in (codes, zeros, scales) if info is not None]
    is_other = f"{module}.wscales" in catalogue or (codes is not None and codes.dtype not in _WORDS)
    if is_other or len(there) < 2:  # noqa: PLR2004  # codes and their scales
        return ()
    points = {layout: _points(layout, codes, zeros, scales) for layout in (GPTQ, AWQ, AWQ_GEMV, _MARLIN)}
    best = max(points.values())
    found = tuple(layout for layout, count in points.items() if count == best)
    if best < 2:  # noqa: PLR2004  # codes fit neither scales nor zero points
        found = (GPTQ,) if f"{module}.g_idx" in catalogue else (GPTQ, AWQ, AWQ_GEMV)
    layout = stated_by(catalogue, module).layout
    return (layout,) if len(found) > 1 and layout in found else found


def refused_layers(catalogue: Catalogue) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield module, name and keys of each layer with codes called ``qweight`` in a layout that nothing here reads."""
    for module in catalogue.modules_with("qweight"):
        name = _refused_name(catalogue, module)
        if name is not None:
            own = {suffix: key for suffix, key in catalogue.children(module).items() if "." not in suffix}
            yield module, name, {"qdata" if key == "qweight" else key: own[key] for key in own if key != "bias"}


def side_problems(catalogue: Catalogue, module: str) -> Iterator[Problem]:
    """Yield a problem for each tensor of a module that the layouts do not have: scales, rotations, side matrices."""
    known = (*_KNOWN, *CACHE_SCALES)
    for suffix, key in catalogue.children(module).items():
        if "." not in suffix and suffix not in known:
            yield Problem("unknown_key", key, f"one that the dialect knows ({', '.join(sorted(known))})")


def _refused_name(catalogue: Catalogue, module: str) -> str | None:
    """Return the name of a layout that is known and not read, or None."""
    below = catalogue.children(module)
    side = next((name for suffix, name in _SIDES.items() if suffix in below), None)
    codes, zeros, scales = (catalogue.get(f"{module}.{suffix}") for suffix in _KEYS)
    if side is not None or codes is None or scales is None:
        return side
    stated = stated_by(catalogue, module)
    if codes.dtype not in _WORDS:
        return stated.method or _FP_QUANT if codes.dtype == torch.uint8 else None
    q, s = _matrix(codes), _matrix(scales)
    name = stated.refused
    if codes.dtype == torch.int16 and zeros is not None and zeros.dtype.is_floating_point:
        name = _GEMV_FAST
    elif codes.dtype == torch.int8 and q and s and q[0] == s[0] and q[1] != s[1]:
        name = _BITBLAS
    elif layouts_of(catalogue, module) == (_MARLIN,):
        name = f"{stated.method or ''} {_MARLIN}".strip()
    return name


def _points(layout: str, codes: TensorInfo | None, zeros: TensorInfo | None, scales: TensorInfo | None) -> int:
    """Return how well shapes fit a layout: 4 for codes and scales, 2 for codes and zero points, 1 for these two."""
    word = _WORD if codes is None else 8 * codes.dtype.itemsize
    q, z, s = _matrix(codes), _matrix(zeros), _matrix(scales)
    pairs = ((4, q, s), (2, q, z), (1, s, z))
    return sum(
        points
        for (points, one, other), is_met in zip(pairs, _FITS[layout], strict=True)
        if one is not None and other is not None and is_met(one, other, word)
    )


_FITS: dict[str, tuple[Callable[[_Shape, _Shape, int], bool], ...]] = {
    GPTQ: (
        lambda q, s, word: q[1] == s[1] and (q[0] != s[0] or word != _WORD),  # no group is as small as a word
        lambda q, z, word: z[1] in {-(-q[1] * bits // word) for bits in _WIDTHS} and (q[0] != z[0] or word != _WORD),
        lambda s, z, _: s[0] == z[0] and s[1] >= z[1],
    ),
    AWQ: (
        lambda q, s, _: s[1] in {4 * q[1], NIBBLES * q[1]},
        lambda q, z, _: z[1] == q[1],
        lambda s, z, _: s[0] == z[0] and s[1] in {4 * z[1], NIBBLES * z[1]},
    ),
    AWQ_GEMV: (
        lambda q, s, word: q[0] == s[0] and word == _WORD,
        lambda q, z, word: q[0] == z[0] and word == _WORD,
        lambda s, z, _: s[0] == z[0] and s[1] == NIBBLES * z[1],
    ),
    # Marlin has 16 rows of codes in a line, so that a word of eight (or four) codes makes two (or four) columns.
    _MARLIN: (
        lambda q, s, word: word == _WORD and q[1] in {2 * s[1], 4 * s[1]},
        lambda q, z, word: word == _WORD and q[1] == 16 * z[1],
        lambda s, z, _: s[0] == z[0] and s[1] >= z[1],
    ),
}
"""Layout → whether codes fit scales, codes fit zero points, scales fit zero points, given the bits of a word."""


def _matrix(info: TensorInfo | None) -> _Shape | None:
    """Return the two sizes of a matrix that has elements, or None."""
    if info is None or len(info.shape) != _MATRIX or 0 in info.shape:
        return None
    return info.shape[0], info.shape[1]
