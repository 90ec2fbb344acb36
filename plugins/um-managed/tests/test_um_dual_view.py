"""Dual views: two sides of the same bytes, in turns where the device wants turns."""

from __future__ import annotations

import concurrent.futures
import gc
import re
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pretended_driver import (
    CONCURRENT,
    CUDA,
    GB10,
    LEGACY,
    OnCuda,
    Pretended,
    RuntimeFaultError,
    accept_pretended,
    pretend,
)

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from q4_um_managed import DualView

CPU = torch.device("cpu")


def _view(attributes: dict[str, int], placement: str = "managed") -> tuple[Pretended, DualView]:
    case = pretend(attributes)
    tensor, _ = case.provider.place(torch.zeros(2, 3), device=CUDA, placement=placement)
    return case, case.provider.dual_view(tensor)


@pytest.mark.parametrize(("attributes", "placement"), [(CONCURRENT, "managed"), (LEGACY, "pinned")])
def test_both_sides_are_the_same_bytes(attributes: dict[str, int], placement: str) -> None:
    """What one side writes the other reads, with shape and dtype, and no byte is copied."""
    case, view = _view(attributes, placement)
    assert view.is_concurrent
    cpu, cuda = view.cpu, view.cuda
    assert (cpu.device, cuda.device) == (CPU, CUDA)
    assert cpu.data_ptr() == cuda.data_ptr()
    assert cpu.shape == cuda.shape
    cpu.add_(2.0)
    assert cuda.sum() == 12.0
    cuda.mul_(2.0)
    assert cpu.sum() == 24.0
    assert case.provider.placement_of(cpu) == case.provider.placement_of(cuda)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_either_side_keeps_the_memory(device: torch.device) -> None:
    """The memory lives until both sides and the view are gone, whichever side the view was made of."""
    case = pretend()
    tensor = case.provider.to_managed(torch.ones(1000), device=device, read_mostly=False, prefetch=False)
    view = case.provider.dual_view(tensor, device=CUDA)
    cpu, cuda = view.cpu, view.cuda
    del tensor, view, cuda
    gc.collect()
    assert case.provider.stats().in_use_bytes == 4096
    assert cpu.sum() == 1000
    del cpu
    gc.collect()
    assert case.provider.stats().in_use_bytes == 0
    assert not case.runtime.events or case.provider.trim()


def test_the_cpu_side_waits_for_the_fence() -> None:
    """on_cpu waits for what an on_cuda block queued, on whatever stream, and without waiting refuses, typed."""
    case, view = _view(CONCURRENT)
    case.torch.current = 20
    with view.on_cuda() as tensor:
        tensor.fill_(5.0)
        case.runtime.queue(20)
    case.torch.current = 7
    with pytest.raises(q4.WriteConflictError, match="still at work"), view.on_cpu(wait=False):
        pass
    with view.on_cpu() as tensor:
        assert case.runtime.done[20] == 1
        assert tensor.sum() == 30.0
    with view.on_cpu(wait=False) as tensor:
        assert tensor.sum() == 30.0


def test_a_device_that_is_not_concurrent_takes_turns() -> None:
    """With concurrentManagedAccess=0 the CPU side is refused by the contract, or handed out when the device rests."""
    case, view = _view(LEGACY)
    assert not view.is_concurrent
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        _ = view.cpu
    assert caught.value.attributes == LEGACY
    assert "concurrentManagedAccess" in str(caught.value)
    case.runtime.queue(99)  # a kernel that nobody told of
    with view.on_cpu() as cpu:
        assert case.runtime.done[99] == 1
        cpu.fill_(3.0)
        with pytest.raises(q4.WriteConflictError):
            _ = view.cuda
        with pytest.raises(q4.WriteConflictError), view.on_cuda():
            pass
    assert cpu.numel() == 0, "a kept tensor can't touch the memory any more"
    with view.on_cuda() as cuda:
        assert cuda.sum() == 18.0
        with pytest.raises(q4.WriteConflictError), view.on_cpu():
            pass
    case.runtime.queue(case.torch.current)
    with pytest.raises(q4.WriteConflictError), view.on_cpu(wait=False):
        pass
    with view.on_cpu():
        pass


