"""The arguments of the kernels, as C has them: ``Q4Quantize`` and ``Q4Gemm`` of the folder ``cuda``."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

__all__ = ["NUMBER_TYPES", "GemmCall", "QuantizeCall"]

NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class QuantizeCall(ctypes.Structure):
    """``struct Q4Quantize``."""

    _fields_: ClassVar = [
        ("x", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("static_scale", ctypes.c_void_p),
        ("row_step", ctypes.c_int64),
        ("m", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("type", ctypes.c_int32),
    ]


class GemmCall(ctypes.Structure):
    """``struct Q4Gemm``."""

    _fields_: ClassVar = [
        ("a_codes", ctypes.c_void_p),
        ("a_scales", ctypes.c_void_p),
        ("a_rows", ctypes.c_void_p),
        ("b_codes", ctypes.c_void_p),
        ("b_scales", ctypes.c_void_p),
        ("b_global", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("global_step", ctypes.c_int32),
        ("global_divides", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    ]
