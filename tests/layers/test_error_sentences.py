"""Errors of states read as one plain sentence, and a hint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 24, 128
SENTENCE = re.compile(r"[A-Za-z][^.]*\.( [A-Z][^.]*(\([^)]*\)|[^.])*\.)?")


def _session() -> q4.Session:
    return q4.Session(registry=registry(FakeBackend()))


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(1)), "nf4", name="proj")


def _closed_session() -> None:
    session = _session()
    session.close()
    session.linear(_weight())


def _closed_layer() -> None:
    layer = _session().linear(_weight())
    layer.close()
    layer(torch.zeros(1, K))


def _empty_layer() -> None:
    _session().linear(_weight().to("meta"))(torch.zeros(1, K))


def _closed_graph() -> None:
    torch.ops.q4core.linear(torch.zeros(1, K), [], None, "nobody/0000")


def _unknown_plan() -> None:
    torch.ops.q4core.linear(torch.zeros(1, K), [torch.zeros(1, dtype=torch.uint8)], None, "nobody/0000")


def _placed_in_a_graph() -> None:
    layer = _session().linear(_weight())
    config = q4.SessionConfig(unified_memory=q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED)
    layer._weight = attrs.evolve(layer._weight, config=config)
    torch.jit.trace(layer, torch.zeros(1, K))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("provoke", "begins"),
    [
        (_closed_session, "session is closed."),
        (_closed_layer, "layer 'proj' is closed."),
        (_empty_layer, "layer 'proj' is on the meta device and has no weight yet."),
        (_closed_graph, "the layer of this graph is closed."),
        (_unknown_plan, "no layer of this process was prepared under plan 'nobody/0000'."),
        (_placed_in_a_graph, "a compiled graph can't place activations, as REQUIRE_UNIFIED asks."),
    ],
)
def test_a_state_is_reported_in_a_plain_sentence(provoke: Callable[[], Any], begins: str) -> None:
    """What is the case, then what to do: no "must be …, got", which is for arguments."""
    with pytest.raises(q4.LifecycleError) as caught:
        provoke()
    told = str(caught.value)
    assert told.startswith(begins)
    assert SENTENCE.fullmatch(told), told
    assert "must be" not in told
    assert ", got" not in told


def test_a_layer_is_not_prepared_inside_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the layer, and what to do before the trace."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(q4.LifecycleError) as caught:
        _session().linear(_weight())
    assert str(caught.value).startswith("layer 'proj' can't be prepared inside a trace or a capture. Make the layer")
