"""q4-snn against snnTorch: the same spikes, the same gradients, networks exchanged by NIR both ways; STDP apart."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from q4_nn import STEConv2d, pack_
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
    NirError,
    NirWarning,
    Population,
    Projection,
    Scale,
    SparseProjection,
    SumPool2d,
    from_nir,
    read_nir,
    spikegen,
    surrogate,
    to_nir,
    write_nir,
)
from q4core import Session, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:nirtorch:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:other programs read:q4_snn.NirWarning"),  # a test of its own looks at it
]
STEPS = 100


@pytest.fixture
def snn(peer: Callable[[str], ModuleType]) -> Any:
    """Return snnTorch."""
    peer("snntorch.export_nir")
    peer("snntorch.import_nir")
    peer("snntorch.spikegen")
    return peer("snntorch")


@pytest.fixture
def nir(peer: Callable[[str], ModuleType]) -> Any:
    """Return NIR."""
    return peer("nir")


def events(size: int, batch: int = 4) -> torch.Tensor:
    """Return random spikes [T, B, size]."""
    return spikegen.rate(torch.full((batch, size), 0.3), STEPS, generator=torch.Generator().manual_seed(0))


SURROGATES = [("atan", {"alpha": 2.0}), ("fast_sigmoid", {"slope": 25}), ("sigmoid", {"slope": 25}), ("straight", {})]


@pytest.mark.parametrize(("name", "options"), SURROGATES)
def test_surrogates(snn: Any, name: str, options: dict[str, Any]) -> None:
    """Spikes and gradients are snnTorch's."""
    ours = surrogate.straight_through() if name == "straight" else getattr(surrogate, name)(**options)
    theirs = snn.surrogate
    theirs = theirs.straight_through_estimator() if name == "straight" else getattr(theirs, name)(**options)
    x = torch.linspace(-2, 2, 401, requires_grad=True)
    assert torch.equal(ours(x), theirs(x))
    pairs = [torch.autograd.grad(function(x).sum(), x)[0] for function in (ours, theirs)]
    torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mechanism", ["subtract", "zero", "none"])
