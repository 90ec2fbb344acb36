"""The unified-memory contract: what each policy makes of weights, mutable tensors and activations."""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4core import memory
from q4core.memory import (
    Availability,
    MemoryDecision,
    MemoryProvider,
    apply_input_policy,
    apply_mutable_policy,
    apply_policy,
    release_input,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DISABLED = q4.UnifiedMemoryPolicy.DISABLED
PREFER = q4.UnifiedMemoryPolicy.PREFER_UNIFIED
REQUIRE = q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED
ATTRIBUTES = {"concurrentManagedAccess": 1, "pageableMemoryAccess": 0}
CPU = torch.device("cpu")


class FakeProvider:
    """Calls memory that it has handed out managed, and writes down what it was asked."""

    def __init__(self, name: str = "fake", *, is_available: bool = True) -> None:
        self.name = name
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}
        self.freed: list[int] = []
        self._answer = Availability(is_available, "managed memory" if is_available else "no managed memory", ATTRIBUTES)
        self._addresses: set[int] = set()

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare a tensor's memory managed."""
        self._addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_available(self, device: torch.device) -> Any:
        """Answer as told to."""
        self.calls.append("is_available")
        assert isinstance(device, torch.device)
        return self._answer

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Look among what was handed out."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        """Copy."""
        self.calls.append("to_managed")
        assert not tensor.requires_grad
        self.options = {"device": device, "read_mostly": read_mostly, "prefetch": prefetch}
        return self.empty(tuple(tensor.shape), tensor.dtype, device).copy_(tensor)

    def prefetch(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Write it down."""
        assert self.is_managed(tensor)
        self.calls.append("prefetch")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Hand out memory."""
        return self.own(torch.empty(shape, dtype=dtype))

    def free(self, tensor: torch.Tensor) -> None:
        """Write it down."""
        self.calls.append("free")
        self.freed.append(tensor.data_ptr())


class Broken(FakeProvider):
    """Fails in one method, by raising or by a wrong answer."""

    def __init__(self, where: str, result: Any = None, name: str = "broken") -> None:
        super().__init__(name)
        self._where, self._result = where, result

    def __getattribute__(self, name: str) -> Any:
        """Return a method that fails, for the one that does."""
        if name.startswith("_") or name != self._where:
            return super().__getattribute__(name)

        def fail(*_: object, **__: object) -> Any:
            if self._result is None:
                raise RuntimeError("cudaErrorUnknown")
            return self._result

        return fail


def _weight() -> torch.Tensor:
    return torch.arange(6, dtype=torch.uint8).reshape(2, 3)


APPLY: dict[str, Callable[..., tuple[torch.Tensor, MemoryDecision]]] = {
    "weight": apply_policy,
    "mutable": apply_mutable_policy,
    "input": apply_input_policy,
}
PROVIDERS: dict[str, Callable[[], list[FakeProvider]]] = {
    "none": list,
    "unable": lambda: [FakeProvider(is_available=False)],
    "able": lambda: [FakeProvider()],
}

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
    tensor = _weight()
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
    assert torch.equal(placed, _weight())
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
    tensor = fake.own(_weight())
    placed, decision = APPLY[what](
        tensor, policy, device="cpu", providers=[fake], environment={"Q4_DISABLE_UM": disable}
    )
    assert torch.equal(placed, _weight())
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
            apply(fake.own(_weight()), REQUIRE, device="cpu", providers=[fake], environment={"Q4_DISABLE_UM": "1"})
        assert caught.value.attributes["Q4_DISABLE_UM"] == "1"
        assert "Q4_DISABLE_UM" in str(caught.value.hint)


@pytest.mark.parametrize("value", ["2", "true", "yes", " 1", "01", "-"])
@pytest.mark.parametrize("policy", [DISABLED, PREFER, REQUIRE])
def test_illegal_variable_is_refused(value: str, policy: q4.UnifiedMemoryPolicy) -> None:
    """Q4_DISABLE_UM is 0 or 1; anything else is a ConfigError that names it, whatever the policy."""
    for apply in APPLY.values():
        with pytest.raises(q4.ConfigError) as caught:
            apply(_weight(), policy, device="cpu", environment={"Q4_DISABLE_UM": value})
        assert (caught.value.name, caught.value.value) == ("Q4_DISABLE_UM", value)


def test_empty_variable_is_unset() -> None:
    """As for every other Q4_ variable."""
    fake = FakeProvider()
    _, decision = apply_policy(_weight(), REQUIRE, device="cpu", providers=[fake], environment={"Q4_DISABLE_UM": ""})
    assert decision.action == "promoted"


# -- what is asked of a provider


def test_provider_is_told_the_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read-mostly and prefetched, mutable tensors neither, activations prefetched."""
    monkeypatch.delenv("Q4_DISABLE_UM", raising=False)
    expected = {"weight": (True, True), "mutable": (False, False), "input": (False, True)}
    for what, (read_mostly, prefetch) in expected.items():
        fake = FakeProvider()
        APPLY[what](_weight(), REQUIRE, device="cuda:1", providers=[fake])
        assert fake.options == {"device": torch.device("cuda:1"), "read_mostly": read_mostly, "prefetch": prefetch}


