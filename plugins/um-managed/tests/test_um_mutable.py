"""A mutable tensor over managed memory stays there, version after version; what does not fit is refused."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, GB10, GIB, Pretended, RuntimeFaultError, accept_pretended, pretend

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from q4_actors.tensors.stream_order import TorchStreams
from q4_um_managed import apply_input_policy, apply_mutable_policy

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
REQUIRE = q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED
SIZE = 1024


def _by_policy(case: Pretended) -> torch.Tensor:
    placed, _ = apply_mutable_policy(torch.zeros(SIZE), REQUIRE, device="cpu", providers=[case.provider])
    return placed


def _by_provider(case: Pretended) -> torch.Tensor:
    return case.provider.empty((SIZE,), torch.float32, CPU).zero_()


def _as_view(case: Pretended) -> torch.Tensor:
    return case.provider.empty((2, SIZE), torch.float32, CPU).zero_()[1].detach()


def _found_there(case: Pretended) -> torch.Tensor:
    """Return managed memory that a driver knows, and that is not the provider's own until a policy sees it."""
    address = case.runtime.mallocManaged(SIZE * 4)
    tensor = case.driver.cpu_bytes(case, address, SIZE * 4).view(torch.float32).zero_()
    placed, decision = apply_mutable_policy(tensor, REQUIRE, device="cpu", providers=[case.provider], copy=False)
    assert decision.action == "left"
    return placed


MADE: list[Callable[[Pretended], torch.Tensor]] = [_by_policy, _by_provider, _as_view, _found_there]


def _is_managed(state: MutableTensor, case: Pretended) -> bool:
    with state.read() as view:
        return case.provider.is_managed(view.tensor)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("mode", MutableMode)
@pytest.mark.parametrize("make", MADE)
def test_every_version_is_managed(make: Callable[[Pretended], torch.Tensor], mode: MutableMode, copy: bool) -> None:
    """The first content, what a writer changes, what replaces it and what heals it lie in the provider's memory."""
    case = pretend()
    state = MutableTensor(make(case), mode=mode, copy=copy)
    assert _is_managed(state, case)
    with state.write() as tensor:
        assert case.provider.is_managed(tensor)
        tensor.add_(1.0)
    assert _is_managed(state, case)
    state.replace(torch.full((SIZE,), 5.0))
    assert _is_managed(state, case)
    assert state.snapshot().tensor.tolist() == [5.0] * SIZE
    with pytest.raises(q4.PoisonedError), state.read() as view:
        view.tensor.add_(1.0)
    state.reset()
    assert _is_managed(state, case)
    assert (state.version, state.snapshot().tensor.sum().item()) == (3, 0.0)


def test_a_required_layers_input_is_never_promoted_again() -> None:
    """What the policy put into managed memory is read there in every version: no activation is copied for it."""
    case = pretend()
    state = MutableTensor(_by_policy(case), copy=False)
    for _ in range(3):
        with state.read() as view:
            _, decision = apply_input_policy(view.tensor, REQUIRE, device="cpu", providers=[case.provider])
        assert (decision.action, decision.bytes) == ("prefetched", 0)
        with state.write() as tensor:
            tensor.add_(1.0)


def test_versions_are_recycled_by_the_pool() -> None:
    """Updates go back and forth between two blocks, and one that a reader keeps makes it three; all are given back."""
    case = pretend()
    state = MutableTensor(_by_policy(case), copy=False)

    def update(times: int) -> None:
        for _ in range(times):
            with state.write() as tensor:
                tensor.add_(1.0)
            del tensor

    update(10)
    assert case.provider.stats().allocations == 2
    kept = _first_of(state)
    update(10)
    assert kept.tolist() == [10.0] * SIZE
    assert case.provider.stats().allocations == 3
    assert state.snapshot().tensor.tolist() == [20.0] * SIZE
    assert (state.stats().copies, state.stats().bytes_copied) == (21, 21 * SIZE * 4)
    state.close()
    del kept
    gc.collect()
    assert case.provider.stats().in_use_bytes == 0
    assert case.runtime.synchronised == 0


def test_a_failed_update_gives_its_memory_back() -> None:
    """A VERSIONED update that raises changes nothing, and its block serves the next one."""
    case = pretend()
    state = MutableTensor(_by_policy(case), copy=False)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), state.write() as tensor:
            tensor.fill_(1 / 0)
        del tensor
        gc.collect()
    assert case.provider.stats().allocations == 2
    assert (state.version, state.snapshot().tensor.sum().item()) == (0, 0.0)


def test_an_update_that_does_not_fit_is_refused_with_numbers() -> None:
    """Where the budget leaves no room for a further version the writer raises, and the content stays as it was."""
    case = pretend(CONCURRENT, free=4 * GIB)
    state = MutableTensor(_by_policy(case), copy=False, name="membrane")
    case.runtime.free_bytes = GIB // 4
    with pytest.raises(q4.UnifiedMemoryError, match=r"'membrane'.*um-managed.*cudaMemGetInfo") as caught, state.write():
        raise AssertionError("let in")
    assert caught.value.attributes["requested_bytes"] == SIZE * 4
    assert caught.value.attributes["free_bytes"] == GIB // 4
    with pytest.raises(q4.UnifiedMemoryError, match="'membrane'"):
        state.replace(torch.ones(SIZE))
    with pytest.raises(q4.UnifiedMemoryError, match="'second'"):
        MutableTensor(_first_of(state), name="second")
    assert (state.version, state.is_poisoned, state.snapshot().tensor.sum().item()) == (0, False, 0.0)
    case.runtime.free_bytes = 4 * GIB
    with state.write() as tensor:
        tensor.add_(1.0)
    assert _is_managed(state, case)


