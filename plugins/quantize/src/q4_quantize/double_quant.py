"""bitsandbytes' double quantisation: the 8-bit levels, and the second level of a float32 absmax."""

from __future__ import annotations

import functools
import itertools
import math
import struct

import torch

_NESTED_BLOCK = 256
_BINS = 65536
_DYNAMIC_DECADES = 7


@functools.cache
def dynamic_map() -> tuple[float, ...]:
    """Return the 256 ascending float32 levels of bitsandbytes' signed dynamic 8-bit type, -0.99297 … 1.

    Decade e (10^-6 … 1) holds 2^e levels of each sign, each the middle of one of as many equal parts of [0.1, 1]; with
    0 and 1. The float32 roundings are those of a fused multiply-add, as torch computes them on CPUs that have one.
    """
    start, end = _round32(0.1), 1.0
    levels = [0.0, 1.0]
    for decade in range(_DYNAMIC_DECADES):
        parts = 2**decade
        step = _round32(_round32(end - start) / parts)
        half = (parts + 1) // 2
        edges = [_round32(start + step * i if i < half else end - step * (parts - i)) for i in range(parts + 1)]
        middles = [_round32(_round32(low + high) / 2) for low, high in itertools.pairwise(edges)]
        power = _round32(10.0 ** (decade - _DYNAMIC_DECADES + 1))
        levels += [sign * _round32(power * middle) for sign in (1, -1) for middle in middles]
    return tuple(sorted(levels))


def _round32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]


def double_quantise(absmax: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the fields of a PackedWeight whose float32 absmax is itself quantised to 8 bits in blocks of 256.

    Blocks run over it flattened, whatever its shape. The mean, torch's own, is taken off first; over more than 32,768
    blocks its last bit depends on torch's thread count, here as in bitsandbytes. Codes come from a table of 65,536 bins
    over [-1, 1]: the one that the value rounds to decides, so a code is the nearest one up to half a bin.
    """
    flat = absmax.reshape(-1)
    mean = flat.mean()
    centred = flat - mean
    table = torch.tensor(dynamic_map(), dtype=torch.float32, device=flat.device)
    count = math.ceil(flat.numel() / _NESTED_BLOCK)
    padded = torch.nn.functional.pad(centred, (0, count * _NESTED_BLOCK - flat.numel())).view(count, _NESTED_BLOCK)
    largest = padded.abs().amax(-1)
    # A block without spread, whose reciprocal is infinite, gets code 0 where 0 * infinity is no number.
    scaled = (padded * largest.reciprocal()[:, None]).nan_to_num(nan=-1.0).clamp(-1, 1)
    # One rounding for the multiply and add together, as a fused multiply-add gives it: exact in float64 first.
    bins = (((scaled + 1) * 0.5).to(torch.float64) * (_BINS - 1) + 0.5).to(torch.float32).to(torch.int64)
    centres = -1 + 2 * torch.arange(_BINS, dtype=torch.float32, device=flat.device) / (_BINS - 1)
    code_of_bin = torch.bucketize(centres, (table[:-1] + table[1:]) * 0.5).to(torch.uint8)
    codes = code_of_bin[bins].reshape(-1)[: flat.numel()]
    return {
        "scale": codes.view(absmax.shape),
        "nested_codebook": table,
        "nested_scale": largest,
        "nested_offset": mean,
    }
