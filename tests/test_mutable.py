"""``MutableTensor``: one writer, many readers, whole versions only, in both modes."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharing import LONG, MODES, Held, content_of, failing_block, poisoned, until

import q4core as q4
from q4core.mutable import MutableMode, MutableStats, MutableTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> MutableMode:
    """Return each mode in turn."""
    return MutableMode(request.param)


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Give a pool whose threads are joined at the end."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


# -- updates and reads


def test_write_publishes_the_next_version(mode: MutableMode) -> None:
    """A block that ends well makes its changes version + 1."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    assert state.version == 0
    with state.write() as tensor:
        tensor.add_(1.0)
        assert state.version == 0
    with state.read() as view:
        assert view.version == state.version == 1
        assert view.tensor.tolist() == [1.0] * 4


def test_update_builds_on_the_version_before(mode: MutableMode) -> None:
    """A writer finds the last version's content."""
    state = MutableTensor(torch.arange(3.0), mode=mode)
    for _ in range(3):
        with state.write() as tensor:
            tensor.mul_(2.0)
    assert content_of(state) == [0.0, 8.0, 16.0]


def test_update_is_counted_and_copied_as_promised(mode: MutableMode) -> None:
    """A read copies nothing, a snapshot once, an update once (VERSIONED) or never (IN_PLACE)."""
    state = MutableTensor(torch.zeros(256), mode=mode)
    for _ in range(5):
        with state.read() as view, state.read() as other:
            assert view.tensor.data_ptr() == other.tensor.data_ptr()
    assert state.stats() == MutableStats(
        reads=10, writes=0, snapshots=0, failures=0, conflicts=0, copies=0, bytes_copied=0
    )
    for _ in range(3):
        with state.write() as tensor:
            tensor.add_(1.0)
    copies = 3 if mode is MutableMode.VERSIONED else 0
    assert (state.stats().writes, state.stats().copies, state.stats().bytes_copied) == (3, copies, copies * 1024)
    for _ in range(2):
        state.snapshot()
    stats = state.stats()
    assert (stats.snapshots, stats.reads) == (2, 10)
    assert (stats.copies, stats.bytes_copied) == (copies + 2, (copies + 2) * 1024)


def test_address_moves_or_stays(mode: MutableMode) -> None:
    """IN_PLACE keeps its address through every kind of update; VERSIONED never changes what was published."""
    state = MutableTensor(torch.zeros(64), mode=mode)
    with state.read() as view:
        before, old = view.tensor.data_ptr(), view.tensor
    with state.write() as tensor:
        tensor.add_(1.0)
    with state.read() as view:
        after = view.tensor.data_ptr()
    state.replace(torch.ones(64))
    with state.read() as view:
        last = view.tensor.data_ptr()
    if mode is MutableMode.IN_PLACE:
        assert before == after == last
    else:
        assert before != after
        assert float(old.sum()) == 0.0


def test_snapshot_is_an_own_copy(mode: MutableMode) -> None:
    """A snapshot has its version, and later updates and its own changes go separate ways."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    state.replace(torch.ones(4))
    snapshot = state.snapshot()
    with state.write() as tensor:
        tensor.fill_(5.0)
    snapshot.tensor.add_(1.0)
    assert snapshot.version == 1
    assert snapshot.tensor.tolist() == [2.0] * 4
    assert content_of(state) == [5.0] * 4


def test_replace_copies_once(mode: MutableMode) -> None:
    """What replaces the content is copied once, and shared with nobody."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    new = torch.ones(4)
    state.replace(new)
    new.fill_(9.0)
    assert (content_of(state), state.version, state.stats().copies) == ([1.0] * 4, 1, 1)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (torch.zeros(5), "shape"),
        (torch.zeros(1), "shape"),
        (torch.zeros(4, dtype=torch.float64), "dtype"),
        (torch.zeros(4, dtype=torch.int32), "dtype"),
        (torch.zeros(4, device="meta"), "tensor"),
        ([0.0] * 4, "tensor"),
    ],
)
def test_replacement_that_does_not_fit_changes_nothing(mode: MutableMode, tensor: Any, name: str) -> None:
    """Another shape, dtype, device or type is an InputError that names it; the tensor is as before."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    with pytest.raises(q4.InputError) as caught:
        state.replace(tensor)
    assert caught.value.name == name
    assert "membrane" in str(caught.value)
    assert (state.version, content_of(state)) == (0, [0.0] * 4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_any_dtype_and_shape(mode: MutableMode, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Scalars, empty tensors and every dtype go through an update, a replacement and a snapshot."""
    state = MutableTensor(torch.zeros(shape, dtype=dtype), mode=mode)
    with state.write() as tensor:
        tensor.copy_(torch.ones(shape).to(dtype))
    state.replace(state.snapshot().tensor)
    snapshot = state.snapshot()
    assert (snapshot.version, snapshot.tensor.dtype, tuple(snapshot.tensor.shape)) == (2, dtype, shape)
    assert bool((snapshot.tensor.to(torch.complex128) == 1.0).all())