def test_a_block_that_fails_ends_its_turn() -> None:
    """An error inside a block leaves the other side usable."""
    _, view = _view(LEGACY)
    for side in (view.on_cpu, view.on_cuda):
        with pytest.raises(RuntimeError, match="boom"), side():
            raise RuntimeError("boom")
    with view.on_cuda() as cuda:
        assert cuda.numel() == 6
    with view.on_cpu() as cpu:
        assert cpu.numel() == 6


def test_events_go_with_the_view() -> None:
    """A view keeps one event for each stream at most, and none after its end."""
    case, view = _view(CONCURRENT)
    before = len(case.runtime.events)
    for _ in range(5):
        case.runtime.queue(case.torch.current)
        with view.on_cuda():
            pass
    assert len(case.runtime.events) == before + 1
    del view
    gc.collect()
    case.runtime.run()
    case.provider.trim()
    assert not case.runtime.events


def test_only_whole_tensors_of_the_provider_have_two_sides() -> None:
    """Other memory, a strided view, an empty tensor and one that was given back are refused, typed."""
    provider = pretend().provider
    tensor = provider.empty((4, 4), torch.float32, CUDA)
    for wrong in (torch.zeros(3), tensor.T[:, 1:], provider.empty((0,), torch.float32, CUDA)):
        with pytest.raises(q4.InputError):
            provider.dual_view(wrong)
    assert provider.dual_view(tensor[1:3]).cpu.shape == (2, 4)
    provider.free(tensor)
    with pytest.raises(q4.LifecycleError):
        provider.dual_view(tensor)


# -- a mutable tensor with two sides


def _state(case: Pretended) -> q4.MutableTensor:
    """Return a mutable tensor over the CPU side, which a torch without CUDA takes for a plain tensor."""
    tensor, _ = case.provider.place(torch.zeros(4), device=CUDA, placement="managed")
    view = case.provider.dual_view(tensor)
    return q4.MutableTensor(view.cpu, mode=q4.MutableMode.IN_PLACE, copy=False, sides=view, name="membrane")


def test_a_mutable_tensor_has_two_sides() -> None:
    """Each side writes and reads the same content at the same address; versions count both, and nothing is copied."""
    case = pretend()
    state = _state(case)
    with state.write(device="cpu") as tensor:
        tensor.add_(1.0)
        address = tensor.data_ptr()
    case.torch.current = 30
    with state.write(device="cuda") as tensor:
        assert (tensor.device, tensor.data_ptr()) == (CUDA, address)
        tensor.mul_(3.0)
        case.runtime.queue(30)
    case.torch.current = 7
    with state.read(device="cpu"):
        assert case.runtime.done[30] == 1, "the update is whole before the CPU is let in"
    for device in ("cpu", "cuda", None):
        with state.read(device=device) as view:
            assert view.version == 2
            assert view.tensor.sum() == 12.0
            assert view.tensor.data_ptr() == address
    assert (state.stats().copies, state.stats().writes) == (0, 2)
    with pytest.raises(q4.LifecycleError):
        _ = view.tensor


