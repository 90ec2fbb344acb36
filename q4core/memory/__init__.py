"""The unified-memory contract: what a provider of managed memory offers, and what each policy makes of it.

A ``Placer`` holds a policy, a device and the providers; each ``apply_*`` function makes one and places one tensor. They
return the tensor to use and a ``MemoryDecision`` that says what was done and why; the caller reports it. Nothing is
logged, and nothing is kept but a note on the memory itself, whose it is. Only a provider allocates managed memory; the
core has none of its own.
"""

from q4core.memory.contract import (
    DISABLE_VARIABLE,
    Availability,
    MemoryAction,
    MemoryDecision,
    MemoryProvider,
    Placement,
)
from q4core.memory.placement import (
    Placer,
    apply_input_policy,
    apply_mutable_policy,
    apply_policy,
    apply_source_policy,
    detached_copy,
    is_turned_off,
    release_input,
)
from q4core.memory.providers import availability, copy_beside, keeper_of, note_provider, provider_of, was_taken_back

__all__ = [
    "DISABLE_VARIABLE",
    "Availability",
    "MemoryAction",
    "MemoryDecision",
    "MemoryProvider",
    "Placement",
    "Placer",
    "apply_input_policy",
    "apply_mutable_policy",
    "apply_policy",
    "apply_source_policy",
    "availability",
    "copy_beside",
    "detached_copy",
    "is_turned_off",
    "keeper_of",
    "note_provider",
    "provider_of",
    "release_input",
    "was_taken_back",
]
