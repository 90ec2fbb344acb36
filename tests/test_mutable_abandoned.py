"""``MutableTensor`` and blocks that nobody leaves: their thread has ended, or they were collected."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharing import until

import q4core as q4
from q4core.mutable import MutableMode, MutableTensor

if TYPE_CHECKING:
    from collections.abc import Callable

HUNG = 10.0
"""Seconds after which a call has hung. Its thread is a daemon, so that it can't hang the suite."""


class _Call:
    """A call in a thread of its own, and what became of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        call, self._call = self._call, lambda: None
        try:
            self._result = call()
        except BaseException as error:  # noqa: BLE001  # it is what the test asks for
            self._error = error

    def _join(self) -> None:
        self._thread.join(HUNG)
        assert not self._thread.is_alive(), "hung"

    def result(self) -> Any:
        self._join()
        if self._error is not None:
            raise self._error
        return self._result

    def error(self) -> BaseException | None:
        self._join()
        return self._error


class _Abandoned:
    """A thread that enters a block, uses it, and ends inside it when it is told to."""

    def __init__(self, block: Any, *, keeps: bool, use: Callable[[Any], object] = lambda _: None) -> None:
        self._entered, self._go = threading.Event(), threading.Event()
        self.block: Any = block if keeps else None
        self._use = use
        holder = [block]
        del block
        self._call = _Call(lambda: self._run(holder))
        until(self._entered.is_set)

    def _run(self, holder: list[Any]) -> None:
        block = holder.pop()
        self._use(block.__enter__())
        self._entered.set()
        assert self._go.wait(HUNG)

    def end(self) -> None:
        """Let the thread end without leaving the block."""
        self._go.set()
        self._call.result()


def _content_of(state: MutableTensor, timeout: float | None = HUNG) -> list[float]:
    with state.read(timeout=timeout) as view:
        return list(view.tensor.tolist())


def _write(state: MutableTensor, value: float, *, wait: bool = False, timeout: float | None = HUNG) -> None:
    with state.write(wait=wait, timeout=timeout) as tensor:
        tensor.fill_(value)


def _in_place(*, keeps: bool) -> MutableTensor:
    """Return an ``IN_PLACE`` tensor whose writer's thread has ended half-way."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, name="membrane")
    _KEPT.append(writer := _Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor[:2].fill_(7.0)))
    writer.end()
    return state


_KEPT: list[_Abandoned] = []


@pytest.fixture(autouse=True)
def _let_go() -> Any:
    yield
    _KEPT.clear()


@pytest.fixture(params=[True, False], ids=["kept", "collected"])
def keeps(request: pytest.FixtureRequest) -> bool:
    """Whether somebody still holds the block that its thread did not leave."""
    return bool(request.param)


USES: dict[str, Callable[[MutableTensor], object]] = {
    "read": lambda state: _content_of(state, timeout=None),
    "read at once": lambda state: state.read(timeout=0).__enter__(),
    "snapshot": lambda state: state.snapshot(),
    "wait": lambda state: state.wait(1),
    "wait at once": lambda state: state.wait(1, timeout=0),
    "write": lambda state: _write(state, 1.0, timeout=None),
    "write in turn": lambda state: _write(state, 1.0, wait=True, timeout=None),
    "write at once": lambda state: _write(state, 1.0, wait=True, timeout=0),
    "replace": lambda state: state.replace(torch.ones(4)),
}


# -- a writer's thread ends


@pytest.mark.parametrize("use", USES)
def test_in_place_writer_that_ended_poisons(use: str, keeps: bool) -> None:
    """Whoever comes next, by whatever call and without a timeout, gets PoisonedError that says why; reset() heals."""
    state = _in_place(keeps=keeps)
    error = _Call(lambda: USES[use](state)).error()
    assert isinstance(error, q4.PoisonedError)
    assert "membrane" in str(error)
    assert "without leaving" in str(error.value)
    _Call(lambda: state.reset(torch.ones(4))).result()
    assert not state.is_poisoned
    assert _Call(lambda: _content_of(state)).result() == [1.0] * 4
    _Call(lambda: _write(state, 2.0)).result()
    assert (state.version, state.stats().failures) == (2, 1)


def test_is_poisoned_looks_itself(keeps: bool) -> None:
    """Who only asks is told too, before anybody has tried to use the tensor; and the failure is counted."""
    state = _in_place(keeps=keeps)
    assert state.stats().failures == 1
    assert _in_place(keeps=keeps).is_poisoned


def test_reset_looks_itself(keeps: bool) -> None:
    """A supervisor may reset first thing, without having asked."""
    state = _in_place(keeps=keeps)
    _Call(state.reset).result()
    assert _content_of(state) == [0.0] * 4


