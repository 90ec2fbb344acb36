"""Layers under each unified-memory policy, over a pretended driver: what is copied, held and given back."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from typing import Any, ClassVar

import pytest
import torch
from pretended_driver import CONCURRENT, Pretended, RuntimeFaultError, pretend

import q4_dequant_fallback
import q4core as q4
from q4_actors import MutableMode, MutableTensor
from q4_um_managed import apply_mutable_policy, q4_placers
from q4_um_managed.blocks import rounded
from q4core import UnifiedMemoryPolicy as Policy

POLICIES = [Policy.DISABLED, Policy.PREFER_UNIFIED, Policy.REQUIRE_UNIFIED]
N, K = 48, 256


class Writing:
    """Writes its layout into what the context gives, as a kernel with a layout of its own does; watches its inputs."""

    name: ClassVar[str] = "writing"
    api_version: ClassVar[tuple[int, int]] = (2, 0)
    capabilities: ClassVar[q4.Capabilities] = q4.Capabilities(
        formats={q4.EVERY_FORMAT},
        scale_kinds=frozenset(q4.ScaleKind),
        devices={"cpu"},
        dtypes={torch.float32},
        precisions={q4.Precision.W4A32},
        features=frozenset(q4.Feature),
    )

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.error: Exception | None = None

    def check(self, request: q4.Request) -> q4.Support:
        """Offer one path."""
        path = q4.KernelPath("writing_gemm", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20)
        return q4.Support.yes([path], native_state="nothing native")

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Write each tensor once."""
        tensors = tuple(context.keep(tensor) for _, tensor in weight.tensors())
        return q4.Prepared(tensors, q4.WeightSpec.of(weight))

    def export(self, prepared: q4.Prepared, rows: torch.Tensor | None = None) -> q4.PackedWeight:
        """Return the weight."""
        weight: q4.PackedWeight = prepared.meta.build(prepared.tensors)
        return weight if rows is None else weight.take_rows(rows)

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
        """Note where x is, and compute through the codec."""
        self.seen.append(x.data_ptr())
        if self.error is not None:
            raise self.error
        out.copy_(x @ q4.dequantize(self.export(prepared), torch.float32).T)


def _plugin(**hooks: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{name: q4.hookimpl(hook) for name, hook in hooks.items()})


def _registry(case: Pretended, backend: Writing | None = None) -> q4.Registry:
    plugins: list[tuple[str, object]] = [
        ("um", _plugin(q4_memory_providers=lambda: [case.provider], q4_placers=q4_placers))
    ]
    if backend is not None:
        plugins.append(("backend", _plugin(q4_backends=lambda: [backend])))
    return q4.Registry([*plugins, ("dequant-fallback", q4_dequant_fallback)])


def _layer(case: Pretended, policy: Policy, backend: Writing | None = None, **wishes: Any) -> q4.Q4Linear:
    config = q4.SessionConfig(device="cpu", unified_memory=policy, **wishes)
    layer: q4.Q4Linear = q4.Session(config, registry=_registry(case, backend)).linear(_weight())
    return layer


def _weight() -> q4.PackedWeight:
    dense = torch.randn(N, K, generator=torch.Generator().manual_seed(5))
    return q4.quantize(dense, "nvfp4")


def _x() -> torch.Tensor:
    return torch.randn(3, K, generator=torch.Generator().manual_seed(6))


def _held(layer: q4.Q4Linear) -> int:
    """Return the bytes of blocks that the layer's buffers need, without its tag."""
    sizes = [buffer.nbytes for name, buffer in layer.named_buffers() if name.startswith("packed_")]
    return sum(rounded(size) for size in sizes[:-1])


