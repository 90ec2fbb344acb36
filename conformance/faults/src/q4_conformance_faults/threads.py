"""Faults between threads, with other numbers of threads, and after a fork."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import torch

from q4_conformance_faults.fault import NF4, backend_fault, numeric_fault
from q4_conformance_faults.toy import Calls, ToyKernel

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import Prepared


_SEVERAL = 3


@backend_fault("keeps-one-thread", "EX-08/settings", "changed the number of threads")
class KeepsOneThread(Calls):
    """Sets torch to one thread, and never sets it back."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        torch.set_num_threads(1)


@backend_fault("dies-with-its-threads", "EX-15/forked", "forked after a call")
class DiesWithItsThreads(Calls):
    """Waits for threads that were made at its first call, which a forked process does not have."""

    _owner = 0

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        self._owner = self._owner or os.getpid()
        if os.getpid() != self._owner:
            threading.Event().wait()


@backend_fault("loses-int8-in-forks", f"EX-15/forked/{NF4}/float32/int8", "the pool is gone")
class LosesInt8InForks(Calls):
    """Raises in int8 calls of a process that was forked from the one that made it."""

    paths = "dot_w4a8"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._home = os.getpid()

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        if os.getpid() != self._home:
            raise RuntimeError("the pool is gone")


@numeric_fault("loses-rest-among-threads", "EX-04/counts", "3 threads")
class LosesRestAmongThreads(ToyKernel):
    """Shares the columns evenly among three and more threads, and leaves the rest out."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        count = torch.get_num_threads()
        if count >= _SEVERAL:
            out[:, out.shape[1] // count * count :] = 0


@numeric_fault("not-thread-safe", "EX-04/threads", "other bits")
class SharedScratch(ToyKernel):
    """Keeps its result in the backend before it writes it: two threads meet there."""

    _scratch: Tensor | None = None

    def write(self, y: Tensor, out: Tensor) -> None:
        self._scratch = y
        time.sleep(0.001)
        if self._scratch.shape == out.shape:
            out.copy_(self._scratch)
        else:
            out.zero_()


@numeric_fault("not-thread-safe-across-layers", "EX-04/threads", "other bits from layer")
class SharedPlace(ToyKernel):
    """Keeps in the backend whose layer it works for: right for any number of threads that share one."""

    _place: Prepared | None = None

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        self._place = prepared
        time.sleep(0.001)
        super().linear(self._place, x, out, bias=bias, path=path)
