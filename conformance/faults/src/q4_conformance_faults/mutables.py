"""Mutable tensors that break the contract of TC-13, to prove that the judge of histories sees it."""
# ruff: noqa: ARG002 - a fault looks at some of what it is given

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance_faults.fault import mutable_fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@attrs.frozen
class _View:
    tensor: Tensor
    version: int


class Register:
    """A right one, by one lock around everything; planted faults override single methods."""

    def __init__(self, tensor: Tensor, mode: Any) -> None:
        self.tensor = tensor.clone()
        self.version = 0
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def write(self, *, wait: bool) -> Iterator[Tensor]:
        """Let one writer change the content."""
        with self._lock:
            yield self.tensor
            self.version += 1

    @contextlib.contextmanager
    def read(self) -> Iterator[_View]:
        """Show the content."""
        with self._lock:
            yield _View(self.tensor, self.version)


@mutable_fault("torn-write", "TC-13/race", "torn read")
class Torn(Register):
    """Takes an update over in two halves, between which a reader may look."""

    @contextlib.contextmanager
    def write(self, *, wait: bool) -> Iterator[Tensor]:
        """Copy the update over in two steps."""
        with self._lock:
            own = self.tensor.clone()
            yield own
        half = own.numel() // 2
        with self._lock:
            self.tensor[:half] = own[:half]
        time.sleep(0.0005)
        with self._lock:
            self.tensor[half:] = own[half:]
            self.version += 1


@mutable_fault("stale-read", "TC-13/race", "had ended")
class Stale(Register):
    """Shows readers the version before the newest, also after its writer has ended."""

    def __init__(self, tensor: Tensor, mode: Any) -> None:
        super().__init__(tensor, mode)
        self._before = _View(self.tensor.clone(), 0)

    @contextlib.contextmanager
    def write(self, *, wait: bool) -> Iterator[Tensor]:
        """Keep what was there."""
        with self._lock:
            kept = _View(self.tensor.clone(), self.version)
            with super().write(wait=wait) as tensor:
                yield tensor
            self._before = kept

    @contextlib.contextmanager
    def read(self) -> Iterator[_View]:
        """Show what was there."""
        with self._lock:
            yield self._before


@mutable_fault("lost-update", "TC-13/race", "must make versions")
class LosesUpdates(Register):
    """Lets writers count the same version twice."""

    @contextlib.contextmanager
    def write(self, *, wait: bool) -> Iterator[Tensor]:
        """Read the version too early."""
        version = self.version
        time.sleep(0.0005)
        with super().write(wait=wait) as tensor:
            self.version = version
            yield tensor


@mutable_fault("unlocked-read", "TC-13/race", "torn read")
class LabelsEarly(Register):
    """Gives the content a new version before it is written."""

    @contextlib.contextmanager
    def read(self) -> Iterator[_View]:
        """Look without the lock."""
        version = self.version
        time.sleep(0.0002)
        yield _View(self.tensor.clone(), version)


class SharedRegister:
    """A right one between processes, by one lock around everything; it can be given to a spawned process."""

    def __init__(self, tensor: Tensor, mode: Any = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._words: Any = context.RawArray("q", [0, *tensor.tolist()])
        self._lock: Any = context.RLock()

    @property
    def version(self) -> int:
        """Number of the newest content."""
        return int(self._words[0])

    @property
    def tensor(self) -> Tensor:
        """The content, in the memory that all share."""
        return torch.frombuffer(self._words, dtype=torch.int64)[1:]

    @contextlib.contextmanager
    def write(self, *, wait: bool) -> Iterator[Tensor]:
        """Let one writer change the content."""
        with self._lock:
            yield self.tensor
            self._words[0] += 1

    @contextlib.contextmanager
    def read(self) -> Iterator[_View]:
        """Show the content."""
        with self._lock:
            yield _View(self.tensor, self.version)


class Unguarded(SharedRegister):
    """Writes in two halves, and lets readers look between."""

    @contextlib.contextmanager
    def write(self, *, wait: bool) -> Iterator[Tensor]:
        """Copy the update over in two steps."""
        with super().write(wait=wait) as tensor:
            own = tensor.clone()
            yield own
            half = own.numel() // 2
            tensor[:half] = own[:half]
            time.sleep(0.0005)
            tensor[half:] = own[half:]

    @contextlib.contextmanager
    def read(self) -> Iterator[_View]:
        """Look without the lock."""
        yield _View(self.tensor.clone(), self.version)
