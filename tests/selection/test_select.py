"""``q4.select``: a request under a configuration, every option of which is followed or rejected."""

from __future__ import annotations

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry

WEIGHT = q4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "nf4")
A8 = attrs.evolve(KERNEL_PATH, name="a8", precision=q4.Precision.W4A8, tier=30)


def _request(**facts: object) -> q4.Request:
    return q4.Request.for_weight(WEIGHT, **facts)  # type: ignore[arg-type]


def test_the_precision_of_the_configuration_is_asked_for() -> None:
    """An option for int8 is rejected where no backend has it, and followed where one has, as for a layer."""
    config = q4.SessionConfig(activation_precision="int8")
    with pytest.raises(q4.BackendUnavailableError, match="int8"):
        q4.select(_request(), config, registry=registry())
    plugins = registry(FakeBackend(paths=(KERNEL_PATH, A8)))
    assert q4.select(_request(), config, registry=plugins).path.name == "a8"
    exact = q4.SessionConfig(activation_precision="exact")
    assert q4.select(_request(), exact, registry=plugins).path.name == "fake_gemm"


def test_gradients_of_the_configuration_are_asked_for() -> None:
    """An option for gradients reaches the request, so that int16 is not chosen under AUTO."""
    rounded = attrs.evolve(A8, name="i16", precision=q4.Precision.W4I16)
    plugins = registry(FakeBackend(paths=(KERNEL_PATH, rounded)))
    assert q4.select(_request(), registry=plugins).path.name == "i16"
    selection = q4.select(_request(), q4.SessionConfig(gradients=True), registry=plugins)
    assert selection.request.gradients
    assert selection.path.name == "fake_gemm"


def test_the_context_is_asked_too() -> None:
    """What ``using`` sets counts for select as it does for a session."""
    with q4.using(q4.SessionConfig(gradients=True)):
        assert q4.select(_request(), registry=registry()).request.gradients


def test_a_device_that_is_not_there_is_refused() -> None:
    """A configuration or a request for a device that this machine has not is refused by name, as by a session."""
    index = torch.cuda.device_count() + 3
    for request, config in (
        (_request(), q4.SessionConfig(device=f"cuda:{index}")),
        (_request(device=f"cuda:{index}"), None),
    ):
        with pytest.raises(q4.ConfigError, match=f"cuda:{index}"):
            q4.select(request, config, registry=registry())


@pytest.mark.parametrize(
    ("facts", "config"),
    [
        ({"precision": q4.ActivationPrecision.EXACT}, q4.SessionConfig(activation_precision="int8")),
        ({"dtype": torch.bfloat16}, q4.SessionConfig(compute_dtype=torch.float16)),
    ],
)
def test_a_contradiction_is_refused(facts: dict[str, object], config: q4.SessionConfig) -> None:
    """A request and a configuration that say different things are a conflict, not a choice."""
    with pytest.raises(q4.PolicyConflictError):
        q4.select(_request(**facts), config, registry=registry())


def test_facts_of_a_request_are_checked() -> None:
    """A device, dtype or precision that is none is refused by name; a precision may be a text."""
    for facts, name in (
        ({"device": "zzz"}, "device"),
        ({"dtype": "float99"}, "dtype"),
        ({"precision": "x"}, "precision"),
    ):
        with pytest.raises(q4.ConfigError) as caught:
            _request(**facts)
        assert caught.value.name == name
    assert _request(precision="int8").precision is q4.ActivationPrecision.INT8
