"""Judges recorded histories of a versioned register: is there one order of all operations that explains them?

Every write makes a version of its own, so the order is known without a search: by version, and a write before the reads
of what it wrote. The history is linearizable exactly if what each read saw is what its version's write wrote, and no
operation comes before one that had ended when it began.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence


@attrs.frozen
class Operation:
    """One finished read, or one update that took effect.

    Args:
        version: What it read, or made.
        value: All that it saw, or wrote.
        kind, start, end: What it was, when it was asked for and when it had returned, in ns.
    """

    kind: Literal["read", "write"]
    version: int
    value: Hashable
    start: int
    end: int

    @property
    def rank(self) -> int:
        """Place in the only order that versions allow."""
        return 2 * self.version + (self.kind == "read")


class Recorder:
    """Collects the operations of many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: list[Operation] = []

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations so far."""
        with self._lock:
            return tuple(self._operations)

    @contextlib.contextmanager
    def record(self, kind: Literal["read", "write"]) -> Iterator[dict[str, Hashable]]:
        """Time the block, which puts ``version`` and ``value`` into the dict; one that raises had no effect."""
        seen: dict[str, Hashable] = {}
        start = time.perf_counter_ns()
        yield seen
        end = time.perf_counter_ns()
        operation = Operation(kind, seen["version"], seen["value"], start, end)  # type: ignore[arg-type]  # an int
        with self._lock:
            self._operations.append(operation)


def violations(history: Sequence[Operation], initial: Hashable) -> tuple[str, ...]:
    """Return what is wrong with all operations on a register that began as ``initial``; nothing if linearizable."""
    return (*_wrong_versions(history), *_wrong_values(history, initial), *_wrong_order(history))


def _wrong_versions(history: Sequence[Operation]) -> Iterator[str]:
    made = sorted(operation.version for operation in history if operation.kind == "write")
    if made != list(range(1, len(made) + 1)):
        yield f"{len(made)} writes must make versions 1 … {len(made)}, once each, got {made}"


def _wrong_values(history: Sequence[Operation], initial: Hashable) -> Iterator[str]:
    written = {0: initial, **{operation.version: operation.value for operation in history if operation.kind == "write"}}
    for operation in history:
        if operation.version not in written:
            yield f"read of version {operation.version}, which nobody wrote"
        elif operation.value != written[operation.version]:
            yield f"torn read of version {operation.version}: {operation.value}, not {written[operation.version]}"


def _wrong_order(history: Sequence[Operation]) -> Iterator[str]:
    by_end = sorted(history, key=lambda operation: operation.end)
    finished = 0
    newest: Operation | None = None
    for operation in sorted(history, key=lambda operation: operation.start):
        while by_end[finished].end < operation.start:
            if newest is None or by_end[finished].rank > newest.rank:
                newest = by_end[finished]
            finished += 1
        if newest is not None and operation.rank < newest.rank:
            yield (
                f"{operation.kind} of version {operation.version} began after the {newest.kind} of version "
                f"{newest.version} had ended"
            )