def _first_of(state: MutableTensor) -> torch.Tensor:
    with state.read() as view:
        return view.tensor


def test_a_driver_that_fails_is_reported_to_the_writer() -> None:
    """A driver's error is the reason of a typed refusal that names the tensor; the next update goes on."""
    case = pretend()
    state = MutableTensor(_by_policy(case), copy=False, name="membrane")
    case.runtime.fails["mallocManaged"] = RuntimeFaultError(2, "cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(q4.UnifiedMemoryError, match=r"'membrane'.*out of memory"), state.write():
        raise AssertionError("let in")
    case.runtime.fails.clear()
    with state.write() as tensor:
        tensor.add_(1.0)
    assert state.version == 1


def test_a_freed_tensor_is_reported_as_such() -> None:
    """Contents that were given back are the reported cause, not room, of which there is enough."""
    case = pretend()
    tensor = _by_provider(case)
    state = MutableTensor(tensor, copy=False)
    case.provider.free(tensor)
    with pytest.raises(q4.LifecycleError, match="given back") as caught:
        MutableTensor(tensor)
    assert "Free some" not in str(caught.value)
    for mode in MutableMode:
        with pytest.raises(q4.LifecycleError, match="given back"):
            MutableTensor(tensor, mode=mode, copy=False)
    with pytest.raises(q4.LifecycleError, match="given back"), state.write():
        raise AssertionError("let in")


def test_updates_in_inference_mode_stay_managed() -> None:
    """What is made in inference mode still counts its changes, and lies where the first version does."""
    case = pretend()
    with torch.inference_mode():
        placed = _by_policy(case)
        assert not placed.is_inference()
        state = MutableTensor(placed, copy=False)
        with state.write() as tensor:
            tensor.add_(1.0)
    assert _is_managed(state, case)


@pytest.mark.parametrize("memory_of", ["another", "the file"])
def test_cuda_memory_of_others_is_read_as_before(memory_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Managed memory that the provider did not allocate, or only maps, is read on any stream, and left by the next."""
    accept_pretended(monkeypatch)
    case = pretend(GB10)
    monkeypatch.setattr("q4_actors.tensors.dual_view.TorchStreams", StreamsOf(case).make)
    if memory_of == "another":
        first = case.torch.cuda_bytes(case, case.runtime.mallocManaged(64), 64, 0)
    else:
        mapped = case.provider.map(torch.zeros(64, dtype=torch.uint8), device=CUDA)
        assert mapped is not None
        first = mapped
    placed, decision = apply_mutable_policy(first, REQUIRE, device=CUDA, providers=[case.provider], copy=False)
    assert (decision.action, placed.data_ptr()) == ("left", first.data_ptr())
    state = MutableTensor(placed, copy=False)
    with state.read():
        pass
    with state.write() as tensor:
        tensor.fill_(3)
    assert _is_managed(state, case)
    assert state.snapshot().tensor.tolist() == [3] * 64


def test_a_version_waits_for_the_streams_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA memory of a version that is let go is handed out again when every stream that read it has passed."""
    accept_pretended(monkeypatch)
    case = pretend()
    kept: list[int] = []
    record = case.provider.record_stream

    def note(tensor: torch.Tensor, stream: int) -> None:
        kept.append(stream)
        record(tensor, stream)

    monkeypatch.setattr(case.provider, "record_stream", note)
    streams = StreamsOf(case)
    monkeypatch.setattr("q4_actors.tensors.dual_view.TorchStreams", streams.make)
    placed, _ = apply_mutable_policy(torch.zeros(SIZE), REQUIRE, device=CUDA, providers=[case.provider])
    state = MutableTensor(placed, copy=False)
    del placed
    case.torch.current = 8
    with state.read() as view:
        case.runtime.queue(8)
        assert case.provider.is_managed(view.tensor)
    assert 8 in kept
    case.torch.current = 7
    for _ in range(2):  # the version that stream 8 reads goes, and must not be the third's memory
        with state.write() as tensor:
            tensor.add_(1.0)
        del tensor
    del view
    assert case.provider.stats().allocations == 3
    case.runtime.run()
    for _ in range(4):
        with state.write() as tensor:
            tensor.add_(1.0)
        del tensor
    assert case.provider.stats().allocations == 3


class StreamsOf:
    """Torch's streams, over the pretended runtime; keeping memory is left to the class under test."""

    def __init__(self, case: Pretended) -> None:
        self.case = case

    def make(self, device: torch.device, keep: Callable[[torch.Tensor, int], object] | None = None) -> StreamsOf:
        """Stand for the class."""
        assert device == CUDA
        assert keep is not None
        self._device, self._keep = device, keep
        return self

    def current(self) -> int:
        """As torch's, like all that follow."""
        return self.case.torch.current

    def is_capturing(self) -> bool:  # noqa: D102
        return False

    def record(self) -> int:  # noqa: D102
        return self.case.driver.record(self.current(), 0)

    def follow(self, event: int) -> None:  # noqa: D102
        self.case.driver.follow(self.current(), event, 0)

    def keep(self, tensor: torch.Tensor) -> None:  # noqa: D102
        TorchStreams.keep(self, tensor)  # type: ignore[arg-type]  # the class under test
