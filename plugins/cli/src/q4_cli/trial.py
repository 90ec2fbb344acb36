"""A trial of each plugin in a child process: one that hangs there, or ends it, is named before anything loads it here.

The child says what it is about to do with which plugin, one line of JSON each. A plugin that goes wrong ends it, and
another child goes on with the plugins that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from typing import TYPE_CHECKING

import torch
import typer

import q4core as q4
from q4_cli.doctor_report import requests_of
from q4core.plugin_api import HOOKS, describe_exception, emit, names_of_plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["disabling", "try_plugins"]

LIMIT_S = 30.0
"""How long one plugin's import, one hook of it, or its backend's answers may take."""
_GRACE_S = 10.0
"""What hangs without giving way to Python's other threads is ended so much later, and its place is not known."""


def disabling(names: Sequence[str]) -> Mapping[str, str]:
    """Return the process's variables, with some plugins shut out."""
    shut = ",".join(filter(None, [os.environ.get("Q4_DISABLE_PLUGINS"), *names]))
    return {**os.environ, "Q4_DISABLE_PLUGINS": shut}


def try_plugins() -> dict[str, str]:
    """Return plugin → what went wrong, for the plugins that hang or end their process."""
    found: dict[str, str] = {}
    left = [*names_of_plugins(os.environ)]
    while left:
        name, error = _run_child(left)
        if name is None:  # it came to the end
            break
        left = left[left.index(name) + 1 :]
        found[name] = f"{error}; Q4_DISABLE_PLUGINS={name} shuts it out"
    return found


def _run_child(names: Sequence[str]) -> tuple[str | None, str]:
    """Try plugins in a child; return the one that went wrong, and how; None where none did."""
    command = [sys.executable, "-m", "q4_cli.trial", str(LIMIT_S), *names]
    name, what, error = None, "", ""
    child = subprocess.Popen(  # noqa: S603  # this module
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
    )
    with child, contextlib.ExitStack() as end:
        end.callback(child.kill)
        while True:
            started = time.monotonic()
            watch = threading.Timer(LIMIT_S + _GRACE_S, child.kill)
            watch.start()
            line = child.stdout.readline() if child.stdout is not None else ""
            watch.cancel()
            if not line:
                break
            name, what, error = json.loads(line)
            if name is None or error:
                return name, f"{what} {error}"
        status = child.wait()
    if time.monotonic() - started > LIMIT_S + _GRACE_S:
        return name, f"{what} did not end within {LIMIT_S:g} s"
    signal_name = f" ({signal.Signals(-status).name})" if status < 0 else ""
    return name, f"{what} ended its process, with status {status}{signal_name}"


def _try(name: str, others: Sequence[str], tell: Callable[[str], None]) -> None:
    """Load one plugin alone, and ask it all that the doctor asks."""
    registry = q4.Registry(environment=disabling(others))
    tell("import")
    registry.records()
    for hook in HOOKS:
        tell(f"hook {hook}")
        if hook == "q4_commands":
            registry.add_commands(typer.Typer())
        elif hook == "q4_event":
            emit("q4.trial", plugin=name)
        else:
            registry.items(hook)
    devices = [torch.device("cpu"), *(torch.device("cuda", item.index) for item in q4.machine_facts().cuda_devices)]
    for label, backend in registry.backends().items():
        tell(f"check of backend {label!r}")
        for request in requests_of(registry, devices, None):
            if not backend.capabilities.refusals(request, any_precision=True):
                with contextlib.suppress(Exception):  # the selection tells
                    backend.check(request)


def _main(limit_s: float, names: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # plugins may print
    everything = names_of_plugins(os.environ)
    step: list[str | None] = [None, "", ""]
    changed = threading.Event()
    main_thread = threading.main_thread().ident or 0

    def say(name: str | None, what: str, error: str = "") -> None:
        step[:] = name, what, error
        changed.set()
        print(json.dumps(step), file=answers, flush=True)

    def watch() -> None:
        while changed.wait(limit_s):
            changed.clear()
        place: types.TracebackType | None = None
        for frame, line in traceback.walk_stack(sys._current_frames().get(main_thread)):  # noqa: SLF001  # the documented way to look at threads
            place = types.TracebackType(place, frame, frame.f_lasti, line)
        error = TimeoutError(f"did not end within {limit_s:g} s").with_traceback(place)
        say(step[0], str(step[1]), describe_exception(error).partition(": ")[2])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    for name in names:
        _try(name, [item for item in everything if item != name], lambda what, name=name: say(name, what))  # type: ignore[misc]
    say(None, "")
    os._exit(0)  # a plugin's threads need not end


if __name__ == "__main__":
    _main(float(sys.argv[1]), sys.argv[2:])
