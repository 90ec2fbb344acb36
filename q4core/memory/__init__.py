"""The unified-memory contract: what a provider of managed memory offers, and what each policy makes of it.

Everything here is a function of its arguments and of ``Q4_DISABLE_UM``: nothing is registered or logged, and nothing is
kept but a note on the memory itself, whose it is. Each ``apply_*`` function returns the tensor to use and a
``MemoryDecision`` that says what was done and why; the caller reports it. Only a provider allocates managed memory;
the core has none of its own.
"""

from q4core.memory.answers import availability, copy_beside, was_taken_back
from q4core.memory.contract import (
    DISABLE_VARIABLE,
    Availability,
    MemoryAction,
    MemoryDecision,
    MemoryProvider,
    Placement,
)
from q4core.memory.homes import keeper_of, note_provider, provider_of
from q4core.memory.placing import (
    apply_input_policy,
    apply_mutable_policy,
    apply_policy,
    apply_source_policy,
    detached_copy,
    managed_empty,
    release_input,
)
from q4core.memory.search import is_turned_off

__all__ = [
    "DISABLE_VARIABLE",
    "Availability",
    "MemoryAction",
    "MemoryDecision",
    "MemoryProvider",
    "Placement",
    "apply_input_policy",
    "apply_mutable_policy",
    "apply_policy",
    "apply_source_policy",
    "availability",
    "copy_beside",
    "detached_copy",
    "is_turned_off",
    "keeper_of",
    "managed_empty",
    "note_provider",
    "provider_of",
    "release_input",
    "was_taken_back",
]
