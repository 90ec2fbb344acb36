"""A process that may hang, crash, print, take all memory or leave children behind, and the object that controls it.

Its messages come through a pipe of their own under a secret mark, so that nothing that it prints can pass for a
result; what it prints is stored for the message of a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import attrs

from q4_conformance.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_START = (
    "import gc, importlib; gc.disable(); module = importlib.import_module({module!r}); gc.freeze(); gc.enable(); "
    "module.main()"
)
"""Torch's own objects outlive every garbage collection, so that none looks through them."""
_TICK = 0.05
_LINGER = 2.0
"""How long a process that has sent everything may take to end, and its last output to arrive."""
_TAIL_BYTES = 1 << 14
_SHOWN = 400
_FATAL = "Fatal Python error"
_LINES_BEFORE = 3
_LINES_OF_STACK = 7
_LONGEST_LINE = 1 << 22
_OWNER = "Q4_CONFORMANCE_RUN"
"""An environment variable of everything that a run starts, so that processes left behind are found."""
_PROC = Path("/proc")
_GIB = 1 << 30


@attrs.frozen(kw_only=True)
class Limits:
    """What one process may take.

    Args:
        case_seconds: How long one case may take.
        start_seconds: How long the process may take until it looks for plugins.
        slow_seconds: How long one that is marked as slow may take. Defaults to 300, or as long as any other.
        load_seconds: How long each step from there to the first case may take, such as importing one plugin.
            Defaults to half as much again as a case, and 10 at least.
        memory_bytes: Resident memory, its own children included.
        deaths: After so many crashes and time-outs the rest of a group is given up.
    """

    case_seconds: float = 60.0
    slow_seconds: float = attrs.Factory(lambda self: max(300.0, self.case_seconds), takes_self=True)
    start_seconds: float = 90.0
    load_seconds: float = attrs.Factory(lambda self: max(10.0, 1.5 * self.case_seconds), takes_self=True)
    memory_bytes: int = 6 * _GIB
    deaths: int = 6