@pytest.mark.parametrize("backend", [None, Writing()], ids=["in place", "own layout"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_numbers(policy: Policy, backend: Writing | None) -> None:
    """A layer's numbers do not depend on where it lies; its buffers are managed by the driver's word, or not."""
    case = pretend()
    layer, plain = _layer(case, policy, backend), _layer(pretend(), Policy.DISABLED, backend)
    assert torch.equal(layer(_x()), plain(_x()))
    buffers = [buffer for name, buffer in layer.named_buffers() if name.startswith("packed_")][:-1]
    is_managed = policy is not Policy.DISABLED
    assert [case.provider.is_managed(buffer) for buffer in buffers] == [is_managed] * len(buffers)
    told = layer.diagnostics().memory
    assert len(told) == (len(buffers) if is_managed else 0)
    assert all("managed memory (concurrentManagedAccess=1)" in line for line in told)
    assert case.provider.stats().in_use_bytes == (_held(layer) if is_managed else 0)


@pytest.mark.parametrize("backend", [None, Writing()], ids=["in place", "own layout"])
def test_nothing_is_held_twice(backend: Writing | None) -> None:
    """Once prepared, the source goes with its owner's reference; no managed byte is held besides the layer's own."""
    case = pretend(max_cached_bytes=0)
    session = q4.Session(
        q4.SessionConfig(device="cpu", unified_memory=Policy.PREFER_UNIFIED), registry=_registry(case, backend)
    )
    weight = _weight()
    parts = [weakref.ref(tensor) for _, tensor in weight.tensors()]
    layer = session.linear(weight)
    del weight
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)
    assert case.provider.stats().in_use_bytes == _held(layer)


def test_a_layout_is_written_in_place() -> None:
    """What a backend allocates through its context is managed at once: one block for each tensor, and no other."""
    case = pretend()
    layer = _layer(case, Policy.PREFER_UNIFIED, Writing())
    count = len(list(_weight().tensors()))
    assert case.runtime.count("mallocManaged") == count
    assert all(line.startswith("left: already managed") for line in layer.diagnostics().memory)


@pytest.mark.parametrize("is_managed", [False, True])
def test_a_preferred_activation_is_never_copied(is_managed: bool) -> None:
    """Under PREFER_UNIFIED the backend sees the caller's own bytes, managed or not; none is taken (TC-23)."""
    case, backend = pretend(), Writing()
    layer = _layer(case, Policy.PREFER_UNIFIED, backend)
    x = _x()
    if is_managed:
        x = case.provider.to_managed(x, device=torch.device("cpu"), read_mostly=False, prefetch=False)
    before, prefetches = case.provider.stats(), case.runtime.count("memPrefetchAsync")
    backend.seen.clear()
    layer(x)
    assert backend.seen == [x.data_ptr()]
    assert case.provider.stats() == before
    assert case.runtime.count("memPrefetchAsync") == prefetches + is_managed


@pytest.mark.parametrize("fails", [False, True])
def test_a_required_activation_is_a_temporary(fails: bool) -> None:
    """Under REQUIRE_UNIFIED the backend sees managed bytes, which are given back when the call ends, well or badly."""
    case, backend = pretend(), Writing()
    layer = _layer(case, Policy.REQUIRE_UNIFIED, backend)
    x = _x()
    before = case.provider.stats()
    backend.seen.clear()
    if fails:
        backend.error = RuntimeError("kernel")
        with pytest.raises(q4.BackendError):
            layer(x)
        backend.error = None
        gc.collect()
    else:
        layer(x)
    assert backend.seen != [x.data_ptr()]
    after = case.provider.stats()
    assert after.in_use_bytes == before.in_use_bytes
    assert after.allocations == before.allocations + 1
    for _ in range(10):
        layer(x)
    last = case.provider.stats()
    assert (last.allocations, last.frees, last.in_use_bytes) == (after.allocations, 0, before.in_use_bytes)
    assert case.runtime.synchronised == 0


def test_gradients_pass_a_required_temporary() -> None:
    """The gradient of x is the one without the temporary, which is gone once the graph is."""
    case = pretend()
    layer = _layer(case, Policy.REQUIRE_UNIFIED, gradients=True)
    plain = _layer(pretend(), Policy.DISABLED, gradients=True)
    before = case.provider.stats().in_use_bytes
    grads = []
    for each in (layer, plain):
        x = _x().requires_grad_()
        each(x).square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    del x
    gc.collect()
    assert case.provider.stats().in_use_bytes == before


@pytest.mark.parametrize("policy", [Policy.PREFER_UNIFIED, Policy.REQUIRE_UNIFIED])
def test_the_variable_turns_promotion_off(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_DISABLE_UM=1: preferred memory is left alone, required memory is an error, and the driver is not asked."""
    monkeypatch.setenv("Q4_DISABLE_UM", "1")
    case = pretend()
    if policy is Policy.REQUIRE_UNIFIED:
        with pytest.raises(q4.UnifiedMemoryError, match="Q4_DISABLE_UM"):
            _layer(case, policy)
    else:
        layer = _layer(case, policy)
        assert all("Q4_DISABLE_UM=1" in line for line in layer.diagnostics().memory)
    assert not case.runtime.calls
    monkeypatch.setenv("Q4_DISABLE_UM", "0")
    assert "managed memory" in _layer(case, policy).diagnostics().memory[0]


def test_closing_gives_every_byte_back() -> None:
    """close() returns the layer's blocks; trim() returns them to the driver."""
    case = pretend()
    layer = _layer(case, Policy.PREFER_UNIFIED)
    twin = copy.deepcopy(layer)
    assert case.provider.stats().in_use_bytes == 2 * _held(layer)
    del twin
    layer.close()
    gc.collect()
    assert case.provider.stats().in_use_bytes == 0
    case.provider.trim()
    assert not case.runtime.areas
    assert not case.runtime.events


def test_a_budget_that_is_spent_is_a_reason() -> None:
    """Without room PREFER_UNIFIED leaves the weight where it is and says the numbers; REQUIRE_UNIFIED refuses."""
    case = pretend(free=1 << 20)
    layer = _layer(case, Policy.PREFER_UNIFIED)
    told = layer.diagnostics().memory
    assert all(line.startswith("fallback") and "cudaMemGetInfo 1048576" in line for line in told)
    assert torch.equal(layer(_x()), _layer(pretend(), Policy.DISABLED)(_x()))
    with pytest.raises(q4.UnifiedMemoryError, match="cudaMemGetInfo 1048576"):
        _layer(case, Policy.REQUIRE_UNIFIED)


@pytest.mark.parametrize("call", ["mallocManaged", "memGetInfo", "getDevice", "streamIsCapturing"])
def test_a_driver_that_fails_is_a_fallback_or_an_error(call: str) -> None:
    """Whatever call of the driver fails, PREFER_UNIFIED serves without it and says why, REQUIRE_UNIFIED refuses."""
    case = pretend()
    assert case.provider.is_available(torch.device("cpu"))
    case.runtime.fails[call] = RuntimeFaultError(2, "cudaErrorMemoryAllocation: out of memory")
    layer = _layer(case, Policy.PREFER_UNIFIED)
    assert all(line.startswith("fallback") and "out of memory" in line for line in layer.diagnostics().memory)
    with pytest.raises(q4.UnifiedMemoryError, match="out of memory"):
        _layer(case, Policy.REQUIRE_UNIFIED)
    case.runtime.fails.clear()
    assert "managed memory" in _layer(case, Policy.REQUIRE_UNIFIED).diagnostics().memory[0]


def test_a_mutable_tensor_lies_in_managed_memory() -> None:
    """The mutable policy promotes an own copy, which a MutableTensor updates in place at one address."""
    case = pretend()
    source = torch.arange(6.0)
    placed, decision = apply_mutable_policy(source, Policy.REQUIRE_UNIFIED, device="cpu", providers=[case.provider])
    assert (decision.action, decision.bytes) == ("promoted", 24)
    assert str(decision.placement) == "managed memory (concurrentManagedAccess=1)"
    assert case.provider.is_managed(placed)
    address = placed.data_ptr()
    with MutableTensor(placed, mode=MutableMode.IN_PLACE, copy=False) as state:
        with state.write() as tensor:
            tensor.add_(1.0)
        with state.read() as view:
            assert view.tensor.data_ptr() == address
            assert view.tensor.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert source.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    del placed, tensor, view
    gc.collect()
    assert case.provider.stats().in_use_bytes == 0


def test_memory_without_a_provider_device_falls_back() -> None:
    """A device that has no managed memory is a recorded fallback with its attributes (TC-07)."""
    case = pretend(CONCURRENT | {"managedMemory": 0})
    layer = _layer(case, Policy.PREFER_UNIFIED)
    assert all(line.startswith("fallback") and "managedMemory=0" in line for line in layer.diagnostics().memory)
    assert case.runtime.count("mallocManaged") == 0
