"""Atomics for the tensors of q4core that processes share: reads and updates without a system call."""

from __future__ import annotations

from q4_shared_native import _native
from q4core import hookimpl

__all__ = ["NativeCells", "q4_shared_cells"]


class NativeCells:
    """What q4core asks for: the layout of segments that this build speaks, and what one process holds of a segment."""

    name = "shared-native"
    layout = _native.LAYOUT
    rows = _native.ROWS
    make = _native.Core


@hookimpl
def q4_shared_cells() -> list[NativeCells]:
    """Return the one implementation of this plugin."""
    return [NativeCells()]
