"""SideLock of the two sides, on a device that is not concurrent: every access takes its own."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pretended_driver import (
    CUDA,
    LEGACY,
    OnCuda,
    Pretended,
    accept_pretended,
    pretend,
)

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from tests.support.limits import scaled, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_um_managed import DualView


@pytest.fixture
def taking_turns(monkeypatch: pytest.MonkeyPatch) -> tuple[Pretended, MutableTensor]:
    """A mutable tensor over a CUDA tensor, on a device whose sides take turns."""
    accept_pretended(monkeypatch)
    case = pretend(LEGACY)
    tensor = case.provider.to_managed(torch.zeros(4), device=CUDA, read_mostly=False, prefetch=False)
    view = case.provider.dual_view(tensor)
    state = MutableTensor(tensor, mode=MutableMode.IN_PLACE, copy=False, sides=view, name="membrane")
    return case, state


def _read(state: MutableTensor, device: str | None, timeout: float | None = 0.0) -> float:
    with state.read(device=device, timeout=timeout) as view:
        return float(view.tensor.sum())


def _write(state: MutableTensor, device: str | None) -> None:
    with state.write(device=device, timeout=0) as tensor:
        tensor.add_(1.0)


ACCESSES: dict[str, Callable[[MutableTensor], object]] = {
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
        return pool.submit(call).exception(timeout=scaled(30))


@pytest.mark.parametrize("access", ACCESSES)
def test_each_access_takes_its_turn(taking_turns: tuple[Pretended, MutableTensor], access: str) -> None:
    """While the CPU is inside, whatever would use the CUDA side is refused by an error that names the tensor."""
    _, state = taking_turns
    with state.read(device="cpu"):
        error = _elsewhere(lambda: ACCESSES[access](state))
        assert isinstance(error, q4.WriteConflictError), error
        assert "membrane" in str(error)
    assert _elsewhere(lambda: ACCESSES[access](state)) is None


@pytest.mark.parametrize("device", [None, "cuda"])
def test_the_cpu_is_refused_while_the_other_side_is_read(
    taking_turns: tuple[Pretended, MutableTensor], device: str | None
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
    taking_turns: tuple[Pretended, MutableTensor], first: str | None, second: str | None
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
        assert waiting.result(scaled(30)) == 0.0
        assert later.result(scaled(30)) == 0.0


def test_both_sides_in_one_thread_are_refused_at_once(taking_turns: tuple[Pretended, MutableTensor]) -> None:
    """A thread that would wait for itself raises, whatever its time limit; its own side nests."""
    _, state = taking_turns
    for outer, inner in (("cpu", None), (None, "cpu")):
        with state.read(device=outer):
            with pytest.raises(q4.WriteConflictError, match=r"membrane.*this thread itself"):
                _read(state, inner, None)
            assert _read(state, outer) == 0.0


def test_reset_takes_its_turn(taking_turns: tuple[Pretended, MutableTensor]) -> None:
    """A reset waits for the whole device, since the failed writer's queued work is unknown, and repairs both sides."""
    case, state = taking_turns
    with pytest.raises(RuntimeError, match="boom"), state.write(device="cuda"):  # noqa: PT012  # the block is the subject
        case.runtime.queue(50)
        raise RuntimeError("boom")
    state.reset(timeout=0)
    assert case.runtime.done[50] == 1
    assert _read(state, "cpu") == _read(state, "cuda") == 0.0


def test_a_side_whose_thread_has_ended_is_free(taking_turns: tuple[Pretended, MutableTensor]) -> None:
    """A thread that ends inside a block of one side does not block the other side, even if its block is referenced."""
    _, state = taking_turns
    view = state.read(device="cpu")
    thread = threading.Thread(target=view.__enter__)
    thread.start()
    thread.join(scaled(30))
    assert _read(state, "cuda", 10.0) == 0.0


def test_a_cpu_turn_begins_when_the_device_rests(taking_turns: tuple[Pretended, MutableTensor]) -> None:
    """A kernel that was not recorded is over before the CPU is let in, to read and to write."""
    case, state = taking_turns
    for block in (state.read(device="cpu"), state.write(device="cpu")):
        case.runtime.queue(99)
        with block:
            assert case.runtime.done[99] == case.runtime.queued[99]


def test_a_retained_cpu_tensor_is_empty_after_its_turn(taking_turns: tuple[Pretended, MutableTensor]) -> None:
    """What a CPU block of a mutable tensor gave can't touch the memory after the block."""
    _, state = taking_turns
    with state.write(device="cpu") as tensor:
        tensor.fill_(2.0)
    assert tensor.numel() == 0
    assert _read(state, None) == 8.0


def test_races_of_both_sides_never_meet(taking_turns: tuple[Pretended, MutableTensor]) -> None:
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
            done.result(scaled(60))
    assert state.version == 120


@pytest.mark.parametrize("timeout", [float("nan"), "x", True], ids=str)
def test_nobody_waits_for_a_time_that_is_none(timeout: Any) -> None:
    """Where the other side is held, a time limit that is no time is refused at once instead of spinning."""
    view = _view_in_turns()
    with view.on_cuda():
        with within(0.5):
            error = _elsewhere(lambda: view.on_cpu(timeout=timeout).__enter__())
        assert isinstance(error, q4.ConfigError), error


def _view_in_turns() -> DualView:
    provider = pretend(LEGACY).provider
    return provider.dual_view(provider.empty((4,), torch.float32, CUDA))
