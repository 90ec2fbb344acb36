"""What atomics add: no system call where nobody waits, rows that die with their process, and who can't take part."""

from __future__ import annotations

import os
import time
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import processes
from sharing import LONG, content_of, fork_by_c, until

import q4core as q4
from q4_actors import SharedMutableTensor, native, native_rows, pauses, segment, shared

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterator

    from q4_actors import MutableMode

AWAITED, TURN_AWAITED = 120, 121
"""The words that say that somebody waits for a version, and for the turn to write."""


@pytest.fixture
def state() -> Iterator[SharedMutableTensor]:
    """Return a tensor of four zeros, with as few slots as can be."""
    with SharedMutableTensor(torch.zeros(4), name="membrane", slots=3, native=True) as state:
        yield state


@pytest.mark.parametrize("numbers", [4, 1 << 16])
def test_update_begins_with_the_newest_version(numbers: int) -> None:
    """Whatever its size, and in whichever slot it lies; one copy is counted for each update."""
    with SharedMutableTensor(torch.arange(float(numbers)), native=True) as state:
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
            cells = state._content.cells  # type: ignore[attr-defined]  # by atomics it has them
            seen.append((cells.rows_used, cells.token(1)))
            process.kill()
    assert [used for used, _ in seen] == [2, 2, 2]
    assert len({token for _, token in seen}) == 3


def test_too_many_handles_are_refused(state: SharedMutableTensor) -> None:
    """LifecycleError with the number; who lets go makes room."""
    joined = [SharedMutableTensor.attach(state.segment) for _ in range(segment.ROWS - 1)]
    with pytest.raises(q4.LifecycleError) as caught:
        SharedMutableTensor.attach(state.segment, name="membrane")
    assert (caught.value.name, caught.value.rule) == ("handles", f"at most {segment.ROWS} at a time")
    assert "membrane" in str(caught.value)
    joined.pop().close()
    with SharedMutableTensor.attach(state.segment) as last:
        last.replace(torch.ones(4))
    assert content_of(joined[-1]) == [1.0] * 4
    for one in joined:
        one.close()


def test_fork_that_python_is_not_told_of(state: SharedMutableTensor) -> None:
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
    monkeypatch.setattr(native_rows, "LONGEST_SLEEP_S", 10 * LONG)
    with processes(state, 1) as (process,):
        for version in (1, 2):
            waiting = threads.submit(state.wait, version)
            until(lambda: bool(state._content.words[AWAITED]))
            process.do("call", "replace", torch.ones(4))
            assert waiting.result(LONG)
        for end, error in (("poison", q4.PoisonedError), ("close", q4.LifecycleError)):
            waiting = threads.submit(state.wait, 99)
            until(lambda: bool(state._content.words[AWAITED]))
            if end == "poison":
                with pytest.raises(q4.PoisonedError), state.read() as view:
                    view.tensor.fill_(7.0)
            else:
                state.close()
            assert isinstance(waiting.exception(LONG), error)
            if end == "poison":
                state.reset(torch.ones(4))


