"""Programs of neurons and time courses: the bits of torch's steps, by the reference, and what has no operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import q4core as q4
from q4_nn import pack_
from q4_programs import EmissionError
from q4_snn import (
    ALIF,
    IF,
    LI,
    LIF,
    AdEx,
    AlphaSynapses,
    CubaLIF,
    ExpSynapses,
    Izhikevich,
    LayerProjection,
    Network,
    NetworkState,
    Population,
    Projection,
    SparseProjection,
    spikegen,
)
from q4_snn.engine import PopulationProgram
from q4_snn.maps import Scale, SumPool2d
from q4_snn.projection import coming_of
from q4_snn.runs import runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS, SIZE = 50, 40
EACH = torch.arange(SIZE) % 4 * 1e-4
NEURONS: dict[str, Callable[[], Any]] = {
    "lif": lambda: LIF.from_beta(0.9, t_refractory=3e-4),
    "lif of each": lambda: LIF(1e-3 + EACH, v_reset=-0.2, v_leak=0.1, reset="value", t_refractory=EACH),
    "cuba": lambda: CubaLIF(1e-3, 5e-4, t_refractory=2e-4, threshold_inclusive=True),
    "if": lambda: IF(t_refractory=5e-4),
    "alif": lambda: ALIF(1e-3, 1e-2, 0.3, t_refractory=1e-4),
    "learned": lambda: LIF.from_beta(
        torch.nn.Parameter(torch.full((SIZE,), 0.9)), torch.nn.Parameter(torch.tensor(0.8))
    ),
    "izhikevich": Izhikevich,
    "izhikevich of each": lambda: Izhikevich(0.02 + 20 * EACH, 0.2 + EACH, -65 + 1e4 * EACH, 8 - 1e4 * EACH),
}
WEIGHTS = {"izhikevich": 40.0, "izhikevich of each": 40.0}


def make_network(kind: str, wrap: Callable[[Any], Any], scale: float = 1.0) -> Network:
    """Return an input, neurons with dense and sparse synapses, and a read-out."""
    torch.manual_seed(0)
    pixels, cells = Population("pixels", SIZE, spikes=True), Population("cells", SIZE, NEURONS[kind]())
    out = Population("out", 5, LI(1e-3))
    source, target = torch.randint(SIZE, (2, 400), generator=torch.Generator().manual_seed(0))
    weights = 0.05 * torch.rand(400, generator=torch.Generator().manual_seed(1))
    sparse = SparseProjection(source, target, weights, 1 + torch.arange(400) % 5, sources=cells, targets=cells)
    dense = Projection(pixels, cells, format="nf4", bias=True)
    network = Network([pixels, cells, out], [wrap(dense), wrap(sparse), wrap(Projection(cells, out, format="nf4"))])
    with torch.no_grad():
        next(dense.parameters()).abs_().mul_(scale * WEIGHTS.get(kind, 3.0))
    return network


def run_as_program(network: Network, x: torch.Tensor, state: NetworkState | None, names: tuple[str, ...]) -> Any:
    """Return what the network gives as a program, which the reference may run, and its state."""
    graph, batch = network.graph, x.shape[1]
    _, places = network.check_run(x, names)
    populations = [name for name in graph.order if name not in graph.inputs]
    program = PopulationProgram(graph, populations, batch=batch, fed=graph.inputs, record=places.values(), chunk=8)
    if state is None:
        begun = {name: coming_of(item, batch) for name, item in graph.projections.items()}
        state = NetworkState({}, {}, {name: item for name, item in begun.items() if item is not None})
    return runs_of(network, graph).run(program, {graph.inputs[0]: x}, state, places)


def expect_the_same(network: Network, *, least: int = 50) -> None:
    """Expect the bits of torch's steps, also from a state within."""
    states = network.population("cells").neuron.states  # type: ignore[union-attr]  # it has one
    names = ("cells", *(f"cells.{name}" for name in states), "out", "pixels")
    x = spikegen.rate(torch.full((2, SIZE), 0.2), STEPS, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        pack_(network, session)
        expected, _ = network(x, record=names)
        first, state = run_as_program(network, x[:21], None, names)
        then, _ = network(x[21:], state, record=names)
        _, state = network(x[:21])
        last, _ = run_as_program(network, x[21:], state, names)
        events, _ = run_as_program(network, x, None, ("cells.events", "pixels.events"))
    assert expected["cells"].sum() > least
    for name in ("cells", "pixels"):
        assert torch.equal(events[f"{name}.events"], expected[name].nonzero()), name
    for name, value in expected.items():
        assert torch.equal(torch.cat([first[name], then[name]]), value), name
        assert torch.equal(torch.cat([first[name], last[name]]), value), name


@pytest.mark.parametrize("kind", NEURONS)
def test_neurons(kind: str) -> None:
    """Neurons that wait, that learned, and Izhikevich's have the bits of their ``forward``, states included."""
    expect_the_same(make_network(kind, lambda item: item))


@pytest.mark.parametrize("reversal", [None, 3.0])
@pytest.mark.parametrize("kind", [ExpSynapses, AlphaSynapses])
def test_time_courses(kind: Any, reversal: float | None) -> None:
    """Currents and conductances of dense and sparse synapses have the bits of ``forward``, from a state too."""
    expect_the_same(make_network("lif", lambda item: kind(item, 4e-4, reversal=reversal), 0.5))


def test_time_constants_of_each_target() -> None:
    """A time constant for each target, and one that learned, are those of ``forward``."""
    taus: Iterator[Any] = iter([2e-4 + EACH, torch.nn.Parameter(torch.tensor(3e-4)), 5e-4])
    expect_the_same(make_network("lif of each", lambda item: AlphaSynapses(item, next(taus)), 0.5))


@pytest.mark.parametrize("layer", [torch.nn.Identity, lambda: Scale(torch.linspace(-1, 2, SIZE))])
@pytest.mark.parametrize("spikes", [False, True])
def test_currents_into_each_neuron(layer: Callable[[], torch.nn.Module], spikes: bool) -> None:
    """One number for each target, or that scaled, of an input of numbers or of spikes; by a time course, too."""
    torch.manual_seed(0)
    pixels, cells = Population("pixels", SIZE, spikes=spikes), Population("cells", SIZE, LIF.from_beta(0.9))
    names = ("cells", "cells.mem")
    parts = [LayerProjection(pixels, cells, layer(), delay=1, name="direct")]
    parts.append(ExpSynapses(LayerProjection(pixels, cells, layer()), 4e-4))  # type: ignore[arg-type]  # modules
    network, x = Network([pixels, cells], parts), torch.rand(STEPS, 2, SIZE) / 4
    x = (x > 0.2).float() if spikes else x
    with torch.no_grad():
        expected, _ = network(x, record=names)
        found, _ = run_as_program(network, x, None, names)
    assert expected["cells"].sum() > 50
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_neurons_without_operations() -> None:
    """No operation is an exponential function: AdEx runs in torch, and the reason names population and class."""
    pixels, cells = Population("pixels", 4, spikes=True), Population("cells", 4, AdEx())
    network = Network([pixels, cells], [Projection(pixels, cells, format="nf4")])
    with torch.no_grad(), q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        pack_(network, session)
        with pytest.raises(EmissionError, match="population 'cells': AdEx has no operations"):
            PopulationProgram(network.graph, ["cells"], batch=1)
        network(torch.zeros(8, 1, 4))
    assert any("AdEx has no operations" in reason for reason in network.record.reasons)


@pytest.mark.parametrize(
    ("layer", "size", "what"),
    [
        (SumPool2d(2), 16, "SumPool2d"),
        (nn.AvgPool2d(2), 16, "AvgPool2d"),
        (nn.Conv2d(1, 1, 3), 36, "Conv2d"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), 72, "Sequential of Conv2d, Flatten"),
    ],
)
def test_layers_without_operations(layer: nn.Module, size: int, what: str) -> None:
    """Convolutions and poolings run in torch, and the reason names projection and layer."""
    pixels, cells = Population("pixels", 64, spikes=True), Population("cells", size, LIF(1e-2))
    network = Network([pixels, cells], [LayerProjection(pixels, cells, layer, shape=(1, 8, 8))])
    with torch.no_grad():
        found, _ = network(torch.ones(8, 1, 64))
    assert found["cells"].shape == (8, 1, size)
    assert network.record.backend is None
    assert network.record.reasons == (f"projection 'pixels->cells': its layer {what} has no operations",)
