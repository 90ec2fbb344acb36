"""Measurements in processes of their own, and the memory of such a process."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["anonymous_bytes", "peak_bytes", "run_child", "settled_bytes"]


def run_child(module: str, *words: object, limit_s: float, python: str = sys.executable) -> dict[str, Any]:
    """Run ``python -m MODULE --child WORDS…`` and return the JSON of its last line.

    Args:
        module: With the package, as Python takes it.
        *words: What follows ``--child``.
        limit_s: Seconds until it is killed.
        python: By which Python.

    Raises:
        SystemExit: It failed; the message has the end of its output.
    """
    command = [python, "-m", module, "--child", *map(str, words)]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}  # as the command q4 sets it
    done = subprocess.run(  # noqa: S603  # no input
        command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def anonymous_bytes() -> int:
    """Return the resident memory of this process that no file backs; on Linux."""
    return _status("RssAnon")


def peak_bytes() -> int:
    """Return the most resident memory that this process has had, files included; on Linux.

    ``getrusage`` counts the process that started it as well.
    """
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def settled_bytes() -> int:
    """Return ``anonymous_bytes`` once garbage is collected and what was freed has gone back to the system; on glibc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_bytes()
