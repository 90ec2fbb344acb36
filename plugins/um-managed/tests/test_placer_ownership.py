"""Whose memory a tensor lies in: what is noted, what stays there, and what is copied once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import q4core as q4
from q4_actors import MutableTensor
from q4_um_managed import Placer, apply_input_policy, apply_mutable_policy, apply_policy
from q4core import memory
from tests.support.managed import PREFER, REQUIRE, FakeProvider

CUDA = torch.device("cuda", 0)


class _OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    device = CUDA


class _Placing(FakeProvider):
    """Hands out tensors that say they are on the device that was asked for."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Hand out memory."""
        made = super().empty(shape, dtype, device)
        return made.as_subclass(_OnCuda) if device.type == "cuda" else made


class _Full(FakeProvider):
    """Is there, and has no room."""

    def to_managed(self, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        """Refuse with numbers."""
        raise q4.UnifiedMemoryError(
            "unified memory for cuda:0",
            name="size",
            rule="at most 100 bytes",
            value=tensor.nbytes,
            hint="Close what holds memory, or place less of it.",
            attributes={"free_bytes": 300, "headroom_bytes": 200, "counted_by": "cudaMemGetInfo"},
        )


# -- the note


def test_memory_of_a_provider_is_known_as_long_as_it_lives() -> None:
    """Views, aliases and parameters over it report its provider; copies do not; the note ends with the memory."""
    provider = FakeProvider()
    placed, _ = apply_policy(torch.ones(2, 3), REQUIRE, device="cpu", providers=[provider], environment={})
    view = torch.nn.Parameter(placed[1].detach())
    for tensor in (placed, view, placed.view(torch.uint8), placed.T):
        assert memory.provider_of(tensor) is provider
    for tensor in (placed.clone(), placed + 1, torch.ones(2), torch.empty(0)):
        assert memory.provider_of(tensor) is None
    gone = weakref.ref(provider)
    del placed, provider, tensor
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_whatever_a_policy_touches_is_noted() -> None:
    """What is promoted, allocated for a backend, or found in managed memory already, has its provider noted."""
    provider = FakeProvider()
    facts: dict[str, Any] = {"device": "cpu", "providers": [provider], "environment": {}}
    empty = Placer(PREFER, device="cpu", providers=[provider]).empty()
    assert empty is not None
    for tensor in (
        apply_mutable_policy(torch.ones(3), PREFER, **facts)[0],
        apply_input_policy(torch.ones(3), REQUIRE, **facts)[0],
        apply_policy(provider.own(torch.ones(3)), PREFER, **facts)[0],
        empty((3,), torch.float32),
    ):
        assert memory.provider_of(tensor) is provider


def test_plain_contents_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutable tensor in ordinary memory copies as torch does, and no provider is looked for."""

    def fail(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("q4_um_managed.Placer.copy_into", fail)
    monkeypatch.setattr("q4core.plugins.registry.default_registry", fail)
    with MutableTensor(torch.zeros(3)) as state:
        with state.write() as tensor:
            tensor.add_(1.0)
        assert state.snapshot().tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize("fault", ["the same memory", "another device", "raises"])
def test_a_provider_that_makes_no_version_of_its_own_is_refused(fault: str) -> None:
    """A version is a copy where the last one lies: after any other answer the content stays and the writer raises."""
    provider = _Placing()
    placed, _ = apply_mutable_policy(torch.zeros(3), REQUIRE, device="cpu", providers=[provider], environment={})
    state = MutableTensor(placed, copy=False, name="membrane")
    with state.write() as tensor:
        tensor.add_(1.0)

    def to_managed(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        if fault == "raises":
            raise SystemExit(3)
        return tensor if fault == "the same memory" else provider.own(tensor.clone()).as_subclass(_OnCuda)

    provider.to_managed = to_managed  # type: ignore[method-assign]
    with (
        pytest.raises(q4.UnifiedMemoryError, match=r"^copy for mutable tensor 'membrane'.*fake") as caught,
        state.write(),
    ):
        raise AssertionError("let in")
    assert ("Free some" in str(caught.value)) is (fault == "raises"), "room does not mend a provider's result"
    assert (state.version, state.snapshot().tensor.tolist()) == (1, [1.0] * 3)


# -- one copy


def test_a_promoted_mutable_tensor_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that copies makes the only copy: neither before it, nor where it refuses, is anything cloned."""
    clones: list[int] = []
    clone = memory.detached_copy

    def note(tensor: torch.Tensor) -> torch.Tensor:
        clones.append(tensor.nbytes)
        return clone(tensor)

    for module in ("q4core.memory.placer", "q4_um_managed.placer"):
        monkeypatch.setattr(f"{module}.detached_copy", note)
    source = torch.arange(3.0)
    facts: dict[str, Any] = {"device": "cpu", "environment": {}}
    placed, _ = apply_mutable_policy(source, REQUIRE, providers=[FakeProvider()], **facts)
    assert placed.data_ptr() != source.data_ptr()
    for providers in ([], [_Full()]):
        with pytest.raises(q4.UnifiedMemoryError):
            apply_mutable_policy(source, REQUIRE, providers=providers, **facts)
    assert clones == []
    placed, decision = apply_mutable_policy(source, PREFER, providers=[_Full()], **facts)
    assert (decision.action, clones) == ("fallback", [12])
    assert placed.data_ptr() != source.data_ptr()


def test_a_managed_source_is_copied_to_managed_memory() -> None:
    """The copy that sets a managed tensor apart lies in managed memory too, and is the only one."""
    provider = FakeProvider()
    source = provider.own(torch.arange(3.0))
    placed, decision = apply_mutable_policy(source, REQUIRE, device="cpu", providers=[provider], environment={})
    assert (decision.action, decision.bytes) == ("promoted", 12)
    assert provider.is_managed(placed)
    placed.add_(1.0)
    assert source.tolist() == [0.0, 1.0, 2.0]
    assert provider.calls.count("to_managed") == 1


# -- on which device


@pytest.mark.parametrize("apply", [apply_policy, apply_input_policy, apply_mutable_policy])
def test_managed_memory_of_another_device_is_promoted(apply: Any) -> None:
    """Already managed means: on the device that computes. A managed CPU tensor comes to a CUDA device by a copy."""
    provider = _Placing()
    source = provider.own(torch.arange(3.0))
    options = {"copy": False} if apply is apply_mutable_policy else {}
    placed, decision = apply(source, REQUIRE, device="cuda", providers=[provider], environment={}, **options)
    assert (decision.action, placed.device) == ("promoted", CUDA)
    same, decision = apply(placed, REQUIRE, device="cuda:0", providers=[provider], environment={}, **options)
    assert (decision.action, same.data_ptr()) == (
        "prefetched" if apply is apply_input_policy else "left",
        placed.data_ptr(),
    )
    _, decision = apply(placed, REQUIRE, device="cuda:1", providers=[provider], environment={}, **options)
    assert decision.action == "promoted"


def test_a_preferred_activation_of_another_device_stays() -> None:
    """Under PREFER_UNIFIED an activation is never copied, wherever it lies; its pages are moved."""
    provider = _Placing()
    x = provider.own(torch.arange(3.0))
    same, decision = apply_input_policy(x, PREFER, device="cuda", providers=[provider], environment={})
    assert (same is x, decision.action) == (True, "prefetched")


# -- what a refusal advises


@pytest.mark.parametrize("apply", [apply_policy, apply_mutable_policy, apply_input_policy])
def test_lack_of_room_is_reported_with_its_numbers_and_hint(apply: Any) -> None:
    """A provider that is there and refuses the size is no reason to install one; its numbers are in the attributes."""
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        apply(torch.zeros(64), REQUIRE, device="cpu", providers=[_Full()], environment={})
    error = caught.value
    assert (
        error.attributes.items()
        >= {
            "free_bytes": 300,
            "headroom_bytes": 200,
            "counted_by": "cudaMemGetInfo",
            "concurrentManagedAccess": 1,
        }.items()
    )
    assert error.hint == "Close what holds memory, or place less of it. Or ask for PREFER_UNIFIED."
    assert str(error).count("Close what holds memory, or place less of it.") == 1
    assert "size must be at most 100 bytes, got 256" in str(error)
    assert "Install" not in str(error)


def test_a_preferred_weight_without_room_has_the_numbers() -> None:
    """The decision of a fallback carries what the provider counted, under its name where there are several."""
    source = torch.zeros(64)
    _, decision = apply_policy(source, PREFER, device="cpu", providers=[_Full("a")], environment={})
    assert decision.attributes["free_bytes"] == 300
    providers = [_Full("a"), FakeProvider("b", is_available=False)]
    _, decision = apply_policy(source, PREFER, device="cpu", providers=providers, environment={})
    assert decision.attributes["a.free_bytes"] == 300


@pytest.mark.parametrize(
    ("providers", "environment", "advice"),
    [
        ([], {}, "Install a plugin"),
        ([FakeProvider(is_available=False)], {}, "q4 doctor"),
        ([FakeProvider()], {"Q4_DISABLE_UM": "1"}, "Unset Q4_DISABLE_UM"),
    ],
)
def test_the_advice_fits_the_refusal(providers: list[FakeProvider], environment: dict[str, str], advice: str) -> None:
    """Who has no provider installs one, who has one that can't looks why, who turned it off turns it on."""
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        apply_policy(torch.ones(3), REQUIRE, device="cpu", providers=providers, environment=environment)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(advice) or advice in caught.value.hint
    assert ("Install" in caught.value.hint) == (not providers)