def test_leaky(snn: Any, mechanism: str) -> None:
    """Spikes, membranes and gradients through time are those of snnTorch's Leaky, bit for bit."""
    reset: Any = "value" if mechanism == "zero" else mechanism
    theirs = snn.Leaky(beta=0.9, threshold=0.7, reset_mechanism=mechanism)
    ours = LIF.from_beta(0.9, 0.7, reset=reset, reset_delay=True)
    found = []
    for neuron in (theirs, ours):
        x = (events(8) * 0.4).requires_grad_()
        mem, spikes = torch.zeros(4, 8), []
        for current in x:
            spk, mem = neuron(current, mem)
            spikes.append(spk)
        (gradient,) = torch.autograd.grad(torch.stack(spikes).sum() + mem.sum(), x)
        found.append((torch.stack(spikes), mem, gradient))
    assert found[0][0].sum() > 100
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_synaptic(snn: Any) -> None:
    """Spikes, currents and membranes are those of snnTorch's Synaptic, bit for bit."""
    theirs = snn.Synaptic(alpha=0.8, beta=0.9)
    ours = CubaLIF.from_alpha_beta(0.8, 0.9, reset_delay=True)
    states: list[Any] = [(torch.zeros(4, 8), torch.zeros(4, 8))] * 2
    fired = 0.0
    for current in events(8) * 0.1:
        results = [neuron(current, *state) for neuron, state in zip((theirs, ours), states, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        states = [result[1:] for result in results]
        fired += float(results[1][0].sum())
    assert fired > 100


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("mechanism", ["subtract", "zero", "none"])
def test_neurons_that_learn(snn: Any, mechanism: str, size: int) -> None:
    """Gradients of beta and threshold, and of the input, are those of snnTorch's Leaky, bit for bit."""
    reset: Any = "value" if mechanism == "zero" else mechanism
    found = []
    for name in ("theirs", "ours"):
        beta, threshold = (torch.full((size,), value) if size > 1 else torch.tensor(value) for value in (0.9, 0.7))
        if name == "theirs":
            neuron = snn.Leaky(beta, threshold, learn_beta=True, learn_threshold=True, reset_mechanism=mechanism)
        else:
            beta, threshold = torch.nn.Parameter(beta), torch.nn.Parameter(threshold)
            neuron = LIF.from_beta(beta, threshold, reset=reset, reset_delay=True)
        x = (events(8) * 0.4).requires_grad_()
        mem, spikes = torch.zeros(4, 8), []
        for current in x:
            spk, mem = neuron(current, mem)
            spikes.append(spk)
        shares = (neuron.beta, neuron.threshold) if name == "theirs" else (beta, threshold)
        gradients = torch.autograd.grad(torch.stack(spikes).sum() + mem.sum(), (x, *shares))
        found.append((torch.stack(spikes), mem, *gradients))
    assert found[0][0].sum() > 100
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert bool((a != 0).any())


@pytest.mark.parametrize("mechanism", ["subtract", "none"])
def test_synaptic_neurons_that_learn(snn: Any, mechanism: str) -> None:
    """Gradients of alpha, beta and threshold are those of snnTorch's Synaptic, bit for bit."""
    reset: Any = mechanism
    found = []
    for name in ("theirs", "ours"):
        shares = [torch.full((8,), value) for value in (0.8, 0.9, 1.0)]
        if name == "theirs":
            learn = {"learn_alpha": True, "learn_beta": True, "learn_threshold": True}
            neuron = snn.Synaptic(*shares, reset_mechanism=mechanism, **learn)
            shares = [neuron.alpha, neuron.beta, neuron.threshold]
        else:
            learned = [torch.nn.Parameter(item) for item in shares]
            neuron = CubaLIF.from_alpha_beta(*learned, reset=reset, reset_delay=True)
            shares = [*learned]
        syn, mem, spikes = torch.zeros(4, 8), torch.zeros(4, 8), []
        for current in events(8) * 0.1:
            spk, syn, mem = neuron(current, syn, mem)
            spikes.append(spk)
        gradients = torch.autograd.grad(torch.stack(spikes).sum() + mem.sum(), shares)
        found.append((torch.stack(spikes), mem, *gradients))
    assert found[0][0].sum() > 100
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_networks_that_learn(snn: Any) -> None:
    """Gradients of two layers, their shares and thresholds are snnTorch's through time, bit for bit."""
    torch.manual_seed(0)
    a, b = torch.nn.Linear(12, 20), torch.nn.Linear(20, 5)
    with torch.no_grad():
        a.weight.mul_(3)
        b.weight.mul_(3)
    facts = [torch.full((size,), value) for size, value in ((20, 0.9), (20, 0.7), (5, 0.8), (5, 1.0))]
    options = {"learn_beta": True, "learn_threshold": True}
    first, last = snn.Leaky(*facts[:2], **options), snn.Leaky(*facts[2:], **options)
    theirs = [*a.parameters(), *b.parameters(), first.beta, first.threshold, last.beta, last.threshold]
    x = events(12)
    mem, read, spikes = torch.zeros(4, 20), torch.zeros(4, 5), []
    for step in x:
        spk, mem = first(a(step), mem)
        out, read = last(b(spk), read)
        spikes.append(out)
    shares = [torch.nn.Parameter(item.clone()) for item in facts]
    populations = [
        Population("in", 12),
        Population("hidden", 20, LIF.from_beta(*shares[:2], reset_delay=True)),
        Population("out", 5, LIF.from_beta(*shares[2:], reset_delay=True)),
    ]
    projections = [Projection(*populations[:2], bias=True), Projection(*populations[1:], bias=True)]
    for projection, layer in zip(projections, (a, b), strict=True):
        projection.synapses.load_state_dict(layer.state_dict())
    network = Network(populations, projections)
    (found,) = network(x)[0].values()
    assert torch.equal(found, torch.stack(spikes))
    assert found.sum() > 100
    ours = [*projections[0].parameters(), *projections[1].parameters(), *shares]
    pairs = zip(
        torch.autograd.grad(found.sum(), ours), torch.autograd.grad(torch.stack(spikes).sum(), theirs), strict=True
    )
    for one, other in pairs:
        assert torch.equal(one, other)
        assert bool((one != 0).any())


def test_time_constants_that_learn(snn: Any) -> None:
    """The gradient of tau_mem is that of snnTorch's Leaky with the beta that is computed of it, bit for bit."""
    found = []
    for name in ("theirs", "ours"):
        tau = torch.nn.Parameter(torch.linspace(5e-4, 4e-3, 8))
        ours = LIF(tau, reset_delay=True)
        mem, spikes = torch.zeros(4, 8), []
        for current in events(8) * 0.4:
            neuron = ours if name == "ours" else snn.Leaky(1 - 1e-4 / tau.clamp(min=1e-4))
            spk, mem = neuron(current, mem)
            spikes.append(spk)
        (gradient,) = torch.autograd.grad(torch.stack(spikes).sum() + mem.sum(), tau)
        found.append((torch.stack(spikes), mem, gradient))
    assert found[0][0].sum() > 100
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_generators(snn: Any) -> None:
    """Latency and delta give snnTorch's spikes; rate gives them by the same random numbers."""
    x = torch.rand(5, 9, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    theirs = snn.spikegen.rate(x, num_steps=20)
    torch.manual_seed(3)
    assert torch.equal(spikegen.rate(x, 20), theirs)
    for linear in (False, True):
        options: dict[str, Any] = {"threshold": 0.1, "linear": linear}
        theirs = snn.spikegen.latency(x, num_steps=20, normalize=True, clip=True, **options)
        assert torch.equal(spikegen.latency(x, 20, **options), theirs)
        theirs = snn.spikegen.latency(x, num_steps=40, tau=5, clip=True, bypass=True, **options)
        assert torch.equal(spikegen.latency(x, 40, tau=5.0, **options), theirs)
    for falls in (False, True):
        assert torch.equal(spikegen.delta(x, off_spike=falls), snn.spikegen.delta(x, off_spike=falls))


def run_theirs(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the spikes [T, B, n] of a network that keeps its own state."""
    for module in model:
        if hasattr(module, "reset_mem"):
            module.reset_mem()
    found = [model(step) for step in x]
    return torch.stack([item[0] if isinstance(item, tuple) else item for item in found])


@pytest.mark.parametrize("mechanism", ["subtract", "zero"])
@pytest.mark.parametrize("kind", ["leaky", "synaptic"])
def test_from_snntorch(snn: Any, kind: str, mechanism: str, tmp_path: Path) -> None:
    """A network of snnTorch's, exported, gives the same spikes here for 100 steps; through a file too."""
    delayed = mechanism == "subtract"
    options: dict[str, Any] = {"init_hidden": True, "reset_mechanism": mechanism, "reset_delay": delayed}

    def neurons(size: int) -> Any:  # the export takes their number from the parameters
        sizes = {"beta": torch.full((size,), 0.9), "threshold": torch.ones(size), **options}
        return snn.Leaky(**sizes) if kind == "leaky" else snn.Synaptic(alpha=torch.full((size,), 0.7), **sizes)

    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(12, 20), neurons(20), torch.nn.Linear(20, 5, bias=False), neurons(5))
    graph = snn.export_nir.export_to_nir(theirs, torch.zeros(1, 12), ignore_dims=[0])
    x = events(12) * 3
    ours = from_nir(graph, program="snntorch", reset=None if delayed else "value", reset_delay=delayed)
    with torch.no_grad():
        expected = run_theirs(theirs, x)
        (found,) = ours(x)[0].values()
        assert expected.sum() > 50
        assert torch.equal(found, expected)
        write_nir(tmp_path / "network.nir", ours)
        again = read_nir(tmp_path / "network.nir")
        (found,) = again(x)[0].values()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["lif", "cuba"])
def test_to_snntorch(snn: Any, kind: str) -> None:
    """A network from here with four-bit synapses, trained form and packed, gives the same spikes in snnTorch."""
    torch.manual_seed(0)

    def neurons() -> Any:
        return LIF.from_beta(0.9, reset="value") if kind == "lif" else CubaLIF.from_alpha_beta(0.7, 0.9, reset="value")

    a, b, c = Population("a", 64), Population("b", 64, neurons()), Population("c", 5, neurons())
    network = Network([a, b, c], [Projection(a, b, format="nf4", bias=True), Projection(b, c, format="nf4")])
    x = events(64)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)
        (expected,) = network(x)[0].values()
        assert expected.sum() > 50
        for packed in (False, True):
            if packed:
                pack_(network, Session(SessionConfig(device="cpu", activation_precision="exact")))
            theirs = snn.import_nir.import_from_nir(to_nir(network))
            found, state = [], None
            for step in x:
                out, state = theirs(step, state)
                found.append(out)
            assert torch.equal(torch.stack(found).float(), expected)


def test_everything_comes_back(nir: Any, tmp_path: Path) -> None:
    """Delays, recurrence, parameters of each neuron, resets, formats and dt are what they were, read from a file."""
    torch.manual_seed(0)
    a = Population("a", 10)
    taus, times = torch.nn.Parameter(torch.linspace(1e-3, 4e-3, 64)), (torch.arange(64) % 8 < 2) * 5e-4
    options: dict[str, Any] = {"dt": 5e-4, "reset": "value", "threshold_inclusive": True, "t_refractory": times}
    b = Population("b", 64, LIF(taus, None, 0.1, 0.6, -0.1, **options))
    c = Population("c", 6, CubaLIF(2e-3, 1e-3, 3.0, w_in=0.7, dt=5e-4, reset_delay=True))
    d, e = (
        Population("d", 6, IF(1500.0, 0.5, dt=5e-4, reset="none", t_refractory=1e-3)),
        Population("e", 3, LI(1e-3, dt=5e-4)),
    )
    projections = [
        Projection(a, b, bias=True, delay=2),
        Projection(b, b, format="nf4", delay=1),
        Projection(b, c, format="nf4"),
        Projection(c, b, delay=3),
        Projection(c, d),
        Projection(d, e),
    ]
    network = Network([a, b, c, d, e], projections)
    with torch.no_grad():
        for parameter in network.projections.parameters():
            parameter.mul_(4)
    names = ("b", "b.mem", "b.refractory", "c", "c.syn", "d", "e")
    write_nir(tmp_path / "network.nir", network)
    again = read_nir(tmp_path / "network.nir")
    with torch.no_grad():
        x = events(10)
        expected, found = network(x, record=names)[0], again(x, record=names)[0]
    assert expected["c"].sum() > 50
    for name in names:
        assert torch.equal(found[name], expected[name]), name
    parts: Any = again.projections
    kept = {name: (item.format, item.delay) for name, item in parts.items()}
    assert kept == {item.name: (item.format, item.delay) for item in projections}
    graph = nir.read(tmp_path / "network.nir")
    assert float(graph.metadata["dt"]) == 5e-4
    for node in graph.nodes.values():
        node.metadata.pop("delay", None)  # as another program would write it
    parts = from_nir(graph).projections
    assert {name: item.delay for name, item in parts.items()} == {item.name: item.delay for item in projections}


def maps(kind: str, *, form: str | None = None) -> Network:
    """Return a network of convolutions and pooling over images [2, 8, 8], or over sequences [2, 20]."""
    torch.manual_seed(0)
    conv: Any = nn.Conv2d if form is None else functools.partial(STEConv2d, format=form)
    neurons = functools.partial(LIF.from_beta, 0.9, reset="value")
    if kind == "sequence":
        a, b = Population("a", 40), Population("b", 4 * 9, neurons())
        first = LayerProjection(a, b, nn.Conv1d(2, 4, 3, stride=2), shape=(2, 20))
        return Network([a, b], [first])
    a, b = Population("a", 128), Population("b", 4 * 8 * 8, neurons())
    c, d = Population("c", 6 * 2 * 2, neurons()), Population("d", 5, neurons())
    pool = nn.AvgPool2d(2) if kind == "average" else SumPool2d(2)
    back: list[nn.Module] = [pool, conv(4, 6, 3, stride=(1, 2), padding=(0, 1), bias=False)]
    if kind == "all":
        back = [SumPool2d((2, 2), (2, 2)), Scale(torch.linspace(0.5, 1.5, 4)[:, None, None]), *back[1:]]
    return Network(
        [a, b, c, d],
        [
            LayerProjection(a, b, conv(2, 4, 3, padding=1), shape=(2, 8, 8)),
            LayerProjection(b, c, nn.Sequential(*back, nn.Identity()), shape=(4, 8, 8)),
            Projection(c, d, bias=True),
        ],
    )


@pytest.mark.parametrize("form", [None, "nf4"])
@pytest.mark.parametrize("kind", ["sequence", "sum", "average", "all"])
def test_maps_come_back(nir: Any, kind: str, form: str | None, tmp_path: Path) -> None:
    """Convolutions, pooling and scales are the same after a file, as they are trained and packed; shapes are stated."""
    network = maps(kind, form=form)
    names = [name for name, item in network.populations.items() if item.neuron is not None]
    x = events(network.population("a").size)[:30] * 3
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)
        for packed in (False, True):
            if packed and form is not None:
                pack_(network, Session(SessionConfig(device="cpu", activation_precision="exact")))
            expected, _ = network(x, record=names)
            assert min(float(value.mean()) for value in expected.values()) > 0.01
            write_nir(tmp_path / "maps.nir", network)
            again = read_nir(tmp_path / "maps.nir")
            assert [*again.projections] == [*network.projections]
            found, _ = again(x, record=names)
            for name in names:  # a packed layer adds in another order
                assert (found[name] != expected[name]).float().mean() <= (2e-3 if packed and form else 0)
    graph = nir.read(tmp_path / "maps.nir")
    assert graph.nodes["b"].v_threshold.shape == ((4, 9) if kind == "sequence" else (4, 8, 8))
    conv = next(node for node in graph.nodes.values() if type(node).__name__.startswith("Conv"))
    assert conv.metadata.get("q4_format") == (None if kind == "sequence" else form)


