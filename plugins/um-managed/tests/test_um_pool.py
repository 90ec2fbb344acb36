"""The pool: blocks wait for the device before they are reused, and the cache has a bound."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, GB10, GIB, LEGACY, Pretended, RuntimeFaultError, pretend

import q4core as q4
from q4_um_managed.blocks import rounded
from q4_um_managed.lease import Lease
from q4core.memory import Placement
from tests.support.limits import scaled

CPU = torch.device("cpu")
SIDE = 8
"""Another stream than the one that is current at first."""


def _take(case: Pretended, size: int = 4096, device: torch.device = CUDA) -> torch.Tensor:
    return case.provider.empty((size,), torch.uint8, device)


def test_sizes_are_few_and_close() -> None:
    """A block is at most an eighth larger than what was asked for, page-sized, and there are few sizes."""
    sizes = {rounded(size) for size in range(1, 1 << 21, 4096 // 7)}
    assert len(sizes) < 100
    for size in [1, 4096, 4097, 65537, (1 << 20) + 1, (1 << 30) - 5, 3 << 30]:
        assert rounded(size) >= size
        assert rounded(size) % 4096 == 0
        assert rounded(size) <= max(4096, size + size // 8 + 4096)
        assert rounded(rounded(size)) == rounded(size)


def test_one_streams_blocks_go_round_without_waiting() -> None:
    """On one stream the next tensor has the last one's memory at once: nothing is freed, nothing waited for."""
    case = pretend()
    address = _take(case).data_ptr()
    gc.collect()
    before = case.runtime.count("eventSynchronize")
    for _ in range(20):
        case.runtime.queue(case.torch.current)
        assert _take(case).data_ptr() == address
        assert len(case.runtime.events) == 1, "a later event of a stream stands for the earlier ones"
    assert case.runtime.count("mallocManaged") == 1
    assert case.runtime.synchronised == 0
    assert case.runtime.count("eventSynchronize") == before
    assert case.provider.stats().reuses == 20
    case.runtime.run()
    _take(case)
    assert len(case.runtime.events) <= 1, "passed events are destroyed"


def test_another_stream_gets_a_block_only_when_the_work_is_done() -> None:
    """A block with pending work goes to no other stream; once the work is done it does."""
    case = pretend()
    tensor = _take(case)
    address = tensor.data_ptr()
    case.runtime.queue(case.torch.current)
    del tensor
    case.torch.current = SIDE
    other = _take(case)
    assert other.data_ptr() != address
    case.runtime.run()
    assert _take(case).data_ptr() == address


def test_the_stream_of_the_making_counts_whoever_drops_it() -> None:
    """Work queued where the tensor was made holds the block back also if another stream is current at its end."""
    case = pretend()
    tensor = _take(case)
    address = tensor.data_ptr()
    case.runtime.queue(case.torch.current)
    case.torch.current = SIDE
    del tensor
    assert _take(case).data_ptr() != address


def test_a_recorded_stream_holds_the_block_back() -> None:
    """record_stream names a further stream, whose work is awaited too."""
    case = pretend()
    tensor = _take(case)
    address = tensor.data_ptr()
    case.provider.record_stream(tensor, SIDE)
    case.runtime.queue(SIDE)
    del tensor
    held = _take(case)
    assert held.data_ptr() != address
    case.runtime.run(SIDE)
    assert _take(case).data_ptr() == address
    with pytest.raises(q4.InputError):
        case.provider.record_stream(torch.zeros(3), SIDE)


def test_the_cpu_waits_for_the_device() -> None:
    """A CPU tensor in a block whose last kernel still runs is handed out after that kernel only."""
    case = pretend()
    tensor = _take(case)
    address = tensor.data_ptr()
    stream = case.torch.current
    case.runtime.queue(stream)
    del tensor
    again = _take(case, device=CPU)
    assert again.data_ptr() == address
    assert case.runtime.done[stream] == case.runtime.queued[stream]


@pytest.mark.parametrize("bound", [0, 1 << 16])
def test_the_cache_has_a_bound(bound: int) -> None:
    """Above the bound the oldest blocks go back to the driver, as soon as they come back."""
    case = pretend(max_cached_bytes=bound)
    held = [_take(case) for _ in range(40)]
    assert case.provider.stats().in_use_bytes == 40 * 4096
    held.clear()
    gc.collect()
    stats = case.provider.stats()
    assert (stats.in_use_bytes, stats.cached_bytes) == (0, bound)
    assert stats.frees == 40 - bound // 4096
    assert len(case.runtime.areas) == bound // 4096
    assert case.provider.trim() == bound
    assert not case.runtime.areas
    assert not case.runtime.events


def test_a_capture_takes_nothing_and_returns_nothing_early() -> None:
    """While a graph is captured no memory is handed out, and what comes back is not handed out after it either."""
    case = pretend()
    tensor = _take(case)
    address = tensor.data_ptr()
    case.runtime.capturing = True
    with pytest.raises(q4.LifecycleError, match="graph"):
        _take(case)
    events = case.runtime.count("eventRecord")
    del tensor
    gc.collect()
    assert case.runtime.count("eventRecord") == events
    case.runtime.capturing = False
    assert _take(case).data_ptr() != address
    assert case.provider.trim() > 0