def test_the_documented_sides_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet of the manual about two sides does what it says, on a device that has them."""
    text = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    (snippet,) = [item for item in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "dual_view(" in item]
    accept_pretended(monkeypatch)
    case = pretend(GB10)
    plugin = types.SimpleNamespace(q4_memory_providers=q4.hookimpl(lambda: [case.provider]))
    monkeypatch.setattr(q4, "default_registry", lambda: q4.Registry([("um", plugin)]))
    names: dict[str, Any] = {}
    exec(snippet, names)  # noqa: S102  # our own
    assert names["y"].tolist() == [1.0] * 8
    assert names["state"].version == 1


def test_sides_keep_each_other_out() -> None:
    """A writer by one side excludes readers by the other; a failed update poisons both."""
    case = pretend()
    state = _state(case)
    with state.read(device="cuda"), pytest.raises(q4.WriteConflictError), state.write(device="cpu", timeout=0):
        pass
    with state.write(device="cpu"), pytest.raises(q4.WriteConflictError), state.read(device="cuda", timeout=0):
        pass
    with pytest.raises(RuntimeError, match="boom"), state.write(device="cuda"):
        raise RuntimeError("boom")
    for device in ("cpu", "cuda"):
        with pytest.raises(q4.PoisonedError), state.read(device=device):
            pass
    state.reset()
    with state.read(device="cuda") as view:
        assert view.tensor.sum() == 0.0


@pytest.mark.parametrize(
    ("call", "device"), [("eventSynchronize", "cpu"), ("eventQuery", "cpu"), ("streamWaitEvent", "cuda")]
)
def test_a_side_that_fails_before_the_update_changes_nothing(call: str, device: str) -> None:
    """A driver that fails while a side is fetched leaves the tensor healthy, at its version, and free for others."""
    case = pretend()
    state = _state(case)
    _on(case, 39, state.write(device="cuda"))
    case.torch.current = 40
    case.runtime.fails[call] = RuntimeFaultError(700, "cudaErrorIllegalAddress")
    with pytest.raises(q4.UnifiedMemoryError), state.write(device=device):
        raise AssertionError("let in")
    with pytest.raises(q4.UnifiedMemoryError), state.read(device=device):
        raise AssertionError("let in")
    case.runtime.fails.clear()
    assert (state.version, state.is_poisoned) == (1, False)
    with state.write(device="cpu") as tensor:
        tensor.add_(1.0)
    assert state.version == 2


def test_a_fence_that_fails_after_the_update_poisons() -> None:
    """If the device can't be awaited, nobody knows whether the update is whole."""
    case = pretend()
    state = _state(case)
    with pytest.raises(q4.UnifiedMemoryError), state.write(device="cuda"):
        case.runtime.fails["eventRecord"] = RuntimeFaultError(700, "cudaErrorIllegalAddress")
    case.runtime.fails.clear()
    assert state.is_poisoned


def test_sides_are_for_memory_that_stays() -> None:
    """VERSIONED content moves and a copy lies elsewhere: both refuse sides; without them no device can be named."""
    case = pretend()
    tensor, _ = case.provider.place(torch.zeros(4), device=CUDA, placement="managed")
    view = case.provider.dual_view(tensor)
    for options in ({"copy": False}, {"mode": q4.MutableMode.IN_PLACE}):
        with pytest.raises(q4.ConfigError):
            q4.MutableTensor(view.cpu, sides=view, **options)
    state = q4.MutableTensor(torch.zeros(4))
    for call in (state.read, state.write):
        with pytest.raises(q4.ConfigError, match="sides"):
            call(device="cpu")
    with pytest.raises(q4.ConfigError, match="'cpu', 'cuda'"):
        _state(case).read(device="cuda:0")


# -- a device that is not concurrent


@pytest.fixture
def taking_turns(monkeypatch: pytest.MonkeyPatch) -> tuple[Pretended, q4.MutableTensor]:
    """A mutable tensor over a CUDA tensor, on a device whose sides take turns."""
    accept_pretended(monkeypatch)
    case = pretend(LEGACY)
    tensor = case.provider.to_managed(torch.zeros(4), device=CUDA, read_mostly=False, prefetch=False)
    view = case.provider.dual_view(tensor)
    state = q4.MutableTensor(tensor, mode=q4.MutableMode.IN_PLACE, copy=False, sides=view, name="membrane")
    return case, state


def _read(state: q4.MutableTensor, device: str | None, timeout: float | None = 0.0) -> float:
    with state.read(device=device, timeout=timeout) as view:
        return float(view.tensor.sum())


