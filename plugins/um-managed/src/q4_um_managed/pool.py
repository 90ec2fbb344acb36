"""``Pool``: blocks of memory that are allocated, returned by finalisers, and reused once the device has finished.

Freeing managed memory waits for the whole device, so blocks are cached for the next tensor of their size, up to a
bound. As with torch's own allocator, a block belongs to the stream that was current when it was taken. It may be reused
once that stream, the stream that was current when it came back, and every stream named to ``record_stream`` have
passed; at once, if all of those are the stream of the next user. The CPU, which follows no stream, waits.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from q4_um_managed.blocks import Block, PoolStats, rounded
from q4_um_managed.errors import DriverFaultError
from q4core import LifecycleError, UnifiedMemoryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_um_managed.budget import Budget
    from q4_um_managed.driver import Driver

__all__ = ["Pool"]

_LARGE = 64 << 20
"""From this size on an allocation is larger than what other processes usually allocate and free."""


class Pool:
    """Blocks of managed and of pinned memory.

    Args:
        driver: CUDA's runtime.
        budget: Decides whether more may be allocated.
        max_cached_bytes: Limit of the cache, of all sizes together.
    """

    def __init__(self, driver: Driver, budget: Budget, *, max_cached_bytes: int) -> None:
        self._driver, self._budget, self._max_cached_bytes = driver, budget, max_cached_bytes
        self._lock = threading.Lock()  # guards _cached and the counts; nothing waits for it in a finaliser
        self._waiting = threading.Lock()
        self._growing = threading.Lock()  # one allocation at a time, so that two can't both take what is left
        self._cached: collections.OrderedDict[int, Block] = collections.OrderedDict()  # by address, oldest first
        self._kin: dict[tuple[int, int, bool], dict[int, Block]] = {}  # the same, by size, device and kind
        self._returned: collections.deque[Block] = collections.deque()  # appended to by finalisers, in any thread
        self._process = os.getpid()
        self._in_use = self._cached_bytes = self._allocations = self._frees = self._reuses = self._lost = 0
        self._hints_refused = 0
        self._unbacked: collections.Counter[int] = collections.Counter()  # by whose memory it is

    def take(
        self, size: int, device: int, attributes: Mapping[str, int], *, is_pinned: bool, source: int = 0
    ) -> tuple[Block, int]:
        """Return a block, and the stream that it belongs to.

        Args:
            size: Bytes that are needed.
            device: The device's number.
            attributes: The device's.
            is_pinned: Whether pinned memory is needed, instead of managed memory.
            source: Address of ``size`` bytes that a new block may be made with; 0 for none.

        Raises:
            LifecycleError: A CUDA graph is being captured.
            UnifiedMemoryError: It does not fit into the budget, or the driver has none.
        """
        if self._driver.is_capturing(device):
            raise LifecycleError(
                "unified memory",
                name="memory",
                rule="taken before a CUDA graph is captured",
                hint="Make the tensor first; a graph replays with its address.",
            )
        stream = self._driver.stream(device)
        block = self._reused(size, device, stream, is_pinned=is_pinned)
        if block is None:
            is_copy = source != 0 and not is_pinned and self._driver.has_copies(device)
            on_host = is_pinned or bool(attributes.get("integrated"))
            block = Block(0, size if is_copy else rounded(size), device, is_pinned, is_of_host=on_host)
            with self._growing:
                self._grow(block, attributes, source if is_copy else 0)
        return block, stream

    def _reused(self, size: int, device: int, stream: int, *, is_pinned: bool) -> Block | None:
        self._settle()
        with self._lock:
            sizes = {rounded(size), size}  # the second of those that were made with a copy
            kin = [block for some in sizes for block in self._kin.get((some, device, is_pinned), {}).values()]
            found = next((block for block in kin if self._is_free_for(block, stream)), None)
            if found is None:  # the oldest with unknown pending work: waiting for the device settles it
                found = next((block for block in kin if block.is_unsure and not block.is_captured), None)
            if found is not None:
                self._remove(found)
                self._in_use += found.size
                found.is_filled = False
        if found is not None and found.is_unsure and not self._is_sure(found):
            self._returned.append(found)
            found = None
        if found is not None:
            with self._lock:
                self._reuses += 1
        self._settle()
        return found

    def _is_sure(self, block: Block) -> bool:
        """Wait for the whole device; return whether that worked."""
        try:
            self._driver.synchronise(block.device)
            for event in block.events.values():
                self._driver.forget(event)
        except DriverFaultError:
            return False
        block.events.clear()
        block.is_unsure = False
        return True

    def _is_free_for(self, block: Block, stream: int) -> bool:
        """Drop the events that have passed; say whether the others are of the stream itself."""
        if block.is_captured:
            return False
        try:
            while block.events and not block.is_unsure:
                behind, event = next(reversed(block.events.items()))
                if not self._driver.is_done(event):
                    return block.events.keys() == {stream}
                del block.events[behind]
                self._driver.forget(event)
        except DriverFaultError:
            block.is_unsure = True
        return not block.is_unsure

    def _remove(self, block: Block) -> None:
        """Remove a block from the cache; the lock is held."""
        del self._cached[block.address]
        del self._kin[block.size, block.device, block.is_pinned][block.address]
        self._cached_bytes -= block.size

    def _grow(self, block: Block, attributes: Mapping[str, int], source: int) -> None:
        """Give a block new memory, with a copy of ``source`` if that is an address."""
        try:
            free = self._allocate(block, attributes, source)
        except UnifiedMemoryError:
            if not self.trim():
                raise
            free = self._allocate(block, attributes, source)
        try:
            if not block.is_pinned and not block.is_filled:
                self._back(block, can_move=bool(attributes.get("concurrentManagedAccess")))
                if block.is_backed and block.size >= _LARGE:  # accepted if the count of free memory went down
                    left = self._budget.room(block.device, on_host=block.is_of_host).free_bytes
                    block.is_backed = free - left >= block.size // 2
        except BaseException:  # it has no owner yet that would free it
            block.is_backed = True
            self._free([block])
            raise
        with self._lock:
            self._allocations += 1
            self._in_use += block.size
            self._unbacked[block.memory] += 0 if block.is_backed else block.size

    def _allocate(self, block: Block, attributes: Mapping[str, int], source: int) -> int:
        """Give a block its memory; return what was free before."""
        with self._lock:
            unbacked = self._unbacked[block.memory]
        room = self._budget.require(block.size, block.device, attributes, on_host=block.is_of_host, unbacked=unbacked)
        if source:
            block.address = self._driver.copy_managed(source, block.size, block.device)
            block.is_filled = True
        else:
            allocate = self._driver.allocate_pinned if block.is_pinned else self._driver.allocate_managed
            block.address = allocate(block.size, block.device)
        return room.free_bytes

    def _back(self, block: Block, *, can_move: bool) -> None:
        """Touch new managed memory, which the driver counts as free until then; note it where that fails."""
        block.is_backed = False
        if can_move:
            try:
                self._driver.prefetch(block.address, block.size, block.device, block.device)
            except DriverFaultError:
                with self._lock:
                    self._hints_refused += 1
            else:
                block.is_backed = self._is_passed(block)
                return
        with contextlib.suppress(DriverFaultError):
            self._driver.fill(block.address, block.size, block.device)
            block.is_backed = self._is_passed(block)

    def _is_passed(self, block: Block) -> bool:
        """Wait for what was just queued for a new block; return whether that worked."""
        try:
            stream = self._driver.stream(block.device)
            block.events[stream] = self._driver.record(stream, block.device)
            self.wait_for(block)
        except DriverFaultError:
            block.is_unsure = True
            return False
        return True

    def note_backed(self, block: Block) -> None:
        """Record that a block was written, so that the driver counts it from now on."""
        with self._lock:
            if not block.is_backed:
                block.is_backed = True
                self._unbacked[block.memory] -= block.size

    def wait_for(self, block: Block) -> None:
        """Wait for the device work that may still use a block."""
        with self._waiting:  # a second thread goes on when the events have passed, not when they are taken
            while block.events:
                stream, event = next(reversed(block.events.items()))
                self._driver.wait_for(event)
                del block.events[stream]
                self._driver.forget(event)

    def take_back(self, block: Block, streams: set[int]) -> None:
        """Return a block to the pool. Called by finalisers: raises nothing, and waits for no lock."""
        if os.getpid() != self._process:
            return  # a forked child has no CUDA
        try:
            if self._driver.is_capturing(block.device):
                block.is_unsure = block.is_captured = True
            else:
                for stream in {*streams, self._driver.stream(block.device)}:
                    event = self._driver.record(stream, block.device)
                    old = block.events.pop(stream, None)
                    block.events[stream] = event  # stands for the earlier one too
                    if old is not None:
                        self._driver.forget(old)
        except Exception:  # noqa: BLE001  # a finaliser's error is lost; waiting for the whole device is right for any cause
            block.is_unsure = True
        self._returned.append(block)
        with contextlib.suppress(Exception):
            self._settle()

    def _settle(self) -> None:
        """Move returned blocks to the cache, and free what is above the bound.

        A thread that finds the lock held leaves this to the holder, which checks again after releasing it.
        """
        while self._returned:
            if not self._lock.acquire(blocking=False):
                return
            try:
                while self._returned:
                    block = self._returned.popleft()
                    self._cached[block.address] = block
                    self._kin.setdefault((block.size, block.device, block.is_pinned), {})[block.address] = block
                    self._cached_bytes += block.size
                    self._in_use -= block.size
                surplus = self._surplus(self._max_cached_bytes)
            finally:
                self._lock.release()
            self._free(surplus)

    def _surplus(self, bound: int) -> list[Block]:
        """Take the oldest blocks out until no more than ``bound`` bytes are left; the lock is held."""
        surplus: list[Block] = []
        if self._cached_bytes > bound and any(
            map(self._is_captured_on, {item.device for item in self._cached.values()})
        ):
            return surplus  # freeing would break the capture; the next call after it frees
        while self._cached_bytes > bound:
            block = next(iter(self._cached.values()))
            self._remove(block)
            surplus.append(block)
        return surplus

    def _is_captured_on(self, device: int) -> bool:
        try:
            return self._driver.is_capturing(device)
        except DriverFaultError:
            return False  # then freeing fails as well, and is counted

    def _free(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.is_backed:
                self.note_backed(block)  # it counts no longer
            try:
                for event in block.events.values():
                    self._driver.forget(event)
                block.events.clear()
                free = self._driver.free_pinned if block.is_pinned else self._driver.free_managed
                free(block.address, block.device)
            except DriverFaultError:
                self._lost += 1
                continue
            self._frees += 1

    def trim(self, max_cached_bytes: int = 0) -> int:
        """Free cached blocks down to a bound; return the bytes that were freed."""
        self._settle()
        with self._lock:
            before = self._cached_bytes
            surplus = self._surplus(max_cached_bytes)
            gone = before - self._cached_bytes
        self._free(surplus)
        self._settle()
        return gone

    def stats(self) -> PoolStats:
        """Return what the pool holds and has done."""
        self._settle()
        with self._lock:
            return PoolStats(
                in_use_bytes=self._in_use,
                cached_bytes=self._cached_bytes,
                allocations=self._allocations,
                frees=self._frees,
                reuses=self._reuses,
                lost=self._lost,
                unbacked_bytes=self._unbacked.total(),
                hints_refused=self._hints_refused,
            )
