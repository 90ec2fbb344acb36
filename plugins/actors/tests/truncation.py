"""The fate of a process whose shared segment is truncated, use by use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.limits import scaled

if TYPE_CHECKING:
    from q4_actors import MutableMode

__all__ = ["SIZES", "ends_after_truncation"]

SIZES = (0, -1)
"""Nothing is left; all but the last page."""
_PROGRAM = """
import json, signal, os, pathlib, sys, threading, traceback
import torch
import q4core as q4
from q4_actors import MutableMode, SharedMutableTensor

mode = MutableMode(sys.argv[1])
size = int(sys.argv[2])
is_in_place = mode is MutableMode.IN_PLACE
torch.set_num_threads(1)

def enter(block):
    return block.__enter__()

def cut(state):
    global size
    path = pathlib.Path("/dev/shm") / state.segment
    size = path.stat().st_size - 4096 if size < 0 else size
    os.truncate(path, size)

def expect(use, state, other):
    try:
        use(state, other)
    except q4.LifecycleError as error:
        assert f"bytes to {size}" in str(error) and "membrane" in str(error), error
    else:
        raise AssertionError("it went on")

def make():
    state = SharedMutableTensor(torch.zeros(4096), name="membrane", mode=mode)
    state.replace(torch.ones(4096))
    return state, SharedMutableTensor.attach(state.segment, name="membrane there")

def close(state, other):
    assert "membrane" in repr(state)
    other.close()
    state.close()

def at_once(use):
    state, other = make()
    cut(state)
    for _ in range(2):
        expect(use, state, other)
    close(state, other)

def in_a_child(use):
    state, other = make()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    state.replace(torch.ones(4096))
    cut(state)
    expect(use, state, other)
    close(state, other)

def in_a_child_of_later(use):
    state, other = make()
    cut(state)
    if child := os.fork():
        expect(use, state, other)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for _ in range(2):
        expect(use, state, other)
    close(state, other)

def while_waiting(use, block):
    state, other = make()
    held = block(other)
    enter(held)
    threading.Timer(0.2, cut, [state]).start()
    expect(use, state, other)
    expect(use, state, other)
    state.close()

USES = {
    "read": lambda state, other: enter(state.read()),
    "snapshot": lambda state, other: state.snapshot(),
    "write": lambda state, other: enter(state.write()),
    "write that waits": lambda state, other: enter(state.write(wait=True)),
    "replace": lambda state, other: state.replace(torch.ones(4096)),
    "version": lambda state, other: state.version,
    "wait": lambda state, other: state.wait(9, timeout=0),
    "is_poisoned": lambda state, other: state.is_poisoned,
    "read through another handle": lambda state, other: enter(other.read()),
    "replace through another handle": lambda state, other: other.replace(torch.ones(4096)),
}
tries = {}
for name, use in USES.items():
    tries[name] = lambda use=use: at_once(use)
    tries[name + ", in a child"] = lambda use=use: in_a_child(use)
    tries[name + ", in a child of later"] = lambda use=use: in_a_child_of_later(use)
def reader(other):
    return other.read()

def writer(other):
    return other.write()

def for_a_version(state, other):
    state.wait(9, timeout=9)

tries["wait for a version"] = lambda: while_waiting(for_a_version, reader)
tries["wait for a writer to write"] = lambda: while_waiting(USES["write that waits"], writer)
if is_in_place:
    tries["wait for a writer to read"] = lambda: while_waiting(USES["read"], writer)
    tries["wait for a reader to write"] = lambda: while_waiting(USES["write that waits"], reader)
def end_of(attempt):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = attempt() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

ends = {}
for name, attempt in tries.items():
    ends[name] = end_of(attempt)
    for _ in range(4):  # a cut that falls between a waiter's look and its read ends the process, as memory.md says
        if name.startswith("wait for") and ends[name] == -signal.SIGBUS:
            ends[name] = end_of(attempt)
print(json.dumps(ends))
"""


def ends_after_truncation(mode: MutableMode, size: int) -> tuple[dict[str, int], str]:
    """Return how a process ended that met a segment of this size in each use, 0 for a typed error; and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, mode.value, str(size)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=scaled(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends: dict[str, int] = json.loads(done.stdout)
    return ends, done.stderr
