"""Checks of a provider of managed memory, and of what the core's policies make of it."""

from __future__ import annotations

import ctypes
import functools
import gc
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.endurance import resident_bytes
from q4_conformance.contract.case import check, expect, raised
from q4_conformance.measurement.allocations import trim, watch
from q4_conformance.oracle.compare import judge
from q4_conformance.oracle.decoding import stored_bytes
from q4_conformance.oracle.exact import exact_linear
from q4_conformance.oracle.grids import draw_on_grid
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.subjects.memory import CountedProvider, MemorySubject, UnableProvider, driver_says_managed
from q4_conformance.subjects.reference import require_device
from q4core import Precision, ScaleKind, Session, SessionConfig, UnifiedMemoryError, UnifiedMemoryPolicy, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.contract.case import Case
    from q4core import Q4Linear

_PREFER, _REQUIRE = UnifiedMemoryPolicy.PREFER_UNIFIED, UnifiedMemoryPolicy.REQUIRE_UNIFIED
_ABSENT = (torch.device("cuda", 127), torch.device("meta"))
_LIVES = 200
_LIFE_BYTES = 1 << 20


def _layer(subject: MemorySubject, policy: UnifiedMemoryPolicy, provider: Any = None) -> Q4Linear:
    weight = WeightRecipe(format="nvfp4", n=32, k=128, scale_kind=ScaleKind.E4M3_MUL).build()
    config = SessionConfig(device=str(subject.device), unified_memory=policy)
    layer: Q4Linear = Session(config, registry=subject.registry(provider)).linear(weight)
    return layer


def _bytes_at(tensor: torch.Tensor) -> bytes:
    """Return what the CPU sees at a tensor's address, whatever device the tensor says it is on."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@check("capability")
def check_capability(_case: Case, subject: MemorySubject) -> str:
    """The provider says of every device whether it can, why, and by which device attributes; twice the same."""
    for device in (subject.device, torch.device("cpu"), *_ABSENT):
        own = MemorySubject(subject.provider, device=str(device))
        answer = own.availability()
        expect(answer.reason, f"{device}: the answer has no reason")
        expect(answer or answer.attributes, f"{device}: a refusal names no device attribute")
        expect(own.availability() == answer, f"{device}: another answer the second time")
        expect(not (answer and device in _ABSENT), f"{device} is not there, and managed memory is offered for it")
    return str(subject.availability().reason)


@check("prefer_provider")
def check_prefer_provider(_case: Case, subject: MemorySubject) -> str:
    """PREFER_UNIFIED promotes a layer where the provider can, else falls back with its reason; the numbers stay."""
    require_device(subject.device)
    x = draw_on_grid(Precision.W4A32, 3, 128, dtype=torch.float32, seed=0).to(subject.device)
    plain = _layer(subject, UnifiedMemoryPolicy.DISABLED)
    expect(not plain.diagnostics().memory, "DISABLED recorded a decision")
    unable = UnableProvider(subject.provider, "told so by the kit", {"concurrentManagedAccess": 0})
    fallen = _layer(subject, _PREFER, unable)
    told = fallen.diagnostics().memory
    expect(told and all("fallback" in line and "told so by the kit" in line for line in told), f"recorded: {told}")
    expect(torch.equal(fallen(x), plain(x)), "other numbers after the fallback")
    subject.require_available()
    layer = _layer(subject, _PREFER)
    y = layer(x)
    weight = WeightRecipe(format="nvfp4", n=32, k=128, scale_kind=ScaleKind.E4M3_MUL).build()
    verdict = judge(y, exact_linear(weight, x), out_dtype=torch.float32)
    expect(verdict.passed, f"wrong numbers in managed memory: {verdict}")
    expect(torch.equal(y, plain(x)), "other numbers in managed memory")
    told = layer.diagnostics().memory
    expect(told and not any("fallback" in line for line in told), f"recorded: {told}")
    managed = [name for name, buffer in layer.named_buffers() if subject.provider.is_managed(buffer)]
    expect(managed, "nothing of the layer is in managed memory")
    return f"{len(managed)} buffers managed; {told[0]}"


@check("require_provider")
def check_require_provider(_case: Case, subject: MemorySubject) -> str:
    """REQUIRE_UNIFIED that the provider can't meet fails at once, naming the attributes that it gave."""
    require_device(subject.device)
    provider: Any = subject.provider
    answer = subject.availability()
    if answer:
        attributes = {"concurrentManagedAccess": 0, "pageableMemoryAccess": 0}
        provider = UnableProvider(provider, "told so by the kit", attributes)
        answer = provider.is_available(subject.device)
    for name, call in _required(subject, provider):
        error = raised(UnifiedMemoryError, call, f"{name} was served without managed memory")
        for key in answer.attributes:
            expect(key in error.attributes, f"{name}: the error does not carry {key!r}: {error.attributes}")
            expect(key in str(error), f"{name}: the message does not name {key!r}: {error}")
        expect(answer.reason in str(error), f"{name}: the message has no reason: {error}")
    return f"layer, weight, mutable tensor, activation: {', '.join(answer.attributes)}"