# -- failures


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt("boom"), GeneratorExit("boom")])
def test_failed_writer_changes_nothing_when_versioned(error: BaseException) -> None:
    """Whatever leaves the block early, readers keep the version that they had."""
    state = MutableTensor(torch.zeros(4))
    with pytest.raises(type(error), match="boom"), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.fill_(7.0)
        raise error
    assert (content_of(state), state.version, state.is_poisoned) == ([0.0] * 4, 0, False)
    assert (state.stats().failures, state.stats().writes) == (1, 0)
    with state.write() as tensor:
        tensor.add_(1.0)
    assert content_of(state) == [1.0] * 4


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt("boom"), GeneratorExit("boom")])
def test_failed_writer_poisons_in_place(error: BaseException) -> None:
    """Every use is told, with the cause, until the content is reset."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, name="membrane")
    with pytest.raises(type(error), match="boom"), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.fill_(7.0)
        raise error
    assert state.is_poisoned
    for use in (
        lambda: state.read().__enter__(),
        lambda: state.write().__enter__(),
        state.snapshot,
        lambda: state.replace(torch.zeros(4)),
        lambda: state.wait(0),
    ):
        with pytest.raises(q4.PoisonedError) as caught:
            use()
        assert "membrane" in str(caught.value)
        assert type(error).__name__ in str(caught.value.value)
    assert state.version == 0


def test_reset_heals(mode: MutableMode) -> None:
    """After reset the content is zeros, or what was given, under a new version; the address stays in IN_PLACE."""
    for content, expected in ((None, 0.0), (torch.full((4,), 3.0), 3.0)):
        state = poisoned(mode)
        address = state._content.tensor.data_ptr()
        state.reset(content)
        assert (content_of(state), state.version, state.is_poisoned) == ([expected] * 4, 1, False)
        assert mode is MutableMode.VERSIONED or state._content.tensor.data_ptr() == address
        with state.write() as tensor:
            tensor.add_(1.0)
        assert state.version == 2


def test_reset_refuses_a_healthy_tensor(mode: MutableMode) -> None:
    """Reset is for what is poisoned; it never wipes good content."""
    state = MutableTensor(torch.ones(4), mode=mode)
    with pytest.raises(q4.LifecycleError) as caught:
        state.reset()
    assert caught.value.rule == "poisoned"
    assert (content_of(state), state.version) == ([1.0] * 4, 0)


def test_reset_with_wrong_content_leaves_it_poisoned(mode: MutableMode) -> None:
    """A reset that does not fit heals nothing."""
    state = poisoned(mode)
    with pytest.raises(q4.InputError):
        state.reset(torch.zeros(5))
    assert state.is_poisoned


def test_only_one_of_two_resets_takes_effect(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Who comes second finds a healthy tensor, and is told."""
    for _ in range(20):
        state = poisoned(mode)
        ready = threading.Barrier(2)

        def reset(state: MutableTensor = state, ready: threading.Barrier = ready) -> bool:
            ready.wait(LONG)
            try:
                state.reset()
            except q4.LifecycleError:
                return False
            return True

        assert sorted(future.result(LONG) for future in [threads.submit(reset) for _ in range(2)]) == [False, True]
        assert state.version == 1