class Ended(Exception):  # noqa: N818  # an event, not an error
    """The process is gone, or was ended: CRASH or TIMEOUT, and why."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants; 0 where the system does not say."""
    total = 0
    for one in _family(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int((_PROC / str(one) / "statm").read_text(encoding="ascii").split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    with contextlib.suppress(OSError, ValueError):
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                yield from _family(int(child))


def _end(pids: Iterable[int]) -> None:
    """End processes that are not our children, and wait a while until they are gone."""
    left = set(pids)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    by = time.monotonic() + _LINGER
    while (left := {pid for pid in left if _is_running(pid)}) and time.monotonic() < by:
        time.sleep(_TICK / 10)


def _is_running(pid: int) -> bool:
    try:
        return bool((_PROC / str(pid) / "cmdline").read_bytes())  # one that ended and was not fetched has none
    except OSError:
        return False


def _owned(token: str) -> Iterator[int]:
    """Yield the processes that a run left behind, whatever parent or session they have by now."""
    wanted = f"{_OWNER}={token}".encode()
    with contextlib.suppress(OSError):
        for entry in _PROC.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name)


def _last_words(text: str) -> str:
    """Return the end of what was printed, without most of the stack that Python prints when it dies."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((number for number, line in enumerate(lines) if line.startswith(_FATAL)), None)
    if fatal is not None:
        lines = lines[max(0, fatal - _LINES_BEFORE) : fatal + _LINES_OF_STACK]
    said = " | ".join(lines)
    return said if len(said) <= _SHOWN or fatal is not None else f"…{said[-_SHOWN:]}"


class Child:
    """One process of ours, which runs the ``main`` of a module with so many threads."""

    def __init__(self, module: str, limits: Limits, *, threads: int) -> None:
        self.limits = limits
        self._mark = secrets.token_hex(16)
        self._owner = secrets.token_hex(16)
        self._tail = bytearray()
        self._is_closed = False
        self._relatives: set[int] = set()
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._process = subprocess.Popen(  # noqa: S603  # an interpreter like this one, with a module of ours
            [sys.executable, "-c", _START.format(module=module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(threads),
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=target, args=(stream,), daemon=True)
            for target, stream in (
                (self._read_messages, self._process.stdout),
                (self._read_output, self._process.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()
        self.send({"mark": self._mark, "data_bytes": 4 * limits.memory_bytes})

    def _environment(self, threads: int) -> dict[str, str]:
        path = os.pathsep.join(item for item in sys.path if item)
        own = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", _OWNER: self._owner}
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            own[name] = os.environ.get(name, str(threads))
        # Threads that spin while they wait would steal the core of the other process.
        own["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        return {**os.environ, **own}

    def send(self, message: dict[str, Any]) -> None:
        """Give the process a message; one that is gone already is noticed when its answer is awaited."""
        stream = self._process.stdin
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.write(json.dumps(message).encode() + b"\n")
                stream.flush()

    def receive(self, seconds: float, *, is_over: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Return the next message within ``seconds``.

        Raises:
            Ended: The process died, took too much memory, or said nothing in time.
            TimeoutError: ``is_over`` said so.
        """
        started = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._inbox.get(timeout=_TICK)
                if message is None:
                    raise self._died()
                return message
            now = time.monotonic()
            if self._process.poll() is not None:
                self._readers[0].join(_LINGER)  # its last output; a child of its own may hold the pipe open
                if self._inbox.empty():
                    raise self._died()
                continue
            taken = resident_bytes(self._process.pid)
            if taken > self.limits.memory_bytes:
                text = f"took {taken / _GIB:.1f} GiB of memory; the limit is {self.limits.memory_bytes / _GIB:.1f} GiB"
                raise self._ended(Outcome.CRASH, text)
            if is_over():
                raise TimeoutError
            if now - started > seconds:
                raise self._ended(Outcome.TIMEOUT, f"no answer for {seconds:g} s")

    def _died(self) -> Ended:
        try:
            code = self._process.wait(_LINGER)
        except subprocess.TimeoutExpired:
            return self._ended(Outcome.CRASH, "the process closed its pipe")
        if code < 0:
            with contextlib.suppress(ValueError):
                return self._ended(Outcome.CRASH, f"the process was ended by {signal.Signals(-code).name}")
        return self._ended(Outcome.CRASH, f"the process ended with exit code {code}")

    def _ended(self, outcome: Outcome, reason: str) -> Ended:
        self.close()
        self._readers[1].join(_LINGER)
        shown = _last_words(self._tail.decode(errors="replace"))
        clean = "".join(letter if letter.isprintable() else "?" for letter in shown)
        return Ended(outcome, f"{reason}; it printed: {clean}" if clean else reason)

    def close(self) -> None:
        """End the process and everything that it started."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._relatives.update(_family(self._process.pid))
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        _end({*self._relatives, *_owned(self._owner)} - {self._process.pid})
        for reader, stream in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(_LINGER)
            if not reader.is_alive() and stream is not None:
                stream.close()

    def finish(self) -> None:
        """Let a process that has sent everything end by itself, then make sure of it."""
        self._relatives.update(_family(self._process.pid))  # once it has ended, they have another parent
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LINGER)
        self.close()

    def _read_messages(self, stream: IO[bytes]) -> None:
        mark = self._mark.encode()
        while line := stream.readline(_LONGEST_LINE):
            if line.startswith(mark):
                with contextlib.suppress(ValueError):
                    self._inbox.put(json.loads(line[len(mark) :]))
        self._inbox.put(None)

    def _read_output(self, stream: IO[bytes]) -> None:
        while piece := os.read(stream.fileno(), 1 << 16):
            self._tail += piece
            del self._tail[:-_TAIL_BYTES]
