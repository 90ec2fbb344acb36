"""``SharedMutableTensor`` between processes: the contract, and what is left of a process that was killed."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from history import Operation, violations
from processes import CONTEXT, processes
from sharing import LONG, Held, content_of

import q4core as q4
from q4_actors import MutableMode, SharedMutableTensor
from q4_actors.tensors.segment import FIRST_ROW
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from processes import Process


BAR = 80
"""The word of the header that says which writer keeps readers out."""


@pytest.fixture
def content() -> torch.Tensor:
    """Return what the shared tensor begins with: 64 zeros."""
    return torch.zeros(64)


@pytest.fixture
def process(state: SharedMutableTensor) -> Iterator[Process]:
    """Return another process that has it."""
    with processes(state, 1) as (process,):
        yield process


def _only(value: float) -> list[float]:
    return [value] * 64


# -- the contract


def test_update_is_seen_by_the_other_process(state: SharedMutableTensor, process: Process) -> None:
    """What one process writes, the other reads, with its version; both ways."""
    state.replace(torch.full((64,), 2.0))
    assert process.do("enter", "read") == (1, _only(2.0))
    process.do("leave")
    process.do("enter", "write")
    process.do("fill", 3.0)
    process.do("leave")
    assert (state.version, content_of(state)) == (2, _only(3.0))
    assert process.do("call", "stats").writes == 1


def test_second_writer_is_refused_or_waits(state: SharedMutableTensor, process: Process) -> None:
    """WriteConflictError at once, by number of the process; write(wait=True) waits, in time or not."""
    process.do("enter", "write")
    with pytest.raises(q4.WriteConflictError) as caught, state.write():
        pass
    assert f"membrane' is being written by process {process.number}" in str(caught.value)
    with pytest.raises(q4.WriteConflictError) as caught, state.write(wait=True, timeout=0.02):
        pass
    assert f"could not be written within 0.02 s: process {process.number} writes" in str(caught.value)
    process.begin("call", "wait", 2, timeout=scaled(LONG))
    with pytest.raises(q4.WriteConflictError):  # it writes itself
        process.result()
    process.do("leave")
    with state.write() as tensor:
        process.begin("enter", "write", wait=True, timeout=scaled(LONG))
        assert not process.is_done(0.1)
        tensor.fill_(5.0)
    assert process.result() == (2, _only(5.0))
    process.do("leave")


def test_reader_in_the_midst_of_an_update(state: SharedMutableTensor, process: Process) -> None:
    """VERSIONED: the version before it, at once. IN_PLACE: waits for the whole one after it, in time or not."""
    process.do("enter", "write")
    process.do("fill", 1.0, 32)
    if state.mode is MutableMode.VERSIONED:
        assert content_of(state) == _only(0.0)
        process.do("leave")
        return
    with pytest.raises(q4.WriteConflictError) as caught:
        state.snapshot(timeout=0.02)
    assert "could not be read within 0.02 s: a writer is there" in str(caught.value)
    assert not state.is_poisoned
    process.do("fill", 1.0)
    process.do("leave")
    assert (content_of(state), state.version) == (_only(1.0), 1)


def test_writer_and_the_readers_of_another_process(
    state: SharedMutableTensor, process: Process, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """VERSIONED: writes at once, the view stays. IN_PLACE: waits for them, and no new reader overtakes it."""
    process.do("enter", "read")
    if state.mode is MutableMode.VERSIONED:
        for value in (1.0, 2.0, 3.0):
            state.replace(torch.full((64,), value))
        assert process.do("values") == _only(0.0)
        process.do("leave")
        return
    with pytest.raises(q4.WriteConflictError), state.write(timeout=0.02):
        pass
    writing = threads.submit(state.replace, torch.ones(64), timeout=scaled(LONG))
    until(lambda: bool(state._protocol.segment.words[BAR]))
    with processes(state, 1) as (late,):
        late.begin("enter", "read", timeout=scaled(LONG))
        assert not late.is_done(0.2)
        assert not writing.done()
        process.do("enter", "read")  # who reads already may read once more
        process.do("leave")
        process.do("leave")
        writing.result(scaled(LONG))
        assert late.result() == (1, _only(1.0))


@pytest.mark.parametrize("stream", ["read", "write"])
def test_streams_do_not_starve_the_other_kind(state: SharedMutableTensor, stream: str) -> None:
    """With five processes that read (or write) without pause, a sixth that does the other gets its turn, often."""
    with processes(state, 5) as streaming:
        for process in streaming:
            process.begin("repeat", stream, seconds=1.5, hold_s=0.01)
        until(lambda: state.version > 0 or stream == "read")
        count = 0
        while not any(process.is_done() for process in streaming):
            if stream == "read":
                state.replace(torch.ones(64), wait=True, timeout=scaled(LONG))
            else:
                state.snapshot(timeout=scaled(LONG))
            count += 1
        streamed = sum(process.result() for process in streaming)
        assert streamed >= 20
        assert count >= (20 if stream == "read" else streamed)  # each writer lets readers that wait go first


def test_writer_that_waits_for_readers_is_the_one_that_is_named() -> None:
    """A second writer's error names the process that has the turn, not the last that wrote."""
    with (
        SharedMutableTensor(torch.zeros(64), mode=MutableMode.IN_PLACE) as state,
        processes(state, 2) as (first, second),
    ):
        first.do("call", "replace", torch.ones(64))
        with SharedMutableTensor.attach(state.segment) as other, other.read():
            second.begin("enter", "write")
            until(lambda: bool(state._protocol.segment.words[BAR]))
            with pytest.raises(q4.WriteConflictError) as caught, state.write():
                pass
            assert f"process {second.number}" in str(caught.value)
        second.result()


