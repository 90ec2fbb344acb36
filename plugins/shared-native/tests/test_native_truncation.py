"""A segment that somebody cuts short is a typed error by atomics, too, for whoever comes afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from q4core.mutable import MutableMode

PROGRAM = """
import json, os, pathlib, sys, traceback
import torch
import q4core as q4
from q4core.mutable import MutableMode, SharedMutableTensor

mode, size = MutableMode(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)

def enter(block):
    return block.__enter__()

def attempt(use, is_inherited):
    state = SharedMutableTensor(torch.zeros(4096), name="membrane", mode=mode, native=True)
    other = SharedMutableTensor.attach(state.segment, name="membrane there")
    state.replace(torch.ones(4096))
    if is_inherited and (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    state.replace(torch.ones(4096))
    os.truncate(pathlib.Path("/dev/shm") / state.segment, size)
    for _ in range(2):
        try:
            use(state, other)
        except q4.LifecycleError as error:
            assert (error.name, error.value) == ("size", size), error
            assert "membrane" in str(error), error
        else:
            raise AssertionError("it went on")
    assert "membrane" in repr(state)
    other.close()
    state.close()
    return 0

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
ends = {}
for name, use in USES.items():
    for is_inherited in (False, True):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = attempt(use, is_inherited)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ends[name + " in a child" * is_inherited] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ends))
"""


@pytest.mark.parametrize("size", [0, 4096, 20480])
@pytest.mark.parametrize("mode", MutableMode)
def test_truncated_segment_is_refused(mode: MutableMode, size: int) -> None:
    """Each use tells the size, as often as it is tried, also in a forked child; every handle can still be closed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode.value, str(size)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert len(ends) == 20
    assert not {name: code for name, code in ends.items() if code}, done.stderr