def test_choice_does_not_depend_on_order() -> None:
    """Of several able providers the first by name serves, however they are listed."""
    for names in (["b", "a", "c"], ["c", "b", "a"]):
        providers = [FakeProvider(name) for name in names]
        _, decision = apply_policy(_weight(), REQUIRE, device="cpu", providers=iter(providers), environment={})
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
    tensor = _weight()
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
    placed, decision = apply_policy(_weight(), REQUIRE, device="cpu", providers=[able, broken], environment={})
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


# -- facts and errors


def test_refusal_names_the_device_attributes() -> None:
    """The error has every attribute that decided, with its value, on the error and in its text (TC-08)."""
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        apply_policy(_weight(), REQUIRE, device="cpu", providers=[FakeProvider(is_available=False)], environment={})
    assert caught.value.attributes.items() >= {**ATTRIBUTES, "provider": None}.items()
    for key, value in caught.value.attributes.items():
        assert f"{key}={value}" in str(caught.value)
    assert caught.value.details["decision"].attributes == caught.value.attributes


def test_refusal_without_cuda_and_without_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has neither is described by just that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        apply_input_policy(torch.ones(3), REQUIRE, device="cuda:0", environment={})
    assert caught.value.attributes == {"cuda_available": False, "provider": None}
    assert caught.value.rule == "managed memory for device cuda:0"


def test_refusal_describes_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a device, torch's facts on it are named; a device that is not there shows in the count."""
    properties = SimpleNamespace(major=12, minor=1, total_memory=2**37, is_integrated=1, name="never asked for")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: [None, properties][index] or properties)
    _, decision = apply_policy(_weight(), PREFER, device="cuda:1", environment={})
    assert decision.attributes == {
        "cuda_available": True,
        "cuda_device_count": 2,
        "cuda_device": 1,
        "capability": "12.1",
        "is_integrated": True,
        "total_memory_bytes": 2**37,
        "provider": None,
    }
    _, decision = apply_policy(_weight(), PREFER, device="cuda:5", environment={})
    assert decision.attributes == {
        "cuda_available": True,
        "cuda_device_count": 2,
        "cuda_device": 5,
        "provider": None,
    }
    _, decision = apply_policy(_weight(), PREFER, device="cpu", environment={})
    assert decision.attributes["cuda_device"] == 0


@pytest.mark.parametrize("what", APPLY)
@pytest.mark.parametrize(
    ("tensor", "policy", "device", "error", "name"),
    [
        ([1.0], PREFER, "cpu", q4.InputError, "tensor"),
        (torch.ones(3).to_sparse(), PREFER, "cpu", q4.InputError, "tensor"),
        (torch.ones(3), "prefer_unified", "cpu", q4.ConfigError, "policy"),
        (torch.ones(3), None, "cpu", q4.ConfigError, "policy"),
        (torch.ones(3), PREFER, "gpu", q4.ConfigError, "device"),
        (torch.ones(3), PREFER, None, q4.ConfigError, "device"),
    ],
)
def test_bad_arguments(what: str, tensor: Any, policy: Any, device: Any, error: type[q4.Q4Error], name: str) -> None:
    """Each is a typed error that names the argument."""
    with pytest.raises(error) as caught:
        APPLY[what](tensor, policy, device=device)
    assert caught.value.name == name


def test_answers_are_plain_values() -> None:
    """Answers and decisions compare, hash, print and travel between processes; an answer is as true as it says."""
    yes, no = Availability(True, "can", ATTRIBUTES), Availability(False, "can't")
    assert yes
    assert not no
    decision = MemoryDecision(PREFER, "left", "because", None, ATTRIBUTES, 0)
    for value in (yes, no, decision):
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301  # our own bytes
        assert hash(value) == hash(attrs.evolve(value))
    error = q4.UnifiedMemoryError("x", attributes=ATTRIBUTES, decision=decision)
    assert pickle.loads(pickle.dumps(error)).details["decision"] == decision  # noqa: S301  # as above


def test_fakes_are_providers() -> None:
    """The protocol can be checked at run time; what lacks a method is none."""
    assert isinstance(FakeProvider(), MemoryProvider)
    assert not isinstance(SimpleNamespace(name="x", is_available=None), MemoryProvider)


def test_module_knows_no_registry_and_logs_nothing() -> None:
    """Decisions depend on arguments and the environment alone, and are reported by the caller."""
    imported: set[str] = set()
    for file in Path(memory.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    foreign = {name for name in imported if name not in sys.stdlib_module_names and "q4core.memory" not in name}
    assert foreign == {"attrs", "collections.abc", "q4core.errors", "q4core.policy", "torch"}
    assert not imported & {"logging", "warnings"}