@pytest.mark.parametrize("form", [None, "nf4"])
def test_maps_to_snntorch_and_back(snn: Any, form: str | None) -> None:
    """Convolutions and average pooling give the same spikes in snnTorch; what it exports of them, here."""
    network = maps("average", form=form)
    x = events(128, batch=1) * 3  # its importer flattens the batch, too: one sample without a batch
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)
        expected = network(x)[0]["d"]
        assert expected.sum() > 50
        theirs = snn.import_nir.import_from_nir(to_nir(network))
        found, state = [], None
        for step in x:
            out, state = theirs(step.view(2, 8, 8), state)
            found.append(out)
        assert torch.equal(torch.stack(found).float(), expected[:, 0])

    def neurons(*shape: int) -> Any:
        options: dict[str, Any] = {"init_hidden": True, "reset_mechanism": "zero", "reset_delay": False}
        return snn.Leaky(beta=torch.full(shape, 0.9), threshold=torch.ones(shape), **options)

    layers = [nn.Conv2d(2, 4, 3), neurons(4, 6, 6), nn.AvgPool2d(2, 2), nn.Flatten(), nn.Linear(36, 5), neurons(5)]
    model = nn.Sequential(*layers)
    graph = snn.export_nir.export_to_nir(model, torch.zeros(1, 2, 8, 8), ignore_dims=[0])
    ours = from_nir(graph, dt=1e-4)
    with torch.no_grad():
        x = events(128) * 3
        expected = run_theirs(model, x.view(STEPS, -1, 2, 8, 8))
        assert expected.sum() > 20
        assert torch.equal(ours(x)[0][ours.outputs[0]], expected)


