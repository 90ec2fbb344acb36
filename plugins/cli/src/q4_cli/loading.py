"""The seconds in which torch is loaded: Ctrl-C ends them quietly, and a terminal says what takes so long."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["load_library", "quiet_interrupt"]

_INTERRUPTED = 130
_PATIENCE_S = 2.0


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once: while modules load there is nothing to unwind, and no traceback helps."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def load_library() -> None:
    """Import q4core, and torch with it, before a command runs."""
    if "q4core" in sys.modules:
        return
    was_on = gc.isenabled()
    gc.disable()  # what torch is made of ends with the process: collections over it take a tenth of the time
    try:
        with quiet_interrupt(), _said_when_slow():
            import q4core  # noqa: F401, PLC0415  # takes a second: help, completion and usage errors do without
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _said_when_slow() -> Iterator[None]:
    """Say on a terminal that torch is being loaded, once that has taken two seconds, and clear the line at the end."""
    if not sys.stderr.isatty():
        yield
        return
    text = "loading torch …"
    said = threading.Event()

    def say() -> None:
        said.set()
        sys.stderr.write(text)
        sys.stderr.flush()

    timer = threading.Timer(_PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if said.is_set():
            sys.stderr.write(f"\r{' ' * len(text)}\r")
            sys.stderr.flush()
