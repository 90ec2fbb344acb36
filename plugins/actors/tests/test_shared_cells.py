"""What atomics add: no system call where none waits, rows that end with their process, rejected processes."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import processes
from sharing import LONG, content_of, fork_by_c

import q4core as q4
from q4_actors import MutableTensor, SharedMutableTensor
from q4_actors.tensors import backoff, file_locks, form, shm_protocol
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterator

    from q4_actors import MutableMode

AWAITED, TURN_AWAITED = 120, 121
"""The words that say that a process waits for a version, and for the turn to write."""


@pytest.fixture
def state() -> Iterator[SharedMutableTensor]:
    """Return a tensor of four zeros, with as few slots as can be."""
    with SharedMutableTensor(torch.zeros(4), name="membrane", slots=3) as state:
        yield state


@pytest.mark.parametrize("numbers", [4, 1 << 16])
def test_update_begins_with_the_newest_version(numbers: int) -> None:
    """Whatever its size, and in whichever slot it lies; one copy is counted for each update."""
    with SharedMutableTensor(torch.arange(float(numbers))) as state:
        for count in range(1, 6):
            with state.write() as tensor:
                assert tensor.equal(torch.arange(float(numbers)) + count - 1)
                tensor.add_(1.0)
        assert state.snapshot().tensor.equal(torch.arange(float(numbers)) + 5)
        assert (state.stats().copies, state.stats().bytes_copied) == (6, 6 * 4 * numbers)


# -- rows


def test_rows_of_killed_readers_are_given_back(state: SharedMutableTensor) -> None:
    """With every old slot held by the dead, a writer that won't wait takes one; what the living hold stays."""
    with processes(state, 2) as (living, dying):
        living.do("enter", "read")
        state.replace(torch.full((4,), 1.0))
        dying.do("enter", "read")
        state.replace(torch.full((4,), 2.0))
        with pytest.raises(q4.WriteConflictError) as caught:
            state.replace(torch.full((4,), 9.0))
        assert "2 of 3" in str(caught.value)
        dying.kill()
        for value in (3.0, 4.0, 5.0):
            state.replace(torch.full((4,), value))
        assert living.do("values") == [0.0] * 4
    assert (content_of(state), state.version) == ([5.0] * 4, 5)


def test_row_of_the_dead_is_taken_by_who_comes(state: SharedMutableTensor) -> None:
    """As many processes may come and go as like: rows are used again, with another token each time."""
    seen = []
    for _ in range(3):
        with processes(state, 1) as (process,):
            process.do("enter", "read")
            cells = state._protocol.cells
            seen.append((cells.rows_used, cells.token(1)))
            process.kill()
    assert [used for used, _ in seen] == [2, 2, 2]
    assert len({token for _, token in seen}) == 3


def test_too_many_handles_are_refused(state: SharedMutableTensor) -> None:
    """LifecycleError with the number; who lets go makes room."""
    joined = [SharedMutableTensor.attach(state.segment) for _ in range(form.ROWS - 1)]
    with pytest.raises(q4.LifecycleError) as caught:
        SharedMutableTensor.attach(state.segment, name="membrane")
    assert f"has {form.ROWS} handles" in str(caught.value)
    assert "membrane" in str(caught.value)
    joined.pop().close()
    with SharedMutableTensor.attach(state.segment) as last:
        last.replace(torch.ones(4))
    assert content_of(joined[-1]) == [1.0] * 4
    for one in joined:
        one.close()


def test_fork_without_pythons_hooks(state: SharedMutableTensor) -> None:
    """A child made by C's fork takes a row of its own, and leaves its parent's row, turn and blocks alone."""
    block = state.write()
    block.__enter__()
    child = fork_by_c()
    if not child:  # pragma: no cover  # in a process of its own
        code = 1
        try:
            with pytest.raises(q4.WriteConflictError):
                state.replace(torch.ones(4))
            with pytest.raises(q4.LifecycleError):
                block.__exit__(None, None, None)
            with pytest.raises(q4.WriteConflictError):
                state.replace(torch.ones(4))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    block.__exit__(ValueError, ValueError(), None)
    assert state.version == 0
    with state.read() as view:
        child = fork_by_c()
        if not child:  # pragma: no cover  # in a process of its own
            code = 1
            try:
                for value in (1.0, 2.0, 3.0):
                    assert content_of(state) == [value - 1] * 4
                    state.replace(torch.full((4,), value))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (state.version, view.version, view.tensor.tolist()) == (3, 0, [0.0] * 4)
    assert content_of(state) == [3.0] * 4


# -- waiting


