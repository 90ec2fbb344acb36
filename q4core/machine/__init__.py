"""Facts about this computer, and the state of torch."""

from q4core.machine.facts import MachineFacts, machine_facts
from q4core.machine.torch_state import (
    below_autograd,
    casts,
    dispatch_modes,
    function_modes,
    innermost_transform,
    is_forward_mode,
    is_plain_call,
    is_recorded,
    is_transformed,
    on_device,
    outside_inference,
    require_outside_trace,
    without_casts,
)

__all__ = [
    "MachineFacts",
    "below_autograd",
    "casts",
    "dispatch_modes",
    "function_modes",
    "innermost_transform",
    "is_forward_mode",
    "is_plain_call",
    "is_recorded",
    "is_transformed",
    "machine_facts",
    "on_device",
    "outside_inference",
    "require_outside_trace",
    "without_casts",
]
