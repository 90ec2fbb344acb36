"""The provider over a pretended driver: what it offers, by which attributes, and whose memory it is."""

from __future__ import annotations

import ctypes
import gc
import inspect
import re
import sys
import time
from typing import Any

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, LEGACY, Runtime, RuntimeFaultError, missing, pretend

import q4core as q4
from q4_um_managed import ManagedProvider, apply_policy, q4_memory_providers, q4_placers
from q4_um_managed.device_attributes import ATTRIBUTES, UNASKED
from q4_um_managed.driver import Driver
from q4_um_managed.probe_driver import Prospect, find_driver
from q4core.memory import MemoryProvider, Placement
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

CPU = torch.device("cpu")
REQUIRE = q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED


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
    run_interpreter(["-c", code], check=True, timeout=scaled(120))
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
    """With a torch that was built without CUDA, only CPU tensors can be had."""
    case = pretend()
    case.torch.is_built_with_cuda = False
    assert not case.provider.is_available(CUDA)
    assert case.provider.is_available(CPU)


def test_without_a_driver_every_answer_says_so() -> None:
    """A machine without a driver keeps the plugin; questions are answered, requests are typed errors with the facts."""
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

        q4_placers = staticmethod(q4_placers)

    registry = q4.Registry([("um-managed", _Plugin())])
    session = q4.Session(q4.SessionConfig(device="cpu", unified_memory="require_unified"), registry=registry)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            session.linear(weight)
        times.append(time.perf_counter() - start)
    assert min(times) < scaled(0.010)
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

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802, D102
        version._obj.value = 99000
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802, D102
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802, D102
        names = {number: name for name, number in ATTRIBUTES.items()}
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
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)  # importing it would be reported as the reason
    times = []
    for _ in range(5):
        provider = ManagedProvider(lambda: find_driver(lambda: library))
        start = time.perf_counter()
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            apply_policy(torch.ones(4), REQUIRE, device="cuda", providers=[provider], environment={})
        times.append(time.perf_counter() - start)
    assert min(times) < scaled(0.010)
    for key, value in told.items():
        assert f"{key}={value}" in str(caught.value)


def test_one_usable_device_is_enough_to_go_on() -> None:
    """Where any device has managed memory, CUDA's runtime is looked for, and answers for each device."""
    found = find_driver(lambda: Library(NO_MANAGED, CONCURRENT))
    assert isinstance(found, Prospect)
    loaded = found.load()
    assert isinstance(loaded, Driver) or "CuPy" in loaded.reason


def test_the_librarys_numbers_are_cupys() -> None:
    """Each attribute has the number that CuPy has for it."""
    from cupy.cuda import runtime as real  # noqa: PLC0415  # slow, and wanted here alone

    assert {name: getattr(real, f"cudaDevAttr{name[0].upper()}{name[1:]}") for name in ATTRIBUTES} == ATTRIBUTES


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


def test_memory_that_was_given_back_serves_nobody() -> None:
    """After free() nothing is done through the old tensor or a view of it: its bytes are another tensor's by then."""
    case = pretend()
    provider = case.provider
    for device in (CUDA, CPU):
        tensor = provider.empty((1024,), torch.float32, device)
        provider.free(tensor)
        provider.empty((1024,), torch.float32, device)
        calls = len(case.runtime.calls)
        for old in (tensor, tensor[1:5], tensor.detach(), tensor[:0]):
            for call in (
                lambda old=old: provider.prefetch(old, CUDA),
                lambda old=old: provider.advise(old, "read_mostly", CUDA),
                lambda old=old: provider.record_stream(old, 9),
                lambda old=old: provider.to_managed(old, device=CUDA, read_mostly=False, prefetch=False),
                lambda old=old: provider.place(old, device=CUDA, placement="pinned"),
                lambda old=old: provider.free(old),
                lambda old=old: provider.dual_view(old),
            ):
                with pytest.raises(q4.LifecycleError, match="given back") as caught:
                    call()
                assert (caught.value.name, caught.value.rule) == ("tensor", "in use, not given back")
                assert caught.value.hint
            assert provider.is_managed(old) is False
            assert provider.placement_of(old) is None
        assert {"memPrefetchAsync", "memAdvise", "mallocManaged"}.isdisjoint(case.runtime.calls[calls:])


def test_no_policy_takes_memory_that_was_given_back() -> None:
    """A freed tensor is not "already managed": a policy that would use it says what is wrong with it."""
    provider = pretend().provider
    tensor = provider.empty((8,), torch.float32, CPU)
    provider.free(tensor)
    with pytest.raises(q4.UnifiedMemoryError, match="given back"):
        apply_policy(tensor, REQUIRE, device="cpu", providers=[provider], environment={})
    prefer = q4.UnifiedMemoryPolicy.PREFER_UNIFIED
    _, decision = apply_policy(tensor, prefer, device="cpu", providers=[provider], environment={})
    assert decision.action == "fallback"
    assert "given back" in decision.reason


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
