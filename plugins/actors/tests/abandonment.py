"""Blocks of a ``MutableTensor`` that their thread does not leave, and calls that may hang because of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.support.limits import explain, scaled, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_actors import MutableTensor

HUNG = 10.0
"""Seconds after which a call has hung. Its thread is a daemon, so that it can't hang the suite."""


class Call:
    """A call in a thread of its own, and what became of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        call, self._call = self._call, lambda: None
        try:
            self._result = call()
        except BaseException as error:  # noqa: BLE001  # it is what the test asks for
            self._error = error

    def _join(self) -> None:
        self._thread.join(scaled(HUNG))
        assert not self._thread.is_alive(), explain()

    def result(self) -> Any:
        """Return what the call returned, or raise what it raised."""
        self._join()
        if self._error is not None:
            raise self._error
        return self._result

    def error(self) -> BaseException | None:
        """Return what the call raised, or None."""
        self._join()
        return self._error


class Abandoned:
    """A thread that enters a block, uses it, and ends inside it on command."""

    def __init__(self, block: Any, *, keeps: bool, use: Callable[[Any], object] = lambda _: None) -> None:
        self._entered, self._go = threading.Event(), threading.Event()
        self.block: Any = block if keeps else None
        self._use = use
        holder = [block]
        del block
        self._call = Call(lambda: self._run(holder))
        until(self._entered.is_set)

    def _run(self, holder: list[Any]) -> None:
        block = holder.pop()
        self._use(block.__enter__())
        self._entered.set()
        assert self._go.wait(scaled(HUNG))

    def end(self) -> None:
        """Let the thread end without leaving the block."""
        self._go.set()
        self._call.result()


def content_of(state: MutableTensor, timeout: float | None = HUNG) -> list[float]:
    """Read the whole content."""
    with state.read(timeout=timeout and scaled(timeout)) as view:
        return list(view.tensor.tolist())


def write(state: MutableTensor, value: float, *, wait: bool = False, timeout: float | None = HUNG) -> None:
    """Make one update, which fills the content."""
    with state.write(wait=wait, timeout=timeout and scaled(timeout)) as tensor:
        tensor.fill_(value)