@pytest.mark.parametrize("call", ["eventRecord", "eventCreateWithFlags", "streamIsCapturing", "getDevice"])
def test_a_driver_that_fails_when_a_tensor_goes_harms_nothing(call: str) -> None:
    """A finaliser raises nothing; the block is not handed out again without a wait for the whole device."""
    case = pretend()
    tensor = _take(case)
    address = tensor.data_ptr()
    case.runtime.device = 1 if call == "getDevice" else 0
    case.runtime.fails[call] = RuntimeFaultError(700, "cudaErrorIllegalAddress")
    del tensor
    gc.collect()
    case.runtime.fails = {"deviceSynchronize": RuntimeFaultError(700, "cudaErrorIllegalAddress")}
    case.runtime.device = 0
    assert _take(case).data_ptr() != address
    case.runtime.fails.clear()
    waits = case.runtime.synchronised
    blocks = [_take(case), _take(case)]
    assert address in {block.data_ptr() for block in blocks}, "it is not lost for good"
    assert case.runtime.synchronised == waits + 1


def test_a_query_that_fails_harms_nothing() -> None:
    """A block whose event can't be asked about goes out after a wait for the whole device only."""
    case = pretend()
    tensor = _take(case)
    address = tensor.data_ptr()
    del tensor
    case.runtime.fails["eventQuery"] = RuntimeFaultError(700, "cudaErrorIllegalAddress")
    case.runtime.queue(SIDE)
    assert _take(case).data_ptr() == address
    assert (case.runtime.synchronised, case.runtime.done[SIDE]) == (1, 1)


def test_a_block_that_the_driver_does_not_take_is_counted() -> None:
    """A free that fails is counted; the others go on."""
    case = pretend(max_cached_bytes=0)
    held = [_take(case), _take(case)]
    case.runtime.fails["free"] = RuntimeFaultError(700, "cudaErrorIllegalAddress")
    held.pop()
    case.runtime.fails.clear()
    held.pop()
    stats = case.provider.stats()
    assert (stats.frees, stats.lost) == (1, 1)


def test_new_memory_is_backed_before_it_is_counted() -> None:
    """New managed memory is moved to its device at once, so that the driver's count of free memory is true."""
    case = pretend()
    _take(case)
    assert case.runtime.count("memPrefetchAsync") == 1
    assert case.runtime.count("eventSynchronize") == 1
    case = pretend(LEGACY)
    _take(case)
    assert case.runtime.count("memPrefetchAsync") == 0


def test_each_device_has_blocks_of_its_own() -> None:
    """A block of one device is never handed to another, and the thread's own device is put back after each call."""
    case = pretend(CONCURRENT, CONCURRENT)
    first = case.provider.empty((4096,), torch.uint8, torch.device("cuda", 1))
    address = first.data_ptr()
    del first
    assert case.runtime.device == 0
    assert _take(case).data_ptr() != address
    assert case.provider.empty((4096,), torch.uint8, torch.device("cuda", 1)).data_ptr() == address
    assert case.runtime.device == 0


def test_a_fork_uses_nothing_of_its_parents() -> None:
    """In a forked child, which has no CUDA, tensors go without a driver call, and requests are rejected, typed."""
    case = pretend()
    tensor = _take(case)
    calls = len(case.runtime.calls)
    child = os.fork()
    if child == 0:  # nothing of pytest's may run here
        code = 1
        try:
            del tensor
            gc.collect()
            is_quiet = len(case.runtime.calls) == calls
            answer = case.provider.is_available(CUDA)
            try:
                _take(case)
            except q4.UnifiedMemoryError:
                code = 0 if is_quiet and not answer and "fork" in answer.reason else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert tensor.numel() == 4096


def test_threads_never_share_a_block() -> None:
    """Threads that take, fill and drop tensors of few sizes find their own bytes unchanged; nothing is lost."""
    case = pretend(max_cached_bytes=1 << 16)
    faults: list[int] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for step in range(300):
            if held and generator.random() < 0.5:
                tensor, mark = held.pop(generator.randrange(len(held)))
                if not bool((tensor == mark).all()):
                    faults.append(step)
                if generator.random() < 0.3:
                    case.provider.free(tensor)
            else:
                tensor = case.provider.empty((generator.choice([10, 5000, 9000]),), torch.uint8, CPU)
                mark = generator.randrange(256)
                held.append((tensor.fill_(mark), mark))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(120))
    assert not faults
    gc.collect()
    stats = case.provider.stats()
    assert stats.in_use_bytes == stats.lost == 0
    assert stats.allocations - stats.frees == len(case.runtime.areas)
    assert stats.cached_bytes <= 1 << 16


