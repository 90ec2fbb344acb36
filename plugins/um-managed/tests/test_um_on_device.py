"""Managed memory on a real device, by the driver's own word; buffers of a few megabytes at most."""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import time
import types
from typing import TYPE_CHECKING

import pytest
import torch

import q4_dequant_fallback
import q4core as q4
from q4_actors import MutableMode, MutableTensor
from q4_um_managed import ManagedProvider, apply_input_policy, apply_mutable_policy, q4_placers
from q4core import UnifiedMemoryPolicy as Policy
from tests.support.limits import scaled

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(scope="module")
def provider() -> ManagedProvider:
    """The provider, whose answer is printed: these tests are for a device with managed memory."""
    found = ManagedProvider()
    answer = found.is_available(CUDA)
    print(answer)  # noqa: T201  # which device this was, in the report
    assert answer, answer.reason
    return found


def _is_concurrent(provider: ManagedProvider) -> bool:
    return bool(provider.is_available(CUDA).attributes["concurrentManagedAccess"])


def _driver_says_managed(tensor: torch.Tensor) -> bool:
    """Ask the driver itself, past CuPy."""
    answer = ctypes.c_uint(0)
    address = ctypes.c_uint64(tensor.data_ptr())
    status = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(answer), 8, address)
    return status == 0 and bool(answer.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_a_conversion_is_managed(provider: ManagedProvider, dtype: torch.dtype) -> None:
    """A conversion is managed by the driver's own word, and keeps values, shape and dtype (TC-21)."""
    for source in (torch.randn(257, 65).to(dtype), torch.randn(257, 65, device=CUDA).to(dtype)):
        managed = provider.to_managed(source, device=CUDA, read_mostly=True, prefetch=True)
        assert (managed.device, managed.dtype, managed.shape) == (CUDA, dtype, source.shape)
        assert _driver_says_managed(managed)
        assert provider.is_managed(managed)
        assert torch.equal(managed.cpu().view(torch.uint8), source.cpu().view(torch.uint8))
    ordinary = torch.zeros(64, device=CUDA)
    assert not _driver_says_managed(ordinary)
    assert not provider.is_managed(ordinary)
    assert not provider.is_managed(torch.zeros(64))


def test_both_sides_show_the_same_bytes(provider: ManagedProvider) -> None:
    """What a kernel writes the CPU reads, and what the CPU writes a kernel reads, in turns (TC-21)."""
    view = provider.dual_view(provider.to_managed(torch.zeros(1 << 18), device=CUDA, read_mostly=False, prefetch=False))
    for step in range(1, 6):
        with view.on_cuda() as tensor:
            tensor.add_(1.0)
        with view.on_cpu() as tensor:
            assert tensor.device == CPU
            assert bool((tensor == 2 * step - 1).all())
            tensor.add_(1.0)
    if _is_concurrent(provider):
        assert view.cpu.data_ptr() == view.cuda.data_ptr()
    else:
        with pytest.raises(q4.UnifiedMemoryError):
            _ = view.cpu


def test_memory_goes_with_its_last_view(provider: ManagedProvider) -> None:
    """Views and detached aliases keep a block, which then goes round without an allocation."""
    tensor = provider.empty((1 << 18,), torch.float32, CUDA)
    tensor.fill_(3.0)
    view = tensor.detach()[10:20]
    del tensor
    gc.collect()
    before = provider.stats()
    assert float(view.sum()) == 30.0
    del view
    for _ in range(50):
        provider.empty((1 << 18,), torch.float32, CUDA).fill_(1.0)
    torch.cuda.synchronize()
    after = provider.stats()
    assert after.allocations == before.allocations
    assert after.in_use_bytes < before.in_use_bytes


def test_another_stream_finds_no_torn_bytes(provider: ManagedProvider) -> None:
    """A block that a slow stream still fills is not handed to another stream before it is done."""
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(slow):
            tensor = provider.empty((1 << 18,), torch.float32, CUDA)
            torch.cuda._sleep(20_000_000)
            tensor.fill_(1.0)
            del tensor
        with torch.cuda.stream(fast):
            other = provider.empty((1 << 18,), torch.float32, CUDA)
            other.fill_(2.0)
            total = other.sum()
            torch.cuda.synchronize()
            assert float(total) == float(other.sum()) == 2.0 * (1 << 18)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_layer_under_each_policy(provider: ManagedProvider, policy: Policy) -> None:
    """A layer gives the same numbers wherever it lies; its buffers are managed by the driver's word, or not."""
    module = types.SimpleNamespace(q4_memory_providers=q4.hookimpl(lambda: [provider]), q4_placers=q4_placers)
    registry = q4.Registry([("um", module), ("dequant-fallback", q4_dequant_fallback)])
    weight = q4.quantize(torch.randn(64, 512, generator=torch.Generator().manual_seed(1)), "nvfp4")
    x = torch.randn(4, 512, device=CUDA)
    plain = q4.Session(q4.SessionConfig(device="cuda:0"), registry=registry).linear(weight)
    held = provider.stats().in_use_bytes
    with q4.Session(q4.SessionConfig(device="cuda:0", unified_memory=policy), registry=registry) as session:
        layer = session.linear(weight)
        assert torch.equal(layer(x), plain(x))
        buffers = [buffer for name, buffer in layer.named_buffers() if name.startswith("packed_")][:-1]
        kinds = [provider.placement_of(buffer) for buffer in buffers]
        if policy is Policy.DISABLED:
            assert kinds == [None] * len(buffers)
        else:
            assert all(kind is not None for kind in kinds), layer.diagnostics().memory
            managed = [kind is not None and kind.kind == "managed" for kind in kinds]
            assert [_driver_says_managed(buffer) for buffer in buffers] == managed
        own = provider.stats().in_use_bytes
        layer(x)
        assert provider.stats().in_use_bytes == own, "a temporary outlived its call"
    del layer, buffers
    gc.collect()
    assert provider.stats().in_use_bytes == held


def test_a_checkpoint_is_never_copied_to_plain_memory(provider: ManagedProvider, tmp_path: Path) -> None:
    """A weight comes from its file into shared memory, uncopied or written once, with no plain device memory taken."""
    module = types.SimpleNamespace(q4_memory_providers=q4.hookimpl(lambda: [provider]), q4_placers=q4_placers)
    registry = q4.Registry([("um", module), ("dequant-fallback", q4_dequant_fallback)])
    dense = torch.randn(512, 1024, generator=torch.Generator().manual_seed(2))
    q4.save_checkpoint(tmp_path / "model.safetensors", {"proj": q4.quantize(dense, "nvfp4")}, dialect="modelopt-nvfp4")
    config = q4.SessionConfig(device="cuda:0", unified_memory=Policy.REQUIRE_UNIFIED)
    q4.Session(config, registry=registry).linear(q4.open(tmp_path / "model.safetensors")["proj"])  # proves the path
    gc.collect()
    before = torch.cuda.memory_allocated()
    layer = q4.Session(config, registry=registry).linear(q4.open(tmp_path / "model.safetensors")["proj"])
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 4096, "the tag alone is plain"
    kinds = {decision.kind for decision in map(provider.placement_of, layer.buffers()) if decision is not None}
    is_mapped = provider.map(torch.zeros(16), device=CUDA) is not None
    assert kinds == {"pageable" if is_mapped else "managed"}


def test_a_preferred_activation_is_the_same_storage(provider: ManagedProvider) -> None:
    """Under PREFER_UNIFIED an activation comes back as it is: no allocation and no copy, counted (TC-23)."""
    ordinary = torch.ones(1 << 20, device=CUDA)
    managed = provider.to_managed(ordinary, device=CUDA, read_mostly=False, prefetch=False)
    before, stats = torch.cuda.memory_stats()["allocation.all.allocated"], provider.stats()
    for x, action in ((ordinary, "left"), (managed, "prefetched")):
        same, decision = apply_input_policy(x, Policy.PREFER_UNIFIED, device=CUDA, providers=[provider], environment={})
        assert same is x
        assert decision.action == action
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert provider.stats() == stats


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_mutable_policy_follows_the_variable(provider: ManagedProvider, value: str) -> None:
    """With Q4_DISABLE_UM=0 the mutable policy promotes to managed memory, with 1 it does not (TC-22)."""
    placed, decision = apply_mutable_policy(
        torch.arange(6.0, device=CUDA),
        Policy.PREFER_UNIFIED,
        device=CUDA,
        providers=[provider],
        environment={"Q4_DISABLE_UM": value},
    )
    assert _driver_says_managed(placed) is (value == "0"), decision
    assert placed.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_system_memory_is_read_in_place_where_the_attributes_allow_it(provider: ManagedProvider) -> None:
    """A CPU tensor becomes a CUDA tensor over the same bytes where the host's page tables are used."""
    attributes = provider.is_available(CUDA).attributes
    source = torch.arange(1 << 16, dtype=torch.float32)
    mapped = provider.map(source, device=CUDA)
    is_read_well = attributes["pageableMemoryAccess"] and (
        attributes["pageableMemoryAccessUsesHostPageTables"] or attributes["integrated"]
    )
    assert (mapped is not None) is bool(is_read_well)
    if attributes["pageableMemoryAccess"]:
        mapped, placement = provider.place(source, device=CUDA, placement="pageable")
        assert mapped.data_ptr() == source.data_ptr()
        assert placement.kind == "pageable"
        assert torch.equal((mapped * 2).cpu(), source * 2)
    else:
        with pytest.raises(q4.UnifiedMemoryError):
            provider.place(source, device=CUDA, placement="pageable")


def test_pinned_memory_has_two_sides_at_once(provider: ManagedProvider) -> None:
    """Pinned memory is used by both sides at any time, whatever concurrentManagedAccess says."""
    pinned, placement = provider.place(torch.zeros(1 << 12), device=CUDA, placement="pinned")
    assert placement.kind == "pinned"
    assert not _driver_says_managed(pinned)
    view = provider.dual_view(pinned)
    view.cpu.fill_(2.0)
    assert float(view.cuda.sum()) == 2.0 * (1 << 12)


def test_what_does_not_fit_is_refused_at_once(provider: ManagedProvider) -> None:
    """More than there is is refused within a second, with the numbers, and nothing is allocated."""
    total = torch.cuda.get_device_properties(0).total_memory
    before = provider.stats().allocations
    start = time.perf_counter()
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        provider.empty((total + (1 << 30),), torch.uint8, CUDA)
    assert time.perf_counter() - start < 1.0
    assert caught.value.attributes["requested_bytes"] > total
    assert provider.stats().allocations == before


def test_a_graph_replays_over_memory_that_the_cpu_writes(provider: ManagedProvider) -> None:
    """A captured kernel reads what the CPU side wrote before the replay; inside a capture no memory is handed out."""
    tensor = provider.to_managed(torch.zeros(1 << 12), device=CUDA, read_mostly=False, prefetch=False)
    view = provider.dual_view(tensor)
    state = MutableTensor(view.cuda, mode=MutableMode.IN_PLACE, copy=False, sides=view)
    out = torch.zeros(1, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    torch.sum(tensor, 0, out=out[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.sum(tensor, 0, out=out[0])
        with pytest.raises(q4.LifecycleError):
            provider.empty((4,), torch.float32, CUDA)
    for step in range(1, 4):
        with state.write(device="cpu") as cpu:
            cpu.fill_(float(step))
        with state.read(device="cuda"):
            graph.replay()
            assert float(out) == step * (1 << 12)


def test_actors_on_both_sides_never_see_half_an_update(provider: ManagedProvider) -> None:
    """CPU writers and GPU writers take turns with readers of both sides: every read is one whole version."""
    tensor = provider.to_managed(torch.zeros(1 << 16), device=CUDA, read_mostly=False, prefetch=False)
    view = provider.dual_view(tensor)
    state = MutableTensor(view.cuda, mode=MutableMode.IN_PLACE, copy=False, sides=view)

    def work(device: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                with state.write(device=device, wait=True) as content:
                    content.add_(1.0)
                with state.read(device=device) as seen:
                    low, high = seen.tensor.aminmax()
                    assert float(low) == float(high) == seen.version

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, ["cpu", "cuda", "cpu", "cuda"], timeout=scaled(120)))
    assert state.version == 200