@pytest.mark.parametrize("timeout", [None, 2 * HUNG])
def test_who_waits_is_told_that_the_writer_ended(
    timeout: float | None,
    keeps: bool,
) -> None:
    """Readers, writers and those who wait for a version, who wait already when the writer's thread ends, are told."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    writer = _Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor[:2].fill_(7.0))
    waiting = [
        _Call(lambda: state.read(timeout=timeout).__enter__()),
        _Call(lambda: _write(state, 1.0, wait=True, timeout=timeout)),
        _Call(lambda: state.wait(1, timeout=timeout)),
    ]
    content = state._content
    until(lambda: bool(content.waiting and content.gate._waiting_readers and content.gate._waiting_writers))
    writer.end()
    for call in waiting:
        assert isinstance(call.error(), q4.PoisonedError)
    state.reset(torch.ones(4), timeout=HUNG)
    assert _content_of(state) == [1.0] * 4


def test_who_waits_only_for_a_version_is_told(keeps: bool) -> None:
    """Also if nobody else waits who could notice."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    writer = _Abandoned(state.write(), keeps=keeps)
    waiting = _Call(lambda: state.wait(1))
    until(lambda: bool(state._content.waiting))
    writer.end()
    assert isinstance(waiting.error(), q4.PoisonedError)


@pytest.mark.parametrize(
    "options", [{"timeout": None}, {"wait": True, "timeout": None}, {"wait": True, "timeout": 0}, {"timeout": 0}]
)
def test_versioned_writer_that_ended_changes_nothing(
    options: dict[str, Any],
    keeps: bool,
) -> None:
    """The version before stays, nothing is poisoned, and the next writer is let in as if nobody had been there."""
    state = MutableTensor(torch.zeros(4))
    writer = _Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor.fill_(7.0))
    writer.end()
    assert (_content_of(state), state.version) == ([0.0] * 4, 0)
    _Call(lambda: _write(state, 1.0, **options)).result()
    assert not state.is_poisoned
    assert (_content_of(state), state.version) == ([1.0] * 4, 1)
    stats = state.stats()
    assert (stats.writes, stats.failures, stats.conflicts) == (1, 1, 0)


def test_versioned_writer_that_waits_gets_its_turn(keeps: bool) -> None:
    """Writers that wait already when the writer's thread ends go on, all of them."""
    state = MutableTensor(torch.zeros(4))
    writer = _Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor.fill_(7.0))
    waiting = [_Call(lambda: _write(state, 1.0, wait=True, timeout=None)) for _ in range(3)]
    until(lambda: len(state._content.gate._waiting_writers) == 3)
    writer.end()
    for call in waiting:
        call.result()
    assert (_content_of(state), state.version) == ([1.0] * 4, 3)


# -- a reader's thread ends


@pytest.mark.parametrize("options", [{"timeout": None}, {"wait": True, "timeout": None}, {"timeout": 0}])
def test_reader_that_ended_keeps_no_writer_out(
    options: dict[str, Any],
    mode: MutableMode,
    keeps: bool,
) -> None:
    """Its place is given back, and nothing is poisoned."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    for reader in [_Abandoned(state.read(), keeps=keeps) for _ in range(2)]:
        reader.end()
    _Call(lambda: _write(state, 1.0, **options)).result()
    assert (_content_of(state), state.version, state.is_poisoned) == ([1.0] * 4, 1, False)


def test_writer_that_waits_for_a_reader_that_ends(keeps: bool) -> None:
    """It is let in once the reader's thread has ended, and readers behind it after it."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    reader = _Abandoned(state.read(), keeps=keeps)
    writer = _Call(lambda: _write(state, 1.0, timeout=None))
    until(lambda: state._content.gate.has_writer)
    late = _Call(lambda: _content_of(state, timeout=None))
    until(lambda: bool(state._content.gate._waiting_readers))
    reader.end()
    writer.result()
    assert late.result() == [1.0] * 4


