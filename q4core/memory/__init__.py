"""The unified-memory contract: what a provider of managed memory offers, and what is decided about a tensor.

``Registry.placer`` gives the ``MemoryPlacer`` of a policy and a device. It returns each tensor to use with a
``MemoryDecision``, which the caller reports. Nothing is logged. Only a note on the memory itself is left, whose it is.
The core allocates no managed memory: q4-um-managed places tensors, in its own memory or that of another plugin's
provider.
"""

from typing import TYPE_CHECKING

from q4core.memory.contract import (
    DISABLE_VARIABLE,
    Availability,
    MemoryAction,
    MemoryDecision,
    MemoryProvider,
    Placement,
)
from q4core.memory.ownership import (
    availability,
    keeper_of,
    note_provider,
    placement_by,
    provider_of,
    release_input,
    was_taken_back,
)
from q4core.memory.placer import MemoryPlacer, check_strided, detached_copy, is_turned_off
from q4core.moved import getattr_of

__all__ = [
    "DISABLE_VARIABLE",
    "Availability",
    "MemoryAction",
    "MemoryDecision",
    "MemoryPlacer",
    "MemoryProvider",
    "Placement",
    "availability",
    "check_strided",
    "detached_copy",
    "is_turned_off",
    "keeper_of",
    "note_provider",
    "placement_by",
    "provider_of",
    "release_input",
    "was_taken_back",
]

_MOVED = dict.fromkeys(
    ["Placer", "apply_input_policy", "apply_mutable_policy", "apply_policy", "apply_source_policy", "copy_into"],
    "q4_um_managed",
)
if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__, _MOVED)
