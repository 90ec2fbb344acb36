"""The reference path of q4core: dequantise + matmul in plain torch, for every format, on every device."""

from __future__ import annotations

from q4_dequant_fallback.backend import DequantFallback
from q4core import hookimpl

__all__ = ["DequantFallback", "q4_backends"]


@hookimpl
def q4_backends() -> list[DequantFallback]:
    """Return the one backend of this plugin."""
    return [DequantFallback()]
