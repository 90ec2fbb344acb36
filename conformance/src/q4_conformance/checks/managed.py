"""Checks of managed memory: a provider of it, and what the core's policies make of one, or of none."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.endurance import Growth
from q4_conformance.contract.case import check, expect, raised
from q4_conformance.measurement.allocations import watch
from q4_conformance.oracle.compare import judge
from q4_conformance.oracle.decoding import stored_bytes
from q4_conformance.oracle.exact import exact_linear
from q4_conformance.oracle.grids import draw_on_grid
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.subjects.backend import make_registry
from q4_conformance.subjects.memory import CountedProvider, MemorySubject, driver_says_managed, unable_provider
from q4_conformance.subjects.reference import require_device
from q4core import Precision, ScaleKind, Session, SessionConfig, UnifiedMemoryError, UnifiedMemoryPolicy, memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from q4_conformance.contract.case import Case
    from q4core import Q4Linear, Registry

_PREFER, _REQUIRE = UnifiedMemoryPolicy.PREFER_UNIFIED, UnifiedMemoryPolicy.REQUIRE_UNIFIED
_ABSENT = (torch.device("cuda", 127), torch.device("meta"))
_LIVES = 200
_LIFE_BYTES = 1 << 20
_RECIPE = WeightRecipe(format="nvfp4", n=32, k=128, scale_kind=ScaleKind.E4M3_MUL)
_CPU = torch.device("cpu")


def _layer(policy: UnifiedMemoryPolicy, registry: Registry, device: torch.device = _CPU) -> Q4Linear:
    config = SessionConfig(device=str(device), unified_memory=policy)
    layer: Q4Linear = Session(config, registry=registry).linear(_RECIPE.build())
    return layer


def _x() -> torch.Tensor:
    return draw_on_grid(Precision.W4A32, 3, 128, dtype=torch.float32, seed=0)


def _expect_same_numbers(layer: Q4Linear, plain: Q4Linear, x: torch.Tensor, where: str) -> None:
    verdict = judge(layer(x), exact_linear(_RECIPE.build(), x), out_dtype=torch.float32)
    expect(verdict.passed, f"wrong numbers {where}: {verdict}")
    expect(torch.equal(layer(x), plain(x)), f"other numbers {where}")


def _recorded(layer: Q4Linear, *, falls_back: bool, reason: str = "") -> str:
    """Return the first recorded decision on memory; all of them must be fallbacks for a reason, or none."""
    lines = layer.diagnostics().memory
    alike = [line.startswith("fallback") if falls_back else "fallback" not in line for line in lines]
    expect(lines and all(alike) and all(reason in line for line in lines), f"memory is recorded as {lines}")
    return str(lines[0])


@check("prefer_unified")
def _check_prefer_unified(_case: Case, _subject: object) -> str:
    plain, preferred = (_layer(policy, make_registry()) for policy in (UnifiedMemoryPolicy.DISABLED, _PREFER))
    _expect_same_numbers(preferred, plain, _x(), "after the fallback")
    first = _recorded(preferred, falls_back=True)
    expect(not plain.diagnostics().memory, "DISABLED recorded a decision")
    tensor = torch.arange(6.0)
    placed, decision = make_registry().placer(_PREFER, device="cpu").weight(tensor)
    expect(placed is tensor and decision.action == "fallback" and decision.reason, f"{decision}")
    return first


@check("require_unified")
def _check_require_unified(_case: Case, _subject: object) -> str:
    return _expect_refused(make_registry(), _CPU, ())


def _expect_refused(registry: Registry, device: torch.device, providers: Sequence[Any]) -> str:
    """Expect that REQUIRE_UNIFIED fails for every request, by the attributes and reasons of the providers."""
    source = torch.zeros(4, device=device)
    placer = registry.placer(_REQUIRE, device=device)
    answers = [provider.is_available(device) for provider in providers]
    for name, call in (
        ("a layer", lambda: _layer(_REQUIRE, registry, device)),
        ("a weight", lambda: placer.weight(source)),
        ("a mutable tensor", lambda: placer.mutable(source)),
        ("an activation", lambda: placer.input(source)),
    ):
        error = raised(UnifiedMemoryError, call, f"{name} was served without managed memory")
        expect(error.attributes, f"{name}: the error names no device attribute")
        for answer in answers:
            expect(answer.attributes.keys() <= error.attributes.keys(), f"{name}: the error carries {error.attributes}")
            expect(answer.reason in str(error), f"{name}: the message has no reason: {error}")
        unnamed = [key for key in error.attributes if key not in str(error)]
        expect(not unnamed, f"{name}: the message does not name {unnamed}: {error}")
    return "layer, weight, mutable tensor, activation"


@check("prefer_activation")
def _check_prefer_activation(_case: Case, _subject: object) -> str:
    _expect_untouched(torch.ones(64, 1 << 15), make_registry().placer(_PREFER, device=_CPU))
    x, counts = _x(), {}
    for policy in (UnifiedMemoryPolicy.DISABLED, _PREFER):
        layer = _layer(policy, make_registry())
        before = x.clone()
        layer(x)
        expect(torch.equal(x, before), f"{policy.value}: the activation was changed")
        counts[policy] = watch(lambda layer=layer: layer(x)).elements  # type: ignore[misc]
    expect(len(set(counts.values())) == 1, f"elements made: {counts}")
    return "no allocation, no copy"


def _expect_untouched(x: torch.Tensor, placer: memory.MemoryPlacer) -> memory.MemoryDecision:
    """Expect that PREFER_UNIFIED gives an activation of ones back as it is, and return what was decided."""
    address = x.data_ptr()
    same, decision = placer.input(x)
    expect(same is x, "another tensor came back")
    expect(decision.bytes == 0, f"{decision.bytes} bytes were promoted")
    used = watch(lambda: placer.input(x), placer.device)
    expect(used.elements == 0, f"{used.elements} elements were made")
    expect((used.peak_bytes or 0) < x.nbytes // 4, f"memory peaked by {used.peak_bytes} bytes")
    expect(x.data_ptr() == address and float(x.sum()) == x.numel(), "the activation moved or changed")
    return decision


def _bytes_at(tensor: torch.Tensor) -> bytes:
    """Return what the CPU sees at a tensor's address, on any device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@check("capability")
