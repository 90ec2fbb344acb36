"""Managed and unified CUDA memory for q4core: one address for CPU and GPU, through CuPy."""

from __future__ import annotations

from q4_um_managed.copies import copy_into
from q4_um_managed.dual import DualView
from q4_um_managed.functions import apply_input_policy, apply_mutable_policy, apply_policy, apply_source_policy
from q4_um_managed.placer import Placer
from q4_um_managed.provider import ManagedProvider
from q4core import hookimpl

__all__ = [
    "DualView",
    "ManagedProvider",
    "Placer",
    "apply_input_policy",
    "apply_mutable_policy",
    "apply_policy",
    "apply_source_policy",
    "copy_into",
    "q4_memory_providers",
    "q4_placers",
]


@hookimpl
def q4_memory_providers() -> list[ManagedProvider]:
    """Return the one provider of this plugin; nothing is loaded before its first question."""
    return [ManagedProvider()]


@hookimpl
def q4_placers() -> list[type[Placer]]:
    """Return the class that places tensors in this provider's memory, and in that of other plugins' providers."""
    return [Placer]