def _write(state: q4.MutableTensor, device: str | None) -> None:
    with state.write(device=device, timeout=0) as tensor:
        tensor.add_(1.0)


ACCESSES: dict[str, Callable[[q4.MutableTensor], object]] = {
    "read": lambda state: _read(state, None),
    "read(cuda)": lambda state: _read(state, "cuda"),
    "snapshot": lambda state: state.snapshot(timeout=0),
    "write": lambda state: _write(state, None),
    "write(cuda)": lambda state: _write(state, "cuda"),
    "replace": lambda state: state.replace(torch.ones(4).as_subclass(OnCuda), timeout=0),
}


def _elsewhere(call: Callable[[], object]) -> object:
    """Return what a call gives or raises in another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception(timeout=30)


@pytest.mark.parametrize("access", ACCESSES)
def test_each_access_takes_its_turn(taking_turns: tuple[Pretended, q4.MutableTensor], access: str) -> None:
    """While the CPU is inside, whatever would use the CUDA side is refused by an error that names the tensor."""
    _, state = taking_turns
    with state.read(device="cpu"):
        error = _elsewhere(lambda: ACCESSES[access](state))
        assert isinstance(error, q4.WriteConflictError), error
        assert "membrane" in str(error)
    assert _elsewhere(lambda: ACCESSES[access](state)) is None


@pytest.mark.parametrize("device", [None, "cuda"])
def test_the_cpu_is_refused_while_the_other_side_is_read(
    taking_turns: tuple[Pretended, q4.MutableTensor], device: str | None
) -> None:
    """A plain reader of a CUDA tensor keeps the CPU out as one that names its side does; the time limit counts."""
    _, state = taking_turns
    with state.read(device=device):
        start = time.monotonic()
        error = _elsewhere(lambda: _read(state, "cpu", 0.2))
        assert time.monotonic() - start >= 0.2
        assert isinstance(error, q4.WriteConflictError), error
        assert "membrane" in str(error)
        assert _elsewhere(lambda: _read(state, device)) is None, "its own side is free for other readers"
    assert state.stats().conflicts == 1


@pytest.mark.parametrize(("first", "second"), [("cpu", None), (None, "cpu"), ("cuda", "cpu")])
def test_a_reader_of_the_other_side_waits(
    taking_turns: tuple[Pretended, q4.MutableTensor], first: str | None, second: str | None
) -> None:
    """It gets its turn when the others leave, without asking again, and they get theirs after it."""
    _, state = taking_turns
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with state.read(device=first):
            waiting = pool.submit(_read, state, second, 30.0)
            assert not concurrent.futures.wait([waiting], timeout=0.2).done
            later = pool.submit(_read, state, first, 30.0)
            assert not concurrent.futures.wait([later], timeout=0.2).done, "a newcomer goes after who waits"
            assert _read(state, first, 5.0) == 0.0, "who is inside already goes on"
        assert waiting.result(30) == 0.0
        assert later.result(30) == 0.0


def test_both_sides_in_one_thread_are_refused_at_once(taking_turns: tuple[Pretended, q4.MutableTensor]) -> None:
    """A thread that would wait for itself is told so, whatever its time limit; its own side nests."""
    _, state = taking_turns
    for outer, inner in (("cpu", None), (None, "cpu")):
        with state.read(device=outer):
            with pytest.raises(q4.WriteConflictError, match=r"membrane.*this thread itself"):
                _read(state, inner, None)
            assert _read(state, outer) == 0.0


def test_reset_takes_its_turn(taking_turns: tuple[Pretended, q4.MutableTensor]) -> None:
    """A reset waits for the whole device, since nobody knows what the failed writer queued, and heals both sides."""
    case, state = taking_turns
    with pytest.raises(RuntimeError, match="boom"), state.write(device="cuda"):  # noqa: PT012  # the block is the subject
        case.runtime.queue(50)
        raise RuntimeError("boom")
    state.reset(timeout=0)
    assert case.runtime.done[50] == 1
    assert _read(state, "cpu") == _read(state, "cuda") == 0.0


def test_a_side_whose_thread_has_ended_is_free(taking_turns: tuple[Pretended, q4.MutableTensor]) -> None:
    """A thread that ends inside a block of one side, whoever holds the block, does not keep the other side out."""
    _, state = taking_turns
    view = state.read(device="cpu")
    thread = threading.Thread(target=view.__enter__)
    thread.start()
    thread.join(30)
    assert _read(state, "cuda", 10.0) == 0.0
    dropped = state.read(device="cuda")
    dropped.__enter__()
    del dropped
    gc.collect()
    assert _read(state, "cpu", 10.0) == 0.0


def test_a_cpu_turn_begins_when_the_device_rests(taking_turns: tuple[Pretended, q4.MutableTensor]) -> None:
    """A kernel that nobody told of is over before the CPU is let in, to read and to write."""
    case, state = taking_turns
    for block in (state.read(device="cpu"), state.write(device="cpu")):
        case.runtime.queue(99)
        with block:
            assert case.runtime.done[99] == case.runtime.queued[99]


def test_a_kept_cpu_tensor_is_empty_after_its_turn(taking_turns: tuple[Pretended, q4.MutableTensor]) -> None:
    """What a CPU block of a mutable tensor gave can't touch the memory after the block."""
    _, state = taking_turns
    with state.write(device="cpu") as tensor:
        tensor.fill_(2.0)
    assert tensor.numel() == 0
    assert _read(state, None) == 8.0


