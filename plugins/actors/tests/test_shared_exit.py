"""Threads that use a tensor by atomics while the interpreter exits."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.limits import scaled

if TYPE_CHECKING:
    from q4_actors import MutableMode

DAEMONS = """
import sys, threading, time, torch
from q4_actors import SharedMutableTensor

mode, use = sys.argv[1:]
state = SharedMutableTensor(torch.zeros(64), mode=mode)

def read():
    while True:
        with state.read():
            pass

def wait():
    state.wait(1_000_000)

def wait_again():
    while True:
        state.wait(1_000_000, timeout=0.001)

for _ in range(3):
    threading.Thread(target=globals()[use], daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("use", ["read", "wait", "wait_again"])
def test_daemon_threads_do_not_end_an_interpreter_that_exits(use: str, mode: MutableMode) -> None:
    """A thread that comes for the interpreter's lock after its end is let go by the plugin as CPython means it.

    An update is left out: it makes an alias by torch, which itself ends the process if that happens inside it.
    """
    done = subprocess.run(
        [sys.executable, "-c", DAEMONS, mode.value, use],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
