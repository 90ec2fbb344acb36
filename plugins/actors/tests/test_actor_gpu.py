"""On a device: packed layers on a GPU, shared between actors on threads, and networks whose states lie there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acting import Layered

import q4core as q4
from q4_actors import ActorSystem, share
from q4_snn import LIF, Network, Population, Projection
from q4_snn.actors import ActorNetwork
from q4core.extension import LayerHandle
from tests.support.limits import scaled

pytestmark = pytest.mark.gpu
LIMIT_S = 120.0


def _layer(rows: int = 128, columns: int = 96) -> q4.Q4Linear:
    draw = torch.Generator().manual_seed(rows)
    weight = q4.quantize(torch.randn(rows, columns, generator=draw) / 4, "nf4", block_size=32)
    session = q4.Session(q4.SessionConfig(device="cuda", compute_dtype=torch.float32))
    return session.linear(weight, name="shared")


def test_actors_compute_with_a_layer_on_the_gpu() -> None:
    """Actors on threads give the layer's own bits over its own memory, where the layer lies."""
    layer, x = _layer(), torch.randn(3, 96, device="cuda")
    with ActorSystem("threads") as system:
        weight = system.share(layer)
        refs = [system.spawn(Layered, weight, name=f"a{index}") for index in range(3)]
        assert all(torch.equal(ref.ask(x, timeout=scaled(LIMIT_S)), layer(x)) for ref in refs)
        own, made = LayerHandle(layer), LayerHandle(weight.layer())
        assert [item.data_ptr() for item in made.tensors] == [item.data_ptr() for item in own.tensors]
    with pytest.raises(q4.LifecycleError, match="closed"):
        weight.layer()


def test_processes_refuse_a_layer_on_the_gpu() -> None:
    """A GPU's memory belongs to one process; the error says which runtime shares it."""
    with pytest.raises(q4.InputError, match="actors on threads"):
        share(_layer())


def _packed(first: Population, second: Population, delay: int = 0) -> Projection:
    found = Projection(first, second, delay=delay)
    found.synapses = _layer(second.size, first.size)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"device": "cuda", "unified_memory": "require_unified"}], ids=["own", "managed"]
)
def test_a_network_of_actors_runs_where_its_states_lie(options: dict[str, Any]) -> None:
    """Actors on threads advance a packed network on the GPU, in ordinary and in managed memory, as one call does."""
    inputs = Population("input", 96)
    first, second = (Population(name, 128, LIF(10e-3, v_threshold=0.5, dt=1e-3)) for name in ("first", "second"))
    projections = [_packed(inputs, first), _packed(first, second, delay=2), _packed(second, first, delay=1)]
    network = Network([inputs, first, second], projections).to("cuda")
    x = (torch.rand(20, 2, 96, generator=torch.Generator().manual_seed(1)) < 0.3).float().cuda()
    with torch.no_grad():
        wanted, _ = network(x, record=["first", "second"])
    assert 0 < float(wanted["second"].mean()) < 1
    with ActorSystem("threads") as system:
        found = ActorNetwork(network, system, batch=2, actors=2, **options)(x, record=["first", "second"])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
