"""Blocks of memory, and the counts of a pool of them."""

from __future__ import annotations

import attrs

from q4_um_managed.driver import CPU

__all__ = ["Block", "PoolStats", "rounded"]

_SMALLEST = 4096
_STEPS = 8


def rounded(size: int) -> int:
    """Return the size of the block for a tensor: eight sizes for each doubling, so at most an eighth is idle."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = max(_SMALLEST, 1 << ((size - 1).bit_length() - _STEPS.bit_length()))
    return -(-size // step) * step


@attrs.define(eq=False)
class Block:
    """A piece of memory.

    Args:
        address: Where it is, for CPU and GPU.
        size: Its bytes.
        device: Number of its device.
        is_pinned: Whether it is pinned host memory; managed otherwise.
        events: By stream, the one behind the device work that may still use it.
        is_unsure: Whether only waiting for the whole device shows that it is free.
        is_captured: Whether it came back while a graph was captured, whose replays may use it.
        is_of_host: Whether it comes out of the host's memory: pinned, or an integrated GPU's.
        is_backed: Whether the driver counts it as used; it does so from the first touch on.
        is_read_mostly: Whether the driver was advised so.
        is_filled: Whether it was made with a copy of what it was taken for.
    """

    address: int
    size: int
    device: int
    is_pinned: bool
    events: dict[int, int] = attrs.field(factory=dict)
    is_unsure: bool = False
    is_captured: bool = False
    is_of_host: bool = False
    is_backed: bool = True
    is_read_mostly: bool = False
    is_filled: bool = False

    @property
    def memory(self) -> int:
        """The memory that it takes: the host's, or a device's, by number."""
        return CPU if self.is_of_host else self.device


@attrs.frozen
class PoolStats:
    """What a pool holds and has done.

    Args:
        in_use_bytes: In use, rounded sizes.
        cached_bytes: Cached for reuse.
        allocations: Blocks that the driver gave.
        frees: Blocks that the driver got back; each waited for the device.
        reuses: Blocks that were reused.
        lost: Blocks that the driver refused to take back.
        unbacked_bytes: Of the first two, untouched, as far as is known.
        hints_refused: How often the driver did not move new memory to its device.
    """

    in_use_bytes: int
    cached_bytes: int
    allocations: int
    frees: int
    reuses: int
    lost: int
    unbacked_bytes: int = 0
    hints_refused: int = 0
