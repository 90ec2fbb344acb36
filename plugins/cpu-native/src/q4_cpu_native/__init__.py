"""SIMD kernels for every 4-bit format of q4core on x86 and Arm CPUs."""

from __future__ import annotations

from q4_cpu_native.backend import CpuNative
from q4core import hookimpl

__all__ = ["CpuNative", "q4_backends"]


@hookimpl
def q4_backends() -> list[CpuNative]:
    """Return the one backend of this plugin."""
    return [CpuNative()]
