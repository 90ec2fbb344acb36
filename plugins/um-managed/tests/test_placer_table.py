"""The unified-memory contract: what each policy makes of weights, mutable tensors and activations."""

from __future__ import annotations

import pytest
import torch

import q4core as q4
from q4_um_managed import apply_policy
from tests.support.managed import APPLY, DISABLED, PREFER, PROVIDERS, REQUIRE, FakeProvider, weight_tensor

# (policy, providers, Q4_DISABLE_UM) -> action for (weights and mutable tensors, activations); "refused" is an error.
TABLE = {
    (DISABLED, "none", None): ("left", "left"),
    (DISABLED, "none", "0"): ("left", "left"),
    (DISABLED, "none", "1"): ("left", "left"),
    (DISABLED, "unable", None): ("left", "left"),
    (DISABLED, "unable", "0"): ("left", "left"),
    (DISABLED, "unable", "1"): ("left", "left"),
    (DISABLED, "able", None): ("left", "left"),
    (DISABLED, "able", "0"): ("left", "left"),
    (DISABLED, "able", "1"): ("left", "left"),
    (PREFER, "none", None): ("fallback", "fallback"),
    (PREFER, "none", "0"): ("fallback", "fallback"),
    (PREFER, "none", "1"): ("left", "left"),
    (PREFER, "unable", None): ("fallback", "fallback"),
    (PREFER, "unable", "0"): ("fallback", "fallback"),
    (PREFER, "unable", "1"): ("left", "left"),
    (PREFER, "able", None): ("promoted", "left"),
    (PREFER, "able", "0"): ("promoted", "left"),
    (PREFER, "able", "1"): ("left", "left"),
    (REQUIRE, "none", None): ("refused", "refused"),
    (REQUIRE, "none", "0"): ("refused", "refused"),
    (REQUIRE, "none", "1"): ("refused", "refused"),
    (REQUIRE, "unable", None): ("refused", "refused"),
    (REQUIRE, "unable", "0"): ("refused", "refused"),
    (REQUIRE, "unable", "1"): ("refused", "refused"),
    (REQUIRE, "able", None): ("promoted", "promoted"),
    (REQUIRE, "able", "0"): ("promoted", "promoted"),
    (REQUIRE, "able", "1"): ("refused", "refused"),
}


@pytest.mark.parametrize("what", APPLY)
@pytest.mark.parametrize(("policy", "providers", "disable"), TABLE)
def test_every_policy_with_every_provider(
    what: str,
    policy: q4.UnifiedMemoryPolicy,
    providers: str,
    disable: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table of the memory contract, entry by entry; the numbers never change (TC-07, TC-08, TC-22)."""
    monkeypatch.delenv("Q4_DISABLE_UM", raising=False)
    if disable is not None:
        monkeypatch.setenv("Q4_DISABLE_UM", disable)
    action = TABLE[policy, providers, disable][what == "input"]
    tensor = weight_tensor()
    fakes: list[FakeProvider] = PROVIDERS[providers]()
    if action == "refused":
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            APPLY[what](tensor, policy, device="cpu", providers=fakes)
        decision = caught.value.details["decision"]
        assert caught.value.attributes == decision.attributes
        placed = tensor
    else:
        placed, decision = APPLY[what](tensor, policy, device="cpu", providers=fakes)
    assert (decision.action, decision.policy) == (action, policy)
    assert decision.reason
    assert torch.equal(placed, weight_tensor())
    is_promoted = action == "promoted"
    assert decision.bytes == (6 if is_promoted else 0)
    assert decision.provider == ("fake" if is_promoted else None)
    assert sum(fake.calls.count("to_managed") for fake in fakes) == is_promoted
    assert any(fake.is_managed(placed) for fake in fakes) == is_promoted
    if action != "refused":
        assert (placed is tensor) == (not is_promoted and what != "mutable")
    if policy is DISABLED or disable == "1":
        assert not any(fake.calls for fake in fakes)


@pytest.mark.parametrize("what", APPLY)
@pytest.mark.parametrize(("policy", "disable"), [(PREFER, "0"), (REQUIRE, "0"), (PREFER, "1")])
def test_managed_already(what: str, policy: q4.UnifiedMemoryPolicy, disable: str) -> None:
    """What is managed stays; activations are prefetched, unless promotion is turned off; mutable ones are cloned."""
    fake = FakeProvider()
    tensor = fake.own(weight_tensor())
    placed, decision = APPLY[what](
        tensor, policy, device="cpu", providers=[fake], environment={"Q4_DISABLE_UM": disable}
    )
    assert torch.equal(placed, weight_tensor())
    if disable == "1":
        assert (decision.action, fake.calls) == ("left", [])
    elif what == "mutable":
        assert (decision.action, fake.is_managed(placed)) == ("promoted", True)
        assert placed.data_ptr() != tensor.data_ptr()
    else:
        assert placed is tensor
        assert decision.action == ("prefetched" if what == "input" else "left")
        assert (decision.provider, decision.bytes) == ("fake", 0)
        assert ("prefetch" in fake.calls) == (what == "input")
        assert "to_managed" not in fake.calls


def test_turned_off_makes_require_fail_also_for_what_is_managed() -> None:
    """Q4_DISABLE_UM=1 wins over everything, and the error says so."""
    fake = FakeProvider()
    for apply in APPLY.values():
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            apply(
                fake.own(weight_tensor()), REQUIRE, device="cpu", providers=[fake], environment={"Q4_DISABLE_UM": "1"}
            )
        assert caught.value.attributes["Q4_DISABLE_UM"] == "1"
        assert "Q4_DISABLE_UM" in str(caught.value.hint)


@pytest.mark.parametrize("value", ["2", "true", "yes", " 1", "01", "-"])
@pytest.mark.parametrize("policy", [DISABLED, PREFER, REQUIRE])
def test_illegal_variable_is_refused(value: str, policy: q4.UnifiedMemoryPolicy) -> None:
    """Q4_DISABLE_UM is 0 or 1; anything else is a ConfigError that names it, whatever the policy."""
    for apply in APPLY.values():
        with pytest.raises(q4.ConfigError) as caught:
            apply(weight_tensor(), policy, device="cpu", environment={"Q4_DISABLE_UM": value})
        assert (caught.value.name, caught.value.value) == ("Q4_DISABLE_UM", value)


def test_empty_variable_is_unset() -> None:
    """As for every other Q4_ variable."""
    fake = FakeProvider()
    _, decision = apply_policy(
        weight_tensor(), REQUIRE, device="cpu", providers=[fake], environment={"Q4_DISABLE_UM": ""}
    )
    assert decision.action == "promoted"
