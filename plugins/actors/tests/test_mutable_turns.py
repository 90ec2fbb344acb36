"""``MutableTensor``: one writer, many readers, who waits for whom, and blocks inside blocks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from sharing import LONG, Held, content_of

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from q4_actors.tensors import rwlock
from q4_actors.tensors.protocol import ThreadProtocol
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterator


# -- one writer


def test_second_writer_is_refused_at_once(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Without wait, a second writer gets WriteConflictError, which names the tensor; the first one is not disturbed."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    with state.write() as tensor:
        tensor.add_(1.0)
        for attempt in (lambda: state.write().__enter__(), lambda: state.replace(torch.ones(4))):
            error = threads.submit(attempt).exception(scaled(LONG))
            assert isinstance(error, q4.WriteConflictError)
            assert "membrane" in str(error)
    assert (state.version, state.stats().conflicts) == (1, 2)


def test_second_writer_waits_by_choice(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """With wait, writers go one after the other, in the order in which they came."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    order: list[int] = []

    def write(index: int) -> None:
        with state.write(wait=True, timeout=scaled(LONG)) as tensor:
            tensor.add_(1.0)
            order.append(index)

    gate = state._protocol.gate
    with state.write() as tensor:
        tensor.add_(1.0)
        futures = []
        for index in range(5):
            futures.append(threads.submit(write, index))
            until(lambda index=index: len(gate._waiting_writers) == index + 1)  # type: ignore[misc]  # a default
    for future in futures:
        future.result(scaled(LONG))
    assert order == [0, 1, 2, 3, 4]
    assert (content_of(state), state.version) == ([6.0] * 4, 6)


def test_writer_that_waited_too_long_gets_an_error(
    threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode
) -> None:
    """When the time runs out it is a WriteConflictError, and the turn goes on to the next one."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.write():
        for timeout in (0, 0.01):
            error = threads.submit(state.replace, torch.ones(4), wait=True, timeout=timeout).exception(scaled(LONG))
            assert isinstance(error, q4.WriteConflictError)
            assert f"could not be written within {float(timeout)} s" in str(error)
    state.replace(torch.ones(4))
    assert (state.version, state.stats().conflicts) == (2, 2)


def test_versioned_readers_never_wait(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """While an update is under way, readers get the version before it."""
    state = MutableTensor(torch.zeros(4))
    with state.write() as tensor:
        tensor.fill_(7.0)
        assert threads.submit(content_of, state).result(scaled(LONG)) == [0.0] * 4
        assert threads.submit(state.snapshot, timeout=scaled(LONG)).result(scaled(LONG)).version == 0


def test_in_place_reader_waits_for_the_writer(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A reader gets in when the update has ended, or raises when its time runs out."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with state.write() as tensor:
        tensor[:2] = 7.0
        for use in (lambda: state.read(timeout=0.01).__enter__(), lambda: state.snapshot(timeout=0)):
            assert isinstance(threads.submit(use).exception(scaled(LONG)), q4.WriteConflictError)
        late = threads.submit(content_of, state)
        until(lambda: len(state._protocol.gate._waiting_readers) == 1)
        assert not late.done()
        tensor[2:] = 7.0
    assert late.result(scaled(LONG)) == [7.0] * 4


def test_in_place_writer_waits_for_readers(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A writer gets in when the last reader has left, or raises when its time runs out; the content is intact."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with Held(threads, state.read(timeout=scaled(LONG))), Held(threads, state.read(timeout=scaled(LONG))):
        for wait in (False, True):
            with pytest.raises(q4.WriteConflictError):
                state.replace(torch.ones(4), wait=wait, timeout=0.01)
        late = threads.submit(state.replace, torch.ones(4), timeout=scaled(LONG))
        until(lambda: state._protocol.gate.has_writer)
        assert not late.done()
        assert state.version == 0
    late.result(scaled(LONG))
    assert content_of(state) == [1.0] * 4


def test_readers_do_not_starve_a_writer(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A reader that comes after a waiting writer goes after it."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    first = Held(threads, state.read(timeout=scaled(LONG)))
    writer = threads.submit(state.replace, torch.ones(4), timeout=scaled(LONG))
    until(lambda: state._protocol.gate.has_writer)
    late = threads.submit(content_of, state)
    until(lambda: len(state._protocol.gate._waiting_readers) == 1)
    first.release()
    writer.result(scaled(LONG))
    assert late.result(scaled(LONG)) == [1.0] * 4


def test_writers_do_not_starve_a_reader(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Readers that waited for a writer go before the next writer."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    first = Held(threads, state.write(timeout=scaled(LONG)))
    writer = threads.submit(state.replace, torch.ones(4), wait=True, timeout=scaled(LONG))
    until(lambda: len(state._protocol.gate._waiting_writers) == 1)
    readers = [threads.submit(content_of, state) for _ in range(2)]
    until(lambda: len(state._protocol.gate._waiting_readers) == 2)
    first.release()
    assert [reader.result(scaled(LONG)) for reader in readers] == [[0.0] * 4] * 2
    writer.result(scaled(LONG))
    assert state.version == 2


def test_readers_go_on_when_the_writer_they_waited_for_gives_up(
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """A writer whose time runs out takes no other turn with it."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with Held(threads, state.read(timeout=scaled(LONG))):
        writer = threads.submit(state.replace, torch.ones(4), timeout=0.2)
        until(lambda: state._protocol.gate.has_writer or writer.done())
        late = threads.submit(content_of, state)
        assert isinstance(writer.exception(scaled(LONG)), q4.WriteConflictError)
        assert late.result(scaled(LONG)) == [0.0] * 4