@pytest.mark.filterwarnings("error::q4_snn.NirWarning")
def test_what_others_do_not_read(nir: Any, tmp_path: Path) -> None:
    """What is metadata alone is a warning that names it and the population; what NIR has is none."""
    a = Population("a", 8)
    for options, told in (
        ({"reset": "subtract"}, "reset='subtract' of population 'b'"),
        ({"reset_delay": True}, "reset_delay=True of population 'b'"),
        ({"threshold_inclusive": True}, "threshold_inclusive=True of population 'b'"),
        ({"t_refractory": 2e-3}, "its refractory time of population 'b'"),
    ):
        b = Population("b", 8, LIF(1e-2, **{"reset": "value", **options}))  # type: ignore[arg-type]  # options of a LIF
        with pytest.warns(NirWarning, match=told):
            to_nir(Network([a, b], [Projection(a, b)]))
    b = Population("b", 8, LIF(1e-2, reset="value"))
    to_nir(Network([a, b], [Projection(a, b, delay=3)]))
    layer = nn.Conv2d(1, 1, (3, 2), stride=(1, 2), padding=(1, 1))
    b = Population("b", 6, LIF(1e-2, reset="value"))
    network = Network([a, b], [LayerProjection(a, b, layer, shape=(1, 2, 4))])
    with pytest.warns(NirWarning, match="nir takes the kernel of 'a->b' for a square one"):
        write_nir(tmp_path / "oblong.nir", network)
    with torch.no_grad():
        x = events(8) * 5
        assert torch.equal(read_nir(tmp_path / "oblong.nir")(x)[0]["b"], network(x)[0]["b"])
    with pytest.raises(ValueError, match="type mismatch"):
        nir.read(tmp_path / "oblong.nir")  # if nir reads it, there is nothing left to warn of


