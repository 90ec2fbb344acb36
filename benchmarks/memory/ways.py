"""Ways to share a state among actors, each with its update and its read.

An update adds one to every element. A read gets a whole version in place, if the way allows that, and checks
that a sample of elements, spread over the state, belongs to one update, and to none older than the last one seen.
"""

from __future__ import annotations

import multiprocessing
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing  # has queues and pipes hand tensors on by shared memory

from benchmarks.candidate import WrongAnswerError
from q4_actors import MutableMode, MutableTensor, SharedMutableTensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CONTEXT", "PROCESSES", "SAMPLE", "SHARED", "THREADS", "Way", "check", "ways"]

SHARED = "q4core VERSIONED"
CONTEXT = multiprocessing.get_context("forkserver")
PROCESSES, THREADS = "processes", "threads"
SAMPLE = 256
PATIENCE_S = 1.0
"""Seconds to wait for a queue whose other side may have stopped."""


def check(tensor: torch.Tensor, oldest: float) -> float:
    """Return which update a version is of.

    Raises:
        WrongAnswerError: It is torn, or older than one that was seen before.
    """
    sample = tensor[:: max(1, len(tensor) // SAMPLE)]
    low, high = torch.aminmax(sample)
    first, last = float(low), float(high)
    if first != last or last < oldest:
        message = f"a read must be of one update, not before {oldest:.0f}, got {first:.0f} … {last:.0f}"
        raise WrongAnswerError(message)
    return last


class Way:
    """A state and how it is shared; made by the process that measures, and passed to each actor.

    Args:
        elements: How many float32 the state has.
        readers: How many actors will read.
    """

    kind = PROCESSES
    copied = 0
    """Bytes that this actor's updates have copied so far."""
    warm_updates = 5
    """Updates before the time begins, so that all memory has been touched."""

    def __init__(self, elements: int, readers: int) -> None:
        self.elements = elements
        self.oldest = [0.0] * readers

    def update(self) -> None:
        """Add one to every element."""
        raise NotImplementedError

    def read(self, reader: int) -> None:
        """Look at a whole version."""
        raise NotImplementedError

    def bytes_copied(self) -> int:
        """Return what this actor's updates have copied so far."""
        return self.copied

    def close(self) -> None:
        """Release what it holds, in the process that made it."""


class Mutable(Way):
    """A ``MutableTensor``, between threads."""

    mode = MutableMode.VERSIONED
    make: Callable[..., MutableTensor] = MutableTensor
    kind = THREADS

    def __init__(self, elements: int, readers: int) -> None:
        super().__init__(elements, readers)
        self.state = type(self).make(torch.zeros(elements), mode=self.mode, name="state")

    def update(self) -> None:
        """Update it in the writer's turn."""
        with self.state.write(wait=True) as tensor:
            tensor.add_(1.0)

    def read(self, reader: int) -> None:
        """Read without a copy."""
        with self.state.read() as view:
            self.oldest[reader] = check(view.tensor, self.oldest[reader])

    def bytes_copied(self) -> int:
        """Return what the tensor counts."""
        return self.state.stats().bytes_copied

    def close(self) -> None:
        """Close it."""
        self.state.close()


class MutableInPlace(Mutable):
    """The same, in place."""

    mode = MutableMode.IN_PLACE


class Shared(Mutable):
    """A ``SharedMutableTensor``, between processes."""

    make = SharedMutableTensor
    kind = PROCESSES


class SharedInPlace(Shared):
    """The same, in place."""

    mode = MutableMode.IN_PLACE


class Locked(Way):
    """A tensor in shared memory, which a lock guards for as long as it is updated or read."""

    lock: Any

    def __init__(self, elements: int, readers: int) -> None:
        super().__init__(elements, readers)
        self.tensor = torch.zeros(elements).share_memory_()
        self.lock = CONTEXT.Lock()

    def update(self) -> None:
        """Update it under the lock."""
        with self.lock:
            self.tensor.add_(1.0)

    def read(self, reader: int) -> None:
        """Read it under the lock."""
        with self.lock:
            self.oldest[reader] = check(self.tensor, self.oldest[reader])


class LockedClone(Locked):
    """The same, where a reader takes a copy, so that it may look at it for as long as it likes."""

    def read(self, reader: int) -> None:
        """Copy it under the lock."""
        with self.lock:
            copy = self.tensor.clone()
        self.oldest[reader] = check(copy, self.oldest[reader])


class ThreadsLocked(Locked):
    """A tensor and a lock, between threads."""

    kind = THREADS

    def __init__(self, elements: int, readers: int) -> None:
        super().__init__(elements, readers)
        self.tensor, self.lock = torch.zeros(elements), threading.Lock()


class Queued(Way):
    """A queue of tensors for each reader, which gets every update; one copy serves all."""

    warm_updates = 0  # they would wait for readers

    def __init__(self, elements: int, readers: int) -> None:
        super().__init__(elements, readers)
        self.tensor = torch.zeros(elements)
        self.queues = [CONTEXT.Queue(maxsize=1) for _ in range(readers)]

    def update(self) -> None:
        """Update an own tensor, copy it to shared memory, and put that into each queue."""
        self.tensor.add_(1.0)
        message = torch.empty_like(self.tensor).share_memory_().copy_(self.tensor)
        for queue in self.queues:
            queue.put(message, timeout=PATIENCE_S)
        self.copied += message.nbytes

    def read(self, reader: int) -> None:
        """Take the next one."""
        self.oldest[reader] = check(self.queues[reader].get(timeout=PATIENCE_S), self.oldest[reader])

    def close(self) -> None:
        """Close the queues, and drop what is in them."""
        for queue in self.queues:
            queue.cancel_join_thread()
            queue.close()


def ways() -> dict[str, type[Way]]:
    """Return all, by name."""
    return {
        "q4core VERSIONED, threads": Mutable,
        "q4core IN_PLACE, threads": MutableInPlace,
        "tensor + Lock, threads": ThreadsLocked,
        SHARED: Shared,
        "q4core IN_PLACE": SharedInPlace,
        "share_memory_ + Lock": Locked,
        "share_memory_ + Lock, clone": LockedClone,
        "Queue of tensors": Queued,
    }
