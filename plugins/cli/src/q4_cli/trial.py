"""Trial of each plugin in a child process: one that hangs there, or ends it, is named before this process loads it.

The child reports what it is about to do with which plugin, one line of JSON each. A plugin that goes wrong ends it, and
another child tries the remaining plugins.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from typing import TYPE_CHECKING

import torch

import q4core as q4
from q4_cli.doctor_report import requests_of
from q4_cli.output import warn
from q4core.plugin_api import HOOKS, PLUGIN_FAULTS, describe_exception, emit, names_of_plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["main", "shut_out", "try_commands", "try_plugins"]

LIMIT_S = 30.0
"""How long one plugin's import, one hook of it, or its backend's answers may take."""
_GRACE_S = 10.0
"""A step that hangs without giving way to Python's other threads is ended so much later, at an unknown line."""
_VARIABLE = "Q4_DISABLE_PLUGINS"


@contextlib.contextmanager
def shut_out(names: Sequence[str]) -> Iterator[None]:
    """Disable these plugins in this process, for every use of the registry, until the end of the block."""
    if not names:
        yield
        return
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = ",".join(filter(None, [before, *names]))
    q4.reset_registry()
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            os.environ[_VARIABLE] = before
        q4.reset_registry()


def try_commands() -> list[str]:
    """Return what is wrong with plugins' commands: what ``q4 --help`` warns of, in a process of its own."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from q4_cli.app import run; sys.exit(run(['--help']))"
    words = [sys.executable, "-c", code]
    environment = {key: text for key, text in os.environ.items() if key not in {"COLUMNS", "Q4_DEBUG"}}
    try:
        done = subprocess.run(  # noqa: S603  # this command
            words, capture_output=True, encoding="utf-8", timeout=LIMIT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return [f"a plugin's command hangs where it is declared: `q4 --help` did not end within {LIMIT_S:g} s"]
    problems = [line.removeprefix("warning ") for line in done.stderr.splitlines() if line.startswith("warning ")]
    if done.returncode:
        problems.append(f"a plugin's command ends `q4 --help`, with status {done.returncode}")
    return problems


def try_plugins(
    devices: Sequence[torch.device], dtype: torch.dtype | None, step: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Return plugin → what went wrong, for the plugins that hang or end their process.

    Args:
        devices: Where each backend is asked for each format.
        dtype: dtype of x. Defaults to float32 on the CPU and bfloat16 elsewhere.
        step: Called with each plugin that is tried next.
    """
    found: dict[str, str] = {}
    left = [*names_of_plugins(os.environ)]
    while left:
        name, error = _run_child(left, devices, dtype, step)
        if name is None:
            if error:
                warn(f"plugins could not be tried in a child process, which {error}; one that hangs will hang here")
            break
        left = left[left.index(name) + 1 :]
        found[name] = f"{error}; {_VARIABLE}={name} shuts it out"
    return found


def _run_child(
    names: Sequence[str], devices: Sequence[torch.device], dtype: torch.dtype | None, step: Callable[[str], None]
) -> tuple[str | None, str]:
    """Try plugins in a child; return the one that went wrong, and how; None where none did, or nothing was tried."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from q4_cli.trial import main; main()"  # not the folder's modules
    facts = json.dumps([LIMIT_S, [*map(str, devices)], dtype and str(dtype).removeprefix("torch."), [*names]])
    name, what, expired = None, "", threading.Event()
    child = subprocess.Popen(  # noqa: S603  # this module
        [sys.executable, "-c", code, facts],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env={key: text for key, text in os.environ.items() if key != "Q4_LOG"},  # misspelt, it would end each trial
        start_new_session=True,  # what a plugin starts holds the pipe, and ends with it
    )

    def expire() -> None:
        expired.set()
        _end(child)

    with child, contextlib.ExitStack() as stack:
        stack.callback(_end, child)
        while True:
            watch = threading.Timer(LIMIT_S + _GRACE_S, expire)
            watch.daemon = True
            watch.start()
            try:
                line = child.stdout.readline() if child.stdout is not None else ""
                if not line:
                    status = child.wait()
                    break
            finally:
                watch.cancel()
            before, (name, what, error) = name, json.loads(line)
            if name not in {None, before}:
                step(name)
            if name is None or error:
                return name, f"{what} {error}".strip()
    if expired.is_set():
        return name, f"{what} did not end within {LIMIT_S:g} s".strip()
    return name, f"{what} ended its process, with status {status}{_signal_name(-status)}".strip()


def _end(child: subprocess.Popen[str]) -> None:
    """Kill a child, and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):  # a status, or a signal without a name
        return f" ({signal.Signals(number).name})"
    return ""


def _try(name: str, others: Sequence[str], devices: Sequence[torch.device], dtype: torch.dtype | None) -> Iterator[str]:
    """Load one plugin alone, and ask it all that the doctor asks; yield what comes next."""
    registry = q4.Registry(environment={**os.environ, _VARIABLE: ",".join(others)})
    yield "import"
    registry.records()
    for hook in HOOKS:
        yield f"hook {hook}"
        if hook == "q4_event":
            emit("q4.trial", plugin=name)
        else:
            registry.items(hook)
    for label, backend in registry.backends().items():
        yield f"check of backend {label!r}"
        for request in requests_of(registry, devices, dtype):
            if not backend.capabilities.refusals(request, any_precision=True):
                with contextlib.suppress(*PLUGIN_FAULTS):  # the selection reports it
                    backend.check(request)


def _watch(limit_s: float, step: list[str | None], changed: threading.Event, say: Callable[..., None]) -> None:
    """End this process when a step takes longer than the limit, and report where it is."""
    main_thread = threading.main_thread().ident or 0
    while changed.wait(limit_s):
        changed.clear()
    name, what = step
    place: types.TracebackType | None = None
    for frame, line in traceback.walk_stack(sys._current_frames().get(main_thread)):  # noqa: SLF001  # the documented way to look at threads
        place = types.TracebackType(place, frame, frame.f_lasti, line)
    error = TimeoutError(f"did not end within {limit_s:g} s").with_traceback(place)
    say(name, what, describe_exception(error).partition(": ")[2])
    os._exit(1)


def main() -> None:
    """Try the plugins that the last argument names, in this process, and report each step on the standard output."""
    limit_s, places, dtype_name, names = json.loads(sys.argv[-1])
    devices = [torch.device(place) for place in places]
    dtype = None if dtype_name is None else getattr(torch, dtype_name)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # plugins may print
    warnings.simplefilter("ignore")  # under "error", a recorded fault would end this process
    step: list[str | None] = [None, ""]
    changed = threading.Event()

    def say(name: str | None, what: str | None, error: str = "") -> None:
        step[:] = name, what
        changed.set()
        print(json.dumps([name, what, error]), file=answers, flush=True)

    threading.Thread(target=_watch, args=(limit_s, step, changed, say), daemon=True).start()
    everything = names_of_plugins(os.environ)
    for name in names:
        for what in _try(name, [item for item in everything if item != name], devices, dtype):
            say(name, what)
    say(None, "")
    os._exit(0)  # a plugin's threads need not end
