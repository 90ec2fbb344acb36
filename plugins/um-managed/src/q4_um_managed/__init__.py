"""Managed and unified CUDA memory for q4core: one address for CPU and GPU, through CuPy."""

from __future__ import annotations

from q4_um_managed.dual import DualView
from q4_um_managed.provider import ManagedProvider
from q4core import hookimpl

__all__ = ["DualView", "ManagedProvider", "q4_memory_providers"]


@hookimpl
def q4_memory_providers() -> list[ManagedProvider]:
    """Return the one provider of this plugin; nothing is loaded until it is asked."""
    return [ManagedProvider()]