# -- what is handed out counts

JETSON = CONCURRENT | {"integrated": 1, "concurrentManagedAccess": 0}
"""An integrated GPU whose CPU must not touch managed memory while a kernel runs."""


def _pretend_large(case: Pretended) -> None:
    """Hand out addresses of untouched memory."""
    addresses = iter(range(1 << 44, 1 << 45, 1 << 36))

    def allocate(size: int, kind: int) -> int:
        address = next(addresses)
        case.runtime.areas[address] = (bytearray(4096), kind)
        return address

    case.runtime._allocate = allocate  # type: ignore[method-assign]  # the test's own


def _hand_out(case: Pretended, attributes: dict[str, int], count: int) -> list[object]:
    """Take blocks of 900 MiB."""
    pool = case.provider._pool_of(case.driver)
    placement = Placement("managed", "managedMemory=1")
    size = 900 << 20
    taken = [pool.take(size, 0, attributes, is_pinned=False) for _ in range(count)]
    return [Lease(pool, block, size, placement, stream) for block, stream in taken]


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "without effect"])
@pytest.mark.parametrize("attributes", [GB10, JETSON], ids=["concurrent", "not concurrent"])
def test_memory_that_nobody_touched_counts(attributes: dict[str, int], *, is_refused: bool) -> None:
    """Where new memory can't be backed, or its count stays, what was handed out is off the room until it is back."""
    case = pretend(attributes, host=(9 * GIB, 128 * GIB), max_cached_bytes=0)
    _pretend_large(case)
    for call in ("memPrefetchAsync", "memsetAsync") if is_refused else ():
        case.runtime.fails[call] = RuntimeFaultError(1, "cudaErrorInvalidValue")
    held = _hand_out(case, attributes, 1)
    with pytest.raises(q4.UnifiedMemoryError, match="handed out and not touched yet") as caught:
        _hand_out(case, attributes, 1)
    assert caught.value.attributes["unbacked_bytes"] == case.provider.stats().unbacked_bytes >= 900 << 20
    assert case.runtime.count("mallocManaged") == 1
    case.runtime.fails.clear()  # with the frames that their tracebacks keep
    held.clear()
    gc.collect()
    assert case.provider.stats().unbacked_bytes == 0
    assert len(_hand_out(case, attributes, 1)) == 1


def test_new_memory_is_filled_where_it_cannot_be_moved() -> None:
    """Without concurrent access, or if the move is refused, zeros back new memory; the refusal is counted."""
    case = pretend(LEGACY)
    _take(case)
    assert (case.runtime.count("memPrefetchAsync"), case.runtime.count("memsetAsync")) == (0, 1)
    case = pretend()
    case.runtime.fails["memPrefetchAsync"] = RuntimeFaultError(1, "cudaErrorInvalidValue")
    _take(case)
    assert case.runtime.count("memsetAsync") == 1
    assert case.provider.hints_refused == 1
    assert case.provider.stats().unbacked_bytes == 0


def test_memory_that_was_written_whole_no_longer_counts() -> None:
    """A conversion writes all of its memory, so the driver itself counts it."""
    case = pretend()
    for call in ("memPrefetchAsync", "memsetAsync"):
        case.runtime.fails[call] = RuntimeFaultError(1, "cudaErrorInvalidValue")
    held = [_take(case)]
    assert case.provider.stats().unbacked_bytes == 4096
    held.append(case.provider.to_managed(torch.ones(1024), device=CUDA, read_mostly=False, prefetch=False))
    assert case.provider.stats().unbacked_bytes == 4096
    assert len(held) == 2


# -- where freeing, or torch, fails


def test_nothing_is_freed_while_a_graph_is_captured() -> None:
    """Above its bound the pool gives memory back after the capture, not in it: a free would break the graph."""
    case = pretend(max_cached_bytes=0)
    tensor = _take(case)
    case.runtime.capturing = True
    del tensor
    gc.collect()
    assert case.runtime.count("free") == 0
    assert case.provider.trim() == 0
    assert case.runtime.count("free") == 0
    case.runtime.capturing = False
    _take(case)
    gc.collect()
    assert case.runtime.count("free") == 2
    assert case.provider.stats().cached_bytes == 0


@pytest.mark.parametrize("call", ["stream", "cuda_bytes"])
@pytest.mark.parametrize("calls_before", range(6))
def test_a_call_of_torchs_that_fails_loses_nothing(
    call: str, calls_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of torch's calls fails while a tensor is made, the error is typed and the block goes back."""
    case = pretend()
    left = [calls_before]
    real = getattr(case.torch, call)

    def fail(*arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("boom")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(case.torch, call, fail)
        tensor = None
        with contextlib.suppress(q4.UnifiedMemoryError):
            tensor = _take(case)
        assert tensor is not None or left[0] < 0
    del tensor
    gc.collect()
    assert case.provider.stats().in_use_bytes == 0
    case.provider.trim()
    assert not case.runtime.areas
    assert not case.runtime.events
