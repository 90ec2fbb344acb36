"""``Nf4Cuda``: the shared weight-only kernels, for the formats of bitsandbytes, ggml and GPTQ."""

from __future__ import annotations

from q4_triton_kernels import WeightOnlyBackend

__all__ = ["Nf4Cuda"]


class Nf4Cuda(WeightOnlyBackend):
    """NF4, FP4, Q4_0, Q4_1, IQ4_NL and INT4; scales of two levels are resolved by the core before."""

    name = "nf4-cuda"
    formats = frozenset({"nf4", "fp4", "q4_0", "q4_1", "iq4_nl", "int4"})