def _required(subject: MemorySubject, provider: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "a layer", lambda: _layer(subject, _REQUIRE, provider)
    facts: dict[str, Any] = {"device": subject.device, "providers": (provider,)}
    source = torch.zeros(4, device=subject.device)
    yield "a weight", lambda: memory.apply_policy(source, _REQUIRE, **facts)
    yield "a mutable tensor", lambda: memory.apply_mutable_policy(source, _REQUIRE, **facts)
    yield "an activation", lambda: memory.apply_input_policy(source, _REQUIRE, **facts)


def _samples(device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(21)
    plain = torch.randn(37, 65, generator=generator)
    yield "float32", plain.to(device)
    yield "transposed", plain.to(device).T
    yield "every second column", plain.to(device)[:, ::2]
    yield "a part", plain.to(device)[3:9, 5:]
    yield "scalar", torch.tensor(2.5, device=device)
    yield "bytes", torch.arange(256, dtype=torch.uint8, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn):
        yield str(dtype), (plain * 8).to(dtype).to(device)


@check("convert_managed")
def check_convert_managed(_case: Case, subject: MemorySubject) -> str:
    """A conversion is managed by the driver's own word, keeps data and shape, and both views show the same bytes."""
    subject.require_available()
    ordinary = torch.zeros(64, device=subject.device)
    expect(not subject.provider.is_managed(ordinary), "ordinary memory is called managed")
    count = 0
    for name, source in _samples(subject.device):
        before = stored_bytes(source)
        managed = subject.managed(source)
        expect(
            (managed.dtype, managed.shape) == (source.dtype, source.shape),
            f"{name}: became {managed.dtype} {list(managed.shape)}",
        )
        expect(managed.device.type == subject.device.type, f"{name}: is on {managed.device}")
        expect(subject.provider.is_managed(managed), f"{name}: the provider does not call its own memory managed")
        if subject.device.type == "cuda":
            expect(driver_says_managed(managed), f"{name}: the driver does not call it managed")
            expect(not driver_says_managed(ordinary), "the driver calls ordinary memory managed")
        expect(stored_bytes(managed) == before, f"{name}: other data")
        expect(stored_bytes(source) == before, f"{name}: the source was written")
        expect(managed.data_ptr() != source.data_ptr(), f"{name}: shares memory with its source")
        dense = managed if managed.is_contiguous() else managed.T
        expect(_bytes_at(dense) == stored_bytes(dense), f"{name}: the CPU sees other bytes than the device")
        managed.zero_()
        expect(not any(_bytes_at(dense)), f"{name}: the CPU does not see what the device wrote")
        count += 1
    return f"{count} tensors"


@check("managed_empty")
def check_managed_empty(_case: Case, subject: MemorySubject) -> str:
    """Empty tensors have the form asked for, never share bytes while they live, and give them back when they go."""
    subject.require_available()
    shapes = ((3, 5), (1,), (7, 1, 2))
    held = [subject.provider.empty(shape, torch.float32, subject.device) for shape in shapes]
    for index, (shape, tensor) in enumerate(zip(shapes, held, strict=True)):
        expect(tuple(tensor.shape) == shape and tensor.dtype is torch.float32, f"{list(shape)}: {list(tensor.shape)}")
        expect(
            tensor.is_contiguous() and subject.provider.is_managed(tensor), f"{list(shape)}: not contiguous, managed"
        )
        tensor.fill_(index + 1)
    for index, tensor in enumerate(held):
        expect(bool((tensor == index + 1).all()), "two living tensors share memory")
    del held, tensor
    start = 0
    for life in range(_LIVES + 10):
        if life == 10:  # noqa: PLR2004  # warm
            trim()
            start = resident_bytes()
        tensor = subject.provider.empty((_LIFE_BYTES,), torch.uint8, subject.device)
        tensor.fill_(1)
        if life % 2:
            subject.provider.free(tensor)
        del tensor
    gc.collect()
    trim()
    grown = resident_bytes() - start
    limit = _LIVES * _LIFE_BYTES // 8
    expect(grown < limit, f"memory grew by {grown} bytes over {_LIVES} tensors of {_LIFE_BYTES}, {limit} at most")
    return f"{_LIVES} tensors, memory grew by {grown} bytes"


@check("mutable_variable")
def check_mutable_variable(_case: Case, subject: MemorySubject) -> str:
    """With Q4_DISABLE_UM=0 the mutable policy promotes a copy; with 1 nothing is promoted, and REQUIRE fails."""
    subject.require_available()
    source = torch.arange(12.0, device=subject.device).reshape(3, 4)
    facts: dict[str, Any] = {"device": subject.device, "providers": (subject.provider,)}
    for value in ("0", ""):
        environment = {memory.DISABLE_VARIABLE: value}
        for policy in (_PREFER, _REQUIRE):
            placed, decision = memory.apply_mutable_policy(source, policy, environment=environment, **facts)
            expect(decision.action == "promoted", f"{value!r}, {policy.value}: {decision.action}: {decision.reason}")
            expect(decision.bytes == source.nbytes, f"{value!r}: {decision.bytes} bytes are recorded")
            expect(subject.provider.is_managed(placed), f"{value!r}: not in managed memory")
            expect(torch.equal(placed, source), f"{value!r}: other data")
            placed.add_(1)
            expect(float(source.sum()) == 66.0, "the caller's tensor was written")  # noqa: PLR2004  # 0 + … + 11
    off = {memory.DISABLE_VARIABLE: "1"}
    placed, decision = memory.apply_mutable_policy(source, _PREFER, environment=off, **facts)
    expect(not subject.provider.is_managed(placed), "promoted although the variable is 1")
    expect(memory.DISABLE_VARIABLE in decision.reason, f"the reason does not name the variable: {decision.reason}")
    required = functools.partial(memory.apply_mutable_policy, source, _REQUIRE, environment=off, **facts)
    error = raised(UnifiedMemoryError, required, "REQUIRE_UNIFIED was met although the variable is 1")
    expect(memory.DISABLE_VARIABLE in str(error), f"the error does not name the variable: {error}")
    return "promoted with 0 and unset, not with 1"


@check("managed_activation")
def check_managed_activation(_case: Case, subject: MemorySubject) -> str:
    """PREFER_UNIFIED gives the same storage back, managed or not: no allocation and no copy, counted."""
    subject.require_available()
    counted = CountedProvider(subject.provider)
    facts: dict[str, Any] = {"device": subject.device, "providers": (counted,)}
    ordinary = torch.ones(64, 1 << 14, device=subject.device)
    managed = subject.managed(ordinary)
    for name, x, action, calls in (
        ("ordinary", ordinary, "left", []),
        ("managed", managed, "prefetched", ["prefetch"]),
    ):
        counted.calls.clear()
        same, decision = memory.apply_input_policy(x, _PREFER, **facts)
        expect(same is x, f"{name}: another tensor came back")
        expect(decision.action == action and decision.bytes == 0, f"{name}: {decision.action}, {decision.bytes} bytes")
        expect(counted.calls == calls, f"{name}: the provider was called for {counted.calls}")
        address = x.data_ptr()
        used = watch(lambda x=x: memory.apply_input_policy(x, _PREFER, **facts), subject.device)  # type: ignore[misc]
        expect(used.elements == 0, f"{name}: {used.elements} elements were made")
        expect((used.peak_bytes or 0) < x.nbytes // 4, f"{name}: memory peaked by {used.peak_bytes} bytes")
        expect(x.data_ptr() == address and float(x.sum()) == x.numel(), f"{name}: the activation moved or changed")
    return "ordinary left, managed prefetched; nothing allocated"
