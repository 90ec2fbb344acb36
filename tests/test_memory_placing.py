"""What placing keeps of activations, weights and mutable tensors: flags, graphs, copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from managed import DISABLED, PREFER, REQUIRE, FakeProvider

import q4core as q4
from q4core import memory
from q4core.memory import (
    apply_input_policy,
    apply_mutable_policy,
    apply_policy,
    release_input,
)

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
    release_input(placed, decision, providers=providers)
    assert (providers[0].freed, providers[1].freed) == ([], [placed.data_ptr()])
    for x in (torch.ones(3), providers[1].own(torch.ones(3))):
        placed, decision = apply_input_policy(x, PREFER, device="cpu", providers=providers, environment={})
        release_input(placed, decision, providers=providers)
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
    state = q4.MutableTensor(placed, mode=q4.MutableMode.IN_PLACE, copy=False)
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

    monkeypatch.setattr(memory, "detached_copy", fail)
    with pytest.raises(q4.UnifiedMemoryError):
        apply_mutable_policy(torch.ones(3), REQUIRE, device="cpu", environment={})


def test_clone_is_an_ordinary_tensor_in_inference_mode() -> None:
    """What is made in inference mode still counts its changes, as MutableTensor needs."""
    with torch.inference_mode():
        placed, _ = apply_mutable_policy(torch.ones(3), DISABLED, device="cpu", environment={})
    assert not placed.is_inference()