def test_wait_is_woken_from_another_process(
    state: SharedMutableTensor, process: Process, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """True once the other process has written; False when the time runs out."""
    assert state.wait(1, timeout=0.01) is False
    waiting = threads.submit(state.wait, 1, scaled(LONG))
    process.do("call", "replace", torch.ones(64))
    assert waiting.result(scaled(LONG))
    process.begin("call", "wait", 2, timeout=scaled(LONG))
    assert not process.is_done(0.05)
    state.replace(torch.ones(64))
    assert process.result()


def test_maker_that_closes_wakes_everybody(state: SharedMutableTensor, process: Process) -> None:
    """Who waits in another process gets a LifecycleError."""
    process.begin("call", "wait", 1)
    assert not process.is_done(0.05)
    state.close()
    with pytest.raises(q4.LifecycleError):
        process.result()


def test_handle_that_is_closed_while_it_waits_to_write(
    state: SharedMutableTensor, process: Process, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """Its thread gets a LifecycleError; the process that writes goes on."""
    process.do("enter", "write")
    with SharedMutableTensor.attach(state.segment, name="membrane") as other:
        waiting = threads.submit(other.replace, torch.ones(64), wait=True)
        until(lambda: other._protocol.gate.has_writer)
        time.sleep(0.02)
    with pytest.raises(q4.LifecycleError, match="membrane"):
        waiting.result(scaled(LONG))
    process.do("leave")
    assert state.version == 1


def test_failed_writer_poisons_in_place_for_others(state: SharedMutableTensor, process: Process) -> None:
    """Its error is the cause in other processes' errors; VERSIONED has not changed."""
    process.do("enter", "write")
    process.do("fill", 7.0)
    process.do("fail")
    if state.mode is MutableMode.VERSIONED:
        assert (content_of(state), state.version) == (_only(0.0), 0)
        return
    with pytest.raises(q4.PoisonedError) as caught:
        state.snapshot()
    assert "RuntimeError: boom" in str(caught.value)


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_handle_is_given_to_a_process(mode: MutableMode, method: str) -> None:
    """As an argument, whichever way the process is started."""
    context: Any = multiprocessing.get_context(method)
    with SharedMutableTensor(torch.zeros(64), mode=mode) as state, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads; the child uses none of them
        child = context.Process(target=_add_one, args=(state,))
        child.start()
        child.join(scaled(LONG))
        assert child.exitcode == 0
        assert (content_of(state), state.version) == (_only(1.0), 1)


def _add_one(state: SharedMutableTensor) -> None:
    with state.write() as tensor:
        tensor.add_(1.0)


# -- fork


def _in_a_fork(action: Callable[[], object]) -> None:
    """Run something in a forked child, which must end well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + scaled(LONG)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("hung")
        time.sleep(0.001)


def test_child_has_a_handle_of_its_own(state: SharedMutableTensor) -> None:
    """It reads, writes and waits; its end gives back nothing of its parent's."""

    def use() -> None:
        with state.write() as tensor:
            tensor.fill_(1.0)
        assert content_of(state) == _only(1.0)
        assert state.stats().writes == 1
        state.close()

    with state.read() as view:
        if state.mode is MutableMode.VERSIONED:
            _in_a_fork(use)
            assert view.tensor.tolist() == _only(0.0)
    if state.mode is MutableMode.IN_PLACE:
        _in_a_fork(use)
    assert (content_of(state), state.version) == (_only(1.0), 1)
    SharedMutableTensor.attach(state.segment).close()


def test_what_a_parent_holds_is_not_its_childs(state: SharedMutableTensor) -> None:
    """In the child the parent is another writer; leaving the parent's blocks there is refused, and changes nothing."""
    block = state.write()
    tensor = block.__enter__()

    def use() -> None:
        with pytest.raises(q4.WriteConflictError), state.write():
            pass
        with pytest.raises(q4.LifecycleError):
            block.__exit__(None, None, None)
        with pytest.raises(q4.WriteConflictError), state.write():
            pass

    _in_a_fork(use)
    tensor.fill_(2.0)
    block.__exit__(None, None, None)
    assert (content_of(state), state.version) == (_only(2.0), 1)


def test_view_is_not_left_in_the_child(state: SharedMutableTensor) -> None:
    """A read begun before the fork goes on in the parent; the child is refused, and its own reads are right."""
    with state.read() as view:

        def use() -> None:
            assert content_of(state) == _only(0.0)
            with pytest.raises(q4.LifecycleError):
                view.__exit__(None, None, None)
            assert content_of(state) == _only(0.0)

        _in_a_fork(use)
        assert view.tensor.tolist() == _only(0.0)
        if state.mode is MutableMode.IN_PLACE:
            with SharedMutableTensor.attach(state.segment) as other, pytest.raises(q4.WriteConflictError):
                other.replace(torch.ones(64), timeout=0.02)


def test_fork_amid_other_threads_blocks(
    state: SharedMutableTensor, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """What other threads of the parent hold does not hang the child, nor does it outlive the parent's hold."""

    def refused() -> None:
        with pytest.raises(q4.WriteConflictError), state.write():
            pass

    with Held(threads, state.read()):
        _in_a_fork(lambda: content_of(state))
    state.replace(torch.ones(64), timeout=scaled(LONG))
    with Held(threads, state.write()):
        _in_a_fork(refused)
    _in_a_fork(lambda: state.replace(torch.zeros(64), timeout=scaled(LONG)))
    assert state.version == 3


# -- killed processes


def test_killed_writer(state: SharedMutableTensor, process: Process) -> None:
    """VERSIONED: nothing has happened. IN_PLACE: poisoned, by number of the process, until reset."""
    process.do("enter", "write")
    process.do("fill", 7.0, 32)
    assert (state.version, state.is_poisoned) == (0, False)
    process.kill()
    if state.mode is MutableMode.VERSIONED:
        assert (content_of(state), state.version, state.is_poisoned) == (_only(0.0), 0, False)
    else:
        assert state.is_poisoned
        for use in (state.snapshot, state.write().__enter__, lambda: state.wait(1)):
            with pytest.raises(q4.PoisonedError) as caught:
                use()
            assert f"process {process.number} ended" in str(caught.value)
        state.reset(torch.full((64,), 2.0))
    state.replace(torch.ones(64))
    assert content_of(state) == _only(1.0)


def test_waiting_for_a_killed_writer_raises(
    state: SharedMutableTensor, process: Process, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """VERSIONED: the next writer is let in. IN_PLACE: readers, writers and waiters get PoisonedError."""
    process.do("enter", "write")
    waiting: list[concurrent.futures.Future[Any]] = [
        threads.submit(state.replace, torch.ones(64), wait=True, timeout=scaled(LONG)),
        threads.submit(state.wait, 1, scaled(LONG)),
    ]
    if state.mode is MutableMode.IN_PLACE:
        waiting.append(threads.submit(state.snapshot, timeout=scaled(LONG)))
    time.sleep(0.05)
    assert not any(future.done() for future in waiting)
    process.kill()
    for future in waiting:
        error = future.exception(scaled(LONG))
        if state.mode is MutableMode.VERSIONED:
            assert error is None
        else:
            assert isinstance(error, q4.PoisonedError)


def test_killed_reader_holds_nothing(state: SharedMutableTensor, process: Process) -> None:
    """Its slot is free for writers again."""
    process.do("enter", "read")
    process.kill()
    for _ in range(8):
        state.replace(torch.ones(64), timeout=scaled(LONG))
    cells = state._protocol.cells
    left = [row for row in range(cells.rows_used) if cells.reads_any(row)]
    with SharedMutableTensor.attach(state.segment) as other:  # a row that can be locked is a dead process's, and free
        assert all(other._protocol.segment.locks.try_exclusive(FIRST_ROW + row) for row in left)


def test_killed_while_it_waits(state: SharedMutableTensor, process: Process) -> None:
    """A process that dies while it waits to write or to read blocks no other."""
    kinds = ("read", "write") if state.mode is MutableMode.IN_PLACE else ("write",)
    with processes(state, len(kinds)) as waiting:
        process.do("enter", "write")
        for kind, other in zip(kinds, waiting, strict=True):
            other.begin("enter", kind, **({"wait": True} if kind == "write" else {}))
            assert not other.is_done(0.05)
        for other in waiting:
            other.kill()
        process.do("leave")
    process.do("enter", "read")
    if state.mode is MutableMode.IN_PLACE:
        with processes(state, 1) as (writer,):
            writer.begin("enter", "write")
            until(lambda: bool(state._protocol.segment.words[BAR]))
            writer.kill()
        assert state._protocol.segment.words[BAR]
        assert content_of(state) == _only(0.0)
        assert not state._protocol.segment.words[BAR]
    process.do("leave")
    state.replace(torch.ones(64), timeout=scaled(LONG))
    assert content_of(state) == _only(1.0)


def test_parent_killed_amid_an_update_has_forked(state: SharedMutableTensor) -> None:
    """A child that lives on holds nothing that its killed parent held."""
    ours, theirs = CONTEXT.Pipe()
    parent = CONTEXT.Process(target=_fork_and_die, args=(state, theirs))
    parent.start()
    parent.join(scaled(LONG))
    assert parent.exitcode == -9
    assert ours.poll(scaled(LONG))
    child = ours.recv()
    try:
        if state.mode is MutableMode.IN_PLACE:
            assert state.is_poisoned
            state.reset()
        state.replace(torch.ones(64))
        os.kill(child, 0)
    finally:
        os.kill(child, 9)


def _fork_and_die(state: SharedMutableTensor, line: Connection) -> None:
    with state.write():
        child = os.fork()
        if not child:
            line.send(os.getpid())
            time.sleep(2 * scaled(LONG))
            os._exit(0)
        os.kill(os.getpid(), 9)


# -- races


def _race(state: SharedMutableTensor, line: Connection, index: int, rounds: int) -> None:
    """Read and write at random, and send what was seen."""
    chance = torch.Generator().manual_seed(index)
    history: list[Operation] = []
    line.send("ready")
    line.recv()
    for round_ in range(rounds):
        start = time.perf_counter_ns()
        if index < 2 and float(torch.rand((), generator=chance)) < 0.7:
            value = 1.0 + index * rounds + round_
            with state.write(wait=True, timeout=scaled(LONG)) as tensor:
                tensor[:32] = value
                tensor[32:] = value
                version = state.version + 1
            history.append(Operation("write", version, value, start, time.perf_counter_ns()))
        else:
            with state.read(timeout=scaled(LONG)) as view:
                seen = set(view.tensor[:32].tolist()) | set(view.tensor[32:].tolist())
                version = view.version
            shown = seen.pop() if len(seen) == 1 else tuple(seen)
            history.append(Operation("read", version, shown, start, time.perf_counter_ns()))
    line.send(history)


def test_races_are_linearizable(state: SharedMutableTensor) -> None:
    """Racing processes leave a history that one order explains, by the clock that they share (TC-13)."""
    count, rounds = 4, 300
    lines = []
    for index in range(count):
        ours, theirs = CONTEXT.Pipe()
        CONTEXT.Process(target=_race, args=(state, theirs, index, rounds), daemon=True).start()
        lines.append(ours)
    for line in lines:
        assert line.poll(scaled(LONG))
        assert line.recv() == "ready"
    for line in lines:
        line.send("go")
    history: list[Operation] = []
    for line in lines:
        assert line.poll(2 * scaled(LONG)), "hung"
        history += line.recv()
    assert len(history) == count * rounds
    assert violations(history, 0.0) == ()
    assert state.version == sum(operation.kind == "write" for operation in history)
