"""NF4 and FP4: the nearest code of ``value / absmax``; absmax plain or quantised again.

Reference:
    Dettmers et al., QLoRA, 2023 (NF4, double quantisation); Dettmers et al., 8-bit Approximations, 2015 (dynamic map).
    Bit-equal to bitsandbytes 0.50 on x86 CPUs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from q4core.codec.rule import Coded
from q4core.formats import dynamic_map

if TYPE_CHECKING:
    from q4core.codec.rule import Rule
    from q4core.formats import Format

_SMALLEST_ABSMAX = 1e-38
_NESTED_BLOCK = 256
_BINS = 65536


def _nearest(values: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the code nearest to each value; halfway between two, the code of the lower value."""
    levels, order = form.codebook_tensor(values.device).sort(stable=True)
    midpoints = (levels[:-1] + levels[1:]) / 2
    index = torch.bucketize(values, midpoints, out_int32=True)
    return order.to(torch.uint8).index_select(0, index.reshape(-1)).view(values.shape)


def code_of_zero(form: Format) -> int:
    """Return the code that pads the last byte of an odd number of codes."""
    return int(_nearest(torch.zeros(1, dtype=torch.float32), form))


def absmax_rule(form: Format, *, short: bool = False) -> Rule:
    """Return the rule of NF4 or FP4, for whole blocks or for the ``short`` one that ends a weight.

    Whole blocks are multiplied by the reciprocal of absmax, the short last block is divided by it, and its absmax is
    at least 1e-38; an all-zero whole block stores 0.
    """

    def rule(blocks: torch.Tensor) -> Coded:
        absmax = blocks.abs().amax(-1)
        floored = absmax.clamp(min=_SMALLEST_ABSMAX)
        if short:
            return Coded(_nearest((blocks / floored[..., None]).clamp(-1, 1), form), floored)
        scaled = blocks * floored.reciprocal()[..., None]
        return Coded(_nearest(scaled.clamp(-1, 1), form), absmax)

    return rule


def double_quantise(absmax: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the fields of a PackedWeight whose float32 absmax is itself quantised to 8 bits in blocks of 256.

    The mean, torch's own, is taken off first; over more than 32,768 blocks its last bit depends on torch's thread
    count, here as in bitsandbytes. Codes come from a table of 65,536 bins over [-1, 1]: the one that the value rounds
    to decides, so a code is the nearest one up to half a bin.

    Args:
        absmax: float32, any shape; blocks run over it flattened.
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