# -- one writer


def test_second_writer_is_refused_at_once(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Without wait, a second writer gets WriteConflictError, which names the tensor; the first one is not disturbed."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    with state.write() as tensor:
        tensor.add_(1.0)
        for attempt in (lambda: state.write().__enter__(), lambda: state.replace(torch.ones(4))):
            error = threads.submit(attempt).exception(LONG)
            assert isinstance(error, q4.WriteConflictError)
            assert "membrane" in str(error)
    assert (state.version, state.stats().conflicts) == (1, 2)


def test_second_writer_waits_by_choice(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """With wait, writers go one after the other, in the order in which they came."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    order: list[int] = []

    def write(index: int) -> None:
        with state.write(wait=True, timeout=LONG) as tensor:
            tensor.add_(1.0)
            order.append(index)

    gate = state._content.gate
    with state.write() as tensor:
        tensor.add_(1.0)
        futures = []
        for index in range(5):
            futures.append(threads.submit(write, index))
            until(lambda index=index: len(gate._waiting_writers) == index + 1)  # type: ignore[misc]  # a default
    for future in futures:
        future.result(LONG)
    assert order == [0, 1, 2, 3, 4]
    assert (content_of(state), state.version) == ([6.0] * 4, 6)


def test_writer_that_waited_too_long_is_told(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """When the time runs out it is a WriteConflictError, and the turn goes on to the next one."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.write():
        for timeout in (0, 0.01):
            error = threads.submit(state.replace, torch.ones(4), wait=True, timeout=timeout).exception(LONG)
            assert isinstance(error, q4.WriteConflictError)
            assert str(float(timeout)) in str(error.rule)
    state.replace(torch.ones(4))
    assert (state.version, state.stats().conflicts) == (2, 2)


def test_versioned_readers_never_wait(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """While an update is under way, readers get the version before it."""
    state = MutableTensor(torch.zeros(4))
    with state.write() as tensor:
        tensor.fill_(7.0)
        assert threads.submit(content_of, state).result(LONG) == [0.0] * 4
        assert threads.submit(state.snapshot, timeout=LONG).result(LONG).version == 0


def test_in_place_reader_waits_for_the_writer(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A reader gets in when the update is done, or is told when its time runs out."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with state.write() as tensor:
        tensor[:2] = 7.0
        for use in (lambda: state.read(timeout=0.01).__enter__(), lambda: state.snapshot(timeout=0)):
            assert isinstance(threads.submit(use).exception(LONG), q4.WriteConflictError)
        late = threads.submit(content_of, state)
        until(lambda: len(state._content.gate._waiting_readers) == 1)
        assert not late.done()
        tensor[2:] = 7.0
    assert late.result(LONG) == [7.0] * 4


def test_in_place_writer_waits_for_readers(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A writer gets in when the last reader has left, or is told when its time runs out; the content is intact."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with Held(threads, state.read(timeout=LONG)), Held(threads, state.read(timeout=LONG)):
        for wait in (False, True):
            with pytest.raises(q4.WriteConflictError):
                state.replace(torch.ones(4), wait=wait, timeout=0.01)
        late = threads.submit(state.replace, torch.ones(4), timeout=LONG)
        until(lambda: state._content.gate.has_writer)
        assert not late.done()
        assert state.version == 0
    late.result(LONG)
    assert content_of(state) == [1.0] * 4


def test_readers_do_not_starve_a_writer(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A reader that comes after a waiting writer goes after it."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    first = Held(threads, state.read(timeout=LONG))
    writer = threads.submit(state.replace, torch.ones(4), timeout=LONG)
    until(lambda: state._content.gate.has_writer)
    late = threads.submit(content_of, state)
    until(lambda: len(state._content.gate._waiting_readers) == 1)
    first.release()
    writer.result(LONG)
    assert late.result(LONG) == [1.0] * 4


def test_writers_do_not_starve_a_reader(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Readers that waited for a writer go before the next writer."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    first = Held(threads, state.write(timeout=LONG))
    writer = threads.submit(state.replace, torch.ones(4), wait=True, timeout=LONG)
    until(lambda: len(state._content.gate._waiting_writers) == 1)
    readers = [threads.submit(content_of, state) for _ in range(2)]
    until(lambda: len(state._content.gate._waiting_readers) == 2)
    first.release()
    assert [reader.result(LONG) for reader in readers] == [[0.0] * 4] * 2
    writer.result(LONG)
    assert state.version == 2


def test_readers_go_on_when_the_writer_they_waited_for_gives_up(
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """A writer whose time runs out takes nobody's turn with it."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with Held(threads, state.read(timeout=LONG)):
        writer = threads.submit(state.replace, torch.ones(4), timeout=0.2)
        until(lambda: state._content.gate.has_writer or writer.done())
        late = threads.submit(content_of, state)
        assert isinstance(writer.exception(LONG), q4.WriteConflictError)
        assert late.result(LONG) == [0.0] * 4


# -- blocks inside blocks


def test_write_inside_own_block_is_refused(mode: MutableMode) -> None:
    """A thread that would wait for itself gets a typed error at once, in both modes, with wait or without."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    for outer in (state.write, state.read):
        for wait in (False, True):
            with outer(), pytest.raises(q4.WriteConflictError) as caught:
                state.replace(torch.ones(4), wait=wait, timeout=LONG)
            assert outer.__name__ in str(caught.value.rule)
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
        for use in (lambda: state.read(timeout=LONG).__enter__(), lambda: state.snapshot(timeout=LONG)):
            with pytest.raises(q4.WriteConflictError) as caught:
                use()
            assert "own write()" in str(caught.value.rule)
    assert content_of(state) == [7.0] * 4


def test_read_inside_own_read_never_waits(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Also where a writer waits already for the outer read to end."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.read() as outer:
        writer = threads.submit(state.replace, torch.ones(4), timeout=LONG)
        until(lambda: state._content.gate.has_writer or writer.done())
        with state.read() as inner:
            assert inner.version == (0 if mode is MutableMode.IN_PLACE else 1)
        state.snapshot()
        assert outer.tensor.tolist() == [0.0] * 4
    writer.result(LONG)
    assert state.version == 1


def test_wait_inside_own_block_that_keeps_the_writer_out(mode: MutableMode) -> None:
    """A wait that could never end is refused."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.write(), pytest.raises(q4.WriteConflictError):
        state.wait(1, LONG)
    if mode is MutableMode.IN_PLACE:
        with state.read(), pytest.raises(q4.WriteConflictError):
            state.wait(2, LONG)
    with state.read():
        assert state.wait(1)


def test_finaliser_inside_the_bookkeeping_does_not_deadlock(mode: MutableMode) -> None:
    """Code that the interpreter runs while this thread holds the lock may use the same tensor."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state._content.lock:
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
    """A generator that holds a block may be finished by whoever collects it; nothing stays held."""
    state = MutableTensor(torch.zeros(4), mode=mode)

    def reader() -> Iterator[int]:
        with state.read() as view:
            yield view.version

    generator = reader()
    assert next(generator) == 0
    threads.submit(list, generator).result(LONG)
    state.replace(torch.ones(4), timeout=0)
    assert state.version == 1


# -- waiting for a version


def test_wait_returns_when_the_version_is_there(
    threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode
) -> None:
    """True as soon as the version is reached or passed."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    assert state.wait(0, timeout=0)
    waiting = [threads.submit(state.wait, version, LONG) for version in (1, 3)]
    until(lambda: state._content.waiting == 2)
    state.replace(torch.ones(4))
    assert waiting[0].result(LONG)
    assert not waiting[1].done()
    for _ in range(3):
        state.replace(torch.ones(4))
    assert waiting[1].result(LONG)
    assert state.wait(2)


def test_wait_says_when_the_time_ran_out(mode: MutableMode) -> None:
    """False, and nothing else happens."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    assert state.wait(1, timeout=0) is False
    assert state.wait(1, timeout=0.01) is False
    assert state.stats().conflicts == 0


def test_who_waits_is_told_of_poison(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Readers, writers and those who wait for a version get PoisonedError when the writer before them fails."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with failing_block(), state.write():
        waiting: list[concurrent.futures.Future[Any]] = [
            threads.submit(state.wait, 1, 2 * LONG),
            threads.submit(state.snapshot, timeout=2 * LONG),
            threads.submit(state.replace, torch.ones(4), wait=True, timeout=2 * LONG),
        ]
        gate = state._content.gate
        until(lambda: bool(state._content.waiting and gate._waiting_readers and gate._waiting_writers))
        raise RuntimeError("boom")
    for future in waiting:
        assert isinstance(future.exception(LONG), q4.PoisonedError)
    state.reset()
    assert content_of(state) == [0.0] * 4


# -- lifetime


def test_use_after_close_is_refused(mode: MutableMode) -> None:
    """Everything that needs the content is a LifecycleError that names the tensor; facts stay."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    content = weakref.ref(state._content.tensor)
    state.close()
    state.close()
    assert content() is None
    for use in (
        lambda: state.read().__enter__(),
        lambda: state.write().__enter__(),
        state.snapshot,
        lambda: state.replace(torch.zeros(4)),
        lambda: state.wait(0),
        state.reset,
        lambda: state.version,
    ):
        with pytest.raises(q4.LifecycleError) as caught:
            use()
        assert "membrane" in str(caught.value)
        assert caught.value.value == "closed"
    assert state.is_closed
    assert (state.shape, state.dtype, state.device.type, state.stats().writes) == ((4,), torch.float32, "cpu", 0)


def test_close_with_blocks_open(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Readers finish with their version; an update under way is dropped, and its writer told."""
    state = MutableTensor(torch.ones(4), mode=mode)
    with state.read() as view:
        threads.submit(state.close).result(LONG)
        assert view.tensor.tolist() == [1.0] * 4
    state = MutableTensor(torch.ones(4), mode=mode)
    with pytest.raises(q4.LifecycleError), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.add_(1.0)
        state.close()
    state = MutableTensor(torch.ones(4), mode=mode)
    with failing_block(), state.write():
        state.close()
        raise RuntimeError("boom")


def test_close_wakes_who_waits(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Readers, writers and those who wait for a version get LifecycleError."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with pytest.raises(q4.LifecycleError), state.write():  # noqa: PT012  # the block is the subject
        waiting: list[concurrent.futures.Future[Any]] = [
            threads.submit(state.wait, 1, 2 * LONG),
            threads.submit(state.snapshot, timeout=2 * LONG),
            threads.submit(state.replace, torch.ones(4), wait=True, timeout=2 * LONG),
        ]
        gate = state._content.gate
        until(lambda: bool(state._content.waiting and gate._waiting_readers and gate._waiting_writers))
        state.close()
        for future in waiting:
            assert isinstance(future.exception(LONG), q4.LifecycleError)


def test_with_closes(mode: MutableMode) -> None:
    """The tensor itself is a block that closes it."""
    with MutableTensor(torch.zeros(4), mode=mode) as state:
        assert not state.is_closed
    assert state.is_closed


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(mode: MutableMode, duplicate: Callable[[object], object]) -> None:
    """A copy would be another tensor that looks like this one, so it is an error that says what to do."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    with pytest.raises(q4.LifecycleError) as caught:
        duplicate(state)
    assert "membrane" in str(caught.value)
    assert "snapshot" in str(caught.value.hint)


def test_repr_says_what_it_is(mode: MutableMode) -> None:
    """Name, mode, form and state, in every state."""
    state = MutableTensor(torch.zeros(2, 3), mode=mode, name="membrane")
    assert repr(state) == f"MutableTensor('membrane', {mode.value}, torch.float32 [2, 3] on cpu, version 0)"
    assert "poisoned" in repr(poisoned(mode))
    state.close()
    assert "closed" in repr(state)


# -- making one


def test_first_content_is_copied_unless_owned(mode: MutableMode) -> None:
    """copy=False takes the tensor itself; otherwise it is copied, contiguous."""
    tensor = torch.zeros(3, 4).t()
    with MutableTensor(tensor, mode=mode, copy=False).read() as view:
        assert view.tensor.data_ptr() == tensor.data_ptr()
        assert view.tensor.stride() == tensor.stride()
    with MutableTensor(tensor, mode=mode).read() as view:
        assert view.tensor.data_ptr() != tensor.data_ptr()
        assert view.tensor.is_contiguous()
    state = MutableTensor(tensor, mode=mode, copy=False)
    tensor.add_(1.0)
    with pytest.raises(q4.PoisonedError):
        state.snapshot()


class _Wrapped(torch.Tensor):
    """A tensor subclass, as quantisation libraries have them."""


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


@pytest.mark.parametrize(
    ("tensor", "options", "name"),
    [
        ([0.0], {}, "tensor"),
        (torch.zeros(4).to_sparse(), {}, "tensor"),
        (torch.zeros(4, device="meta"), {}, "tensor"),
        (torch.zeros(4).as_subclass(_Wrapped), {}, "tensor"),
        (torch.zeros(1).expand(4), {"copy": False}, "tensor"),
        (_inference_tensor(), {"copy": False}, "tensor"),
    ],
)
def test_tensor_that_cannot_be_shared_is_refused(tensor: Any, options: dict[str, Any], name: str) -> None:
    """InputError names the rule that it breaks."""
    with pytest.raises(q4.InputError) as caught:
        MutableTensor(tensor, **options)
    assert caught.value.name == name
    assert caught.value.rule


def test_expanded_and_inference_tensors_are_fine_as_copies(mode: MutableMode) -> None:
    """What can't be shared can be copied."""
    for tensor in (torch.zeros(1).expand(4), _inference_tensor()):
        state = MutableTensor(tensor, mode=mode)
        with state.write() as content:
            content.add_(torch.arange(4.0))
        assert content_of(state) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: MutableTensor(torch.zeros(1), mode="both"), "mode"),  # type: ignore[arg-type]  # that is the point
        (lambda: MutableTensor(torch.zeros(1), name=3), "name"),  # type: ignore[arg-type]  # as above
        (lambda: MutableTensor(torch.zeros(1)).read(timeout=-1), "timeout"),
        (lambda: MutableTensor(torch.zeros(1)).snapshot(timeout=float("nan")), "timeout"),
        (lambda: MutableTensor(torch.zeros(1)).write(timeout="1"), "timeout"),  # type: ignore[arg-type]  # as above
        (lambda: MutableTensor(torch.zeros(1)).replace(torch.zeros(1), timeout=True), "timeout"),
        (lambda: MutableTensor(torch.zeros(1)).wait(0.5), "version"),  # type: ignore[arg-type]  # as above
        (lambda: MutableTensor(torch.zeros(1)).wait(True), "version"),
        (lambda: MutableTensor(torch.zeros(1)).wait(0, timeout=-1), "timeout"),
    ],
)
def test_bad_argument_is_a_config_error(use: Callable[[], object], name: str) -> None:
    """The error names the argument."""
    with pytest.raises(q4.ConfigError) as caught:
        use()
    assert caught.value.name == name


def test_endless_timeout_is_no_limit(mode: MutableMode) -> None:
    """More seconds than the platform can count are taken as its longest wait."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode(mode.value))
    with state.read(timeout=float("inf")), state.read(timeout=1e300):
        assert state.wait(0, timeout=float("inf"))
