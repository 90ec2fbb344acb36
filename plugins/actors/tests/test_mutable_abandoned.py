"""``MutableTensor`` and blocks whose thread has ended: the next block is admitted, or raises."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from abandonment import HUNG, Abandoned, Call, content_of, write

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    from collections.abc import Callable


def _in_place(*, keeps: bool) -> MutableTensor:
    """Return an ``IN_PLACE`` tensor whose writer's thread has ended half-way."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, name="membrane")
    _KEPT.append(writer := Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor[:2].fill_(7.0)))
    writer.end()
    return state


_KEPT: list[Abandoned] = []


@pytest.fixture(autouse=True)
def _let_go() -> Any:
    yield
    _KEPT.clear()


USES: dict[str, Callable[[MutableTensor], object]] = {
    "read": lambda state: content_of(state, timeout=None),
    "read at once": lambda state: state.read(timeout=0).__enter__(),
    "snapshot": lambda state: state.snapshot(),
    "wait": lambda state: state.wait(1),
    "wait at once": lambda state: state.wait(1, timeout=0),
    "write": lambda state: write(state, 1.0, timeout=None),
    "write in turn": lambda state: write(state, 1.0, wait=True, timeout=None),
    "write at once": lambda state: write(state, 1.0, wait=True, timeout=0),
    "replace": lambda state: state.replace(torch.ones(4)),
}


# -- a writer's thread ends


@pytest.mark.parametrize("use", USES)
def test_in_place_writer_that_ended_poisons(use: str, keeps: bool) -> None:
    """The next call, of any kind and without a timeout, raises PoisonedError with the cause; reset() repairs."""
    state = _in_place(keeps=keeps)
    error = Call(lambda: USES[use](state)).error()
    assert isinstance(error, q4.PoisonedError)
    assert "membrane" in str(error)
    assert "without leaving" in str(error.value)
    Call(lambda: state.reset(torch.ones(4))).result()
    assert not state.is_poisoned
    assert Call(lambda: content_of(state)).result() == [1.0] * 4
    Call(lambda: write(state, 2.0)).result()
    assert (state.version, state.stats().failures) == (2, 1)


def test_is_poisoned_looks_itself(keeps: bool) -> None:
    """A query reports it too, before any use of the tensor was tried; and the failure is counted."""
    state = _in_place(keeps=keeps)
    assert state.stats().failures == 1
    assert _in_place(keeps=keeps).is_poisoned


def test_reset_looks_itself(keeps: bool) -> None:
    """A supervisor may reset first thing, without having asked."""
    state = _in_place(keeps=keeps)
    Call(state.reset).result()
    assert content_of(state) == [0.0] * 4


@pytest.mark.parametrize("timeout", [None, 2 * HUNG])
def test_waiting_blocks_get_an_error_when_the_writer_ends(
    timeout: float | None,
    keeps: bool,
) -> None:
    """Readers, writers and calls for a version, which wait already when the writer's thread ends, raise."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    writer = Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor[:2].fill_(7.0))
    timeout = timeout and scaled(timeout)
    waiting = [
        Call(lambda: state.read(timeout=timeout).__enter__()),
        Call(lambda: write(state, 1.0, wait=True, timeout=timeout)),
        Call(lambda: state.wait(1, timeout=timeout)),
    ]
    content = state._protocol
    until(lambda: bool(content.waiting and content.gate._waiting_readers and content.gate._waiting_writers))
    writer.end()
    for call in waiting:
        assert isinstance(call.error(), q4.PoisonedError)
    state.reset(torch.ones(4), timeout=scaled(HUNG))
    assert content_of(state) == [1.0] * 4


def test_waiting_for_a_version_gets_the_error(keeps: bool) -> None:
    """Also if no other thread waits that could notice."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    writer = Abandoned(state.write(), keeps=keeps)
    waiting = Call(lambda: state.wait(1))
    until(lambda: bool(state._protocol.waiting))
    writer.end()
    assert isinstance(waiting.error(), q4.PoisonedError)


