"""A process that begins as a copy of this one, so that it need not load again what this one has loaded.

Good for the first process of a command that asks for a case or two, where loading torch a second time would take as
long as all the rest. ``is_copyable`` says where it is safe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.metadata
import math
import mmap
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if sys.platform == "linux":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Copied", "is_copyable", "label_of"]

_GROUP = "q4core.plugins"
_HANDLERS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
if sys.platform != "win32":
    _HANDLERS[signal.SIGHUP] = signal.SIG_DFL
"""Signals that a command may catch, and what a new process does with them."""
_STDERR = 2
_TICK = 0.002
_held: list[mmap.mmap] = []
"""What a copy keeps mapped, for as long as it or a copy of it lives."""


def is_copyable() -> bool:
    """Say whether a copy would be as good as a new process: no other thread, no device in use, no plugin but this one.

    Threads that wait in a library of numbers don't count: such libraries see to their own (``pthread_atfork``).
    """
    if sys.platform != "linux" or threading.active_count() > 1 or torch.cuda.is_initialized():
        return False
    own = __name__.partition(".")[0]
    modules = {point.module.partition(".")[0] for point in importlib.metadata.entry_points(group=_GROUP)}
    modules |= {name.strip().partition(".")[0] for name in os.environ.get("Q4_PLUGIN_MODULES", "").split(",")}
    return not (modules - {own, ""}) & set(sys.modules)


def label_of(owner: str) -> str:
    """Return the name of the memory that a copy and its own copies hold, by which they are known as a run's."""
    return f"q4-conformance-{owner}"


class Copied:
    """One copy of this process, held as ``subprocess.Popen`` holds a new one.

    Args:
        module: Its ``main`` is what the copy runs.
        environment: The environment of the copy.
        owner: Whose it is, as ``label_of`` takes it.
        threads: How many threads its libraries may use.
    """

    def __init__(self, module: str, environment: Mapping[str, str], *, owner: str, threads: int) -> None:
        ends = [tuple(_beyond_the_standard(end) for end in os.pipe()) for _ in range(3)]
        ours, theirs = [ends[0][1], ends[1][0], ends[2][0]], [ends[0][0], ends[1][1], ends[2][1]]
        arguments = (module, dict(environment), owner, threads, theirs, list(warnings.filters))
        self._process = multiprocessing.get_context("fork").Process(target=_begin, args=arguments, daemon=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which is_copyable knows of
            self._process.start()
        for end in theirs:
            os.close(end)
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(ours[0], "wb"),
            os.fdopen(ours[1], "rb"),
            os.fdopen(ours[2], "rb"),
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid or 0

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return ``poll()``.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:  # join() would wait for a pipe that the copy has closed, and then for ever
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self._process.name), timeout or 0.0)
            time.sleep(_TICK)
        return code

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._process.kill()


def _beyond_the_standard(end: int) -> int:
    """Return a descriptor of the same pipe that is none of 0, 1 and 2, which the command may have been given closed."""
    if end > _STDERR:
        return end
    try:
        return fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    finally:
        os.close(end)


def _begin(  # noqa: PLR0913  # what a new process is told by its command line, environment and pipes
    module: str, environment: dict[str, str], owner: str, threads: int, ends: list[int], filters: list[Any]
) -> NoReturn:
    """Become as much of a new process as a copy can."""
    gc.freeze()
    os.setsid()
    for caught, begun_with in _HANDLERS.items():
        if signal.getsignal(caught) is not signal.SIG_IGN:  # which a new process would be given, too
            signal.signal(caught, begun_with)
    for number, end in enumerate(ends):
        os.dup2(end, number)
    for entry in [int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir()]:
        if entry > _STDERR:
            with contextlib.suppress(OSError):  # the one that the list itself was read by
                os.close(entry)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # As ``python -c`` has them: modules of the working directory are found, and no program's main is looked for.
    sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
    sys.path.insert(0, "")
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]  # a list, as documented
    if os.environ.get("OMP_NUM_THREADS") is None:  # else it was loaded with as many
        torch.set_num_threads(threads)
    os.environ.update(environment)
    faulthandler.enable()
    _hold(owner)
    importlib.import_module(module).main()
    raise SystemExit(0)


def _hold(owner: str) -> None:
    """Map memory under the owner's name: unlike the environment, which the system shows as it was at the start."""
    file = os.memfd_create(label_of(owner))
    os.ftruncate(file, mmap.PAGESIZE)
    _held.append(mmap.mmap(file, mmap.PAGESIZE))
    os.close(file)
