"""What the tests of ``MutableTensor`` share: modes, threads, and blocks that other threads hold."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    import concurrent.futures
    import contextlib

MODES = list(MutableMode)
LONG = 30.0
"""Seconds after which a test has hung."""


def failing_block() -> contextlib.AbstractContextManager[Any, bool]:
    """Expect the error with which a block fails on purpose."""
    return pytest.raises(RuntimeError, match="boom")


def poisoned(mode: MutableMode) -> MutableTensor:
    """Return a tensor whose content is unknown: by a failed writer, or a reader that wrote."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    if mode is MutableMode.IN_PLACE:
        with failing_block(), state.write() as tensor:
            tensor.fill_(7.0)
            raise RuntimeError("boom")
    else:
        with pytest.raises(q4.PoisonedError), state.read() as view:
            view.tensor.fill_(7.0)
    return state


def content_of(state: MutableTensor) -> list[float]:
    """Read all values."""
    with state.read(timeout=scaled(LONG)) as view:
        content: list[float] = view.tensor.tolist()
        return content


class Held:
    """A block that another thread holds until it is let go."""

    def __init__(self, pool: concurrent.futures.ThreadPoolExecutor, block: Any) -> None:
        self._entered, self._go = threading.Event(), threading.Event()
        self._block = block
        self._future = pool.submit(self._run)
        until(lambda: self._entered.is_set() or self._future.done())

    def _run(self) -> None:
        with self._block:
            self._entered.set()
            assert self._go.wait(scaled(LONG))

    def release(self) -> None:
        """Let the block end."""
        self._go.set()
        self._future.result(scaled(LONG))

    def __enter__(self) -> None:
        """Do nothing: it is held already."""

    def __exit__(self, *error: object) -> None:
        """Let the block end."""
        self.release()


def fork_by_c() -> int:
    """Fork as C does, without Python's hooks, and return what ``fork`` returns.

    A thread that has just asked for the interpreter's lock would be waited for in the child, where it does not exist:
    so all threads are made to wait for long before they ask.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.5)
    try:
        time.sleep(0.02)  # who has asked, gets it, and asks no more for half a second
        return int(ctypes.PyDLL(None).fork())
    finally:
        sys.setswitchinterval(usual)