def test_maps_that_nir_has_not(nir: Any) -> None:
    """Layers and paddings that no node states are errors that name the projection."""
    del nir
    a, b = Population("a", 64), Population("b", 64, LIF(1e-3))
    for layer in (
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Sequential(nn.Upsample(scale_factor=2), nn.AvgPool2d(2, ceil_mode=True)),
        nn.Linear(8, 8),
    ):
        with pytest.raises(NirError) as caught:
            to_nir(Network([a, b], [LayerProjection(a, b, layer, shape=(1, 8, 8))]))
        assert (caught.value.where, caught.value.name) == ("a->b", "layer")


def test_time_courses_come_back(nir: Any, tmp_path: Path) -> None:
    """Exponential synapses are LI nodes between weights and neurons, and are read as what they were, bit for bit."""
    torch.manual_seed(0)
    a, b, c = Population("a", 10), Population("b", 64, LIF(2e-3, reset="value")), Population("c", 5, LI(1e-3))
    each = torch.linspace(2e-4, 9e-4, 64)
    parts: list[Any] = [
        ExpSynapses(Projection(a, b, bias=True), 3e-4),
        ExpSynapses(Projection(b, b, format="nf4", delay=3, name="back"), each),
        Projection(b, c),
    ]
    network = Network([a, b, c], parts)
    with torch.no_grad():
        for parameter in network.projections.parameters():
            parameter.mul_(3)
    write_nir(tmp_path / "network.nir", network)
    graph = nir.read(tmp_path / "network.nir")
    again, names = read_nir(tmp_path / "network.nir"), ("b", "b.mem", "c")
    assert isinstance(graph.nodes["back_synapses"], nir.LI)
    assert ("back_delay", "back_synapses") in graph.edges
    assert sorted(again.graph.projections) == ["a->b", "b->c", "back"]
    with torch.no_grad():
        x = events(10)
        expected, found = network(x, record=names)[0], again(x, record=names)[0]
        assert expected["b"].sum() > 50
        for name in names:
            assert torch.equal(found[name], expected[name]), name
        for node in graph.nodes.values():
            node.metadata.pop("tau_syn", None)  # as another program would write it
        found, _ = from_nir(graph)(x, record=names)
    torch.testing.assert_close(found["b.mem"], expected["b.mem"], rtol=1e-3, atol=1e-3)