def test_living_reader_still_keeps_the_writer_out(keeps: bool) -> None:
    """A place that is given back is only the one of the thread that ended."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    living, ending = _Abandoned(state.read(), keeps=True), _Abandoned(state.read(), keeps=keeps)
    ending.end()
    for timeout in (0, 0.4):
        assert isinstance(_Call(lambda: _write(state, 1.0, timeout=timeout)).error(), q4.WriteConflictError)  # noqa: B023
    assert not state.is_poisoned
    living.end()
    _write(state, 1.0)


def test_reader_that_wrote_and_ended_is_found_out(
    mode: MutableMode,
    keeps: bool,
) -> None:
    """What it changed is no version, so whoever comes next is told."""
    for use in (_content_of, lambda state: _write(state, 1.0)):
        state = MutableTensor(torch.zeros(4), mode=mode)
        _Abandoned(state.read(), keeps=keeps, use=lambda view: view.tensor.fill_(7.0)).end()
        error = _Call(lambda: use(state)).error()  # noqa: B023
        assert isinstance(error, q4.PoisonedError)
        assert "outside write()" in str(error.value)
        state.reset(timeout=HUNG)
        assert _content_of(state) == [0.0] * 4


# -- a block is collected while its thread lives


def test_collected_write_block_is_a_failed_update(mode: MutableMode) -> None:
    """A block that can't be left any more has failed: for its own thread and for others, also by way of a cycle."""
    for makes_cycle in (False, True):
        state = MutableTensor(torch.zeros(4), mode=mode)
        block = state.write()
        block.__enter__().fill_(7.0)
        if makes_cycle:
            block.source = cycle = [block]  # type: ignore[assignment]  # any cycle will do
            del cycle
        del block
        gc.collect()
        if mode is MutableMode.IN_PLACE:
            for call in (lambda: _content_of(state), lambda: _Call(lambda: _content_of(state)).result()):  # noqa: B023
                with pytest.raises(q4.PoisonedError) as caught:
                    call()
                assert "without leaving" in str(caught.value.value)
            state.reset(timeout=HUNG)
        assert _content_of(state) == [0.0] * 4
        _write(state, 1.0, timeout=0)
        assert state.stats().failures == 1


def test_collected_read_block_keeps_no_writer_out(mode: MutableMode) -> None:
    """Its own thread and others may write; an outer block of the same thread still counts."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.read():
        state.read().__enter__()
        with pytest.raises(q4.WriteConflictError):
            _write(state, 1.0, timeout=0)
    state.read().__enter__()
    _write(state, 1.0, timeout=0)
    state.read().__enter__()
    _Call(lambda: _write(state, 2.0, timeout=0)).result()
    assert (_content_of(state), state.is_poisoned) == ([2.0] * 4, False)


def test_collected_blocks_leave_nothing_behind(mode: MutableMode) -> None:
    """The bookkeeping does not grow by blocks that nobody left, once there has been an update."""
    for drop in (
        lambda state: state.read().__enter__(),
        lambda state: _Abandoned(state.read(), keeps=False).end(),
        lambda state: _Call(lambda: state.read().__enter__()).result(),
    ):
        state = MutableTensor(torch.zeros(4), mode=mode)
        for _ in range(5):
            drop(state)
        _write(state, 1.0)
        gate = state._content.gate
        assert (len(gate._reads_by_thread), len(gate.lost_reads), len(gate.lost_writes)) == (0, 0, 0)


def test_collected_generator_leaves_its_block(mode: MutableMode) -> None:
    """A generator that its thread did not finish is closed by the interpreter, which fails its update."""
    state = MutableTensor(torch.zeros(4), mode=mode)

    def update() -> Any:
        with state.write(timeout=HUNG) as tensor:
            tensor.fill_(7.0)
            yield

    _Call(lambda: next(update())).result()
    assert state.is_poisoned is (mode is MutableMode.IN_PLACE)
    if state.is_poisoned:
        state.reset(timeout=HUNG)
    assert _Call(lambda: _content_of(state)).result() == [0.0] * 4
    assert state.stats().failures == 1


# -- who is taken for whom


def test_living_holder_is_left_alone(mode: MutableMode) -> None:
    """However long it takes, a block that can still be left is waited for; and its update takes effect."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.write(timeout=HUNG) as tensor:
        gc.collect()
        error = _Call(lambda: _write(state, 1.0, wait=True, timeout=0.5)).error()
        assert isinstance(error, q4.WriteConflictError)
        assert not state.is_poisoned
        tensor.fill_(7.0)
    assert (_content_of(state), state.version) == ([7.0] * 4, 1)


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

        ended = _Abandoned(hold(state), keeps=keeps, use=note)
        ended.end()

        def use(state: MutableTensor = state, numbers: list[int] = numbers) -> bool:
            if threading.get_ident() != numbers[0]:
                return False
            if state.is_poisoned:
                state.reset(timeout=HUNG)
            _write(state, 1.0)
            return True

        deadline = time.monotonic() + HUNG
        while not _Call(use).result():
            assert time.monotonic() < deadline, "no thread got the number, so nothing was tested"
        assert _content_of(state) == [1.0] * 4


# -- leaving too late