@pytest.mark.parametrize(
    "options", [{"timeout": None}, {"wait": True, "timeout": None}, {"wait": True, "timeout": 0}, {"timeout": 0}]
)
def test_versioned_writer_that_ended_changes_nothing(
    options: dict[str, Any],
    keeps: bool,
) -> None:
    """The version before stays, nothing is poisoned, and the next writer is let in as if there had been none."""
    state = MutableTensor(torch.zeros(4))
    writer = Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor.fill_(7.0))
    writer.end()
    assert (content_of(state), state.version) == ([0.0] * 4, 0)
    Call(lambda: write(state, 1.0, **options)).result()
    assert not state.is_poisoned
    assert (content_of(state), state.version) == ([1.0] * 4, 1)
    stats = state.stats()
    assert (stats.writes, stats.failures, stats.conflicts) == (1, 1, 0)


def test_versioned_writer_that_waits_gets_its_turn(keeps: bool) -> None:
    """Writers that wait already when the writer's thread ends go on, all of them."""
    state = MutableTensor(torch.zeros(4))
    writer = Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor.fill_(7.0))
    waiting = [Call(lambda: write(state, 1.0, wait=True, timeout=None)) for _ in range(3)]
    until(lambda: len(state._protocol.gate._waiting_writers) == 3)
    writer.end()
    for call in waiting:
        call.result()
    assert (content_of(state), state.version) == ([1.0] * 4, 3)


# -- a reader's thread ends


@pytest.mark.parametrize("options", [{"timeout": None}, {"wait": True, "timeout": None}, {"timeout": 0}])
def test_reader_that_ended_keeps_no_writer_out(
    options: dict[str, Any],
    mode: MutableMode,
    keeps: bool,
) -> None:
    """Its place is given back, and nothing is poisoned."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    for reader in [Abandoned(state.read(), keeps=keeps) for _ in range(2)]:
        reader.end()
    Call(lambda: write(state, 1.0, **options)).result()
    assert (content_of(state), state.version, state.is_poisoned) == ([1.0] * 4, 1, False)


def test_writer_that_waits_for_a_reader_that_ends(keeps: bool) -> None:
    """It is let in once the reader's thread has ended, and readers behind it after it."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    reader = Abandoned(state.read(), keeps=keeps)
    writer = Call(lambda: write(state, 1.0, timeout=None))
    until(lambda: state._protocol.gate.has_writer)
    late = Call(lambda: content_of(state, timeout=None))
    until(lambda: bool(state._protocol.gate._waiting_readers))
    reader.end()
    writer.result()
    assert late.result() == [1.0] * 4


def test_living_reader_still_keeps_the_writer_out(keeps: bool) -> None:
    """A place that is given back is only the one of the thread that ended."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    living, ending = Abandoned(state.read(), keeps=True), Abandoned(state.read(), keeps=keeps)
    ending.end()
    for timeout in (0, 0.4):
        assert isinstance(Call(lambda: write(state, 1.0, timeout=timeout)).error(), q4.WriteConflictError)  # noqa: B023
    assert not state.is_poisoned
    living.end()
    write(state, 1.0)


def test_reader_that_wrote_and_ended_is_found_out(
    mode: MutableMode,
    keeps: bool,
) -> None:
    """What it changed is no version, so the next block raises."""
    for use in (content_of, lambda state: write(state, 1.0)):
        state = MutableTensor(torch.zeros(4), mode=mode)
        Abandoned(state.read(), keeps=keeps, use=lambda view: view.tensor.fill_(7.0)).end()
        error = Call(lambda: use(state)).error()  # noqa: B023
        assert isinstance(error, q4.PoisonedError)
        assert "outside write()" in str(error.value)
        state.reset(timeout=scaled(HUNG))
        assert content_of(state) == [0.0] * 4


# -- who is taken for whom


def test_living_holder_is_left_alone(mode: MutableMode) -> None:
    """However long it takes, a block that can still be left is waited for; and its update takes effect."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.write(timeout=scaled(HUNG)) as tensor:
        gc.collect()
        error = Call(lambda: write(state, 1.0, wait=True, timeout=0.5)).error()
        assert isinstance(error, q4.WriteConflictError)
        assert not state.is_poisoned
        tensor.fill_(7.0)
    assert (content_of(state), state.version) == ([7.0] * 4, 1)