def test_races_of_both_sides_never_meet(taking_turns: tuple[Pretended, q4.MutableTensor]) -> None:
    """Threads that read and write by both sides and plainly never have the CPU and the GPU inside together."""
    _, state = taking_turns
    inside = {"cpu": 0, "cuda": 0}
    guard = threading.Lock()

    def work(device: str | None, *, is_writer: bool) -> None:
        side = device or "cuda"
        for _ in range(60):
            with state.write(device=device, wait=True) if is_writer else state.read(device=device):
                with guard:
                    inside[side] += 1
                    assert not (inside["cpu"] and inside["cuda"]), inside
                time.sleep(0)
                with guard:
                    inside[side] -= 1

    kinds: list[tuple[str | None, bool]] = [("cpu", False), ("cuda", False), (None, False), ("cpu", True), (None, True)]
    with concurrent.futures.ThreadPoolExecutor(len(kinds)) as pool:
        for done in [pool.submit(work, device, is_writer=is_writer) for device, is_writer in kinds]:
            done.result(60)
    assert state.version == 120


# -- fences between streams


@pytest.fixture
def fenced(monkeypatch: pytest.MonkeyPatch) -> tuple[Pretended, q4.MutableTensor]:
    """A mutable tensor over a CUDA tensor, on a device whose sides may be used at once."""
    accept_pretended(monkeypatch)
    case = pretend()
    tensor = case.provider.to_managed(torch.zeros(4), device=CUDA, read_mostly=False, prefetch=False)
    view = case.provider.dual_view(tensor)
    case.runtime.run()
    state = q4.MutableTensor(tensor, mode=q4.MutableMode.IN_PLACE, copy=False, sides=view, name="membrane")
    return case, state


def _waits(case: Pretended) -> int:
    """Return how often the CPU has waited for the device."""
    return case.runtime.count("eventSynchronize") + case.runtime.synchronised


def _on(case: Pretended, stream: int, block: AbstractContextManager[object]) -> None:
    """Queue work on a stream inside a block."""
    case.torch.current = stream
    with block:
        case.runtime.queue(stream)