def test_who_waits_is_woken(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """By an update, by poison and by closing, not by the time after which it would look itself."""
    monkeypatch.setattr(shm_protocol, "VERSION_SLEEP_S", 10 * scaled(LONG))
    with processes(state, 1) as (process,):
        for version in (1, 2):
            waiting = threads.submit(state.wait, version)
            until(lambda: bool(state._protocol.segment.words[AWAITED]))
            process.do("call", "replace", torch.ones(4))
            assert waiting.result(scaled(LONG))
        for end, error in (("poison", q4.PoisonedError), ("close", q4.LifecycleError)):
            waiting = threads.submit(state.wait, 99)
            until(lambda: bool(state._protocol.segment.words[AWAITED]))
            if end == "poison":
                with pytest.raises(q4.PoisonedError), state.read() as view:
                    view.tensor.fill_(7.0)
            else:
                state.close()
            assert isinstance(waiting.exception(scaled(LONG)), error)
            if end == "poison":
                state.reset(torch.ones(4))


def test_who_waits_for_the_turn_is_woken(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """By the process that leaves its block, well or not, not by the time after which it would look itself."""
    with processes(state, 1) as (process,):
        monkeypatch.setattr(backoff.Backoff, "next", lambda _: 10 * scaled(LONG))
        for version, end in ((2, "leave"), (3, "fail")):
            process.do("enter", "write")
            waiting = threads.submit(state.replace, torch.full((4,), float(version)), wait=True)
            until(lambda: bool(state._protocol.segment.words[TURN_AWAITED]))
            process.do(end)
            waiting.result(scaled(LONG))
            assert (content_of(state), state.version) == ([version] * 4, version)


def test_killed_waiter_costs_one_call(state: SharedMutableTensor) -> None:
    """What it leaves behind is taken away by the next update."""
    with processes(state, 1) as (process,):
        process.begin("call", "wait", 5)
        until(lambda: bool(state._protocol.segment.words[AWAITED]))
        process.kill()
    state.replace(torch.ones(4))
    assert state._protocol.segment.words[AWAITED] == 0


def test_waker_that_is_killed_strands_nobody(
    state: SharedMutableTensor, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """A version that was published without a wake-up is seen nevertheless."""
    waiting = threads.submit(state.wait, 1)
    until(lambda: bool(state._protocol.segment.words[AWAITED]))
    time.sleep(0.05)
    state._protocol.segment.words[form.CURRENT] += 1 << 8  # all that the killed process came to do
    assert waiting.result(scaled(LONG))


# -- who can't take part


def test_process_without_the_extension_module_gets_a_hint(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ConfigError names the tensor, the package and what it needs, made or joined; threads do without it."""
    monkeypatch.setitem(sys.modules, "q4_actors._native", None)
    uses: list[Callable[[], object]] = [
        lambda: SharedMutableTensor.attach(state.segment, name="membrane"),
        lambda: SharedMutableTensor(torch.zeros(4), name="membrane"),
    ]
    for use in uses:
        with pytest.raises(q4.ConfigError, match=r"membrane.*extension module of q4-actors is missing.*C\+\+ compiler"):
            use()
    with MutableTensor(torch.zeros(4)) as own:
        own.replace(torch.ones(4))
        assert content_of(own) == [1.0] * 4


def test_both_halves_agree_on_the_rows() -> None:
    """The header has as many rows in Python as in C++."""
    assert importlib.import_module("q4_actors._native").ROWS == form.ROWS


def test_nobody_asks_for_a_lock(mode: MutableMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, snapshots and updates that wait for no other take no system lock."""

    def refuse(*_: object) -> None:
        raise AssertionError("a lock was asked for")

    made = SharedMutableTensor(torch.zeros(4), mode=mode)
    with made as state, SharedMutableTensor.attach(state.segment) as other:
        for method in ("try_shared", "try_exclusive", "release"):
            monkeypatch.setattr(file_locks.FileLocks, method, refuse)
        for value in range(1, 6):
            for one in (state, other):
                with one.write() as tensor:
                    tensor.fill_(value)
                one.replace(torch.full((4,), float(value)))
                assert content_of(other) == one.snapshot().tensor.tolist() == [value] * 4
        monkeypatch.undo()
        assert (other.version, other.stats().reads, other.stats().snapshots) == (20, 10, 5)


# -- blocks


def test_block_is_entered_once(state: SharedMutableTensor) -> None:
    """A second time is a LifecycleError, and the first goes on."""
    block = state.read()
    with block as view:
        with pytest.raises(q4.LifecycleError) as caught:
            block.__enter__()
        assert "was entered before" in str(caught.value)
        assert view.tensor.tolist() == [0.0] * 4


def test_collected_block_gives_its_slot_back(state: SharedMutableTensor) -> None:
    """At once, without anybody looking for it."""
    cells = state._protocol.cells
    blocks = [state.read() for _ in range(3)]
    for block in blocks:
        block.__enter__()
    assert cells.open == 3
    assert cells.reads_any(cells.row)
    blocks.clear()
    del block
    assert cells.open == 0
    assert not cells.reads_any(cells.row)


def test_closed_cells_are_never_touched(state: SharedMutableTensor) -> None:
    """What the plugin itself is asked after the end is an error, not a crash."""
    cells: Any = state._protocol.cells
    state.close()
    for ask in (
        lambda: cells.turn,
        lambda: cells.wait(0, 0.1),
        lambda: cells.begin(True, False, False, 1),  # called by position
        lambda: cells.end(0, False),  # as above
        lambda: cells.enter(0),
        cells.wake,
    ):
        with pytest.raises(ValueError, match="the segment must be open"):
            ask()
    with pytest.raises(q4.LifecycleError):
        cells.read(state._protocol).__enter__()
