"""The arguments of the kernels, as C has them: ``Q4Quantize`` and ``Q4Gemm`` of the folder ``cuda``.

Addresses are integers, 0 for none. A launch packs a call behind the driver's launch configuration, all in one buffer:
``ctypes`` structures, filled field by field, would take three times as long.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

__all__ = ["ARGUMENTS_OFFSET", "CALL_OFFSET", "LAYOUTS", "NUMBER_TYPES", "GemmCall", "QuantizeCall"]

NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# CUlaunchConfig (grid, block, shared memory, stream, attributes and their number), then the list of one argument.
_LAUNCH = "@7I4xPPI4xP"
ARGUMENTS_OFFSET, CALL_OFFSET = 56, 64


class QuantizeCall(NamedTuple):
    """``struct Q4Quantize``."""

    x: int
    codes: int
    scales: int
    rows: int
    static_scale: int
    row_step: int
    m: int
    k: int
    type: int


class GemmCall(NamedTuple):
    """``struct Q4Gemm``."""

    a_codes: int
    a_scales: int
    a_rows: int
    b_codes: int
    b_scales: int
    b_global: int
    bias: int
    out: int
    m: int
    n: int
    k: int
    global_step: int
    global_divides: int
    out_type: int


LAYOUTS: dict[type, struct.Struct] = {
    QuantizeCall: struct.Struct(f"{_LAUNCH}5Pq3i4x"),
    GemmCall: struct.Struct(f"{_LAUNCH}8P6i"),
}
"""How a launch lays itself and its call out, by the call's class."""
