"""Misuse of a ``MutableTensor``: typed errors, intact contents."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_actors import MutableMode, MutableTensor, SharedMutableTensor
from q4_um_managed import apply_policy
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = [
    MutableTensor,
    pytest.param(SharedMutableTensor, id="shared"),
]


def in_child(use: Callable[[], object]) -> str:
    """Return what a use raised in a forked child, whose lock another thread may have held; empty if nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(30)  # whoever hangs says nothing
        try:
            use()
            told = ""
        except BaseException as error:  # noqa: BLE001  # told to the parent
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        told = lines.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.parametrize("size", [0, 4, 1 << 20], ids=["emptied", "cut", "grown"])
def test_an_update_that_resizes_its_storage_has_failed(mode: MutableMode, size: int) -> None:
    """Shape and strides stay, but the memory behind them does not: a read would end the process."""
    state = MutableTensor(torch.ones(4), mode=mode)
    with pytest.raises(q4.InputError, match="address must be left as it is"), state.write() as tensor:
        tensor.untyped_storage().resize_(size)
    if mode is MutableMode.VERSIONED:
        assert state.snapshot().tensor.tolist() == [1.0] * 4
    else:
        state.reset()
        assert state.snapshot().tensor.tolist() == [0.0] * 4


def _cut(storage: torch.UntypedStorage, size: int) -> None:
    """Make a storage smaller, where it lies if that can be had."""
    before = storage.data_ptr()
    for _ in range(100):
        storage.resize_(size)
        if storage.data_ptr() == before:
            return


def test_an_update_whose_storage_comes_back_to_its_address_has_failed(mode: MutableMode) -> None:
    """A storage that was resized twice may lie where it lay, and be too short nevertheless."""
    state = MutableTensor(torch.ones(1000), mode=mode)
    with pytest.raises(q4.InputError, match=r"(address|bytes) must be left as it is"), state.write() as tensor:
        _cut(tensor.untyped_storage(), 3000)


