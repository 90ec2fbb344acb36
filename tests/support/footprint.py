"""What a process holds and spends, for tests that run code in an interpreter of its own.

Not ``getrusage``: its peak starts at the peak of the process that started this one, so that it never grows in the
child of a large test run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["PeakAnonymous", "anonymous", "peak_resident", "resident", "run_child"]

_STATUS = Path("/proc/self/status")


def run_child(code: str, *arguments: object, timeout: float = 300.0) -> dict[str, Any]:
    """Run code, which may import this module, in a fresh interpreter.

    Returns:
        The JSON object that it printed on its last line, and under ``printed`` the lines before.
    """
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    *lines, last = done.stdout.splitlines()
    return {**json.loads(last), "printed": lines}


def _status(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def resident() -> int:
    """Return the bytes that this process holds now, mapped files included."""
    return _status("VmRSS")


def peak_resident() -> int:
    """Return the most bytes that this process has held, mapped files included."""
    return _status("VmHWM")


def anonymous() -> int:
    """Return the bytes that this process holds now and that no file backs."""
    return _status("RssAnon")


class PeakAnonymous:
    """The most anonymous bytes of this process while the context lasts, looked at every millisecond by a thread.

    A temporary that lives for less than a millisecond may be missed; one that matters here takes longer to fill.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, anonymous())

    def __enter__(self) -> PeakAnonymous:  # noqa: PYI034  # Self needs Python 3.11
        """Start to look."""
        self.bytes = anonymous()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Look for the last time."""
        self._done.set()
        self._watcher.join()
        self.bytes = max(self.bytes, anonymous())