def test_time_courses_of_other_programs(nir: Any) -> None:
    """An LI between weights and neurons decays by Euler's step; one that rests elsewhere, or too short, is refused."""
    ones = np.ones(3)
    lif = nir.LIF(tau=ones * 1e-3, r=ones * 10, v_leak=0 * ones, v_threshold=ones * 1e9)
    for change, name in (({}, None), ({"v_leak": ones}, "v_leak"), ({"r": ones}, "r"), ({"tau": ones * 1e-4}, "tau")):
        facts = {"tau": ones * 5e-4, "r": ones * 5, "v_leak": 0 * ones} | change
        if name == "tau":
            facts["r"] = ones
        nodes = {"in": nir.Input(np.array([3])), "w": nir.Linear(np.eye(3)), "li": nir.LI(**facts), "lif": lif}
        nodes["out"] = nir.Output(np.array([3]))
        graph = nir.NIRGraph(nodes, [*itertools.pairwise(nodes)])
        if name is not None:
            with pytest.raises(NirError) as caught:
                from_nir(graph, dt=1e-4)
            assert (caught.value.where, caught.value.name) == ("li", name)
            continue
        x = torch.zeros(6, 1, 3)
        x[0] = 1
        with torch.no_grad():
            found, _ = from_nir(graph, dt=1e-4)(x, record=("lif.mem",))
        current = 0.8 ** torch.arange(6.0)
        mem = torch.stack([sum(0.9 ** (t - s) * current[s] for s in range(t + 1)) for t in range(6)])  # type: ignore[misc]  # numbers
        torch.testing.assert_close(found["lif.mem"][:, 0, 0], mem)


def test_recurrent_of_snntorch(snn: Any) -> None:
    """A recurrent network of snnTorch's, which is a graph in the graph, becomes a projection with a delay of one."""
    torch.manual_seed(0)
    rec = snn.RLeaky(beta=0.9, linear_features=20, init_hidden=True, reset_mechanism="zero", reset_delay=False)
    theirs = torch.nn.Sequential(torch.nn.Linear(12, 20), rec)
    ours = from_nir(snn.export_nir.export_to_nir(theirs, torch.zeros(1, 12), ignore_dims=[0]), dt=1e-4)
    parts: Any = ours.projections
    assert sorted(item.delay for item in parts.values()) == [0, 1]
    x = events(12) * 3
    with torch.no_grad():
        expected = run_theirs(theirs, x)
        (found,) = ours(x)[0].values()
    assert expected.sum() > 50
    assert torch.equal(found, expected)


