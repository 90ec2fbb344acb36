"""Fences between streams: a block waits for what comes before it, and the CPU for nothing more."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from pretended_driver import (
    CUDA,
    Pretended,
    accept_pretended,
    pretend,
    queue_on,
)

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from tests.support.limits import scaled

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


@pytest.fixture
def fenced(monkeypatch: pytest.MonkeyPatch) -> tuple[Pretended, MutableTensor]:
    """A mutable tensor over a CUDA tensor, on a device whose sides may be used at once."""
    accept_pretended(monkeypatch)
    case = pretend()
    tensor = case.provider.to_managed(torch.zeros(4), device=CUDA, read_mostly=False, prefetch=False)
    view = case.provider.dual_view(tensor)
    case.runtime.run()
    state = MutableTensor(tensor, mode=MutableMode.IN_PLACE, copy=False, sides=view, name="membrane")
    return case, state


def _waits(case: Pretended) -> int:
    """Return how often the CPU has waited for the device."""
    return case.runtime.count("eventSynchronize") + case.runtime.synchronised


def test_streams_follow_each_other_without_the_cpu(fenced: tuple[Pretended, MutableTensor]) -> None:
    """Readers wait for the last update, a writer for the update and its readers, all on the device alone."""
    case, state = fenced
    before = _waits(case)
    queue_on(case, 21, state.write())
    case.runtime.follows.clear()
    queue_on(case, 22, state.read())
    queue_on(case, 23, state.read(device="cuda"))
    assert [(stream, after) for stream, after, _ in case.runtime.follows] == [(22, 21), (23, 21)]
    case.runtime.follows.clear()
    queue_on(case, 24, state.write())
    assert {(stream, after, place) for stream, after, place in case.runtime.follows} == {
        (24, 21, 1),
        (24, 22, 1),
        (24, 23, 1),
    }
    case.runtime.follows.clear()
    queue_on(case, 24, state.read())
    assert case.runtime.follows == [], "a stream needs no event of its own"
    state.snapshot()
    assert _waits(case) == before
    assert not case.runtime.done.get(24), "nothing of it has run yet"


def test_the_cpu_waits_for_what_it_needs_alone(fenced: tuple[Pretended, MutableTensor]) -> None:
    """A CPU reader waits for the update and not for readers, a CPU writer for those too; once."""
    case, state = fenced
    queue_on(case, 21, state.write())
    queue_on(case, 22, state.read())
    case.runtime.queue(23)  # nobody's
    before = case.runtime.count("eventSynchronize")
    with state.read(device="cpu"):
        assert case.runtime.done[21] == 1
        assert not case.runtime.done.get(22)
    with state.write(device="cpu"):
        assert case.runtime.done[22] == 1
        assert not case.runtime.done.get(23)
    with state.read(device="cpu"):
        pass
    assert case.runtime.count("eventSynchronize") == before + 2
    assert case.runtime.synchronised == 0


def test_a_block_inside_a_capture_waits_for_nothing(fenced: tuple[Pretended, MutableTensor]) -> None:
    """In a capture no event is recorded or followed, the address is what replays use, and the CPU side is refused."""
    case, state = fenced
    queue_on(case, 21, state.write())
    case.torch.current = 22
    case.runtime.capturing = True
    asked = [case.runtime.count(call) for call in ("eventRecord", "streamWaitEvent", "eventSynchronize")]
    with state.read() as view:
        address = view.tensor.data_ptr()
    with pytest.raises(q4.LifecycleError, match=r"membrane.*capture"):
        state.read(device="cpu", timeout=0).__enter__()
    assert [case.runtime.count(call) for call in ("eventRecord", "streamWaitEvent", "eventSynchronize")] == asked
    case.runtime.capturing = False
    case.runtime.follows.clear()
    with state.read() as view:  # the replay
        assert view.tensor.data_ptr() == address
    assert [(stream, after) for stream, after, _ in case.runtime.follows] == [(22, 21)]


def test_a_block_that_ends_in_a_capture_begun_inside_is_refused(fenced: tuple[Pretended, MutableTensor]) -> None:
    """What it queued before the capture can't be awaited: a writer poisons, and raises."""
    case, state = fenced
    with pytest.raises(q4.LifecycleError, match=r"membrane.*capture"), state.write():
        case.runtime.capturing = True
    case.runtime.capturing = False
    assert state.is_poisoned


def _followed(case: Pretended, stream: int, block: AbstractContextManager[object]) -> set[int]:
    """Return the streams that a block on a stream waits for."""
    case.runtime.follows.clear()
    queue_on(case, stream, block)
    return {after for _, after, _ in case.runtime.follows}


def test_a_block_that_changes_its_stream_stands_for_no_other(fenced: tuple[Pretended, MutableTensor]) -> None:
    """What was done before it on a third stream is waited for still, since only its first stream has followed that."""
    case, state = fenced
    queue_on(case, 20, state.write())
    case.torch.current = 21
    with state.write():
        case.torch.current = 22
    assert _followed(case, 23, state.write()) == {20, 22}


def test_a_block_that_is_left_too_late_forgets_no_reader(fenced: tuple[Pretended, MutableTensor]) -> None:
    """An update that was evicted, and whose block is left by another thread, leaves the others' events alone."""
    case, state = fenced
    case.torch.current = 21
    block = state.write()
    thread = threading.Thread(target=block.__enter__)
    thread.start()
    thread.join(scaled(30))
    case.torch.current = 22
    state.reset(timeout=scaled(30))
    queue_on(case, 23, state.read())
    case.torch.current = 21
    with pytest.raises(q4.LifecycleError):
        block.__exit__(None, None, None)
    assert _followed(case, 24, state.write()) == {22, 23}


def test_memory_waits_for_the_streams_of_its_blocks(fenced: tuple[Pretended, MutableTensor]) -> None:
    """A closed tensor lets its memory go, to another stream only after the streams that its blocks were on."""
    case, state = fenced
    with state.read() as view:
        address = view.tensor.data_ptr()
    queue_on(case, 31, state.read())
    case.torch.current = 7
    state.close()
    gc.collect()
    assert case.provider.stats().in_use_bytes == 0
    case.torch.current = 32
    other = case.provider.empty((4,), torch.float32, CUDA)
    assert other.data_ptr() != address
    case.runtime.run()
    assert case.provider.empty((4,), torch.float32, CUDA).data_ptr() == address
    for device in ("cpu", None):
        with pytest.raises(q4.LifecycleError, match="closed"), state.read(device=device):
            pass


def test_events_do_not_pile_up(fenced: tuple[Pretended, MutableTensor]) -> None:
    """Blocks on a few streams keep an event or two for each of them, however many there are."""
    case, state = fenced
    for _ in range(30):
        for stream in (21, 22, 23):
            queue_on(case, stream, state.read())
        queue_on(case, 21, state.write())
    assert len(case.runtime.events) <= 8