def test_streams_follow_each_other_without_the_cpu(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """Readers wait for the last update, a writer for the update and its readers, all on the device alone."""
    case, state = fenced
    before = _waits(case)
    _on(case, 21, state.write())
    case.runtime.follows.clear()
    _on(case, 22, state.read())
    _on(case, 23, state.read(device="cuda"))
    assert [(stream, after) for stream, after, _ in case.runtime.follows] == [(22, 21), (23, 21)]
    case.runtime.follows.clear()
    _on(case, 24, state.write())
    assert {(stream, after, place) for stream, after, place in case.runtime.follows} == {
        (24, 21, 1),
        (24, 22, 1),
        (24, 23, 1),
    }
    case.runtime.follows.clear()
    _on(case, 24, state.read())
    assert case.runtime.follows == [], "a stream needs no event of its own"
    state.snapshot()
    assert _waits(case) == before
    assert not case.runtime.done.get(24), "nothing of it has run yet"


def test_the_cpu_waits_for_what_it_needs_alone(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """A CPU reader waits for the update and not for readers, a CPU writer for those too; once."""
    case, state = fenced
    _on(case, 21, state.write())
    _on(case, 22, state.read())
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


def test_a_block_inside_a_capture_waits_for_nothing(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """In a capture no event is recorded or followed, the address is what replays use, and the CPU side is refused."""
    case, state = fenced
    _on(case, 21, state.write())
    case.torch.current = 22
    case.runtime.capturing = True
    asked = [case.runtime.count(call) for call in ("eventRecord", "streamWaitEvent", "eventSynchronize")]
    with state.read() as view:
        address = view.tensor.data_ptr()
    with pytest.raises(q4.LifecycleError, match=r"membrane.*capture"):
        _read(state, "cpu")
    assert [case.runtime.count(call) for call in ("eventRecord", "streamWaitEvent", "eventSynchronize")] == asked
    case.runtime.capturing = False
    case.runtime.follows.clear()
    with state.read() as view:  # the replay
        assert view.tensor.data_ptr() == address
    assert [(stream, after) for stream, after, _ in case.runtime.follows] == [(22, 21)]


def test_a_block_that_ends_in_a_capture_begun_inside_is_refused(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """Nobody could wait for what it queued before the capture: a writer poisons, and is told."""
    case, state = fenced
    with pytest.raises(q4.LifecycleError, match=r"membrane.*capture"), state.write():
        case.runtime.capturing = True
    case.runtime.capturing = False
    assert state.is_poisoned


def _followed(case: Pretended, stream: int, block: AbstractContextManager[object]) -> set[int]:
    """Return the streams that a block on a stream waits for."""
    case.runtime.follows.clear()
    _on(case, stream, block)
    return {after for _, after, _ in case.runtime.follows}


def test_a_block_that_changes_its_stream_stands_for_no_other(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """What was done before it on a third stream is waited for still, since only its first stream has followed that."""
    case, state = fenced
    _on(case, 20, state.write())
    case.torch.current = 21
    with state.write():
        case.torch.current = 22
    assert _followed(case, 23, state.write()) == {20, 22}


def test_a_block_that_is_left_too_late_forgets_no_reader(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """An update that was put out, and whose block is left by another thread, leaves the others' events alone."""
    case, state = fenced
    case.torch.current = 21
    block = state.write()
    thread = threading.Thread(target=block.__enter__)
    thread.start()
    thread.join(30)
    case.torch.current = 22
    state.reset(timeout=30)
    _on(case, 23, state.read())
    case.torch.current = 21
    with pytest.raises(q4.LifecycleError):
        block.__exit__(None, None, None)
    assert _followed(case, 24, state.write()) == {22, 23}


def test_memory_waits_for_the_streams_of_its_blocks(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """A closed tensor lets its memory go, to another stream only after the streams that its blocks were on."""
    case, state = fenced
    with state.read() as view:
        address = view.tensor.data_ptr()
    _on(case, 31, state.read())
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


def test_events_do_not_pile_up(fenced: tuple[Pretended, q4.MutableTensor]) -> None:
    """Blocks on a few streams keep an event or two for each of them, however many there are."""
    case, state = fenced
    for _ in range(30):
        for stream in (21, 22, 23):
            _on(case, stream, state.read())
        _on(case, 21, state.write())
    assert len(case.runtime.events) <= 8
