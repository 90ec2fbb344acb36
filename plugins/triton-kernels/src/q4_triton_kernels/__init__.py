"""Weight-only Triton kernels for 4-bit formats, which q4core's plugins for CUDA GPUs share.

Importing this package needs neither Triton nor a GPU; what is missing becomes a reason when a backend is asked.
"""

from q4_triton_kernels.ahead import Compiled, Usage, compile_for
from q4_triton_kernels.backend import WeightOnlyBackend, weight_only_capabilities
from q4_triton_kernels.layout import WeightMeta, export_weight, prepare_weight
from q4_triton_kernels.target import ARCHITECTURES, LOWEST_TRITON, Facts, Target, machine_facts

__all__ = [
    "ARCHITECTURES",
    "LOWEST_TRITON",
    "Compiled",
    "Facts",
    "Target",
    "Usage",
    "WeightMeta",
    "WeightOnlyBackend",
    "compile_for",
    "export_weight",
    "machine_facts",
    "prepare_weight",
    "weight_only_capabilities",
]
