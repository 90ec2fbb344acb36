"""The provider over a pretended driver: what it offers, by which attributes, and whose memory it is."""

from __future__ import annotations

import ctypes
import gc
import inspect
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, GB10, GIB, LEGACY, Runtime, RuntimeFaultError, missing, pretend

import q4core as q4
from q4_um_managed import ManagedProvider, q4_memory_providers
from q4_um_managed.budget import host_memory
from q4_um_managed.cgroups import group_memory
from q4_um_managed.driver import ATTRIBUTES, UNASKED, Driver, find_driver
from q4_um_managed.library import NUMBERS
from q4core.memory import MemoryProvider, Placement, apply_policy, apply_source_policy

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
PREFER = q4.UnifiedMemoryPolicy.PREFER_UNIFIED
REQUIRE = q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED


def _unaligned() -> torch.Tensor:
    """Return floats at an address that floats can't have."""
    return torch.frombuffer(bytearray(17), dtype=torch.float32, count=3, offset=1)


def _bytes_at(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


# -- what it answers


def test_the_hook_gives_a_provider_and_loads_nothing() -> None:
    """The plugin brings one provider, of the contract's form; CuPy is imported by the first question only."""
    code = """
import sys, q4_um_managed
(provider,) = q4_um_managed.q4_memory_providers()
assert not [name for name in sys.modules if name.startswith("cupy")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    (provider,) = q4_memory_providers()
    assert isinstance(provider, MemoryProvider)
    assert provider.name == "um-managed"


def test_the_pretended_runtime_has_cupys_functions() -> None:
    """Each function of the pretended runtime is one of CuPy's, with as many arguments, and each constant is there."""
    from cupy.cuda import runtime as real  # noqa: PLC0415  # slow, and wanted here alone

    ours = [name for name, value in vars(Runtime).items() if callable(value) and re.match(r"[a-z]+[A-Z]|free$", name)]
    assert len(ours) > 15
    for name in ours:
        told = inspect.getdoc(getattr(real, name)) or ""
        arguments = re.search(r"\((.*?)\)", told.splitlines()[0])
        assert arguments is not None, name
        required = [item for item in arguments[1].split(",") if item and "=" not in item]
        assert len(required) == len(inspect.signature(getattr(Runtime, name)).parameters) - 1, (name, told)
    constants = [name for name in vars(Runtime) if re.match(r"cuda|hostAlloc[MP]|eventDisable", name)]
    for name in [*constants, *Runtime(CONCURRENT).__dict__]:
        if name.startswith(("cuda", "hostAllocM", "hostAllocP", "eventD")):
            assert hasattr(real, name), name
    for name in constants:
        assert getattr(real, name) == getattr(Runtime, name), name


@pytest.mark.parametrize(
    ("attributes", "device", "is_available", "why"),
    [
        (CONCURRENT, CUDA, True, "concurrentManagedAccess=1"),
        (CONCURRENT, CPU, True, "concurrentManagedAccess=1"),
        (LEGACY, CUDA, True, "concurrentManagedAccess=0"),
        (LEGACY, CPU, False, "concurrentManagedAccess=0"),
        (CONCURRENT | {"managedMemory": 0}, CUDA, False, "managedMemory=0"),
        (CONCURRENT, torch.device("cuda", 3), False, "there is no device cuda:3"),
        (CONCURRENT, torch.device("meta"), False, "not for meta"),
    ],
)
def test_an_answer_names_what_decided(
    attributes: dict[str, int], device: torch.device, is_available: bool, why: str
) -> None:
    """Each device is answered by its attributes, which the answer carries; twice the same, and asked for once."""
    case = pretend(attributes)
    answer = case.provider.is_available(device)
    assert answer.is_available is is_available
    assert why in answer.reason
    assert answer.attributes
    if device.type != "meta" and device.index != 3:
        assert answer.attributes == attributes
    asked = case.runtime.count("deviceGetAttribute")
    assert case.provider.is_available(device) == answer
    assert case.runtime.count("deviceGetAttribute") == asked


def test_a_device_without_number_is_the_current_one() -> None:
    """Of two unlike devices, "cuda" is asked about as the one that is current now."""
    case = pretend(CONCURRENT, CONCURRENT | {"managedMemory": 0})
    cuda = torch.device("cuda")
    assert case.provider.is_available(cuda)
    case.runtime.device = 1
    assert not case.provider.is_available(cuda)
    case.runtime.device = 0
    assert case.provider.is_available(cuda)


@pytest.mark.parametrize("call", ["getDeviceCount", "getDevice", "deviceGetAttribute"])
def test_a_driver_that_fails_is_a_refusal(call: str) -> None:
    """A driver error at any question is a refusal that names the call and the error, never an exception."""
    case = pretend()
    case.runtime.fails[call] = RuntimeFaultError(35, "cudaErrorInsufficientDriver: too old")
    for device in (CPU, CUDA):
        answer = case.provider.is_available(device)
        if call == "getDevice" and device is CUDA:
            continue
        assert not answer
        assert "cudaErrorInsufficientDriver" in answer.reason
        assert answer.attributes == {"cuda_error": "35", **UNASKED}


def test_a_torch_without_cuda_refuses_cuda_tensors_alone() -> None:
    """Beside a torch that was built without CUDA, only CPU tensors can be had."""
    case = pretend()
    case.torch.is_built_with_cuda = False
    assert not case.provider.is_available(CUDA)
    assert case.provider.is_available(CPU)


def test_without_a_driver_every_answer_says_so() -> None:
    """A machine without a driver keeps the plugin; questions are answered, wishes are typed errors with the facts."""
    provider = missing()
    for device in (CPU, CUDA):
        answer = provider.is_available(device)
        assert not answer
        assert answer.attributes == {"cupy": True, "cuda_driver": False, **UNASKED}
    assert not provider.is_managed(torch.zeros(3))
    assert provider.placement_of(torch.zeros(3)) is None
    assert provider.map(torch.zeros(4), device=CUDA) is None
    assert provider.stats().allocations == provider.trim() == 0
    for call in (
        lambda: provider.empty((3,), torch.float32, CUDA),
        lambda: provider.to_managed(torch.zeros(3), device=CPU, read_mostly=False, prefetch=False),
        lambda: provider.place(torch.zeros(3), device=CUDA),
        lambda: provider.prefetch(torch.zeros(3), CUDA),
    ):
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            call()
        assert caught.value.attributes["cuda_driver"] is False


def test_this_machine_is_answered_too() -> None:
    """The real search for a driver ends in an answer with its facts, here as anywhere."""
    answer = ManagedProvider().is_available(torch.device("cuda", 127))
    assert not answer
    assert answer.attributes


@pytest.mark.parametrize("attributes", [None, CONCURRENT | {"managedMemory": 0}], ids=["no driver", "attribute 0"])
def test_a_requirement_fails_fast_with_every_attribute(attributes: dict[str, int] | None) -> None:
    """REQUIRE_UNIFIED without the means fails in less than 10 ms, with every attribute's value in the message."""
    provider = missing() if attributes is None else pretend(attributes).provider
    weight = q4.quantize(torch.randn(16, 128), "nf4")

    class _Plugin:
        @q4.hookimpl
        def q4_memory_providers(self) -> list[ManagedProvider]:
            return [provider]

    registry = q4.Registry([("um-managed", _Plugin())])
    session = q4.Session(q4.SessionConfig(device="cpu", unified_memory="require_unified"), registry=registry)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            session.linear(weight)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010
    nobody_asked: dict[str, object] = {"cupy": True, "cuda_driver": False, **UNASKED}
    for key, value in (attributes or nobody_asked).items():
        assert f"{key}={value}" in str(caught.value)


class Library:
    """The driver's own library, pretended: what ``cuInit`` gives, and each device's attributes."""

    def __init__(self, *devices: dict[str, int], status: int = 0) -> None:
        self.devices, self.status = devices, status

    def cuInit(self, flags: int) -> int:  # noqa: N802  # the driver's names
        """As the driver's, like all that follow."""
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802, D102
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802, D102
        names = {number: name for name, number in NUMBERS.items()}
        value._obj.value = self.devices[device][names[attribute]]
        return 0


NO_MANAGED = CONCURRENT | {"managedMemory": 0, "concurrentManagedAccess": 0}


@pytest.mark.parametrize(
    ("library", "told"),
    [
        (Library(status=100), {"cuInit": 100, **UNASKED}),
        (Library(), {"cuda_device_count": 0, **UNASKED}),
        (Library(NO_MANAGED, NO_MANAGED), {"cuda_device_count": 2, **NO_MANAGED}),
    ],
    ids=["refuses", "no device", "no managed memory"],
)
def test_a_driver_without_a_usable_device_is_refused_before_cupy(
    library: Library, told: dict[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own answers refuse in less than 10 ms, with each attribute, and CuPy is not imported for it."""
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)  # importing it would be told as the reason
    times = []
    for _ in range(5):
        provider = ManagedProvider(lambda: find_driver(lambda: library))
        start = time.perf_counter()
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            apply_policy(torch.ones(4), REQUIRE, device="cuda", providers=[provider], environment={})
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010
    for key, value in told.items():
        assert f"{key}={value}" in str(caught.value)


def test_one_usable_device_is_enough_to_go_on() -> None:
    """Where any device has managed memory, CUDA's runtime is looked for, and answers for each device."""
    found = find_driver(lambda: Library(NO_MANAGED, CONCURRENT))
    assert isinstance(found, Driver) or "CuPy" in found.reason


def test_the_librarys_numbers_are_cupys() -> None:
    """Each attribute has the number that CuPy has for it."""
    from cupy.cuda import runtime as real  # noqa: PLC0415  # slow, and wanted here alone

    assert {name: getattr(real, constant) for name, constant in ATTRIBUTES.items()} == NUMBERS


# -- whose memory it is


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (4, 0, 2)])
def test_a_conversion_keeps_values_and_form(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """What is converted is managed by the driver's own word, has the source's values, and is apart from it."""
    provider = pretend().provider
    source = (torch.randn(shape) * 4).to(dtype)
    managed = provider.to_managed(source, device=device, read_mostly=True, prefetch=True)
    assert (managed.shape, managed.dtype, managed.device) == (source.shape, dtype, device)
    assert provider.is_managed(managed)
    assert provider.is_managed(managed.detach())
    assert not provider.is_managed(source)
    assert _bytes_at(managed) == _bytes_at(source)
    placement = provider.placement_of(managed)
    assert placement == Placement("managed", "concurrentManagedAccess=1")
    assert provider.placement_of(source) is None


def test_strides_are_followed() -> None:
    """A transposed or cut source arrives by value, contiguous."""
    provider = pretend().provider
    base = torch.arange(24.0).reshape(4, 6)
    for source in (base.T, base[:, ::2], base[1:3, 2:], base[0].expand(3, 6)):
        managed = provider.to_managed(source, device=CUDA, read_mostly=False, prefetch=False)
        assert managed.is_contiguous()
        assert torch.equal(managed.as_subclass(torch.Tensor), source)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_last_view_keeps_the_memory(device: torch.device) -> None:
    """Memory lives as long as any view or detached alias of it, in whatever order they go, and comes back then."""
    provider = pretend().provider
    tensor = provider.empty((1024,), torch.float32, device)
    tensor.fill_(3.0)
    alias, view = tensor.detach(), tensor[100:200].view(10, 10)
    del tensor, alias
    gc.collect()
    assert provider.stats().in_use_bytes == 4096
    other = provider.empty((1024,), torch.float32, device)
    other.zero_()
    assert view.sum() == 300.0
    del view, other
    gc.collect()
    stats = provider.stats()
    assert (stats.in_use_bytes, stats.cached_bytes) == (0, 8192)


def test_free_takes_back_at_once_and_once() -> None:
    """free() gives the block back while the tensor object lives; again, or of other memory, it is a typed error."""
    provider = pretend().provider
    tensor = provider.empty((1024,), torch.float32, CUDA)
    provider.free(tensor)
    assert provider.stats().in_use_bytes == 0
    again = provider.empty((1024,), torch.float32, CUDA)
    assert again.data_ptr() == tensor.data_ptr()
    with pytest.raises(q4.LifecycleError):
        provider.free(tensor)  # must not take the new tensor's memory
    assert provider.stats().in_use_bytes == 4096
    del tensor
    gc.collect()
    assert provider.stats().in_use_bytes == 4096
    with pytest.raises(q4.InputError):
        provider.free(torch.zeros(4))


def test_hints_are_given_and_may_be_refused() -> None:
    """Weights are advised read-mostly and prefetched; a driver that takes no hint costs nothing but the hint."""
    case = pretend()
    managed = case.provider.to_managed(torch.ones(8), device=CUDA, read_mostly=True, prefetch=True)
    assert [item for item in case.runtime.details if item[0] == "memAdvise"] == [
        ("memAdvise", managed.data_ptr(), 32, 1, 0)
    ]
    assert case.runtime.details[-1] == ("memPrefetchAsync", managed.data_ptr(), 32, 0, 7)
    case.runtime.fails = {
        name: RuntimeFaultError(1, "cudaErrorInvalidValue") for name in ("memAdvise", "memPrefetchAsync")
    }
    managed = case.provider.to_managed(torch.ones(8), device=CUDA, read_mostly=True, prefetch=True)
    assert managed.sum() == 8
    assert case.provider.hints_refused == 3, "the first move of the new memory is one too"
    with pytest.raises(q4.UnifiedMemoryError, match="memPrefetchAsync"):
        case.provider.prefetch(managed, CUDA)
    with pytest.raises(q4.UnifiedMemoryError, match="memAdvise"):
        case.provider.advise(managed, "accessed_by", CUDA)


def test_read_mostly_ends_with_the_tensor() -> None:
    """A block that was advised read-mostly is taken back to ordinary before another tensor gets it."""
    case = pretend()
    del_me = case.provider.to_managed(torch.ones(8), device=CUDA, read_mostly=True, prefetch=False)
    address = del_me.data_ptr()
    del del_me
    again = case.provider.empty((8,), torch.float32, CUDA)
    assert again.data_ptr() == address
    assert case.runtime.details[-1] == ("memAdvise", address, 4096, 2, 0)


@pytest.mark.parametrize("attributes", [LEGACY, CONCURRENT])
def test_prefetch_and_advice_name_the_place(attributes: dict[str, int]) -> None:
    """Pages move to the device named, the CPU included; a device that moves them by itself is not asked."""
    case = pretend(attributes)
    tensor = case.provider.empty((10,), torch.float32, CUDA)
    case.runtime.calls.clear()
    case.runtime.details.clear()
    case.provider.prefetch(tensor[2:5], CPU)
    moved = [item for item in case.runtime.details if item[0] == "memPrefetchAsync"]
    expected = [("memPrefetchAsync", tensor.data_ptr() + 8, 12, -1, 7)] if attributes is CONCURRENT else []
    assert moved == expected
    case.provider.advise(tensor, "preferred_location", CPU)
    assert case.runtime.details[-1] == ("memAdvise", tensor.data_ptr(), 40, 3, -1)
    with pytest.raises(q4.ConfigError):
        case.provider.advise(tensor, "hot", CPU)


# -- budget


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


def test_foreign_managed_memory_is_told_without_a_question_before() -> None:
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


# -- placements


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
    """A wish is obeyed or refused with every attribute; left open, the best that the attributes allow is taken."""
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


def test_a_recycled_storage_object_is_not_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may make an ordinary storage where one of ours was, while our memory lives on: its address tells."""
    provider = pretend().provider
    tensor = provider.empty((4,), torch.float32, CUDA)
    key = tensor.untyped_storage()._cdata
    monkeypatch.setattr("q4_um_managed.provider.storage_of", lambda _: key)
    assert provider.placement_of(tensor) is not None
    assert provider.placement_of(torch.zeros(4)) is None
    with pytest.raises(q4.InputError):
        provider.free(torch.zeros(4))
    assert provider.stats().in_use_bytes == 4096
