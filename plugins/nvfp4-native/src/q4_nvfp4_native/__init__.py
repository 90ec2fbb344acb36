"""NVFP4 and MXFP4: FP4 tensor cores on Blackwell and GB10, weight-only kernels on older GPUs, a native quantiser."""

from __future__ import annotations

from q4_nvfp4_native.backend import Nvfp4Native
from q4_nvfp4_native.library import Library, find_library
from q4_nvfp4_native.quantizer import quantize_packed, swizzle_scales
from q4core import hookimpl

__all__ = ["Library", "Nvfp4Native", "find_library", "q4_backends", "quantize_packed", "swizzle_scales"]


@hookimpl
def q4_backends() -> list[Nvfp4Native]:
    """Return the one backend of this plugin."""
    return [Nvfp4Native()]
