"""NF4, FP4, Q4_0, Q4_1, IQ4_NL and INT4 on CUDA GPUs."""

from __future__ import annotations

from q4_nf4_cuda.backend import Nf4Cuda
from q4core import hookimpl

__all__ = ["Nf4Cuda", "q4_backends"]


@hookimpl
def q4_backends() -> list[Nf4Cuda]:
    """Return the one backend of this plugin."""
    return [Nf4Cuda()]
