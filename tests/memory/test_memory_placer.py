"""Unified-memory policies without a package that places tensors, and the hook that brings one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4core import memory
from tests.support.fakes import plugin
from tests.support.managed import DISABLED, PREFER, REQUIRE, FakeProvider, weight_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

BARE = q4.Registry([("provider", plugin(q4_memory_providers=lambda: [FakeProvider()]))])
PLACE: dict[str, Callable[[memory.MemoryPlacer, torch.Tensor], tuple[torch.Tensor, q4.MemoryDecision]]] = {
    "weight": lambda placer, tensor: placer.weight(tensor, "proj"),
    "mutable": lambda placer, tensor: placer.mutable(tensor, name="state"),
    "input": lambda placer, tensor: placer.input(tensor),
}
OFF = {"Q4_DISABLE_UM": "1"}


@pytest.mark.parametrize("what", [*PLACE, "source"])
@pytest.mark.parametrize(
    ("policy", "environment", "action"),
    [(DISABLED, {}, "left"), (DISABLED, OFF, "left"), (PREFER, OFF, "left"), (PREFER, {}, "fallback")],
)
def test_without_a_package_all_stays(
    what: str, policy: q4.UnifiedMemoryPolicy, environment: dict[str, str], action: str
) -> None:
    """Numbers are the same, nothing is promoted, and the reason of a fallback says what to install."""
    tensor = weight_tensor()
    placer = BARE.placer(policy, device="meta" if what == "source" else "cpu", environment=environment)
    placed, decision = placer.source(tensor) if what == "source" else PLACE[what](placer, tensor)
    assert (decision.policy, decision.action, decision.provider, decision.bytes) == (policy, action, None, 0)
    assert ("pip install q4-um-managed" in decision.reason) is (action == "fallback")
    assert ("cuda_available" in decision.attributes) is (action == "fallback")
    assert placer.empty() is None
    if what == "source":
        assert placed.device.type == "meta"
    else:
        assert torch.equal(placed, weight_tensor())
        assert (placed is tensor) is (what != "mutable")
        assert (placed.data_ptr() == tensor.data_ptr()) is (what != "mutable")


@pytest.mark.parametrize("what", PLACE)
def test_a_requirement_without_a_package_fails_with_the_facts(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has what torch says of the device, the decision, and what to install."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(q4.UnifiedMemoryError, match=r"pip install q4-um-managed.*concurrentManagedAccess") as caught:
        PLACE[what](BARE.placer(REQUIRE, device="cpu", environment={}), weight_tensor())
    error = caught.value
    assert error.attributes == {"cuda_available": False, "provider": None}
    assert error.rule == "managed memory for device cpu"
    assert error.hint == "Install q4-um-managed. Or ask for PREFER_UNIFIED."
    decision = error.details["decision"]
    assert (decision.action, decision.policy, decision.attributes) == ("refused", REQUIRE, error.attributes)


def test_a_requirement_that_is_turned_off_names_the_variable() -> None:
    """Q4_DISABLE_UM=1 wins, and nothing is to be installed then."""
    for place in PLACE.values():
        with pytest.raises(q4.UnifiedMemoryError, match="Q4_DISABLE_UM=1 turns promotion off") as caught:
            place(BARE.placer(REQUIRE, device="cpu", environment=OFF), weight_tensor())
        assert caught.value.attributes["Q4_DISABLE_UM"] == "1"
        assert caught.value.hint == "Unset Q4_DISABLE_UM. Or ask for PREFER_UNIFIED."


def test_a_source_arrives_without_a_package() -> None:
    """What a weight is prepared from is moved plainly under every policy, and stays where it is on its device."""
    source = torch.arange(8.0)
    for policy in (PREFER, REQUIRE):
        same, decision = BARE.placer(policy, device="cpu", environment={}).source(source)
        assert (same is source, decision.action) == (True, "left")
        placed, decision = BARE.placer(policy, device="meta", environment={}).source(source)
        assert (placed.device.type, decision.action) == ("meta", "fallback")
    with pytest.raises(q4.ConfigError, match="device must be a device that torch has here, got 'xpu'"):
        BARE.placer(PREFER, device="xpu", environment={}).source(source)


def test_a_mutable_tensor_of_its_sole_owner_is_not_copied() -> None:
    """copy=False only detaches, also in inference mode, and the tensor counts its changes."""
    source = torch.nn.Parameter(torch.ones(3))
    placer = BARE.placer(PREFER, device="cpu", environment={})
    with torch.inference_mode():
        placed, _ = placer.mutable(source, copy=False)
        copied, _ = placer.mutable(source)
    assert placed.data_ptr() == source.data_ptr()
    assert (placed.requires_grad, placed.is_inference(), copied.is_inference()) == (False, False, False)


def test_a_copy_in_managed_memory_needs_the_package() -> None:
    """The error of a copy within a provider's memory says what to install."""
    with pytest.raises(q4.UnifiedMemoryError, match=r"in memory of fake, on cpu.*pip install q4-um-managed"):
        BARE.placer_type().copy_into(FakeProvider(), torch.ones(3), "copy for state")


