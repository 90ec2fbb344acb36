"""Tests of ``mutable``: from a tensor to shared state, placed by a policy; on a pretended CUDA machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pretended_driver import CUDA, GB10, Pretended, accept_pretended, pretend

import q4core as q4
from q4_actors import ActorSystem, MutableMode, mutable

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Return a provider of managed memory on a machine whose GPU shares memory with the CPU."""
    accept_pretended(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return pretend(GB10)


def test_ordinary_memory() -> None:
    """Unless a policy says otherwise, the content is a copy in ordinary memory, and the decision is recorded."""
    given = torch.ones(3)
    with mutable(given, name="plain") as state:
        given.zero_()
        assert state.snapshot().tensor.tolist() == [1.0, 1.0, 1.0]
        assert (state.mode, state.name, state.version) == (MutableMode.VERSIONED, "plain", 0)
        assert state.placement is not None
        assert state.placement.action == "left"


def test_promoted_with_both_sides(case: Pretended) -> None:
    """What a provider promotes is in place, and each device reads and writes the same bytes."""
    state = mutable(torch.zeros(4), unified_memory="require_unified", device="cuda:0", providers=[case.provider])
    assert (state.mode, state.device) == (MutableMode.IN_PLACE, CUDA)
    assert state.placement is not None
    assert state.placement.action == "promoted"
    with state.write(device="cpu") as tensor:
        assert tensor.device.type == "cpu"
        tensor.add_(2)
    with state.read(device="cuda") as view:
        assert view.tensor.sum() == 8


def test_promoted_in_versions(case: Pretended) -> None:
    """Who asks for versions gets them, in managed memory."""
    options = {"unified_memory": "require_unified", "mode": "versioned", "providers": [case.provider]}
    state = mutable(torch.zeros(4), device="cpu", **options)  # type: ignore[arg-type]  # as written above
    assert state.mode is MutableMode.VERSIONED
    with state.write() as tensor:
        tensor.add_(1)
    with state.read() as view:
        assert case.provider.is_managed(view.tensor)


@pytest.mark.parametrize("way", ["using", "environment", "system"])
def test_policy_of_the_context(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy may come from ``using`` or the environment, and reaches a system's tensors."""
    if way == "environment":
        monkeypatch.setenv("Q4_UNIFIED_MEMORY", "require_unified")
        with pytest.raises(q4.UnifiedMemoryError, match="mutable tensor"):
            mutable(torch.zeros(4), providers=[])
        return
    with q4.using(q4.SessionConfig(unified_memory="require_unified")):
        if way == "using":
            with pytest.raises(q4.UnifiedMemoryError, match="mutable tensor"):
                mutable(torch.zeros(4), providers=[])
        else:
            with ActorSystem("threads") as system, pytest.raises(q4.UnifiedMemoryError, match="mutable tensor"):
                system.mutable(torch.zeros(4), name="state", providers=[])


def test_required_names_the_tensor() -> None:
    """What can't be had where it is required names the tensor, and carries the decision."""
    with pytest.raises(q4.UnifiedMemoryError, match="mutable tensor 'membrane' under REQUIRE_UNIFIED") as caught:
        mutable(torch.zeros(4), unified_memory="require_unified", providers=[], name="membrane")
    assert caught.value.details["decision"].action == "refused"


@pytest.mark.parametrize("policy", ["disabled", "prefer_unified"])
def test_every_runtime_records_a_reason(
    runtime: str, policy: str, heard: Callable[[], list[tuple[str, dict[str, Any]]]]
) -> None:
    """A system's tensor says what became of the policy and why, and so does its event, with the policy's own word."""
    with ActorSystem(runtime) as system:
        made = system.mutable(torch.zeros(4), name="state", unified_memory=policy)
        assert made.placement is not None
        assert made.placement.action == {"disabled": "left", "prefer_unified": "fallback"}[policy]
        assert made.placement.reason
    (fields,) = [fields for event, fields in heard() if event == "mutable"]
    assert (fields["tensor"], fields["policy"], fields["reason"]) == ("state", policy, made.placement.reason)
    assert fields["mode"] == "versioned"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")
def test_required_of_processes() -> None:
    """Processes refuse a required policy with the decision."""
    with ActorSystem("processes") as system, pytest.raises(q4.UnifiedMemoryError, match="one process") as caught:
        system.mutable(torch.zeros(4), name="state", unified_memory="require_unified")
    assert (caught.value.details["decision"].action, system.clock) == ("refused", 0)


def test_preferred_falls_back() -> None:
    """Without a provider of managed memory, a preferred policy leaves the tensor, and the decision says why."""
    state = mutable(torch.zeros(4), unified_memory="prefer_unified", providers=[])
    assert state.placement is not None
    assert state.placement.action == "fallback"
    assert state.mode is MutableMode.VERSIONED


def test_bad_arguments() -> None:
    """What is no tensor, or no device or mode, is refused by a typed error."""
    with pytest.raises(q4.InputError, match="tensor must be a tensor, got 'list'"):
        mutable([1.0])  # type: ignore[arg-type]  # on purpose
    with pytest.raises(q4.ConfigError, match="mode must be a MutableMode"):
        mutable(torch.zeros(3), mode="sideways")
    with pytest.raises(q4.ConfigError, match="version must be 0"):
        mutable(torch.zeros(3), version=-1)
    with pytest.raises(q4.ConfigError, match="device"):
        mutable(torch.zeros(3), device="tpu")
