"""Dual views: two sides of the same bytes, in turns where the device wants turns."""

from __future__ import annotations

import gc
import math
import re
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
    Pretended,
    RuntimeFaultError,
    accept_pretended,
    pretend,
    queue_on,
)

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from q4_um_managed import q4_placers

if TYPE_CHECKING:
    from collections.abc import Callable

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
    with pytest.raises(q4.WriteConflictError, match="still busy"), view.on_cpu(wait=False):
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
    case.runtime.queue(99)  # a kernel that was not recorded
    with view.on_cpu() as cpu:
        assert case.runtime.done[99] == 1
        cpu.fill_(3.0)
        with pytest.raises(q4.WriteConflictError):
            _ = view.cuda
        with pytest.raises(q4.WriteConflictError), view.on_cuda():
            pass
    assert cpu.numel() == 0, "a retained tensor can't touch the memory any more"
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


SIDES_TAKEN: dict[str, Callable[[DualView], object]] = {
    "cpu": lambda view: view.cpu,
    "cuda": lambda view: view.cuda,
    "on_cpu": lambda view: view.on_cpu().__enter__(),
    "on_cuda": lambda view: view.on_cuda().__enter__(),
    "turn cpu": lambda view: view.turn("cpu", timeout=0).__enter__(),
    "turn cuda": lambda view: view.turn("cuda", timeout=0).__enter__(),
}


@pytest.mark.parametrize("attributes", [CONCURRENT, LEGACY], ids=["concurrent", "in turns"])
@pytest.mark.parametrize("side", SIDES_TAKEN)
def test_a_view_of_memory_that_was_given_back_has_no_side(side: str, attributes: dict[str, int]) -> None:
    """After free() the bytes are another tensor's, which no side of an older view may reach."""
    provider = pretend(attributes).provider
    tensor = provider.empty((4,), torch.float32, CUDA)
    view, second = provider.dual_view(tensor), provider.dual_view(tensor[1:])
    provider.free(tensor)
    other = provider.empty((4,), torch.float32, CUDA)
    assert other.data_ptr() == tensor.data_ptr()
    for item in (view, second):
        with pytest.raises(q4.LifecycleError) as caught:
            SIDES_TAKEN[side](item)
        assert (caught.value.name, caught.value.rule) == ("tensor", "in use, not given back")
        assert "dual view" in str(caught.value)
        assert caught.value.hint


def test_a_mutable_tensor_over_a_freed_view_is_refused() -> None:
    """Blocks by either side of memory that was given back are refused, and leave nothing waiting."""
    case = pretend()
    tensor, _ = case.provider.place(torch.zeros(4), device=CUDA, placement="managed")
    view = case.provider.dual_view(tensor)
    state = MutableTensor(view.cpu, mode=MutableMode.IN_PLACE, copy=False, sides=view)
    case.provider.free(tensor)
    for device in ("cpu", "cuda", None):
        for block in (state.read(device=device, timeout=0), state.write(device=device, timeout=0)):
            with pytest.raises(q4.LifecycleError, match="given back"), block:
                raise AssertionError("let in")
    assert not state.is_poisoned


@pytest.mark.parametrize("attributes", [CONCURRENT, LEGACY], ids=["concurrent", "in turns"])
@pytest.mark.parametrize("device", ["mps", "cuda:0", CUDA, None])
def test_a_side_that_is_none_is_refused(device: Any, attributes: dict[str, int]) -> None:
    """There are two sides, by name; no other name stands for one of them."""
    _, view = _view(attributes)
    with pytest.raises(q4.ConfigError, match="'cpu' or 'cuda'") as caught, view.turn(device, timeout=0):
        pass
    assert (caught.value.name, caught.value.value) == ("device", device)


@pytest.mark.parametrize("attributes", [CONCURRENT, LEGACY], ids=["concurrent", "in turns"])
@pytest.mark.parametrize("timeout", [math.nan, -1, True, "x"], ids=str)
def test_a_timeout_that_is_no_time_is_refused(timeout: Any, attributes: dict[str, int]) -> None:
    """Whether or not anybody has to wait, a time limit is seconds or None."""
    _, view = _view(attributes)
    for block in (view.on_cpu(timeout=timeout), view.on_cuda(timeout=timeout), view.turn("cpu", timeout=timeout)):
        with pytest.raises(q4.ConfigError) as caught, block:
            pass
        assert caught.value.name == "timeout"
    for block in (view.on_cpu(timeout=math.inf), view.on_cuda(timeout=None), view.turn("cpu", timeout=1)):
        with block:
            pass


# -- a mutable tensor with two sides


def _state(case: Pretended) -> MutableTensor:
    """Return a mutable tensor over the CPU side, which a torch without CUDA takes for a plain tensor."""
    tensor, _ = case.provider.place(torch.zeros(4), device=CUDA, placement="managed")
    view = case.provider.dual_view(tensor)
    return MutableTensor(view.cpu, mode=MutableMode.IN_PLACE, copy=False, sides=view, name="membrane")


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
    plugin = types.SimpleNamespace(q4_memory_providers=q4.hookimpl(lambda: [case.provider]), q4_placers=q4_placers)
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
    queue_on(case, 39, state.write(device="cuda"))
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
    """If the device can't be awaited, it is unknown whether the update is whole."""
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
    for options in ({"copy": False}, {"mode": MutableMode.IN_PLACE}):
        with pytest.raises(q4.ConfigError):
            MutableTensor(view.cpu, sides=view, **options)
    state = MutableTensor(torch.zeros(4))
    for call in (state.read, state.write):
        with pytest.raises(q4.ConfigError, match="sides"):
            call(device="cpu")
    with pytest.raises(q4.ConfigError, match="'cpu', 'cuda'"):
        _state(case).read(device="cuda:0")
