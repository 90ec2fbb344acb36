"""Other processes that use a shared tensor on command, and that can be killed while they do."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from sharing import LONG

from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from q4_actors import SharedMutableTensor

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["q4_actors", "processes"])


class Worker:
    """What runs in the other process: one block at a time, step by step."""

    def __init__(self, state: SharedMutableTensor) -> None:
        self._state = state
        self._blocks: list[Any] = []

    def enter(self, kind: str, **options: Any) -> tuple[int, list[float]]:
        """Enter ``read()`` or ``write()``, and return the version and what is seen."""
        block = getattr(self._state, kind)(**options)
        entered = block.__enter__()
        self._blocks.append((block, entered))
        tensor = entered if kind == "write" else entered.tensor
        return self._state.version, tensor.tolist()

    def fill(self, value: float, count: int | None = None) -> None:
        """Fill the newest block's tensor, or its first values."""
        self._blocks[-1][1][:count].fill_(value)

    def leave(self) -> None:
        """Leave the newest block well."""
        self._blocks.pop()[0].__exit__(None, None, None)

    def fail(self) -> None:
        """Leave the newest block by an error."""
        self._blocks.pop()[0].__exit__(RuntimeError, RuntimeError("boom"), None)

    def values(self) -> list[float]:
        """Return what the newest read block shows."""
        shown: list[float] = self._blocks[-1][1].tensor.tolist()
        return shown

    def repeat(self, kind: str, seconds: float, hold_s: float) -> int:
        """Read or write again and again without rest, each block for some time, and return how often."""
        count = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.enter(kind, timeout=scaled(LONG), **({"wait": True} if kind == "write" else {}))
            time.sleep(hold_s)
            self.leave()
            count += 1
        return count

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the tensor, or look at a property."""
        found = getattr(self._state, name)
        return found(*arguments, **options) if callable(found) else found


def _serve(state: SharedMutableTensor, line: Connection) -> None:
    worker = Worker(state)
    while True:
        try:
            name, arguments, options = line.recv()
        except EOFError:
            return
        try:
            line.send((getattr(worker, name)(*arguments, **options), None))
        except Exception as error:  # noqa: BLE001  # it is sent back whole
            line.send((None, error))


class Process:
    """Another process, from this side."""

    def __init__(self, state: SharedMutableTensor) -> None:
        self._line, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(state, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def number(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, name: str, *arguments: Any, **options: Any) -> None:
        """Send it a command."""
        self._line.send((name, arguments, options))

    def is_done(self, seconds: float = 0.0) -> bool:
        """Return whether it has answered."""
        return self._line.poll(seconds)

    def result(self) -> Any:
        """Return its answer, or raise its error."""
        assert self._line.poll(scaled(LONG)), "hung"
        result, error = self._line.recv()
        if error is not None:
            raise error
        return result

    def do(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Send it a command, and return its answer."""
        self.begin(name, *arguments, **options)
        return self.result()

    def kill(self) -> None:
        """Kill it, so that nothing of it runs any more."""
        self._process.kill()
        self._process.join(scaled(LONG))
        assert not self._process.is_alive()

    def end(self) -> None:
        """Let it end."""
        self._line.close()
        self._process.join(scaled(LONG))
        self._process.kill()


@contextlib.contextmanager
def processes(state: SharedMutableTensor, count: int) -> Iterator[list[Process]]:
    """Give processes that have the tensor, and end them."""
    started: list[Process] = []
    try:
        started.extend(Process(state) for _ in range(count))
        for process in started:
            process.do("call", "name")  # it has attached
        yield started
    finally:
        for process in started:
            process.end()