USES = {
    "read": lambda state: state.read().__enter__(),
    "write": lambda state: state.write().__enter__(),
    "snapshot": lambda state: state.snapshot(),
    "replace": lambda state: state.replace(torch.ones(4)),
    "wait": lambda state: state.wait(7, timeout=0.01),
    "version": lambda state: state.version,
    "reset": lambda state: state.reset(),
    "side": lambda state: state.read(device="cuda"),
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_may_not_use_it(mode: MutableMode, use: str) -> None:
    """Its memory is a copy, so what it wrote there, the parent would never see; a lock may be held there forever."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with state._protocol.lock:
            held.set()
            done.wait(scaled(60))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(scaled(60))
    told = in_child(lambda: USES[use](state))
    done.set()
    thread.join()
    assert told.startswith("LifecycleError: mutable tensor 'membrane' belongs to the process that made it")
    assert "SharedMutableTensor" in told
    assert state.version == 0
    state.replace(torch.ones(4))
    assert state.version == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_block_is_left_by_the_process_that_entered_it(kind: Any, mode: MutableMode, what: str) -> None:
    """The error in a child says so, and not that a thread has ended; in the parent the block goes on."""
    with kind(torch.zeros(4), mode=mode) as state:
        block = state.write() if what == "write" else state.read()
        block.__enter__()
        told = in_child(lambda: block.__exit__(None, None, None))
        assert "LifecycleError" in told
        assert "or in a forked child" in told
        block.__exit__(None, None, None)
        assert state.version == (what == "write")


OVERLAPPING = [torch.zeros(10).unfold(0, 3, 1), torch.zeros(1).expand(4), torch.zeros(8).as_strided((2, 2), (1, 1))]
APART = [
    torch.zeros(4, 6)[:, ::2],
    torch.zeros(2, 3, 4).permute(2, 0, 1),
    torch.zeros(1, 5).expand(1, 5),
    torch.zeros(0, 3),
    torch.zeros(0, 1).expand(0, 3),
]


@pytest.mark.parametrize("tensor", OVERLAPPING)
def test_a_content_that_overlaps_itself_is_not_taken_uncopied(mode: MutableMode, tensor: torch.Tensor) -> None:
    """To write one of its elements would change another."""
    with pytest.raises(q4.InputError, match="without overlap"):
        MutableTensor(tensor, mode=mode, copy=False)
    MutableTensor(tensor, mode=mode)


@pytest.mark.parametrize("tensor", APART)
def test_a_content_in_another_order_is_taken_uncopied(tensor: torch.Tensor) -> None:
    """Gaps, another order of the axes, and axes of one element share no memory."""
    state = MutableTensor(tensor, mode=MutableMode.IN_PLACE, copy=False)
    wanted = torch.rand(tensor.shape)
    state.replace(wanted)
    assert torch.equal(state.snapshot().tensor, wanted)


class _MuteError(Exception):
    def __str__(self) -> str:
        raise OSError("no words")


class _SelfishError(Exception):
    def __str__(self) -> str:
        raise self


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error", [ValueError("a\udcff"), _MuteError(), _SelfishError()], ids=lambda e: type(e).__name__
)
def test_a_writers_own_exception_leaves_its_block(kind: Any, mode: MutableMode, error: Exception) -> None:
    """Whatever its text is, or does when it is asked for; and the turn is over."""
    with kind(torch.zeros(4), mode=mode) as state:
        with pytest.raises(type(error)) as caught, state.write():
            raise error
        assert caught.value is error
        if mode is MutableMode.IN_PLACE:
            with pytest.raises(q4.PoisonedError, match=type(error).__name__):
                state.read().__enter__()
            state.reset()
        with state.write() as tensor:
            tensor.fill_(2.0)
        assert state.snapshot().tensor.tolist() == [2.0] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_it_closes_under_any_default_device(kind: Any, mode: MutableMode) -> None:
    """A default device is for tensors that somebody makes, and need not be one that is there."""
    state = kind(torch.zeros(4), mode=mode)
    with torch.device("meta"):
        state.close()
    assert state._protocol.tensor.device.type == "cpu"


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_limit_may_be_any_number(kind: Any, mode: MutableMode) -> None:
    """One that no float holds is as good as none."""
    with kind(torch.zeros(4), mode=mode) as state:
        with state.read(timeout=10**400), pytest.raises(q4.ConfigError, match="timeout"):
            state.read(timeout=float("nan"))
        assert state.wait(0, timeout=10**400)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_nested_tensors_are_refused(kind: Any) -> None:
    """They have no strides of one kind."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(q4.InputError, match="plain and strided, got 'a nested tensor'"):
        kind(nested)
    with kind(torch.zeros(4)) as state, pytest.raises(q4.InputError, match="nested"):
        state.replace(nested)


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_has_no_version_before_its_block(kind: Any, mode: MutableMode) -> None:
    """As it has no tensor; afterwards it still has the version that it read."""
    with kind(torch.zeros(4), mode=mode) as state:
        view = state.read()
        with pytest.raises(q4.LifecycleError, match=r"view\.version of mutable tensor is used outside its with block"):
            _ = view.version
        with view:
            assert view.version == 0
        assert view.version == 0


def test_the_slots_that_readers_hold_are_counted_where_the_time_runs_out() -> None:
    """As where a writer does not wait at all."""
    with SharedMutableTensor(torch.zeros(4), slots=3) as state:
        views = []
        for _ in range(2):
            view = SharedMutableTensor.attach(state.segment).read()
            view.__enter__()
            views.append(view)
            state.replace(torch.ones(4))
        with pytest.raises(q4.WriteConflictError, match=r"within 0\.05 s: readers of old versions hold 2 of 3 slots"):
            state.replace(torch.ones(4), wait=True, timeout=0.05)
        for view in views:
            view.__exit__(None, None, None)


def test_sides_are_those_of_a_memory() -> None:
    """Anything else is refused when it is given, not when a block asks for a side."""
    with pytest.raises(q4.ConfigError, match="sides must be a dual view, got 'object'"):
        MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, copy=False, sides=object())  # type: ignore[arg-type]  # that is the test


def test_providers_are_providers() -> None:
    """Anything else is refused by the function that is given it."""
    with pytest.raises(q4.ConfigError, match="providers must be memory providers, got 'object'"):
        apply_policy(torch.ones(4), "prefer_unified", device="cpu", providers=[object()])  # type: ignore[list-item]  # that is the test
