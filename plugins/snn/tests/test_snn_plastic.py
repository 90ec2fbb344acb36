"""Projections that learn in a network: the weights and currents of a loop by hand, in one state, on actors too."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from crews import Mortal

import q4core as q4
from q4_actors import ActorSystem
from q4_snn import (
    LIF,
    STDP,
    Network,
    PlasticProjection,
    PlasticSparseProjection,
    Poisson,
    Population,
    Projection,
    Recorder,
    STDPRule,
    connectors,
    spikegen,
)
from q4_snn.actors import ActorNetwork
from q4_snn.stdp import Traces, dense_changes
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
INPUTS, CELLS, BATCH = 40, 30, 2
RULES = {
    "pairs": STDPRule(a_plus=0.03, a_minus=0.02),
    "triplets": STDPRule(a_plus=0.02, a_minus=0.03, a3_plus=0.05, a3_minus=0.01, nearest=True),
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Run without gradients."""
    with torch.no_grad():
        yield


def dense(rule: str = "pairs", delay: int = 0) -> Network:
    """Return inputs that reach cells by dense synapses that learn, and cells that reach each other by fixed ones."""
    torch.manual_seed(0)
    inputs, cells = Population("inputs", INPUTS, spikes=True), Population("cells", CELLS, LIF(10e-3, dt=1e-3))
    weight = q4.quantize(torch.rand(CELLS, INPUTS) * 0.4, "nf4")
    learning = PlasticProjection(inputs, cells, weight, RULES[rule], delay=delay, seed=3, name="learning")
    return Network([inputs, cells], [learning, Projection(cells, cells, delay=1)])


def sparse(rule: str = "pairs") -> Network:
    """Return cells that inputs reach by fixed synapses, and that reach each other by sparse ones that learn."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    inputs, cells = Population("inputs", INPUTS, spikes=True), Population("cells", CELLS, LIF(10e-3, dt=1e-3))
    pairs = connectors.fixed_in_degree(cells, cells, 9, generator=generator)
    delay = torch.randint(1, 6, pairs[0].shape, generator=generator)
    learning = PlasticSparseProjection(
        *pairs, torch.rand(len(delay), generator=generator) * 0.3, delay,
        sources=cells, targets=cells, rule=RULES[rule], bounds=(0.0, 0.5), seed=3, name="learning",
    )  # fmt: skip
    first = Projection(inputs, cells)
    first.synapses.get_parameter("weight").mul_(6)
    return Network([inputs, cells], [first, learning])


def spikes(steps: int = 60, batch: int = BATCH) -> torch.Tensor:
    """Return the spikes [T, B, inputs]."""
    rates = torch.full((batch, INPUTS), 0.15)
    return spikegen.rate(rates, steps, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_dense_by_hand(rule: str, delay: int) -> None:
    """Spikes, and the weight at the end, are those of a loop with ``STDP`` and products by the weight as it is."""
    network, x = dense(rule, delay), spikes()
    found, state = network(x, record=("cells",))
    learning, back = (network.projections[name] for name in ("learning", "cells->cells"))
    assert isinstance(learning, PlasticProjection)
    neuron = network.population("cells").neuron
    facts = {name: getattr(RULES[rule], name) for name in STDPRule.__annotations__}
    by_hand = STDP(learning.weight_in(), seed=3, **facts)
    mem, fired = None, torch.zeros(BATCH, CELLS)
    arrivals = torch.cat([torch.zeros(delay, BATCH, INPUTS), x])
    moved = 0
    for step in range(len(x)):
        weight = q4.dequantize(by_hand.weight)
        current = torch.zeros(BATCH, CELLS)
        for sample, source in arrivals[step].nonzero().tolist():  # one after the other
            current[sample] += weight[:, source]
        fired, mem = neuron(current + back(fired), mem)  # type: ignore[misc]  # it has one
        assert torch.equal(found["cells"][step], fired), step
        if step < len(x) - 1:  # a run learns from its last step as the next begins
            moved += by_hand.step(arrivals[step], fired)
    assert moved > 200
    after = learning.weight_in(state.coming["learning"])
    assert torch.equal(after.qdata, by_hand.weight.qdata)
    assert torch.equal(after.scale, learning.weight_in().scale)


@pytest.mark.parametrize("rule", RULES)
def test_sparse_by_hand(rule: str) -> None:
    """Currents are sums of single synapses' weights at their sending; each changes as a dense one of its pair does."""
    network, x = sparse(rule), spikes()
    learning, first = network.projections["learning"], network.projections["inputs->cells"]
    neuron = network.population("cells").neuron
    assert isinstance(learning, PlasticSparseProjection)
    state, mem, fired = None, None, torch.zeros(BATCH, CELLS)
    sent: dict[int, torch.Tensor] = {}
    traces, weights = Traces.none(fired, fired), learning.weights_in()
    source, target, wait = learning.origin.long(), learning.index.long(), learning.steps.tolist()
    total = torch.zeros(len(weights), dtype=torch.float64)
    for step in range(len(x)):
        given, state = network.step({"inputs": x[step]}, state)
        if step:
            for sample, index in ((b, s) for b in range(BATCH) for s in range(len(weights)) if fired[b, source[s]]):
                at = step - 1 + wait[index]
                sent.setdefault(at, torch.zeros(BATCH, CELLS))[sample, target[index]] += weights[index]
            change, traces = RULES[rule].advance(traces, fired, fired)
            whole = torch.zeros(CELLS * CELLS).index_put_(*_put(dense_changes(change)))
            expected = whole.view(CELLS, CELLS)[target, source]
            after = learning.weights_in(state.coming["learning"])
            level = 0.5 / 15
            inside = (weights + expected > 0) & (weights + expected < 0.5)
            assert bool(((after - weights - expected).abs()[inside] < level * 1.0001).all())  # one of the two round it
            assert torch.equal(after[expected == 0], weights[expected == 0])
            total += torch.where(inside, (after - weights - expected).double(), 0.0)
            weights = after
        fired, mem = neuron(first(x[step]) + sent.pop(step, torch.zeros(BATCH, CELLS)), mem)  # type: ignore[misc]
        assert torch.equal(given["cells"], fired), step
    assert not torch.equal(weights, learning.weights_in())
    # what rounding adds is a level at most, with mean 0: its sum over synapses and steps is within 5 of its deviations
    assert abs(float(total.sum())) < 5 * level / 2 * math.sqrt(len(weights) * len(x))