def test_passed_turn_wakes_only_whom_it_lets_in(
    threads: concurrent.futures.ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last reader leaves, the writer goes on, and a reader that waits for that writer sleeps on."""
    monkeypatch.setattr(rwlock, "LOOK_INTERVAL_S", scaled(LONG))
    looks: list[int] = []
    look = ThreadProtocol.check_waiting

    def watched(self: ThreadProtocol) -> None:
        looks.append(threading.get_ident())
        look(self)

    monkeypatch.setattr(ThreadProtocol, "check_waiting", watched)
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    gate = state._protocol.gate
    entered, go = threading.Event(), threading.Event()

    def write() -> None:
        with state.write(timeout=scaled(LONG)):
            entered.set()
            assert go.wait(scaled(LONG))

    first = Held(threads, state.read(timeout=scaled(LONG)))
    writer = threads.submit(write)
    until(lambda: len(gate._waiting_writers) == 1)
    late = threads.submit(lambda: (content_of(state), threading.get_ident()))
    until(lambda: len(gate._waiting_readers) == 1)
    looks.clear()
    first.release()
    assert entered.wait(scaled(LONG))
    time.sleep(0.05)  # enough for whoever was woken
    woken = set(looks)
    go.set()
    writer.result(scaled(LONG))
    content, reader = late.result(scaled(LONG))
    assert content == [0.0] * 4
    assert reader not in woken


# -- blocks inside blocks


def test_write_inside_own_block_is_refused(mode: MutableMode) -> None:
    """A thread that would wait for itself gets a typed error at once, in both modes, with wait or without."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    for outer in (state.write, state.read):
        for wait in (False, True):
            with outer(), pytest.raises(q4.WriteConflictError) as caught:
                state.replace(torch.ones(4), wait=wait, timeout=scaled(LONG))
            assert f"can't write inside this thread's own {outer.__name__}()" in str(caught.value)
    assert not state.is_poisoned
    assert content_of(state) == [0.0] * 4


def test_read_inside_own_write() -> None:
    """VERSIONED shows the version before; IN_PLACE refuses, for there is none."""
    state = MutableTensor(torch.zeros(4))
    with state.write() as tensor:
        tensor.fill_(7.0)
        assert content_of(state) == state.snapshot().tensor.tolist() == [0.0] * 4
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with state.write() as tensor:
        tensor.fill_(7.0)
        for use in (lambda: state.read(timeout=scaled(LONG)).__enter__(), lambda: state.snapshot(timeout=scaled(LONG))):
            with pytest.raises(q4.WriteConflictError) as caught:
                use()
            assert "can't read inside this thread's own write()" in str(caught.value)
    assert content_of(state) == [7.0] * 4


def test_read_inside_own_read_never_waits(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Also where a writer waits already for the outer read to end."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.read() as outer:
        writer = threads.submit(state.replace, torch.ones(4), timeout=scaled(LONG))
        until(writer.done if mode is MutableMode.VERSIONED else lambda: state._protocol.gate.has_writer)
        with state.read() as inner:
            assert inner.version == (0 if mode is MutableMode.IN_PLACE else 1)
        state.snapshot()
        assert outer.tensor.tolist() == [0.0] * 4
    writer.result(scaled(LONG))
    assert state.version == 1


def test_wait_inside_own_block_that_keeps_the_writer_out(mode: MutableMode) -> None:
    """A wait that could never end is refused."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.write(), pytest.raises(q4.WriteConflictError):
        state.wait(1, scaled(LONG))
    if mode is MutableMode.IN_PLACE:
        with state.read(), pytest.raises(q4.WriteConflictError):
            state.wait(2, scaled(LONG))
    with state.read():
        assert state.wait(1)


def test_finaliser_inside_the_bookkeeping_does_not_deadlock(mode: MutableMode) -> None:
    """Code that the interpreter runs while this thread holds the lock may use the same tensor."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state._protocol.lock:
        state.replace(torch.ones(4))
        assert content_of(state) == [1.0] * 4
        state.close()


def test_block_is_entered_once(mode: MutableMode) -> None:
    """A block that is used again is an error, not a second update."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    for block in (state.read(), state.write()):
        with block:
            pass
        with pytest.raises(q4.LifecycleError), block:
            pass
    assert state.version == 1


def test_block_may_end_in_another_thread(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """A generator that holds a block may be finished by the thread that collects it; nothing stays held."""
    state = MutableTensor(torch.zeros(4), mode=mode)

    def reader() -> Iterator[int]:
        with state.read() as view:
            yield view.version

    generator = reader()
    assert next(generator) == 0
    threads.submit(list, generator).result(scaled(LONG))
    state.replace(torch.ones(4), timeout=0)
    assert state.version == 1