def test_write_block_that_is_left_too_late(mode: MutableMode) -> None:
    """Once its place was given back, leaving it is a LifecycleError for who does, and nothing happens to the rest."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    for version, error in enumerate((None, RuntimeError("boom"))):
        writer = _Abandoned(state.write(), keeps=True, use=lambda tensor: tensor.fill_(7.0))
        writer.end()
        _Call(state.reset if state.is_poisoned else lambda: _write(state, 0.0)).result()
        stats = state.stats()
        if error is None:
            with pytest.raises(q4.LifecycleError) as caught:
                writer.block.__exit__(None, None, None)
            assert "membrane" in str(caught.value)
            assert "thread" in str(caught.value)
        else:
            writer.block.__exit__(type(error), error, None)
        assert (state.version, state.is_poisoned, state.stats()) == (version + 1, False, stats)
        assert _content_of(state) == [0.0] * 4


def test_write_block_that_is_left_too_late_does_not_end_another(mode: MutableMode) -> None:
    """The writer who came after stays the only one."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    writer = _Abandoned(state.write(), keeps=True)
    writer.end()
    if state.is_poisoned:
        state.reset(timeout=HUNG)
    with state.write(timeout=HUNG) as tensor:
        with pytest.raises(q4.LifecycleError):
            writer.block.__exit__(None, None, None)
        assert isinstance(_Call(lambda: _write(state, 1.0)).error(), q4.WriteConflictError)
        tensor.fill_(2.0)
    assert _content_of(state) == [2.0] * 4


def test_in_place_read_block_that_is_left_too_late() -> None:
    """What it saw may be two versions, so it is a LifecycleError; the tensor, which is right, is not poisoned."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, name="membrane")
    for error in (None, RuntimeError("boom")):
        reader = _Abandoned(state.read(), keeps=True)
        reader.end()
        _Call(lambda: _write(state, 1.0)).result()
        if error is None:
            with pytest.raises(q4.LifecycleError, match="membrane"):
                reader.block.__exit__(None, None, None)
        else:
            reader.block.__exit__(type(error), error, None)
        assert not state.is_poisoned
        assert _content_of(state) == [1.0] * 4


def test_versioned_read_block_may_be_left_late() -> None:
    """Its version stayed what it was, so leaving it is fine; if the reader changed it, it is still told."""
    state = MutableTensor(torch.zeros(4))
    for touches in (False, True):
        reader = _Abandoned(state.read(), keeps=True)
        reader.end()
        assert not state.is_poisoned
        _Call(lambda: _write(state, 1.0)).result()
        if touches:
            reader.block.tensor.fill_(7.0)
            with pytest.raises(q4.PoisonedError):
                reader.block.__exit__(None, None, None)
        else:
            reader.block.__exit__(None, None, None)
        assert (_content_of(state), state.is_poisoned) == ([1.0] * 4, False)


# -- many of them


def test_updates_are_whole_though_every_third_writer_ends(mode: MutableMode) -> None:
    """Racing threads, many of which end inside their block: no update is lost, none is half there, nobody hangs."""
    state = MutableTensor(torch.zeros(64), mode=mode)
    counted = threading.Lock()
    done = 0

    def add(index: int) -> None:
        nonlocal done
        for round_ in range(10):
            try:
                if (index + round_) % 3 == 0:
                    _Call(lambda: state.write(wait=True).__enter__()[:32].add_(1.0)).result()
                    _Call(lambda: state.read().__enter__()).result()
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

    for call in [_Call(lambda index=index: add(index)) for index in range(6)]:  # type: ignore[misc]  # a default
        call.result()
    if state.is_poisoned:
        state.reset(timeout=HUNG)
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
    content = state._content
    seen: list[tuple[list[float], int]] = []

    def settle() -> None:
        seen.append((content.tensor.tolist(), content.version))
        content.is_unsettled = False

    monkeypatch.setattr(content, "is_asynchronous", True)
    monkeypatch.setattr(content, "synchronise", lambda: None)
    monkeypatch.setattr(content, "settle", settle)
    _write(state, 1.0)
    assert seen == []
    _Abandoned(state.write(), keeps=keeps, use=lambda tensor: tensor.fill_(7.0)).end()
    state.reset(timeout=HUNG)
    assert seen.pop() == ([7.0] * 4, 1)
    _Abandoned(state.read(), keeps=keeps).end()
    _write(state, 1.0)
    assert seen.pop() == ([0.0] * 4, 2)
    with pytest.raises(RuntimeError, match="boom"), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.fill_(7.0)
        raise RuntimeError("boom")
    state.reset(timeout=HUNG)
    assert seen.pop() == ([7.0] * 4, 3)
    _write(state, 1.0)
    assert seen == []


@pytest.mark.gpu
def test_cuda_work_of_a_writer_that_ended_is_over_before_the_next(keeps: bool) -> None:
    """What it had queued on its own stream does not land in the content that reset() gives."""

    def queue(tensor: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(2_000_000_000)
            tensor.fill_(7.0)

    state = MutableTensor(torch.zeros(1 << 20, device="cuda"), mode=MutableMode.IN_PLACE)
    _Abandoned(state.write(), keeps=keeps, use=queue).end()
    with torch.cuda.stream(torch.cuda.Stream()):
        state.reset(timeout=HUNG)
    torch.cuda.synchronize()
    assert state.snapshot().tensor.count_nonzero().item() == 0