def test_new_thread_is_not_taken_for_one_that_ended(
    mode: MutableMode,
    keeps: bool,
) -> None:
    """The system gives a new thread the number of one that ended; it holds no block for that."""
    for hold in (MutableTensor.read, MutableTensor.write):
        state = MutableTensor(torch.zeros(4), mode=mode)
        numbers: list[int] = []

        def note(_: object, numbers: list[int] = numbers) -> None:
            numbers.append(threading.get_ident())

        ended = Abandoned(hold(state), keeps=keeps, use=note)
        ended.end()

        def use(state: MutableTensor = state, numbers: list[int] = numbers) -> bool:
            if threading.get_ident() != numbers[0]:
                return False
            if state.is_poisoned:
                state.reset(timeout=scaled(HUNG))
            write(state, 1.0)
            return True

        deadline = time.monotonic() + scaled(HUNG)
        while not Call(use).result():
            assert time.monotonic() < deadline, "no thread got the number, so nothing was tested"
        assert content_of(state) == [1.0] * 4


# -- many of them


def test_updates_are_whole_though_every_third_writer_ends(mode: MutableMode) -> None:
    """Racing threads, many of which end inside their block: no update is lost, none is half there, nothing hangs."""
    state = MutableTensor(torch.zeros(64), mode=mode)
    counted = threading.Lock()
    done = 0

    def write_half() -> None:
        block = state.write(wait=True)  # stored until it has written: then it is over, and others may write there
        block.__enter__()[:32].add_(1.0)

    def add(index: int) -> None:
        nonlocal done
        for round_ in range(10):
            try:
                if (index + round_) % 3 == 0:
                    Call(write_half).result()
                    Call(lambda: state.read().__enter__()).result()
                with state.write(wait=True) as tensor:
                    tensor[:32].add_(1.0)
                    tensor[32:].add_(1.0)
                with counted:
                    done += 1
                with state.read() as view:
                    assert len(set(view.tensor.tolist())) == 1
            except q4.PoisonedError:
                try:
                    state.reset(torch.full((64,), 100.0))
                except q4.LifecycleError:  # another one was faster
                    continue

    for call in [Call(lambda index=index: add(index)) for index in range(6)]:  # type: ignore[misc]  # a default
        call.result()
    if state.is_poisoned:
        state.reset(timeout=scaled(HUNG))
    with state.read() as view:
        values = set(view.tensor.tolist())
    assert len(values) == 1
    assert state.stats().failures > 0
    if mode is MutableMode.VERSIONED:
        assert values == {float(state.version)}
        assert done == state.version == 60


def test_device_is_waited_for_before_the_content_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    """Where work is queued, what a block that ended or failed has queued is over before the next update, once."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    content = state._protocol
    seen: list[tuple[list[float], int]] = []

    class Watched:
        """Lets all go on, and notes when the device is waited for."""

        def arrive(self, block: object) -> None:
            """Take no note."""

        def begin(self, block: object, base: torch.Tensor, *, is_reading: bool) -> None:
            """Let it go on."""

        end = begin

        def end_write(self, block: object, work: torch.Tensor, problem: BaseException | None) -> BaseException | None:
            """Let it end."""
            return problem

        def settle(self) -> None:
            """Note the content at that instant."""
            seen.append((content.tensor.tolist(), content.version))

    monkeypatch.setattr(content, "sync", Watched())
    write(state, 1.0)
    assert seen == []
    Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor.fill_(7.0)).end()
    state.reset(timeout=scaled(HUNG))
    assert seen.pop() == ([7.0] * 4, 1)
    Abandoned(state.read(), keeps=keeps).end()
    write(state, 1.0)
    assert seen.pop() == ([0.0] * 4, 2)
    with pytest.raises(RuntimeError, match="boom"), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.fill_(7.0)
        raise RuntimeError("boom")
    state.reset(timeout=scaled(HUNG))
    assert seen.pop() == ([7.0] * 4, 3)
    write(state, 1.0)
    assert seen == []


@pytest.mark.gpu
def test_cuda_work_of_a_writer_that_ended_is_over_before_the_next(keeps: bool) -> None:
    """What it had queued on its own stream does not land in the content that reset() gives."""

    def queue(tensor: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(2_000_000_000)
            tensor.fill_(7.0)

    state = MutableTensor(torch.zeros(1 << 20, device="cuda"), mode=MutableMode.IN_PLACE)
    Abandoned(state.write(), keeps=keeps, use=queue).end()
    with torch.cuda.stream(torch.cuda.Stream()):
        state.reset(timeout=scaled(HUNG))
    torch.cuda.synchronize()
    assert state.snapshot().tensor.count_nonzero().item() == 0