def _check_capability(_case: Case, subject: MemorySubject) -> str:
    for device in (subject.device, torch.device("cpu"), *_ABSENT):
        own = MemorySubject(subject.provider, device=str(device))
        answer = own.availability()
        expect(answer.reason, f"{device}: the answer has no reason")
        expect(answer or answer.attributes, f"{device}: a refusal names no device attribute")
        expect(own.availability() == answer, f"{device}: another answer the second time")
        expect(not (answer and device in _ABSENT), f"{device} is not there, and managed memory is offered for it")
    return str(subject.availability().reason)


@check("prefer_provider")
def _check_prefer_provider(_case: Case, subject: MemorySubject) -> str:
    require_device(subject.device)
    x = _x().to(subject.device)
    plain = _layer(UnifiedMemoryPolicy.DISABLED, subject.registry(), subject.device)
    expect(not plain.diagnostics().memory, "DISABLED recorded a decision")
    unable = unable_provider(subject.provider, "set by the kit", {"concurrentManagedAccess": 0})
    fallen = _layer(_PREFER, subject.registry(unable), subject.device)
    _recorded(fallen, falls_back=True, reason="set by the kit")
    _expect_same_numbers(fallen, plain, x, "after the fallback")
    subject.require_available()
    layer = _layer(_PREFER, subject.registry(), subject.device)
    _expect_same_numbers(layer, plain, x, "in managed memory")
    decision = _recorded(layer, falls_back=False)
    managed = [name for name, buffer in layer.named_buffers() if subject.provider.is_managed(buffer)]
    expect(managed, "nothing of the layer is in managed memory")
    return f"{len(managed)} buffers managed; {decision}"


@check("require_provider")
def _check_require_provider(_case: Case, subject: MemorySubject) -> str:
    require_device(subject.device)
    provider: Any = subject.provider
    if subject.availability():
        attributes = {"concurrentManagedAccess": 0, "pageableMemoryAccess": 0}
        provider = unable_provider(provider, "set by the kit", attributes)
    return _expect_refused(subject.registry(provider), subject.device, (provider,))


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
def _check_convert_managed(_case: Case, subject: MemorySubject) -> str:
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
def _check_managed_empty(_case: Case, subject: MemorySubject) -> str:
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
    growth = Growth(torch.device("cpu"))
    for life in growth.over(_LIVES):
        tensor = subject.provider.empty((_LIFE_BYTES,), torch.uint8, subject.device)
        tensor.fill_(1)
        if life % 2:
            subject.provider.free(tensor)
        del tensor
    return growth.expect_flat(_LIVES, _LIFE_BYTES / 8, "tensors")


@check("mutable_variable")
def _check_mutable_variable(_case: Case, subject: MemorySubject) -> str:
    subject.require_available()
    source = torch.arange(12.0, device=subject.device).reshape(3, 4)
    placer = functools.partial(subject.registry().placer, device=subject.device)
    for value in ("0", ""):
        environment = {memory.DISABLE_VARIABLE: value}
        for policy in (_PREFER, _REQUIRE):
            placed, decision = placer(policy, environment=environment).mutable(source)
            expect(decision.action == "promoted", f"{value!r}, {policy.value}: {decision.action}: {decision.reason}")
            expect(decision.bytes == source.nbytes, f"{value!r}: {decision.bytes} bytes are recorded")
            expect(subject.provider.is_managed(placed), f"{value!r}: not in managed memory")
            expect(torch.equal(placed, source), f"{value!r}: other data")
            placed.add_(1)
            expect(float(source.sum()) == 66.0, "the caller's tensor was written")  # noqa: PLR2004  # 0 + … + 11
    off = {memory.DISABLE_VARIABLE: "1"}
    placed, decision = placer(_PREFER, environment=off).mutable(source)
    expect(not subject.provider.is_managed(placed), "promoted although the variable is 1")
    expect(memory.DISABLE_VARIABLE in decision.reason, f"the reason does not name the variable: {decision.reason}")
    required = functools.partial(placer(_REQUIRE, environment=off).mutable, source)
    error = raised(UnifiedMemoryError, required, "REQUIRE_UNIFIED was met although the variable is 1")
    expect(memory.DISABLE_VARIABLE in str(error), f"the error does not name the variable: {error}")
    return "promoted with 0 and unset, not with 1"


@check("managed_activation")
def _check_managed_activation(_case: Case, subject: MemorySubject) -> str:
    subject.require_available()
    counted = CountedProvider(subject.provider, calls=[])
    ordinary = torch.ones(64, 1 << 14, device=subject.device)
    placer = subject.registry(counted).placer(_PREFER, device=subject.device)
    for x, action, calls in ((ordinary, "left", []), (subject.managed(ordinary), "prefetched", ["prefetch"])):
        decision = _expect_untouched(x, placer)
        expect(decision.action == action, f"{decision.action}, not {action}: {decision.reason}")
        counted.calls.clear()
        placer.input(x)
        expect(counted.calls == calls, f"{action}: the provider was called for {counted.calls}")
    return "ordinary left, managed prefetched; nothing allocated"
