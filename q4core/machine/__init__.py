"""Facts about this computer, and the state of torch."""

from q4core.machine.facts import (
    CudaDevice,
    MachineFacts,
    cpu_features,
    machine_facts,
    memory_available_bytes,
    on_device,
)
from q4core.machine.torch_state import (
    below_autograd,
    casts,
    dispatch_modes,
    function_modes,
    innermost_transform,
    is_forward_mode,
    is_recorded,
    is_transformed,
    outside_inference,
    without_casts,
)

__all__ = [
    "CudaDevice",
    "MachineFacts",
    "below_autograd",
    "casts",
    "cpu_features",
    "dispatch_modes",
    "function_modes",
    "innermost_transform",
    "is_forward_mode",
    "is_recorded",
    "is_transformed",
    "machine_facts",
    "memory_available_bytes",
    "on_device",
    "outside_inference",
    "without_casts",
]