def test_one_number_for_all_neurons(nir: Any, tmp_path: Path) -> None:
    """A file whose neurons have one number for all, as Norse writes them, is read as with one for each."""
    one, weight = np.ones(1), np.ones((16, 20))
    found = []
    for each in (one, np.ones(16)):
        cells = nir.LIF(tau=each * 1e-5, r=each, v_leak=each * 0, v_threshold=each)
        nodes = {"in": nir.Input(np.array([20])), "w": nir.Affine(weight, np.zeros(16)), "cells": cells}
        nodes["out"] = nir.Output(np.array([16]))
        graph = nir.NIRGraph(nodes, [*itertools.pairwise(nodes)], type_check=False)
        nir.write(tmp_path / "cells.nir", graph)
        found.append(read_nir(tmp_path / "cells.nir", dt=1e-6)(torch.ones(9, 1, 20), record=("cells.mem",))[0])
    assert torch.equal(found[0]["cells.mem"], found[1]["cells.mem"])
    assert found[0]["cells.mem"].shape == (9, 1, 16)


def test_graphs_of_other_sizes(nir: Any, tmp_path: Path) -> None:
    """A bias or neurons of another size than their weights, and edges to nowhere, are errors that name the node."""
    for bias, size, edge, name in ((5, 3, "out", "bias"), (3, 4, "out", "size"), (3, 3, "nobody", "edge")):
        ones = np.ones(size)
        lif = nir.LIF(tau=ones, r=ones, v_leak=0 * ones, v_threshold=ones)
        nodes = {"in": nir.Input(np.array([3])), "w": nir.Affine(np.ones((3, 3)), np.ones(bias)), "lif": lif}
        nodes["out"] = nir.Output(np.array([3]))
        graph = nir.NIRGraph(nodes, [("in", "w"), ("w", "lif"), ("lif", edge)], type_check=False)
        with pytest.raises(NirError) as caught:
            from_nir(graph, dt=1e-4)
        assert caught.value.name == name


def test_refused_graphs(nir: Any) -> None:
    """What can't be a network is an error that names the node; so is a neuron that NIR has not."""
    ones = np.ones(3)
    lif = nir.LIF(tau=ones, r=ones, v_leak=0 * ones, v_threshold=ones)
    matrix, start, end = nir.Linear(np.ones((3, 3))), nir.Input(np.array([3])), nir.Output(np.array([3]))
    for nodes, where, name in (
        ({"step": nir.Threshold(ones), "lif": lif}, "step", "node"),
        ({"w": matrix, "scale": nir.Scale(np.ones(4)), "lif": lif}, "w", "node"),
        ({"w": matrix, "scale": nir.Scale(np.ones((3, 1))), "lif": lif}, "w", "node"),
        ({"lif": lif}, "lif", "edge"),
        ({"w": matrix, "lif": nir.LIF(tau=0 * ones, r=ones, v_leak=ones, v_threshold=ones)}, "lif", "tau_mem"),
    ):
        chain = ["in", *nodes, "out"]
        graph = nir.NIRGraph({"in": start, **nodes, "out": end}, [*itertools.pairwise(chain)], type_check=False)
        with pytest.raises(NirError) as caught:
            from_nir(graph, dt=1e-4)
        assert (caught.value.where, caught.value.name) == (where, name)
        with pytest.raises(NirError, match="dt must be given"):
            from_nir(graph)
    a, b = Population("a", 3), Population("b", 3, ALIF(1e-3, 1e-2, 0.1))
    with pytest.raises(NirError) as caught:
        to_nir(Network([a, b], [Projection(a, b)]))
    assert (caught.value.where, caught.value.value) == ("b", "ALIF")
    for neuron in (AdEx(dt=1e-3), Izhikevich(dt=1e-3)):
        b = Population("b", 3, neuron)
        network = Network([a, b], [Projection(a, b)])
        with pytest.raises(NirError, match="which NIR has") as caught:
            to_nir(network)
        assert (caught.value.where, caught.value.value) == ("b", type(neuron).__name__)
    b = Population("b", 3, LIF(1e-3))
    for wrapped in (ExpSynapses(Projection(a, b), 1e-3, reversal=0.0), AlphaSynapses(Projection(a, b), 1e-3)):
        network = Network([a, b], [wrapped])
        with pytest.raises(NirError, match="ExpSynapses of currents around one") as caught:
            to_nir(network)
        assert (caught.value.where, caught.value.value) == ("a->b", type(wrapped).__name__)
    b, one = Population("b", 3, LIF(1e-3)), torch.ones(1, dtype=torch.int64)
    sparse = SparseProjection(one, one, torch.ones(1), one, sources=b, targets=b)
    with pytest.raises(NirError, match="a Projection or LayerProjection, as NIR has dense") as caught:
        to_nir(Network([a, b], [Projection(a, b), sparse]))
    assert (caught.value.where, caught.value.value) == ("b->b", "SparseProjection")