def _put(changes: tuple[torch.Tensor, torch.Tensor]) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    return (changes[0],), changes[1]


@pytest.mark.parametrize("make", [dense, sparse])
def test_what_is_learnt_is_state(make: Any) -> None:
    """Two calls, and runs in chunks, learn what one call learns; projections and given states don't change."""
    network, x = make(), spikes()
    before = [item.clone() for item in network.projections["learning"].buffers()]
    whole, last = network(x, record=("cells",))
    first, state = network(x[:23], record=("cells",))
    held = state.coming["learning"].clone()
    for _ in range(2):
        second, end = network(x[23:], state, record=("cells",))
        assert torch.equal(torch.cat([first["cells"], second["cells"]]), whole["cells"])
        assert torch.equal(_bits(end.coming["learning"]), _bits(last.coming["learning"]))
        assert torch.equal(_bits(state.coming["learning"]), _bits(held))
    ran = network.run(iter(x), chunk=7)
    assert torch.equal(_bits(ran.coming["learning"]), _bits(last.coming["learning"]))
    assert all(torch.equal(a, b) for a, b in zip(before, network.projections["learning"].buffers(), strict=True))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int32)


def with_other(network: Network) -> Network:
    """Return the network with a population that reads its cells."""
    cells, other = network.population("cells"), Population("other", 5, LIF(10e-3, dt=1e-3))
    populations: list[Any] = [*network.populations.values(), other]
    torch.manual_seed(1)
    return Network(populations, [*network.projections.values(), Projection(cells, other)])


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("make", [dense, sparse])
@pytest.mark.parametrize("runtime", ["threads", pytest.param("processes", marks=[linux, pytest.mark.slow])])
def test_actors_learn_the_same(make: Any, actors: int, runtime: str) -> None:
    """A crew learns what one process learns: the same spikes in every step, in two runs."""
    network, x = with_other(make()), spikes()
    expected, state = network(x, record=("cells", "other"))
    assert expected["cells"].mean() > 0.02
    with ActorSystem(runtime) as system:
        crew = ActorNetwork(network, system, batch=BATCH, actors=actors)
        found = crew(x[:31], record=("cells", "other"))
        assert all(torch.equal(found[name], expected[name][:31]) for name in found)
        recorders = [Recorder("cells"), Recorder("other", every=2, start=31)]
        crew.run(iter(x[31:]), recorders=recorders, chunk=16)
        assert torch.equal(recorders[0].data, expected["cells"][31:])
        assert torch.equal(recorders[1].data, expected["other"][31::2])
        assert torch.equal(_bits(crew.coming("learning")), _bits(state.coming["learning"]))
        with pytest.raises(InputError, match="projection must be that of a projection whose state is stored"):
            crew.coming("cells->other")
        with pytest.raises(InputError, match="record must be names of populations"):
            crew.run(iter(x), recorders=[Recorder("nobody")])


