"""The formats that are measured, and a dense weight in one of them."""

from __future__ import annotations

from typing import Any

import torch

import q4core as q4

__all__ = ["FORMATS", "exact_value", "weight_of"]

FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {},
    "fp4": {},
    "nvfp4": {},
    "mxfp4": {},
    "q4_0": {},
    "q4_1": {},
    "int4 g32": {"block_size": 32},
    "int4 g128": {"block_size": 128},
    "q8_0": {},
}
"""What is measured, with the choices that the format leaves open."""


def weight_of(name: str, dense: torch.Tensor) -> q4.PackedWeight:
    """Return a dense weight in one of ``FORMATS``; INT4 with half-precision scales, as its checkpoints have."""
    format_ = name.split(maxsplit=1)[0]
    return q4.quantize(dense.half() if format_ == "int4" else dense, format_, **FORMATS[name])


def exact_value(weight: q4.PackedWeight) -> torch.Tensor:
    """Return scale × code in float64, without the rounding of any library's own dtype."""
    return q4.dequantize(weight, torch.float64)
