"""What the unified-memory contract asks of providers, and what it does when they fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from q4_um_managed import apply_input_policy, apply_policy, q4_placers
from q4core import memory
from tests.support.fakes import plugin

if TYPE_CHECKING:
    from collections.abc import Callable

from tests.support.managed import APPLY, ATTRIBUTES, PREFER, REQUIRE, Broken, FakeProvider, weight_tensor


def test_provider_receives_the_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read-mostly and prefetched, mutable tensors neither, activations prefetched."""
    monkeypatch.delenv("Q4_DISABLE_UM", raising=False)
    expected = {"weight": (True, True), "mutable": (False, False), "input": (False, True)}
    for what, (read_mostly, prefetch) in expected.items():
        fake = FakeProvider()
        APPLY[what](weight_tensor(), REQUIRE, device="cuda:1", providers=[fake])
        assert fake.options == {"device": torch.device("cuda:1"), "read_mostly": read_mostly, "prefetch": prefetch}


def test_choice_does_not_depend_on_order() -> None:
    """Of several able providers the first by name serves, however they are listed."""
    for names in (["b", "a", "c"], ["c", "b", "a"]):
        providers = [FakeProvider(name) for name in names]
        _, decision = apply_policy(weight_tensor(), REQUIRE, device="cpu", providers=iter(providers), environment={})
        assert decision.provider == "a"
        assert decision.attributes == {f"{name}.{key}": value for name in "abc" for key, value in ATTRIBUTES.items()}


FAULTS: dict[str, tuple[Callable[[], FakeProvider], str]] = {
    "is_available raises": (lambda: Broken("is_available"), "is_available raised RuntimeError: cudaErrorUnknown"),
    "is_available answers with a flag": (lambda: Broken("is_available", True), "must return Availability, not bool"),
    "is_managed raises": (lambda: Broken("is_managed"), "is_managed raised RuntimeError: cudaErrorUnknown"),
    "to_managed raises": (lambda: Broken("to_managed"), "to_managed: RuntimeError: cudaErrorUnknown"),
    "to_managed returns no tensor": (lambda: Broken("to_managed", 7), "result must be a tensor, got 'int'"),
    "to_managed returns another shape": (
        lambda: Broken("to_managed", torch.zeros(6, dtype=torch.uint8)),
        "result must be torch.uint8 [2, 3], got 'torch.uint8 [6]'",
    ),
    "to_managed returns another dtype": (
        lambda: Broken("to_managed", torch.zeros(2, 3)),
        "result must be torch.uint8 [2, 3], got 'torch.float32 [2, 3]'",
    ),
    "to_managed returns ordinary memory": (
        lambda: Broken("to_managed", torch.zeros(2, 3, dtype=torch.uint8)),
        "result must be in managed memory",
    ),
}


@pytest.mark.parametrize("what", APPLY)
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_provider_is_a_reason(what: str, fault: str) -> None:
    """A provider that breaks its contract is a fallback under PREFER, an error under REQUIRE, both with its reason."""
    make, reason = FAULTS[fault]
    tensor = weight_tensor()
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        APPLY[what](tensor, REQUIRE, device="cpu", providers=[make()], environment={})
    assert reason in str(caught.value.details["decision"].reason)
    placed, decision = APPLY[what](tensor, PREFER, device="cpu", providers=[make()], environment={})
    assert torch.equal(placed, tensor)
    assert decision.bytes == 0
    if what != "input" or fault.startswith("is_available"):
        assert decision.action == "fallback"
        assert reason in decision.reason
    else:
        assert (decision.action, placed is tensor) == ("left", True)


@pytest.mark.parametrize("fault", FAULTS)
def test_next_provider_serves_when_one_fails(fault: str) -> None:
    """A faulty provider does not stand in the way of an able one."""
    broken, able = FAULTS[fault][0](), FakeProvider("zzz")
    placed, decision = apply_policy(weight_tensor(), REQUIRE, device="cpu", providers=[able, broken], environment={})
    assert (decision.action, decision.provider) == ("promoted", "zzz")
    assert able.is_managed(placed)


def test_prefetch_that_fails_is_no_error() -> None:
    """What is managed already satisfies every policy; the failed prefetch is in the reason."""
    for policy in (PREFER, REQUIRE):
        broken = Broken("prefetch")
        x = broken.own(torch.ones(3))
        placed, decision = apply_input_policy(x, policy, device="cpu", providers=[broken], environment={})
        assert (placed is x, decision.action, decision.provider) == (True, "left", "broken")
        assert "cudaErrorUnknown" in decision.reason


@pytest.mark.parametrize("what", APPLY)
def test_installed_providers_are_asked_by_default(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``providers`` those of the installed plugins serve; an empty list means none."""
    fake = FakeProvider()
    mine = q4.Registry([("a", plugin(q4_memory_providers=lambda: [fake], q4_placers=q4_placers))])
    monkeypatch.setattr("q4core.plugins.registry._default", mine)
    placed, decision = APPLY[what](torch.ones(3), REQUIRE, device="cpu", environment={})
    assert (decision.action, decision.provider) == ("promoted", "fake")
    if what == "input":
        memory.release_input(placed, decision)
        assert fake.freed == [placed.data_ptr()]
    with pytest.raises(q4.UnifiedMemoryError):
        APPLY[what](torch.ones(3), REQUIRE, device="cpu", providers=(), environment={})


def test_no_plugin_is_loaded_where_nothing_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DISABLED, and where Q4_DISABLE_UM turns promotion off, no plugins are loaded."""
    mine = q4.Registry([])
    monkeypatch.setattr("q4core.plugins.registry._default", mine)
    for apply in APPLY.values():
        apply(torch.ones(3), "disabled", device="cpu", environment={})
        apply(torch.ones(3), PREFER, device="cpu", environment={"Q4_DISABLE_UM": "1"})
    assert mine._manager is None