def test_graphs_that_are_broken(nir: Any, tmp_path: Path) -> None:
    """Cycles without neurons, delays and steps that are no numbers, other files, and taken names are errors."""
    ones = np.ones(3)
    lif = nir.LIF(tau=ones, r=ones, v_leak=0 * ones, v_threshold=ones)
    nodes = {"in": nir.Input(np.array([3])), "w": nir.Linear(np.ones((3, 3))), "lif": lif}
    nodes |= {"late": nir.Delay(ones), "later": nir.Delay(ones), "out": nir.Output(np.array([3]))}
    chain = [("in", "w"), ("w", "late"), ("late", "lif"), ("lif", "out")]
    loop = nir.NIRGraph(nodes, [*chain, ("late", "later"), ("later", "late")])
    with pytest.raises(NirError, match="edge must be free of cycles without neurons"):
        from_nir(loop, dt=1e-4)
    for delay in (np.nan, np.inf, -1.0):
        nodes["late"] = nir.Delay(delay * ones)
        graph = nir.NIRGraph({name: node for name, node in nodes.items() if name != "later"}, chain)
        with pytest.raises(NirError, match="delay must be one whole number of steps"):
            from_nir(graph, dt=1e-4)
        with pytest.raises(NirError, match="dt must be above 0 seconds"):
            from_nir(graph, dt=0.0)
    (tmp_path / "text.nir").write_text("no graph", encoding="utf-8")
    for name in ("text.nir", "missing.nir"):
        with pytest.raises(NirError, match="no file of NIR"):
            read_nir(tmp_path / name, dt=1e-4)
    a, b = Population("a", 3), Population("b", 3, LIF(1e-3))
    with pytest.raises(NirError, match="name must be that of one node"):
        to_nir(Network([a, b], [Projection(a, b, name="b")]))


EXCHANGED = sorted((Path(__file__).parents[2] / "plugins" / "snn" / "tests" / "golden" / "exchange").glob("*.nir"))


@pytest.mark.parametrize("path", EXCHANGED, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:a neuron that fires several times:q4_snn.NirWarning")  # sinabs's fire once in these
def test_files_of_other_programs(nir: Any, path: Path) -> None:
    """Networks that Norse, SpikingJelly and sinabs exported give the spikes here that they gave there."""
    del nir
    stored = np.load(path.with_suffix(".npz"))
    network = read_nir(path, program=path.stem.split("-")[0])
    with torch.no_grad():
        found, _ = network(torch.from_numpy(stored["x"]).float() * 3)
    assert torch.equal(found[network.outputs[0]], torch.from_numpy(stored["spikes"]).float())


def test_programs_that_are_named(nir: Any) -> None:
    """A program nobody knows is an error, what one does not state a warning; who names a step or a reset is right."""
    graph = nir.read(next(path for path in EXCHANGED if path.stem == "sinabs-if"), type_check=False)
    with pytest.warns(NirWarning, match="fires several times in one step"):
        network = from_nir(graph, program="sinabs", dt=2e-3, reset="value")
    neurons: Any = [item.neuron for item in network.populations.values() if item.neuron is not None]  # type: ignore[union-attr]
    assert [(item.dt, item.reset, item.threshold_inclusive) for item in neurons] == [(2e-3, "value", True)] * 2
    with pytest.raises(NirError, match=r"program must be one of None, snntorch, .* sinabs, got 'nest'"):
        from_nir(graph, program="nest")
    with pytest.raises(NirError, match="dt must be given"):
        from_nir(graph)
