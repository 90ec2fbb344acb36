"""A command whose compiler steps are shown as they end, with the time: ``python -m tools.progress COMMAND …``.

A large file takes minutes, in which a line says that the compiler is at work. All else that the command prints is shown
only where it fails.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["CommandError", "run_command", "step"]

_STEP = re.compile(r"^\s*\[(\d+/\d+)\] (?:\S+ )*?(?:\S*/)?(\S+)$")
_TAIL = 60
SILENCE_S = 20.0
"""After so many seconds without a line of the command, one of ours says that it is compiling."""


class CommandError(RuntimeError):
    """A command that failed, with the last lines that it printed."""


def step(line: str) -> str | None:
    """Return a compiler step of ninja's output, as ``12/25 call.cpp.o``, or None for any other line."""
    found = _STEP.match(line.rstrip())
    return None if found is None else " ".join(found.groups())


def run_command(
    command: Sequence[str], *, cwd: Path | None = None, variables: dict[str, str] | None = None, shown: bool = True
) -> str:
    """Run a command and return what it printed; with ``shown``, print each compiler step with the seconds so far.

    After the first step, ``SILENCE_S`` seconds without a line of the command print one that says that it is compiling.

    Raises:
        CommandError: Its exit status is not 0.
    """
    started = time.monotonic()
    lines: list[str] = []
    steps = 0
    environment = {**os.environ, **(variables or {})}
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in _lines(process):
            if line is not None:
                lines.append(line)
            text = step(line) if line is not None else "compiling …" if steps else None
            if shown and text:
                steps += line is not None
                print(f"  {time.monotonic() - started:4.0f} s  {text}", flush=True)
    if process.returncode:
        status = f"{' '.join(command)} ended with status {process.returncode}"
        raise CommandError(f"{status}:\n{''.join(lines[-_TAIL:])}")
    if steps:
        print(f"  compiled in {time.monotonic() - started:.0f} s", flush=True)
    return "".join(lines)


def _lines(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """Yield each line that a process prints, and None after each ``SILENCE_S`` seconds without one."""
    heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in process.stdout or ():
                heard.put(line)
        finally:
            heard.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = heard.get(timeout=SILENCE_S)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def main() -> int:
    """Run the command of the arguments; return 1 where it fails."""
    try:
        run_command(sys.argv[1:])
    except CommandError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
