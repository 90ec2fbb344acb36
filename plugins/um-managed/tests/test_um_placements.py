"""Placements: which memory a tensor is put into, what is read where it lies, and what is refused."""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, GB10, pretend

import q4core as q4
from q4_actors import MutableMode, SharedMutableTensor
from q4_um_managed import apply_source_policy
from q4core.memory import Placement

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
PREFER = q4.UnifiedMemoryPolicy.PREFER_UNIFIED


def _unaligned() -> torch.Tensor:
    """Return floats at an address that floats can't have."""
    return torch.frombuffer(bytearray(17), dtype=torch.float32, count=3, offset=1)


def _bytes_at(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def test_a_mapped_file_becomes_a_cuda_tensor_without_a_copy() -> None:
    """Where the GPU uses the host's page tables, a CPU tensor is read in place, by the attribute that is recorded."""
    case = pretend(GB10)
    source = torch.arange(64.0)[8:40].view(4, 8)[:, :6]
    mapped = case.provider.map(source, device=CUDA)
    assert mapped is not None
    assert (mapped.data_ptr(), mapped.device, mapped.stride()) == (source.data_ptr(), CUDA, source.stride())
    assert torch.equal(mapped.as_subclass(torch.Tensor), source)
    placement = case.provider.placement_of(mapped)
    assert placement == Placement("pageable", "pageableMemoryAccessUsesHostPageTables=1")
    assert not case.provider.is_managed(mapped)
    assert case.runtime.count("mallocManaged") == 0
    kept = source.sum()
    del source
    gc.collect()
    assert mapped.sum() == kept
    before = case.runtime.synchronised
    del mapped
    gc.collect()
    assert case.runtime.synchronised == before + 1  # a kernel may have been reading it


@pytest.mark.parametrize("mode", MutableMode)
def test_what_processes_share_is_read_where_it_is_shared(mode: MutableMode) -> None:
    """The process that has such a GPU lets it read, or write, the very bytes that other processes write and read."""
    case = pretend(GB10)
    with SharedMutableTensor(torch.arange(16.0), mode=mode) as state:
        with SharedMutableTensor.attach(state.segment) as actor, actor.write() as tensor:
            tensor.add_(1.0)
        with state.read() as view:
            mapped = case.provider.map(view.tensor, device=CUDA)
            assert mapped is not None
            assert (mapped.data_ptr(), mapped.device) == (view.tensor.data_ptr(), CUDA)
            assert _bytes_at(mapped) == _bytes_at(torch.arange(16.0) + 1.0)
            del mapped
        with state.write() as tensor:
            mapped = case.provider.map(tensor, device=CUDA)
            assert mapped is not None
            mapped.as_subclass(torch.Tensor).fill_(3.0)
            del mapped
        assert state.snapshot().tensor.tolist() == [3.0] * 16
        assert case.runtime.count("mallocManaged") == 0


def test_a_checkpoint_is_read_where_it_is_mapped(tmp_path: Path) -> None:
    """On a device that reads system memory well, every tensor of a checkpoint's weight is the file's own pages."""
    case = pretend(GB10)
    weights = {f"layers.{index}": q4.quantize(torch.randn(16, 64), "nvfp4") for index in range(3)}
    q4.save_checkpoint(tmp_path / "model.safetensors", weights, dialect="modelopt-nvfp4")
    checkpoint = q4.open(tmp_path / "model.safetensors")
    for name, written in weights.items():
        source = checkpoint[name]
        brought = [
            apply_source_policy(tensor, PREFER, device=CUDA, providers=[case.provider], environment={})
            for _, tensor in source.tensors()
        ]
        assert [decision.action for _, decision in brought] == ["mapped"] * 3, brought
        assert [tensor.data_ptr() for tensor, _ in brought] == [tensor.data_ptr() for _, tensor in source.tensors()]
        placements = {str(decision.placement) for _, decision in brought}
        assert placements == {"pageable memory (pageableMemoryAccessUsesHostPageTables=1)"}
        del source
        gc.collect()
        for (tensor, _), (_, expected) in zip(brought, written.tensors(), strict=True):
            assert _bytes_at(tensor) == _bytes_at(expected)
    assert case.runtime.count("mallocManaged") == 0


@pytest.mark.parametrize(
    ("attributes", "tensor", "device"),
    [
        (CONCURRENT, torch.zeros(8), CUDA),
        (CONCURRENT | {"pageableMemoryAccess": 1}, torch.zeros(8), CUDA),
        (GB10, _unaligned(), CUDA),
        (GB10, torch.zeros(0), CUDA),
        (GB10, torch.zeros(8), CPU),
    ],
    ids=["not pageable", "over a bus", "unaligned", "empty", "for the CPU"],
)
def test_what_is_not_read_well_in_place_is_not_mapped(
    attributes: dict[str, int], tensor: torch.Tensor, device: torch.device
) -> None:
    """Without the attributes, without alignment, or for the CPU, there is no mapping."""
    assert pretend(attributes).provider.map(tensor, device=device) is None


@pytest.mark.parametrize(
    ("attributes", "wish", "expected"),
    [
        (CONCURRENT, "auto", "managed"),
        (GB10, "auto", "pageable"),
        (GB10, "managed", "managed"),
        (CONCURRENT, "pinned", "pinned"),
        (CONCURRENT | {"pageableMemoryAccess": 1}, "pageable", "pageable"),
        (CONCURRENT | {"pageableMemoryAccess": 1}, "auto", "managed"),
        (CONCURRENT | {"managedMemory": 0, "concurrentManagedAccess": 0}, "auto", "pinned"),
        (CONCURRENT, "pageable", None),
        (CONCURRENT | {"managedMemory": 0}, "managed", None),
        (CONCURRENT | {"canMapHostMemory": 0}, "pinned", None),
        (dict.fromkeys(CONCURRENT, 0), "auto", None),
    ],
)
def test_a_placement_is_chosen_by_attributes(attributes: dict[str, int], wish: str, expected: str | None) -> None:
    """A request is followed or rejected with every attribute; the default is the best that the attributes allow."""
    case = pretend(attributes)
    source = torch.arange(16.0)
    if expected is None:
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            case.provider.place(source, device=CUDA, placement=wish)
        assert caught.value.attributes == attributes
        return
    placed, placement = case.provider.place(source, device=CUDA, placement=wish)
    assert placement.kind == expected
    assert case.provider.is_managed(placed) == (expected == "managed")
    assert any(f"{key}=" in placement.decided_by for key in attributes)
    assert case.provider.placement_of(placed) == placement
    assert torch.equal(placed.as_subclass(torch.Tensor), source)
    assert (placed.data_ptr() == source.data_ptr()) == (expected == "pageable")
    assert case.runtime.count("hostAlloc") == (expected == "pinned")


def test_placing_refuses_what_it_does_not_know() -> None:
    """An unknown placement, or a device that is no GPU, is a ConfigError."""
    provider = pretend().provider
    with pytest.raises(q4.ConfigError):
        provider.place(torch.zeros(4), device=CUDA, placement="shared")
    with pytest.raises(q4.ConfigError):
        provider.place(torch.zeros(4), device=CPU)


def test_memory_of_another_provider_is_not_mistaken() -> None:
    """Each provider knows its own memory, also through views, and no other's; the note goes with the memory."""
    own, other = pretend().provider, pretend().provider
    tensor = own.empty((4,), torch.float32, CUDA)
    assert own.placement_of(tensor[1:].detach()) is not None
    assert other.placement_of(tensor) is None
    for foreign in (tensor, torch.zeros(4)):
        with pytest.raises(q4.InputError):
            other.free(foreign)
    del tensor, foreign
    assert own.stats().in_use_bytes == 0
    assert own.placement_of(torch.zeros(4)) is None
