"""What a layer says of the memory that it was asked to lie in, beyond its own buffers."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import pytest
import torch

import q4_dequant_fallback
import q4core as q4
from q4_um_managed import apply_policy, q4_placers
from tests.support.managed import PREFER, REQUIRE, FakeProvider

if TYPE_CHECKING:
    from collections.abc import Sequence


def _session(provider: FakeProvider | None, policy: q4.UnifiedMemoryPolicy, device: str = "cpu") -> q4.Session:
    plugins: Sequence[tuple[str, object]] = [("dequant-fallback", q4_dequant_fallback)]
    if provider is not None:
        hooks = types.SimpleNamespace(q4_memory_providers=q4.hookimpl(lambda: [provider]), q4_placers=q4_placers)
        plugins = [("fake", hooks), *plugins]
    return q4.Session(q4.SessionConfig(device=device, unified_memory=policy), registry=q4.Registry(plugins))


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.ones(16, 64), "nf4")


@pytest.mark.parametrize("policy", [PREFER, REQUIRE])
def test_a_bias_that_stays_is_reported(policy: q4.UnifiedMemoryPolicy) -> None:
    """A bias is its owner's parameter and is not moved; the report says so, and whose memory it lies in."""
    provider = FakeProvider()
    bare = _session(provider, policy).linear(_weight())
    assert not [line for line in bare.diagnostics().memory if "bias" in line]
    layer = _session(provider, policy).linear(_weight(), torch.ones(16))
    (line,) = [line for line in layer.diagnostics().memory if "bias" in line]
    assert line == "left: the bias is its owner's parameter, in ordinary memory"
    assert line in str(layer.diagnostics())
    placed, _ = apply_policy(
        torch.nn.Parameter(torch.ones(16)), policy, device="cpu", providers=[provider], environment={}
    )
    managed = _session(provider, policy).linear(_weight(), torch.nn.Parameter(placed))
    assert "left: the bias is its owner's parameter, in memory of fake" in managed.diagnostics().memory


def test_without_a_policy_nothing_is_reported_about_a_bias() -> None:
    """Under DISABLED there is no word on memory."""
    layer = _session(FakeProvider(), q4.UnifiedMemoryPolicy.DISABLED).linear(_weight(), torch.ones(16))
    assert layer.diagnostics().memory == ()


@pytest.mark.parametrize("provider", [None, FakeProvider(is_available=False)], ids=["none", "unable"])
def test_required_memory_of_a_device_that_is_not_there_is_refused_as_such(
    provider: FakeProvider | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REQUIRE_UNIFIED on a CUDA device that is not there is a refusal of unified memory, with the facts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        _session(provider, REQUIRE, "cuda").linear(_weight(), name="proj")
    assert caught.value.attributes["cuda_available"] is False
    assert "weight of layer 'proj'" in str(caught.value)
    assert caught.value.rule == "managed memory for device cuda"


def test_a_device_that_is_not_there_is_a_wrong_setting_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is not the obstacle, the device is named: a provider that says yes, or no policy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for provider, policy in ((FakeProvider(), REQUIRE), (None, PREFER)):
        with pytest.raises(q4.ConfigError) as caught:
            _session(provider, policy, "cuda").linear(_weight())
        assert str(caught.value).startswith("device 'cuda' is not available: torch sees 0 CUDA devices")
        assert caught.value.value == "cuda"
