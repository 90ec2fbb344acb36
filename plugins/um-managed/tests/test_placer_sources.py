"""What placing keeps of activations, weights and mutable tensors: flags, graphs, copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from q4_um_managed import apply_input_policy, apply_mutable_policy, apply_policy, apply_source_policy, q4_placers
from q4core import memory
from q4core.memory import release_input
from tests.support.managed import DISABLED, PREFER, REQUIRE, Broken, FakeProvider

# -- activations


def test_preferred_activation_is_never_copied() -> None:
    """The very same tensor comes back, with no allocation and no copy, managed or not (TC-23)."""
    fake = FakeProvider()
    ordinary, managed = torch.ones(3), fake.own(torch.ones(3))
    for x, action in ((ordinary, "left"), (managed, "prefetched")):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            placed, decision = apply_input_policy(x, PREFER, device="cpu", providers=[fake], environment={})
        assert placed is x
        assert (decision.action, decision.bytes) == (action, 0)
        assert not [event for event in profile.events() or () if event.cpu_memory_usage]
    assert fake.calls == ["is_available", "is_available", "prefetch"]


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_flow_through_a_promoted_activation(*, is_leaf: bool) -> None:
    """The temporary is the identity to autograd: a gradient is never silently lost."""
    leaf = torch.ones(3, requires_grad=True)
    x = leaf if is_leaf else leaf * 1.0
    placed, decision = apply_input_policy(x, REQUIRE, device="cpu", providers=[FakeProvider()], environment={})
    assert decision.action == "promoted"
    (placed * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 2.0, 3.0]


def test_promoted_activation_is_given_back_once() -> None:
    """release_input frees what was promoted, by the provider that holds it, and nothing else."""
    providers = [FakeProvider("a", is_available=False), FakeProvider("b")]
    placed, decision = apply_input_policy(torch.ones(3), REQUIRE, device="cpu", providers=providers, environment={})
    release_input(placed, decision)
    assert (providers[0].freed, providers[1].freed) == ([], [placed.data_ptr()])
    for x in (torch.ones(3), providers[1].own(torch.ones(3))):
        placed, decision = apply_input_policy(x, PREFER, device="cpu", providers=providers, environment={})
        release_input(placed, decision)
    assert len(providers[1].freed) == 1


# -- weights and mutable tensors


def test_promoted_weight_keeps_its_flag_and_drops_its_graph() -> None:
    """A weight comes back as a leaf that wants gradients if the source did."""
    for tensor in (torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True) * 2.0, torch.ones(3)):
        placed, _ = apply_policy(tensor, REQUIRE, device="cpu", providers=[FakeProvider()], environment={})
        assert (placed.requires_grad, placed.is_leaf) == (tensor.requires_grad, True)
        assert torch.equal(placed, tensor)


@pytest.mark.parametrize("policy", [DISABLED, PREFER, REQUIRE])
def test_mutable_tensor_is_apart_from_its_source(policy: q4.UnifiedMemoryPolicy) -> None:
    """Detached and cloned, so that no other holder sees a write, nor any graph; fit for MutableTensor as it is."""
    source = torch.nn.Parameter(torch.ones(3))
    placed, _ = apply_mutable_policy(source, policy, device="cpu", providers=[FakeProvider()], environment={})
    assert (placed.requires_grad, placed.is_leaf) == (False, True)
    state = MutableTensor(placed, mode=MutableMode.IN_PLACE, copy=False)
    with state.write() as tensor:
        assert tensor.data_ptr() == placed.data_ptr()
        tensor.add_(1.0)
    assert source.tolist() == [1.0] * 3


def test_clone_comes_before_promotion() -> None:
    """Even a provider that hands the same memory back (mapped memory, say) can't join a writer to other holders."""

    class Mapping(FakeProvider):
        def to_managed(self, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
            return self.own(tensor)

    source = torch.ones(3)
    placed, decision = apply_mutable_policy(source, REQUIRE, device="cpu", providers=[Mapping()], environment={})
    assert decision.action == "promoted"
    placed.add_(1.0)
    assert source.tolist() == [1.0] * 3


def test_sole_owner_spares_the_copy() -> None:
    """copy=False shares the memory where nothing is promoted, and only detaches."""
    source = torch.nn.Parameter(torch.ones(3))
    for policy, providers in ((DISABLED, [FakeProvider()]), (PREFER, [])):
        placed, _ = apply_mutable_policy(source, policy, device="cpu", providers=providers, copy=False, environment={})
        assert placed.data_ptr() == source.data_ptr()
        assert not placed.requires_grad


def test_refusal_comes_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be promoted is not cloned first."""

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("copied")

    for module in ("q4core.memory.placer", "q4_um_managed.placer"):
        monkeypatch.setattr(f"{module}.detached_copy", fail)
    with pytest.raises(q4.UnifiedMemoryError):
        apply_mutable_policy(torch.ones(3), REQUIRE, device="cpu", environment={})
    with pytest.raises(q4.UnifiedMemoryError):
        apply_mutable_policy(torch.ones(3), REQUIRE, device="cpu", providers=[Broken("to_managed")], environment={})


def test_clone_is_an_ordinary_tensor_in_inference_mode() -> None:
    """What is made in inference mode still counts its changes, as MutableTensor needs."""
    with torch.inference_mode():
        placed, _ = apply_mutable_policy(torch.ones(3), DISABLED, device="cpu", environment={})
    assert not placed.is_inference()


# -- the source of a weight on its way to its device


class _OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    device = torch.device("cuda", 0)


class _Reading(FakeProvider):
    """A provider whose device reads system memory where it lies by default."""

    def __init__(self, *, result: Any = None, fails: bool = False, is_shy: bool = False) -> None:
        super().__init__()
        self.result, self.fails, self.is_shy = result, fails, is_shy
        self.mapped: set[int] = set()

    def map(self, tensor: torch.Tensor, *, device: torch.device) -> Any:
        """Return the very bytes, or the configured result."""
        self.calls.append("map")
        if self.fails:
            raise RuntimeError("cudaErrorNotSupported")
        if self.is_shy or self.result is not None:
            return self.result
        self.mapped.add(tensor.data_ptr())
        return tensor.as_subclass(_OnCuda)

    def placement_of(self, tensor: torch.Tensor) -> memory.Placement | None:
        """Name the attribute."""
        return memory.Placement("pageable", "integrated=1") if tensor.data_ptr() in self.mapped else None


def test_a_source_that_the_device_reads_in_place_is_not_copied() -> None:
    """A provider that maps gives the same bytes on the device; the decision says where, and by which attribute."""
    provider, source = _Reading(), torch.ones(8)
    placed, decision = apply_source_policy(source, REQUIRE, device="cuda", providers=[provider], environment={})
    assert placed.data_ptr() == source.data_ptr()
    assert (decision.action, decision.bytes) == ("mapped", 0)
    assert decision.placement == memory.Placement("pageable", "integrated=1")
    assert "pageable memory (integrated=1)" in decision.reason
    assert provider.calls == ["is_available", "map"]
    # What a backend keeps of it is not promoted again.
    kept, decision = apply_policy(placed, REQUIRE, device="cuda", providers=[provider], environment={})
    assert (kept is placed, decision.action) == (True, "left")
    assert "pageable memory (integrated=1)" in decision.reason


@pytest.mark.parametrize(
    "provider",
    [
        _Reading(is_shy=True),
        _Reading(fails=True),
        _Reading(result=7),
        _Reading(result=torch.ones(8)),
        _Reading(result=torch.ones(8).as_subclass(_OnCuda)),
        _Reading(result=torch.ones(7).as_subclass(_OnCuda)),
        FakeProvider(),
    ],
    ids=["shy", "fails", "no tensor", "on the CPU", "other bytes", "other shape", "maps nothing"],
)
def test_a_source_that_is_not_mapped_is_written_once(provider: FakeProvider) -> None:
    """Where the device can't read it in place, or the provider gives something else, it is promoted, by one copy."""
    placed, decision = apply_source_policy(
        torch.arange(8.0), PREFER, device="cuda", providers=[provider], environment={}
    )
    assert (decision.action, decision.bytes) == ("promoted", 32)
    assert provider.calls.count("to_managed") == 1
    assert provider.options == {"device": torch.device("cuda"), "read_mostly": True, "prefetch": True}
    assert torch.equal(placed, torch.arange(8.0))


@pytest.mark.parametrize("policy", [DISABLED, PREFER, REQUIRE])
def test_a_source_arrives_in_any_case(policy: q4.UnifiedMemoryPolicy) -> None:
    """Without a provider, or with one that fails, the source is moved plainly: what is prepared of it is judged."""
    source = torch.arange(8.0)
    for providers in ([], [Broken("to_managed")], [FakeProvider(is_available=False)]):
        placed, decision = apply_source_policy(source, policy, device="meta", providers=providers, environment={})
        assert placed.device.type == "meta"
        assert decision.action == ("left" if policy is DISABLED else "fallback")
        same, decision = apply_source_policy(source, policy, device="cpu", providers=providers, environment={})
        assert (same is source, decision.action) == (True, "left")


def test_a_layers_source_is_brought_by_the_policy() -> None:
    """Preparing on another device brings each tensor of the weight by the policy: mapped under it, moved without."""
    weight = q4.quantize(torch.randn(16, 64), "nf4")
    provider = _Reading()

    class _Plugin:
        @q4.hookimpl
        def q4_memory_providers(self) -> list[FakeProvider]:
            return [provider]

        q4_placers = staticmethod(q4_placers)

    registry = q4.Registry([("reading", _Plugin())])

    def moved_to(device: str, policy: q4.UnifiedMemoryPolicy) -> q4.PackedWeight:
        placer = registry.placer(policy, device=device)
        return weight.map_tensors(lambda tensor: placer.source(tensor)[0])

    moved = moved_to("cuda", PREFER)
    assert [tensor.data_ptr() for _, tensor in moved.tensors()] == [t.data_ptr() for _, t in weight.tensors()]
    plain = moved_to("meta", DISABLED)
    assert plain.device.type == "meta"
    assert provider.calls.count("map") == len(list(weight.tensors()))


def test_placement_of_that_raises_is_reported() -> None:
    """A provider whose optional answer fails loses the answer, not the tensor."""

    class Mute(FakeProvider):
        def placement_of(self, tensor: torch.Tensor) -> None:
            raise RuntimeError("cudaErrorUnknown")

    provider = Mute()
    placed, decision = apply_policy(torch.ones(3), REQUIRE, device="cpu", providers=[provider], environment={})
    assert (decision.action, decision.placement) == ("promoted", None)
    assert "placement_of raised RuntimeError" in decision.reason
    assert torch.equal(placed, torch.ones(3))
