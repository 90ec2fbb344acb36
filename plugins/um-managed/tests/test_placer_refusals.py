"""What a refusal of unified memory says, and what the module's answers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import q4core as q4
from q4_um_managed import apply_input_policy, apply_policy, apply_source_policy
from tests.support.managed import APPLY, ATTRIBUTES, PREFER, REQUIRE, FakeProvider, weight_tensor


def test_refusal_names_the_device_attributes() -> None:
    """The error has every attribute that decided, with its value, on the error and in its text (TC-08)."""
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        apply_policy(
            weight_tensor(), REQUIRE, device="cpu", providers=[FakeProvider(is_available=False)], environment={}
        )
    assert caught.value.attributes.items() >= {**ATTRIBUTES, "provider": None}.items()
    for key, value in caught.value.attributes.items():
        assert f"{key}={value}" in str(caught.value)
    assert caught.value.details["decision"].attributes == caught.value.attributes


def test_refusal_without_cuda_and_without_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has neither is described by just that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        apply_input_policy(torch.ones(3), REQUIRE, device="cuda:0", providers=(), environment={})
    assert caught.value.attributes == {"cuda_available": False, "provider": None}
    assert caught.value.rule == "managed memory for device cuda:0"


def test_refusal_without_provider_says_who_would_ask() -> None:
    """Where no plugin provides memory, the message names the one that asks a CUDA device for its attributes."""
    with pytest.raises(q4.UnifiedMemoryError, match=r"q4-um-managed.*concurrentManagedAccess"):
        apply_policy(weight_tensor(), REQUIRE, device="cuda", providers=(), environment={})


def test_refusal_names_the_layer() -> None:
    """A layer's weight is called so, with the layer's name; the memory of another provider makes no difference."""
    weight = q4.quantize(torch.randn(16, 128), "nf4")
    session = q4.Session(q4.SessionConfig(device="cpu", unified_memory=REQUIRE))
    with pytest.raises(q4.UnifiedMemoryError, match=r"^weight of layer 'proj' under REQUIRE_UNIFIED"):
        session.linear(weight, name="proj")


def test_refusal_describes_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a device, torch's facts on it are named; a device that is not there shows in the count."""
    properties = SimpleNamespace(major=12, minor=1, total_memory=2**37, is_integrated=1, name="never asked for")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: [None, properties][index] or properties)
    _, decision = apply_policy(weight_tensor(), PREFER, device="cuda:1", providers=(), environment={})
    assert decision.attributes == {
        "cuda_available": True,
        "cuda_device_count": 2,
        "cuda_device": 1,
        "capability": "12.1",
        "is_integrated": True,
        "total_memory_bytes": 2**37,
        "provider": None,
    }
    _, decision = apply_policy(weight_tensor(), PREFER, device="cuda:5", providers=(), environment={})
    assert decision.attributes == {
        "cuda_available": True,
        "cuda_device_count": 2,
        "cuda_device": 5,
        "provider": None,
    }
    _, decision = apply_policy(weight_tensor(), PREFER, device="cpu", providers=(), environment={})
    assert decision.attributes["cuda_device"] == 0


@pytest.mark.parametrize("what", APPLY)
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
def test_bad_arguments(what: str, tensor: Any, policy: Any, device: Any, error: type[q4.Q4Error], name: str) -> None:
    """Each is a typed error that names the argument."""
    with pytest.raises(error) as caught:
        APPLY[what](tensor, policy, device=device)
    assert caught.value.name == name
    if name == "policy":
        assert "'disabled', 'prefer_unified', 'require_unified'" in str(caught.value.rule)


def test_a_policy_may_be_named() -> None:
    """As a session's configuration takes it."""
    assert apply_policy(weight_tensor(), "prefer_unified", device="cpu")[1].policy is PREFER


def test_a_source_for_a_device_that_is_not_there_is_refused() -> None:
    """By an error of ours that carries torch's own words, not by what torch raises."""
    with pytest.raises(q4.ConfigError, match="device must be a device that torch has here, got 'xpu'"):
        apply_source_policy(weight_tensor(), PREFER, device="xpu")  # which torch's builds for CPU and CUDA leave out
