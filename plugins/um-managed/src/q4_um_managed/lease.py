"""``Lease``: a block in use, owned by torch's storages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from q4core import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_um_managed.blocks import Block
    from q4_um_managed.pool import Pool
    from q4core.memory import Placement

__all__ = ["Lease"]


class Lease:
    """A block in use: torch's storages own it, and with the last of them it is returned to the pool.

    Args:
        pool: The pool that the block returns to.
        block: The block.
        size: Bytes in use.
        placement: The kind of memory, and the attribute that decided it.
        stream: The stream that was current when the block was taken.
    """

    __slots__ = ("block", "placement", "pool", "size", "streams")

    def __init__(self, pool: Pool, block: Block, size: int, placement: Placement, stream: int) -> None:
        self.pool = pool
        self.block: Block | None = block
        self.size = size
        self.placement = placement
        self.streams = {stream}

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
        """Wait for the device work of the block's previous owner."""
        block = self.block
        if block is not None and block.events:
            self.pool.wait_for(block)

    def note_written(self) -> None:
        """Record that the whole memory was written, so that the driver counts it."""
        if self.block is not None:
            self.pool.note_backed(self.block)

    def give_back(self) -> None:
        """Return the block to the pool; a second call does nothing."""
        block, self.block = self.block, None
        if block is not None:
            self.pool.take_back(block, self.streams)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Return the block to the pool, except at the interpreter's exit, which frees all memory."""
        if not is_exiting():
            self.give_back()
