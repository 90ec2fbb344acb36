"""Atomics for the tensors of q4core that processes share: reads and updates without a lock of the system's."""

from __future__ import annotations

import sys

from q4core import hookimpl

if sys.platform == "linux":
    from q4_shared_native import _native

__all__ = ["q4_shared_cells"]


@hookimpl
def q4_shared_cells() -> list[object]:
    """Return what processes agree by, where they can share tensors at all."""
    return [_NativeCells()] if sys.platform == "linux" else []


class _NativeCells:
    """What q4core asks for; its ``SharedCells`` says what each is."""

    def __init__(self) -> None:
        self.name, self.layout, self.rows = "shared-native", _native.LAYOUT, _native.ROWS
        self.make = _native.Core
