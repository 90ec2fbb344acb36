"""The managed-memory budget: by what an allocation is judged, and the error when there is too little."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from pretended_driver import CUDA, GB10, GIB, RuntimeFaultError, missing, pretend

import q4core as q4
from q4_um_managed import ManagedProvider
from q4_um_managed.budget import host_memory
from q4_um_managed.cgroups import group_memory
from q4_um_managed.driver import Driver

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("call", ["mallocManaged", "memGetInfo"])
def test_an_allocation_that_fails_is_typed(call: str) -> None:
    """What the driver refuses is a UnifiedMemoryError that names the call."""
    case = pretend()
    case.runtime.fails[call] = RuntimeFaultError(2, "cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(q4.UnifiedMemoryError, match=f"{call}.*out of memory"):
        case.provider.empty((8,), torch.float32, CUDA)
    case.runtime.fails.clear()
    assert case.provider.empty((8,), torch.float32, CUDA).numel() == 8


def test_a_discrete_gpu_is_judged_by_its_own_memory() -> None:
    """More than the card has free, less what stays free, is refused with the numbers, before the driver is asked."""
    case = pretend(free=GIB)
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        case.provider.empty((GIB - (200 << 20),), torch.uint8, CUDA)
    facts = caught.value.attributes
    assert facts["counted_by"] == "cudaMemGetInfo"
    assert (facts["free_bytes"], facts["headroom_bytes"]) == (GIB, 256 << 20)
    assert str(facts["requested_bytes"]) in str(caught.value)
    assert case.runtime.count("mallocManaged") == 0


@pytest.mark.parametrize(("available", "fits"), [(9, True), (8, False), (1, False)])
def test_an_integrated_gpu_is_judged_by_the_hosts_memory(available: int, fits: bool) -> None:
    """On a GPU that shares the host's memory, MemAvailable counts, whatever CUDA says, and 8 GiB stay free."""
    case = pretend(GB10, host=(available * GIB, 128 * GIB), free=1 << 20)
    if fits:
        assert case.provider.empty((1 << 20,), torch.uint8, CUDA).numel() == 1 << 20
        return
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        case.provider.empty((1 << 20,), torch.uint8, CUDA)
    facts = caught.value.attributes
    assert (facts["counted_by"], facts["free_bytes"]) == ("MemAvailable", available * GIB)
    assert facts["headroom_bytes"] == 8 * GIB
    assert facts["integrated"] == 1
    assert case.runtime.count("mallocManaged") == 0


GROUP_FILES: dict[str, dict[str, str]] = {
    "v2": {
        "self": "0::/a/b\n",
        "memory.max": "max\n",
        "a/memory.max": f"{16 * GIB}\n",
        "a/memory.current": f"{15 * GIB}\n",
        "a/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
        "a/b/memory.max": f"{20 * GIB}\n",
        "a/b/memory.current": f"{GIB}\n",
    },
    "v1": {
        "self": "5:cpu:/a\n4:memory:/a\n",
        "memory/memory.limit_in_bytes": f"{1 << 62}\n",
        "memory/memory.usage_in_bytes": f"{GIB}\n",
        "memory/a/memory.limit_in_bytes": f"{16 * GIB}\n",
        "memory/a/memory.usage_in_bytes": f"{15 * GIB}\n",
        "memory/a/memory.stat": f"cache 1\ntotal_inactive_file {GIB // 2}\n",
    },
}


@pytest.mark.parametrize("version", GROUP_FILES)
def test_a_control_group_limits_the_hosts_memory(version: str, tmp_path: Path) -> None:
    """The tightest limit of the process's groups counts where it leaves less than the machine does, and is named."""
    for name, text in GROUP_FILES[version].items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    room = group_memory(tmp_path / "self", tmp_path)
    assert room is not None
    assert room[:2] == (GIB + GIB // 2, 16 * GIB)
    assert host_memory(lambda: (1, 16 * GIB, room[2])) == (1, 16 * GIB, room[2])
    assert host_memory(lambda: (1 << 62, 1 << 62, room[2]))[2] == "MemAvailable"
    case = pretend(GB10)
    provider = ManagedProvider(lambda: case.driver, host=lambda: room)
    with pytest.raises(q4.UnifiedMemoryError, match=r"cgroup memory\.(max|limit_in_bytes)"):
        provider.empty((1 << 20,), torch.uint8, CUDA)


def test_no_control_group_limits_nothing(tmp_path: Path) -> None:
    """Without groups, or with files that say nothing, the machine's own memory counts."""
    assert group_memory(tmp_path / "none", tmp_path) is None
    (tmp_path / "self").write_text("0::/\nnonsense\n")
    assert group_memory(tmp_path / "self", tmp_path) is None


def test_foreign_managed_memory_is_detected_on_first_use() -> None:
    """The driver is asked about any memory, also if nothing of this provider has been used yet; without one, no."""
    case = pretend()
    foreign = Driver.cpu_bytes(None, case.runtime._allocate(4096, 3), 4096)
    assert case.provider.is_managed(foreign)
    assert not missing().is_managed(foreign)


def test_what_the_pool_keeps_is_given_back_before_a_refusal() -> None:
    """Cached blocks don't stand in the way of a tensor of another size."""
    case = pretend(free=GIB, max_cached_bytes=GIB)
    held = case.provider.empty((600 << 20,), torch.uint8, CUDA)
    del held
    gc.collect()
    assert case.provider.stats().cached_bytes > 0
    larger = case.provider.empty((700 << 20,), torch.uint8, CUDA)
    assert larger.numel() == 700 << 20
    assert (case.provider.stats().cached_bytes, case.runtime.count("free")) == (0, 1)
