"""``IN_PLACE`` by atomics: no system call where none waits, waiters are woken, and ended processes hold nothing."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from processes import processes
from sharing import LONG, Held, content_of, fork_by_c

import q4core as q4
from q4_actors import MutableMode, SharedMutableTensor
from q4_actors.tensors import backoff
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterator

BAR, BAR_AWAITED, MOVES_AWAITED = 80, 81, 89
"""The words that say who keeps readers out, and that a process waits for the end of that, or for a reader."""


@pytest.fixture
def state() -> Iterator[SharedMutableTensor]:
    """Return a tensor of four zeros."""
    with SharedMutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, name="membrane") as state:
        yield state


def test_reader_that_is_blocked_is_woken(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """By the end of the update, well or not, not by the time after which it would look itself."""
    with processes(state, 1) as (process,):
        monkeypatch.setattr(backoff.Backoff, "next", lambda _: 10 * scaled(LONG))
        for end in ("leave", "fail"):
            process.do("enter", "write")
            process.do("fill", 3.0)
            reading = threads.submit(content_of, state)
            until(lambda: bool(state._protocol.segment.words[BAR_AWAITED]))
            process.do(end)
            if end == "leave":
                assert reading.result(scaled(LONG)) == [3.0] * 4
            else:
                assert isinstance(reading.exception(scaled(LONG)), q4.PoisonedError)
    monkeypatch.undo()
    state.reset()


def test_writer_that_waits_for_readers_is_woken(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """By the last of them, not by the time after which it would look itself."""
    with processes(state, 2) as (one, other):
        monkeypatch.setattr(backoff.Backoff, "next", lambda _: 10 * scaled(LONG))
        one.do("enter", "read")
        other.do("enter", "read")
        writing = threads.submit(state.replace, torch.ones(4))
        for process in (one, other):
            until(lambda: bool(state._protocol.segment.words[MOVES_AWAITED]))
            assert not writing.done()
            process.do("leave")
        writing.result(scaled(LONG))
    assert (content_of(state), state.version) == ([1.0] * 4, 1)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_bar_of_a_killed_writer_is_taken_away(state: SharedMutableTensor, kind: str) -> None:
    """One that was killed while it waited for readers has changed nothing: who comes next reads or writes at once."""
    with processes(state, 2) as (reader, writer):
        reader.do("enter", "read")
        writer.begin("call", "replace", torch.ones(4))
        until(lambda: bool(state._protocol.segment.words[BAR]))
        writer.kill()
        reader.do("leave")
        if kind == "read":
            with state.read(timeout=0) as view:
                assert (view.version, view.tensor.tolist()) == (0, [0.0] * 4)
        else:
            state.replace(torch.ones(4), timeout=0)
        assert state._protocol.segment.words[BAR] == 0
    assert (state.version, state.is_poisoned) == (int(kind == "write"), False)


def test_reader_that_was_killed_while_it_waited_keeps_nobody(state: SharedMutableTensor) -> None:
    """A writer lets it go first once, for a moment, and then takes its row away."""
    cells = state._protocol.cells
    with processes(state, 1) as (process,):
        with state.write() as tensor:
            process.begin("enter", "read")
            until(cells.keeps_out)
            process.kill()
            tensor.fill_(1.0)
        assert cells.keeps_out()

        def is_taken_away() -> bool:
            state.replace(torch.full((4,), 2.0))
            return not cells.keeps_out()

        until(is_taken_away)
    assert content_of(state) == [2.0] * 4


def test_reader_that_gives_up_is_not_waited_for(state: SharedMutableTensor) -> None:
    """Once its time has run out, no row says that it is blocked."""
    cells = state._protocol.cells
    with processes(state, 1) as (process,), state.write():
        with pytest.raises(q4.WriteConflictError):
            process.do("enter", "read", timeout=0.01)
        assert not cells.keeps_out()


def test_fork_without_pythons_hooks(state: SharedMutableTensor) -> None:
    """A child made by C's fork takes a row of its own, and leaves its parent's row, turn and blocks alone."""
    block = state.write()
    block.__enter__().fill_(1.0)
    child = fork_by_c()
    if not child:  # pragma: no cover  # in a process of its own
        code = 1
        try:
            with pytest.raises(q4.LifecycleError):
                block.__exit__(None, None, None)
            for use in (state.read(timeout=0).__enter__, lambda: state.replace(torch.ones(4))):
                with pytest.raises(q4.WriteConflictError):
                    use()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    block.__exit__(None, None, None)
    with state.read() as view:
        child = fork_by_c()
        if not child:  # pragma: no cover  # in a process of its own
            code = 1
            try:
                view.__exit__(None, None, None)
                with pytest.raises(q4.WriteConflictError):
                    state.replace(torch.ones(4), timeout=0.01)
                assert content_of(state) == [1.0] * 4
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert view.tensor.tolist() == [1.0] * 4
    state.replace(torch.full((4,), 2.0))
    assert (content_of(state), state.version) == ([2.0] * 4, 2)


def test_thread_that_ended_inside_its_read_keeps_no_other_process(state: SharedMutableTensor) -> None:
    """Its place is given back as it ends, though the block is still referenced."""
    block = state.read()
    ended = threading.Thread(target=block.__enter__)
    ended.start()
    ended.join()
    with processes(state, 1) as (process,):
        process.do("call", "replace", torch.ones(4), timeout=scaled(LONG))
    with pytest.raises(q4.LifecycleError):
        block.__exit__(None, None, None)
    assert content_of(state) == [1.0] * 4


def test_timeout_error_names_the_holder(
    state: SharedMutableTensor, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """For readers of its own process, whom the plugin let in, or for the other writer."""
    for block, who in ((state.read(), "readers are there"), (state.write(), "another writer is there")):
        held = Held(threads, block)
        with pytest.raises(q4.WriteConflictError) as caught, state.write(wait=True, timeout=0.01):
            raise AssertionError("let in")
        assert who in str(caught.value)
        held.release()
