"""What a pool hands out: blocks of memory, and the leases by which torch's storages hold them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import attrs

from q4_um_managed.driver import CPU
from q4core import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_um_managed.pool import Pool
    from q4core.memory import Placement

__all__ = ["Block", "Lease", "PoolStats", "rounded"]

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
        device: Whose it is.
        is_pinned: Whether it is pinned host memory; managed otherwise.
        events: By stream, the one behind the device work that may still use it.
        is_unsure: Whether only waiting for the whole device tells that it is free.
        is_captured: Whether it came back while a graph was captured, whose replays may use it.
        is_of_host: Whether it comes out of the host's memory: pinned, or an integrated GPU's.
        is_backed: Whether the driver counts it as used; it does so from the first touch on.
        is_read_mostly: Whether the driver was told so.
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

    @property
    def memory(self) -> int:
        """Whose memory it takes: the host's, or a device's, by number."""
        return CPU if self.is_of_host else self.device


class Lease:
    """A block in somebody's hands: torch's storages keep it, and when the last one goes, the block comes back."""

    __slots__ = ("__weakref__", "_start", "block", "placement", "pool", "size", "streams")

    def __init__(self, pool: Pool, block: Block, size: int, placement: Placement, stream: int) -> None:
        self.pool = pool
        self.block: Block | None = block
        self._start = block.address
        self.size = size
        self.placement = placement
        self.streams = {stream}

    def holds(self, address: int) -> bool:
        """Return whether a storage at an address is this memory's, given back or not."""
        return self._start <= address < self._start + max(1, self.size)

    @property
    def is_given_back(self) -> bool:
        """Whether the block is the pool's again, or another's."""
        return self.block is None

    def require_block(self, what: str) -> Block:
        """Return the block, which ``what`` needs.

        Raises:
            LifecycleError: It was given back.
        """
        block = self.block
        if block is None:
            rule, hint = "in use, not given back", "Make a new tensor: these bytes may be another's by now."
            raise LifecycleError(what, name="tensor", rule=rule, value="given back by free()", hint=hint)
        return block

    def wait(self) -> None:
        """Wait for the device work of whoever had the block before."""
        block = self.block
        if block is not None and block.events:
            self.pool.wait_for(block)

    def note_written(self) -> None:
        """Take note that the whole memory was written, so that the driver counts it."""
        if self.block is not None:
            self.pool.note_backed(self.block)

    def give_back(self) -> None:
        """Let the pool have the block again; doing so twice is allowed."""
        block, self.block = self.block, None
        if block is not None:
            self.pool.take_back(block, self.streams)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Let the pool have the block again, except at the interpreter's exit, which frees all memory."""
        if not is_exiting():
            self.give_back()


@attrs.frozen
class PoolStats:
    """What a pool holds and has done.

    Args:
        in_use_bytes: In somebody's hands, rounded sizes.
        cached_bytes: Kept for the next.
        allocations: Blocks that the driver gave.
        frees: Blocks that the driver got back; each waited for the device.
        reuses: Blocks that went out again.
        lost: Blocks that the driver refused to take back.
        unbacked_bytes: Of the first two, what nobody has touched, as far as is known.
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