@linux
@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, sparse])
def test_killed_actors_learn_the_same(make: Any, tmp_path: Path) -> None:
    """What was learnt survives kills within chunks and checkpoints across runtimes, bit for bit."""
    x, found = spikes(), []
    expected, state = make()(x, record=("cells",))
    for index, runtime in enumerate(("processes", "threads", "processes")):
        network = make()
        neuron = Mortal(10e-3, dt=1e-3)
        neuron.path = tmp_path / f"steps-{index}"
        neuron.fatal = frozenset({5, 6, 19} if runtime == "processes" else {})
        cells = network.population("cells")
        cells.neuron = neuron
        before = tmp_path / f"state-{index}" if index else None
        with ActorSystem(runtime, resume=before, restarts=8) as system:
            crew = ActorNetwork(network, system, batch=BATCH, chunk=8)
            found.append(crew(x[20 * index :][:20], record=("cells",))["cells"])
            system.checkpoint(tmp_path / f"state-{index + 1}")
            learnt = crew.coming("learning")
    assert torch.equal(torch.cat(found), expected["cells"])
    assert torch.equal(_bits(learnt), _bits(state.coming["learning"]))


def test_a_source_before_its_target_is_strengthened() -> None:
    """Of inputs that fire just before a cell does and others at random, the first come to have the greater weights."""
    inputs, cells = Population("inputs", 64, spikes=True), Population("cells", 2, LIF(5e-3, dt=1e-3))
    weight = q4.quantize(torch.full((2, 64), 0.05) + torch.linspace(0, 0.1, 64), "nf4")
    rule = STDPRule(a_plus=0.004, a_minus=0.003)
    network = Network([inputs, cells], [PlasticProjection(inputs, cells, weight, rule, name="learning")])
    x = Poisson(64, 20.0, dt=1e-3, seed=2).draw(0, 1500)
    x[::20, :, :24] = 1  # these fire together, and so make the cells fire
    _, state = network(x)
    learning = network.projections["learning"]
    assert isinstance(learning, PlasticProjection)
    change = q4.dequantize(learning.weight_in(state.coming["learning"])) - q4.dequantize(weight)
    assert float(change[:, :24].mean()) > 0.02
    assert float(change[:, 24:].mean()) < 0.0


def test_refused() -> None:
    """What does not fit is an error that names the projection and the argument."""
    plain, fires = Population("plain", 3), Population("fires", 3, LIF(1e-3))
    weight, rule = q4.quantize(torch.rand(3, 3), "nf4"), STDPRule()
    one = torch.zeros(1, dtype=torch.int64)

    def make(**change: Any) -> PlasticSparseProjection:
        given: dict[str, Any] = {
            "source": one,
            "target": one,
            "weight": 0.5,
            "delay": 1,
            "sources": fires,
            "targets": fires,
        }
        return PlasticSparseProjection(**({**given, "rule": rule, "bounds": (0, 1)} | change))

    calls: list[tuple[Any, str]] = [
        (lambda: PlasticProjection(plain, fires, weight, rule), "source"),
        (lambda: PlasticProjection(fires, plain, weight, rule), "target"),
        (lambda: PlasticProjection(fires, fires, weight, rule, delay=-1), "delay"),
        (lambda: PlasticProjection(fires, fires, q4.quantize(torch.rand(2, 3), "nf4"), rule), "weight"),
        (lambda: make(bounds=(1, 1)), "bounds"),
        (lambda: make(bounds=(0, math.nan)), "bounds"),
        (lambda: make(weight=1.5), "weight"),
        (lambda: make(weight=torch.tensor([math.nan])), "weight"),
        (lambda: make(delay=0), "delay"),
        (lambda: make(target=one + 3), "target"),
        (lambda: make(source=one.float()), "source"),
    ]
    for call, name in calls:
        with pytest.raises((ConfigError, InputError)) as caught:
            call()
        assert caught.value.name == name
    network, x = dense(), spikes(5)
    _, state = network(x)
    with pytest.raises(InputError, match="projection 'learning': state must be of shape"):
        network(x, type(state)(state.neurons, state.history))
    with torch.enable_grad(), pytest.raises(InputError, match=r"spikes must be .* without gradients"):
        network(x.clone().requires_grad_())
