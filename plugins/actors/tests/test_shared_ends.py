"""``SharedMutableTensor`` at the ends of threads, processes and handles, and where the system gives no more."""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import processes
from sharing import LONG, content_of

import q4core as q4
from q4_actors import MutableMode, SharedMutableTensor
from q4_actors.tensors.file_locks import FileLocks
from q4_actors.tensors.segment import FIRST_ROW
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks with threads: the children use none
FOLDER = pathlib.Path("/dev/shm")  # noqa: S108  # where segments are
DAEMON = """
import sys, threading
import torch
from q4_actors import MutableMode, SharedMutableTensor

state = SharedMutableTensor(torch.zeros(4), mode=MutableMode(sys.argv[1]))
inside = threading.Event()

def write():
    with state.write() as tensor:
        tensor[0] = 1.0
        inside.set()
        threading.Event().wait()

threading.Thread(target=write, daemon=True).start()
inside.wait()

class Last:
    def __init__(self):
        self.other = SharedMutableTensor.attach(state.segment)
    def look(self):
        try:
            with self.other.write(timeout=0): pass
        except Exception as error:
            print(type(error).__name__, error, flush=True)

import atexit, weakref
last = Last()
atexit.unregister(weakref.finalize._exitfunc)
atexit.register(last.look)
atexit.register(weakref.finalize._exitfunc)
"""


# -- a process that exits


def test_daemon_thread_keeps_its_locks_while_the_interpreter_exits(mode: MutableMode) -> None:
    """Whoever looks after the finalisers have run finds a writer, not one that has ended; the name is gone."""
    before = set(FOLDER.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", DAEMON, mode.value], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert re.match("WriteConflictError mutable tensor .* is being written by process", done.stdout), done
    assert not {path for path in set(FOLDER.iterdir()) - before if path.name.startswith("q4core-") and not _used(path)}


def _used(path: pathlib.Path) -> bool:
    """Whether another test's process has it open."""
    try:
        locks = FileLocks(str(path), path.name)
    except FileNotFoundError:
        return True
    try:
        return not locks.try_exclusive(0)
    finally:
        locks.close()


# -- forks without room for another file


def _in_a_child_without_files(action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it in a forked child that can't open anything, which must end well."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        child = os.fork()
        if not child:
            code = 1
            try:
                action()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", ["read", "write"])
def test_child_without_files_leaves_its_parents_locks(
    kind: str, state: SharedMutableTensor, other: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the child it is closed, by a typed error for every use; what the parent holds stays held."""

    def use() -> None:
        for attempt in (state.snapshot, state.write().__enter__, state.read().__enter__, lambda: state.version):
            with pytest.raises(q4.LifecycleError):
                attempt()
        state.close()
        gc.collect()

    with getattr(state, kind)():
        _in_a_child_without_files(use, monkeypatch)
        assert not other._protocol.segment.locks.try_exclusive(FIRST_ROW + state._protocol.cells.row)
    assert content_of(other) == [1.0] * 4


# -- a thread that ends inside its block


@pytest.mark.parametrize("kind", ["read", "write"])
def test_thread_that_ends_is_evicted_at_once(kind: str, state: SharedMutableTensor) -> None:
    """Another process may write, or raises, though this one never polls."""
    blocks = [getattr(state, kind)()]
    thread = threading.Thread(target=blocks[0].__enter__)
    thread.start()
    thread.join()
    with processes(state, 1) as (process,):
        if kind == "write" and state.mode is MutableMode.IN_PLACE:
            with pytest.raises(q4.PoisonedError, match="without leaving"):
                process.do("call", "snapshot", timeout=scaled(LONG))
            process.do("call", "reset", timeout=scaled(LONG))
        process.do("call", "replace", torch.zeros(4), timeout=scaled(LONG))
    until(lambda: content_of(state) == [0.0] * 4)


# -- memory and files


def test_closing_gives_the_memory_back(mode: MutableMode) -> None:
    """Though the handle is referenced, nothing is mapped any more."""
    state = SharedMutableTensor(torch.ones(1 << 16), mode=mode)
    name = state.segment
    state.close()
    assert name not in pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "closed" in repr(state)
    state.close()


def test_memory_that_can_not_be_mapped_leaves_no_file_open(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it is made nor when it is attached to."""

    def refuse(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    gc.collect()  # what earlier tests left closes its files now, or at a later time
    files = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    attempts: list[Callable[[], object]] = [
        lambda: SharedMutableTensor(torch.ones(4)),
        lambda: SharedMutableTensor.attach(state.segment),
    ]
    for attempt in attempts:
        with pytest.raises(q4.LifecycleError) as caught:
            attempt()
        # Fewer is no leak: threads that have ended may close what they held at any time.
        assert len(list(pathlib.Path("/proc/self/fd").iterdir())) <= files, caught


def test_own_segments_are_not_opened_to_make_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twenty others, creating one opens as few files as with none."""
    opened: list[object] = []
    allow = os.open

    def note(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(path)
        return allow(path, *rest, **named)

    kept = [SharedMutableTensor(torch.ones(4)) for _ in range(20)]
    monkeypatch.setattr(os, "open", note)
    kept.append(SharedMutableTensor(torch.ones(4)))
    assert opened
    assert not {tensor.segment for tensor in kept} & {str(path).rsplit("/", 1)[-1] for path in opened}


# -- small things


def test_shape_that_is_none_is_refused(state: SharedMutableTensor) -> None:
    """ConfigError that names it."""
    with pytest.raises(q4.ConfigError) as caught:
        SharedMutableTensor.attach(state.segment, shape=4)  # type: ignore[arg-type]  # that is the test
    assert caught.value.name == "shape"


def test_there_are_no_sides_between_processes(state: SharedMutableTensor) -> None:
    """ConfigError, as for any tensor without them."""
    for use in (lambda: state.read(device="cpu"), lambda: state.write(device="cpu")):
        with pytest.raises(q4.ConfigError) as caught:
            use()
        assert caught.value.name == "device"
        assert "MutableTensor(…, sides=…)" in str(caught.value)