@pytest.mark.parametrize(
    ("tensor", "policy", "device", "error", "name"),
    [
        ([1.0], PREFER, "cpu", q4.InputError, "tensor"),
        (torch.ones(3).to_sparse(), PREFER, "cpu", q4.InputError, "tensor"),
        (torch.ones(3), "preferred", "cpu", q4.ConfigError, "policy"),
        (torch.ones(3), None, "cpu", q4.ConfigError, "policy"),
        (torch.ones(3), PREFER, "gpu", q4.ConfigError, "device"),
        (torch.ones(3), PREFER, None, q4.ConfigError, "device"),
    ],
)
def test_bad_arguments(tensor: Any, policy: Any, device: Any, error: type[q4.Q4Error], name: str) -> None:
    """Each is a typed error that names the argument, with or without a package."""
    for place in PLACE.values():
        with pytest.raises(error) as caught:
            place(BARE.placer(policy, device=device, environment={}), tensor)
        assert caught.value.name == name


@pytest.mark.parametrize("value", ["2", "true", " 1"])
@pytest.mark.parametrize("policy", [DISABLED, PREFER, REQUIRE])
def test_an_illegal_variable_is_refused(value: str, policy: q4.UnifiedMemoryPolicy) -> None:
    """Q4_DISABLE_UM is 0 or 1; anything else is a ConfigError that names it, whatever the policy."""
    with pytest.raises(q4.ConfigError) as caught:
        BARE.placer(policy, device="cpu", environment={"Q4_DISABLE_UM": value})
    assert (caught.value.name, caught.value.value) == ("Q4_DISABLE_UM", value)


class _Placing(memory.MemoryPlacer):
    """A placer that remembers who it may ask."""

    name = "placing"

    def __init__(self, policy: Any, *, providers: Any = None, **facts: Any) -> None:
        super().__init__(policy, providers=providers, **facts)
        self.asked = [provider.name for provider in providers]


def test_a_plugin_brings_the_placer() -> None:
    """Its class is given the providers of all plugins, or those that the caller names."""
    registry = q4.Registry(
        [
            ("placer", plugin(q4_placers=lambda: [_Placing])),
            ("provider", plugin(q4_memory_providers=lambda: [FakeProvider("b"), FakeProvider("a")])),
        ]
    )
    assert registry.placer_type() is _Placing
    placer: Any = registry.placer(PREFER, device="cpu", environment={})
    assert (type(placer), placer.asked) == (_Placing, ["a", "b"])
    placer = registry.placer(PREFER, device="cpu", environment={}, providers=[FakeProvider("mine")])
    assert placer.asked == ["mine"]


def test_no_plugin_is_loaded_where_nothing_is_placed() -> None:
    """Under DISABLED, and where Q4_DISABLE_UM turns promotion off, no plugins are loaded."""
    registry = q4.Registry([])
    for policy, environment in ((DISABLED, {}), (PREFER, OFF), (REQUIRE, OFF)):
        assert type(registry.placer(policy, device="cpu", environment=environment)) is memory.MemoryPlacer
    assert registry._manager is None


@pytest.mark.parametrize("item", [FakeProvider("no-class"), FakeProvider])
def test_a_plugin_that_brings_no_placer_is_recorded(item: object) -> None:
    """What is no subclass of MemoryPlacer is not used; the plugin's record says so."""
    registry = q4.Registry([("wrong", plugin(q4_placers=lambda: [item]))])
    with pytest.warns(q4.Q4PluginWarning, match="must be a subclass of MemoryPlacer"):
        found = registry.placer_type()
    assert found is memory.MemoryPlacer
    assert "must be a subclass of MemoryPlacer" in registry.records()[0].errors[0]