def test_who_waits_for_the_turn_is_woken(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """By whoever leaves its block, well or not, not by the time after which it would look itself."""
    with processes(state, 1) as (process,):
        monkeypatch.setattr(pauses.Pauses, "next", lambda _: 10 * LONG)
        for version, end in ((2, "leave"), (3, "fail")):
            process.do("enter", "write")
            waiting = threads.submit(state.replace, torch.full((4,), float(version)), wait=True)
            until(lambda: bool(state._content.words[TURN_AWAITED]))
            process.do(end)
            waiting.result(LONG)
            assert (content_of(state), state.version) == ([version] * 4, version)


def test_killed_waiter_costs_one_call(state: SharedMutableTensor) -> None:
    """What it leaves behind is taken away by the next update."""
    with processes(state, 1) as (process,):
        process.begin("call", "wait", 5)
        until(lambda: bool(state._content.words[AWAITED]))
        process.kill()
    state.replace(torch.ones(4))
    assert state._content.words[AWAITED] == 0


def test_waker_that_is_killed_strands_nobody(
    state: SharedMutableTensor, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """A version that was published without waking anybody is seen all the same."""
    waiting = threads.submit(state.wait, 1)
    until(lambda: bool(state._content.words[AWAITED]))
    time.sleep(0.05)
    state._content.words[segment.CURRENT] += 1 << 8  # all that the killed process came to do
    assert waiting.result(LONG)


# -- who can't take part


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a process without the plugin."""
    monkeypatch.setattr(shared, "find_cells", lambda: None)


def test_process_without_atomics_is_told_the_way_out(
    state: SharedMutableTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LifecycleError names the tensor, the plugin and the argument; nothing stays taken."""
    monkeypatch.setattr(shared, "find_cells", lambda: None)
    with pytest.raises(q4.LifecycleError) as caught:
        SharedMutableTensor.attach(state.segment, name="membrane")
    assert caught.value.name == "layout"
    for part in ("membrane", "q4-shared-native", "native=False"):
        assert part in str(caught.value)
    with SharedMutableTensor(torch.zeros(4), native=False) as slower:
        monkeypatch.undo()
        with SharedMutableTensor.attach(slower.segment) as joined:
            joined.replace(torch.ones(4))
        assert content_of(slower) == [1.0] * 4


@pytest.mark.usefixtures("without")
def test_atomics_that_are_missing_are_refused() -> None:
    """ConfigError if they are asked for; else the core's locks serve."""
    with pytest.raises(q4.ConfigError) as caught:
        SharedMutableTensor(torch.zeros(4), name="membrane", native=True)
    assert caught.value.name == "native"
    assert "membrane" in str(caught.value)
    with SharedMutableTensor(torch.zeros(4)) as state:
        assert state._content.segment.form.layout == segment.LOCKS


@pytest.mark.parametrize("asked", [1, "yes"])
def test_what_can_not_be_asked_for_is_refused(mode: MutableMode, asked: Any) -> None:
    """ConfigError: the argument is a truth value or None."""
    with pytest.raises(q4.ConfigError) as caught:
        SharedMutableTensor(torch.zeros(4), mode=mode, native=asked)
    assert (caught.value.name, caught.value.value) == ("native", asked)
    with SharedMutableTensor(torch.zeros(4), mode=mode) as state:
        state.replace(torch.ones(4))


@pytest.mark.parametrize("difference", [{"layout": segment.ATOMICS + 1}, {"rows": 1}])
def test_plugin_of_another_layout_is_not_used(monkeypatch: pytest.MonkeyPatch, difference: dict[str, int]) -> None:
    """It would misread what others write."""
    cells = types.SimpleNamespace(**{"name": "other", "layout": segment.ATOMICS, "rows": segment.ROWS, **difference})
    monkeypatch.setattr(native, "default_registry", lambda: types.SimpleNamespace(shared_cells=lambda: (cells,)))
    assert native.find_cells() is None


# -- blocks


def test_block_is_entered_once(state: SharedMutableTensor) -> None:
    """A second time is a LifecycleError, and the first goes on."""
    block = state.read()
    with block as view:
        with pytest.raises(q4.LifecycleError) as caught:
            block.__enter__()
        assert caught.value.name == "with block"
        assert view.tensor.tolist() == [0.0] * 4


def test_collected_block_gives_its_slot_back(state: SharedMutableTensor) -> None:
    """At once, without anybody looking for it."""
    cells = state._content.cells  # type: ignore[attr-defined]  # by atomics it has them
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
    cells: Any = state._content.cells  # type: ignore[attr-defined]  # by atomics it has them
    state.close()
    for ask in (
        lambda: cells.turn,
        lambda: cells.wait(0, 0.1),
        lambda: cells.begin_write(True, 1),  # called by position
        lambda: cells.end_write(0),
        lambda: cells.enter(0),
        cells.try_turn,
        cells.wake,
    ):
        with pytest.raises(ValueError, match="the segment must be open"):
            ask()
    with pytest.raises(q4.LifecycleError):
        cells.read(state._content).__enter__()
