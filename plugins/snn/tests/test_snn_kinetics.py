"""Synapses with time courses against numbers of NEST, recurrences in float64, differences, and a finer integration."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch

import q4core as q4
from q4_actors import ActorSystem
from q4_nn import pack_
from q4_snn import (
    LI,
    LIF,
    AdEx,
    AlphaSynapses,
    CubaLIF,
    ExpSynapses,
    Izhikevich,
    Network,
    PlasticProjection,
    PlasticSparseProjection,
    Population,
    Projection,
    SparseProjection,
    STDPRule,
    spikegen,
)
from q4_snn.actors import ActorNetwork
from q4_snn.neuron import Neuron
from q4core import ConfigError, InputError
from tests.support.simulators import case, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 40
DT = 1e-4


def spikes(batch: int = 3, size: int = 16, steps: int = STEPS) -> torch.Tensor:
    """Return random spikes [T, B, size]."""
    return spikegen.rate(torch.full((batch, size), 0.3), steps, generator=torch.Generator().manual_seed(1))


def one_to_one(weight: float = 1.0, delay: int = 0) -> tuple[Population, Population, Projection]:
    """Return an input, a membrane without a leak to speak of, and one float synapse between them."""
    source, target = Population("in", 1), Population("out", 1, LI(1e9))
    projection = Projection(source, target, delay=delay)
    torch.nn.init.constant_(next(projection.parameters()), weight)
    return source, target, projection.double()


def currents_of(synapses: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what synapses give in each step, [T]."""
    coming = synapses.coming(1)
    with torch.no_grad():
        return torch.cat([synapses(row[None, None], coming, step)[0] for step, row in enumerate(x)])


@pytest.mark.parametrize(
    ("kind", "name"), [(ExpSynapses, "nest_exp"), (AlphaSynapses, "nest_alpha")], ids=["exp", "alpha"]
)
def test_currents_of_nest(kind: Any, name: str) -> None:
    """Excitation and inhibition of different time constants have the currents of NEST's neurons, to 12 digits."""
    theirs = case(name)
    for at, (which, tau) in enumerate((("exciting", "tau_syn_ex"), ("inhibiting", "tau_syn_in"))):
        expected = theirs[("ex", "in")[at]]
        x = torch.zeros_like(expected)
        x[steps_of(which)] = 1
        synapses = kind(one_to_one(theirs["weights"][at])[2], theirs["params"][tau] * 1e-3, dt=DT).double()
        assert float(expected.abs().max()) > 200
        torch.testing.assert_close(currents_of(synapses, x), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("tau", [DT, 3e-4, 2e-3])
def test_alpha_functions(tau: float) -> None:
    """The current of one spike is the alpha function itself at every step, with its peak, the weight, at tau_syn."""
    x = torch.zeros(60, dtype=torch.float64)
    x[2] = 1
    found = currents_of(AlphaSynapses(one_to_one(5.0)[2], tau, dt=DT).double(), x)
    time = torch.arange(-2, 58, dtype=torch.float64).clamp(min=0) * DT / tau
    torch.testing.assert_close(found, 5.0 * time * torch.exp(1 - time), rtol=1e-12, atol=1e-14)
    assert found.max() == pytest.approx(5.0)


def test_the_same_bits_as_cuba_neurons() -> None:
    """One projection with a time course into LIF neurons is a CubaLIF of the same shares, bit for bit."""
    torch.manual_seed(0)
    pixels, lif = Population("pixels", 16), Population("cells", 8, LIF.from_beta(0.9))
    cuba = Population("cells", 8, CubaLIF.from_alpha_beta(math.exp(-DT / 5e-4), 0.9))
    projection = Projection(pixels, lif, bias=True)
    networks = Network([pixels, lif], [ExpSynapses(projection, 5e-4)]), Network([pixels, cuba], [projection])
    found = []
    for network in networks:
        recorded, _ = network(spikes(), record=("cells", "cells.mem"))
        assert recorded["cells"].sum() > 50
        gradients = torch.autograd.grad(
            recorded["cells"].sum() + recorded["cells.mem"][-1].sum(), [*network.parameters()]
        )
        found.append((*recorded.values(), *gradients))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(found[0][:2], found[1][:2], strict=True))


def conductances(seed: int = 0, dt: float = DT) -> tuple[Network, list[Any]]:
    """Return neurons with excitatory and inhibitory conductances, by float64; and the two."""
    torch.manual_seed(seed)
    pixels = Population("pixels", 16, spikes=True)
    cells = Population("cells", 8, LIF(10e-3, 1.0, -70.0, -52.0, -60.0, dt=dt, reset="value", t_refractory=2 * dt))
    parts: list[Any] = [
        ExpSynapses(Projection(pixels, cells, name="exciting"), 2e-3, dt=dt, reversal=0.0),
        AlphaSynapses(Projection(pixels, cells, name="inhibiting"), 5e-3, dt=dt, reversal=-80.0),
    ]
    network = Network([pixels, cells], parts).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.abs_().mul_(0.5)
    return network, parts


def test_conductances() -> None:
    """Membranes are those of a loop over ``τ dv/dt = v_leak - v + Σ g (E - v)`` in numpy, refractory steps included."""
    network, parts = conductances()
    x = spikes(steps=300).double()
    with torch.no_grad():
        found, _ = network(x, record=("cells", "cells.mem"))
        weights = [item.inner.dense_weight().numpy().T for item in parts]
    exciting = rising = inhibiting = np.zeros((3, 8))
    v, left = np.full((3, 8), -70.0), np.zeros((3, 8))
    p, q = math.exp(-DT / 2e-3), math.exp(-DT / 5e-3)
    for step, arrived in enumerate(x.numpy()):
        exciting = p * exciting + arrived @ weights[0]
        inhibiting, rising = q * inhibiting + math.e * DT / 5e-3 * q * rising, q * rising + arrived @ weights[1]
        moved = v + DT / 10e-3 * (-70.0 - v + exciting * (0.0 - v) + inhibiting * (-80.0 - v))
        moved = np.where(left > 0, v, moved)
        fired = (moved > -52.0) & (left == 0)
        v, left = np.where(fired, -60.0, moved), np.where(fired, 2, np.maximum(left - 1, 0))
        assert np.array_equal(found["cells"][step].numpy(), fired)
        np.testing.assert_allclose(found["cells.mem"][step].numpy(), v, rtol=1e-11)
    assert found["cells"].sum() > 50


def test_conductances_of_nest() -> None:
    """The membrane goes to NEST's with the error of Euler's method: half the step has half of it, a tenth a tenth.

    NEST integrates with the conductances of the step before, to 1e-3 by an adaptive Runge-Kutta method: so a spike
    arrives one of its steps later here.
    """
    theirs = case("nest_conductance")
    facts = theirs["params"]

    def membrane(parts: int) -> torch.Tensor:
        dt = theirs["dt"] * 1e-3 / parts
        sources = [Population(name, 1, spikes=True) for name in ("exciting", "inhibiting")]
        neuron = LIF(
            facts["C_m"] / facts["g_L"] * 1e-3, 1 / facts["g_L"], facts["E_L"], facts["V_th"], facts["V_reset"], dt=dt,
            reset="value", t_refractory=facts["t_ref"] * 1e-3, threshold_inclusive=True,
        )  # fmt: skip
        cell, constant = Population("cell", 1, neuron), Population("constant", 1)
        projections: list[Any] = [Projection(constant, cell)]
        torch.nn.init.constant_(next(projections[0].parameters()), facts["I_e"])
        for source, end, weight in zip(sources, ("ex", "in"), theirs["weights"], strict=True):
            inner = Projection(source, cell, delay=parts)
            torch.nn.init.constant_(next(inner.parameters()), abs(weight))
            tau = facts[f"tau_syn_{end}"] * 1e-3
            projections.append(ExpSynapses(inner, tau, dt=dt, reversal=facts[f"E_{end}"]))
        steps = len(theirs["v"]) * parts
        x = {name: torch.zeros(steps, 1, 1, dtype=torch.float64) for name in ("exciting", "inhibiting", "constant")}
        for name, value in x.items():
            value[slice(None) if name == "constant" else [step * parts for step in steps_of(name)]] = 1
        with torch.no_grad():
            found, _ = Network([*sources, constant, cell], projections).double()(x, record=("cell", "cell.mem"))
        assert found["cell"].sum() == len(theirs["fired"]) == 1
        mem: torch.Tensor = found["cell.mem"].flatten()[parts - 1 :: parts][:110]  # before the spike
        return mem

    expected = theirs["v"][:110]
    whole, half, tenth = (float((membrane(parts) - expected).abs().max()) for parts in (1, 2, 10))
    assert whole < 0.2
    assert whole / half == pytest.approx(2, rel=0.05)
    assert whole / tenth == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(("kind", "name"), [(ExpSynapses, "nest_exp"), (AlphaSynapses, "nest_alpha")])
def test_neurons_by_the_table_of_names(kind: Any, name: str) -> None:
    """Cells of PyNN as the docs map them fire when NEST's neurons do, to two of Euler's steps."""
    theirs = case(name)
    facts, steps = theirs["params"], len(theirs["ex"])
    neuron = LIF(
        facts["tau_m"] * 1e-3, facts["tau_m"] / facts["C_m"], facts["E_L"], facts["V_th"], facts["V_reset"], dt=DT,
        reset="value", threshold_inclusive=True, t_refractory=facts["t_ref"] * 1e-3,
    )  # fmt: skip
    cell, sources, parts = Population("cell", 1, neuron), [], []
    for which, weight, end in zip(("exciting", "inhibiting"), theirs["weights"], ("ex", "in"), strict=True):
        sources.append(Population(which, 1, spikes=True))
        inner = Projection(sources[-1], cell, delay=1)
        torch.nn.init.constant_(next(inner.parameters()), weight)
        parts.append(kind(inner, facts[f"tau_syn_{end}"] * 1e-3, dt=DT))
    x = {which: torch.zeros(steps, 1, 1, dtype=torch.float64) for which in ("exciting", "inhibiting")}
    for which, value in x.items():
        value[steps_of(which)] = 1
    with torch.no_grad():
        found, _ = Network([*sources, cell], parts).double()(x)
    fired = found["cell"].flatten().nonzero().flatten().tolist()
    assert len(fired) == len(theirs["fired"]) >= 1
    assert max(abs(a - b) for a, b in zip(fired, theirs["fired"], strict=True)) <= 2


@pytest.mark.parametrize("kind", [ExpSynapses, AlphaSynapses])
@pytest.mark.parametrize("reversal", [None, -0.5])
@pytest.mark.parametrize("size", [None, 3])
def test_gradients(kind: Any, reversal: float | None, size: int | None) -> None:
    """Gradients of weights, time constants and spikes through time are what differences show."""
    torch.manual_seed(0)
    tau = torch.nn.Parameter(torch.full(() if size is None else (size,), 4e-4, dtype=torch.float64))
    source, target = Population("in", 2), Population("out", 3, LI(1e-3))
    inner = Projection(source, target, delay=1)
    network = Network([source, target], [kind(inner, tau, reversal=reversal)]).double()
    weight = network.get_parameter("projections.in->out.inner.synapses.weight")
    assert network.get_parameter("projections.in->out.tau_syn") is tau
    x = torch.rand(6, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        first, state = network(x[:3])
        last: torch.Tensor = network(x[3:], state)[0]["out"][-1] + first["out"][-1]
        return last

    assert torch.autograd.gradcheck(run, (x, weight, tau), eps=1e-7)
    state = network(x)[1].detach()
    assert not state.coming["in->out"].requires_grad


@pytest.mark.parametrize("kind", [ExpSynapses, AlphaSynapses])
def test_state_goes_on(kind: Any) -> None:
    """Two calls give what one gives, steps alone too; no call changes the state that it is given; batches are apart."""
    torch.manual_seed(0)
    pixels, cells = Population("pixels", 70, spikes=True), Population("cells", 64, LIF.from_beta(0.9))
    source, target = torch.randint(64, (2, 500), generator=torch.Generator().manual_seed(0))
    sparse = SparseProjection(
        source, target, torch.rand(500) * 0.1, 1 + torch.arange(500) % 5, sources=cells, targets=cells
    )
    dense = Projection(pixels, cells, format="nf4", bias=True)
    network = Network([pixels, cells], [kind(dense, 5e-4), kind(sparse, 1e-3, reversal=-1.0)])
    x, names = spikes(size=70), ("cells", "cells.mem")
    with torch.no_grad(), q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        report = pack_(network, session)
        assert report.names == ["projections.pixels->cells.inner.synapses"]
        whole, _ = network(x, record=names)
        assert whole["cells"].sum() > 50
        first, state = network(x[:13], record=names)
        before = {name: item.clone() for name, item in state.coming.items()}
        second, _ = network(x[13:], state, record=names)
        again, _ = network(x[13:], state, record=names)
        assert all(torch.equal(state.coming[name], item) for name, item in before.items())
        single, alone = None, []
        for row in x:
            given, single = network.step({"pixels": row}, single)
            alone.append(given["cells"])
        for name in names:
            assert torch.equal(torch.cat([first[name], second[name]]), whole[name])
            assert torch.equal(again[name], second[name])
        assert torch.equal(torch.stack(alone), whole["cells"])
        assert torch.equal(network(x[:, 1:2].contiguous(), record=names)[0]["cells"], whole["cells"][:, 1:2])
        shorter = {name: item[1:] for name, item in state.coming.items()}
        with pytest.raises(InputError, match=r"projection 'pixels->cells': state must be of shape \[\d, 3, 64\]"):
            network(x, attrs.evolve(state, coming=shorter))


@pytest.mark.parametrize("actors", [1, 2])
def test_actors(actors: int, tmp_path: Any) -> None:
    """Actors give the bits of one process, from a checkpoint too; another time constant is another network."""

    def build(tau: float) -> Network:
        torch.manual_seed(0)
        pixels, cells = Population("pixels", 16, spikes=True), Population("cells", 20, LIF(1e-3))
        out = Population("out", 3, LI(1e-3))
        first, last = torch.randint(20, (2, 100), generator=torch.Generator().manual_seed(0))
        sparse = SparseProjection(first, last, torch.rand(100), 1 + torch.arange(100) % 3, sources=cells, targets=cells)
        parts = [
            ExpSynapses(Projection(pixels, cells, delay=1), 3e-4),
            AlphaSynapses(sparse, tau, reversal=-0.5),
            AlphaSynapses(Projection(cells, out), 1e-3),
        ]
        return Network([pixels, cells, out], parts)

    network, names = build(4e-4), ("cells", "cells.mem", "out")
    with torch.no_grad():
        whole, _ = network(spikes(), record=names)
    assert whole["cells"].sum() > 50
    with ActorSystem("threads") as system:
        parts = [ActorNetwork(network, system, batch=3, actors=actors)(spikes()[:9], names)]
        system.checkpoint(tmp_path / "state")
    with ActorSystem("threads", resume=tmp_path / "state") as system:
        parts.append(ActorNetwork(network, system, batch=3)(spikes()[9:], names))
    for name in names:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name
    with ActorSystem("threads", resume=tmp_path / "state") as system, pytest.raises(InputError, match="digest"):
        ActorNetwork(build(5e-4), system, batch=3)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@torch.no_grad()
def test_synapses_that_learn(kind: str, tmp_path: Any) -> None:
    """Synapses that learn by STDP have a time course, too: they learn the same, and their currents are filtered."""
    torch.manual_seed(0)
    pixels, cells = Population("pixels", 16, spikes=True), Population("cells", 20, LIF.from_beta(0.9))
    rule = STDPRule(a_plus=0.02, a_minus=0.02)
    weight = q4.quantize(torch.rand(20, 16), "nf4")
    source, target = torch.randint(16, (100,)), torch.randint(20, (100,))
    inner: Any = PlasticProjection(pixels, cells, weight, rule)
    if kind == "sparse":
        ends: dict[str, Any] = {"sources": pixels, "targets": cells}
        inner = PlasticSparseProjection(source, target, torch.rand(100), 2, **ends, rule=rule, bounds=(0.0, 1.0))
    network = Network([pixels, cells], [ExpSynapses(inner, 3e-4, reversal=2.0)])
    first, state = network(spikes()[:13], record=("cells.mem",))
    second, state = network(spikes()[13:], state, record=("cells.mem",))
    coming, by_hand = inner.coming(3), []
    lif, mem, fired, current = cells.neuron, None, None, torch.zeros(3, 20)
    given = torch.cat([torch.zeros(inner.delay, 3, 16), spikes()])
    for step in range(STEPS):
        current = math.exp(-DT / 3e-4) * current + inner(given[step], coming, step, fired=fired)
        before = torch.zeros(3, 20) if mem is None else mem
        fired, mem = lif(current * (2.0 - before), mem)  # type: ignore[misc]  # a neuron
        by_hand.append(mem)
    assert torch.equal(torch.cat([first["cells.mem"], second["cells.mem"]]), torch.stack(by_hand))
    held = state.coming[inner.name][: len(coming)]
    assert torch.equal(held.view(torch.uint8), coming.view(torch.uint8))
    assert not torch.equal(held.view(torch.uint8), inner.coming(3).view(torch.uint8))
    with ActorSystem("threads") as system:
        crew = ActorNetwork(network, system, batch=3)
        found = [crew(part, ("cells.mem",))["cells.mem"] for part in spikes().split(20)]
    assert torch.equal(torch.cat(found), torch.stack(by_hand))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
def test_killed_processes() -> None:
    """Processes that are killed in between give the same bits of time courses, waits and adaptations."""
    torch.manual_seed(0)
    pixels, cells = Population("pixels", 16, spikes=True), Population("cells", 20, LIF(1e-3, t_refractory=3e-4))
    other, out = Population("other", 12, AdEx(t_refractory=1e-3)), Population("out", 3, Izhikevich())
    source, target = torch.randint(20, (2, 100), generator=torch.Generator().manual_seed(0))
    sparse = SparseProjection(source, target, torch.rand(100), 1 + torch.arange(100) % 3, sources=cells, targets=cells)
    parts = [
        ExpSynapses(Projection(pixels, cells), 3e-4),
        AlphaSynapses(sparse, 4e-4, reversal=-0.5),
        ExpSynapses(Projection(cells, other), 1e-3, reversal=0.0),
        AlphaSynapses(Projection(other, out, delay=1), 1e-3),
    ]
    network = Network([pixels, cells, other, out], parts)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.abs_()
        names = ("cells", "cells.refractory", "other.adapt", "other.mem", "out.recovery", "out.mem")
        whole, _ = network(spikes(), record=names)
    assert whole["cells"].sum() > 50
    found = []
    with ActorSystem("processes", restarts=10) as system:
        crew = ActorNetwork(network, system, batch=3, actors=2)
        for part in spikes().split(STEPS // 4):
            next(iter(system.actors.values())).kill()
            found.append(crew(part, names))
    for name in names:
        assert torch.equal(torch.cat([part[name] for part in found]), whole[name]), name


class Without(Neuron):
    """A neuron without a membrane."""

    states = ("level",)


A, B = Population("a", 2, spikes=True), Population("b", 3, LIF(1e-3))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: ExpSynapses(Projection(A, B), 5e-5), "tau_syn"),
        (lambda: ExpSynapses(torch.nn.Linear(2, 3), 1e-3), "projection"),  # type: ignore[arg-type]  # the point
        (lambda: ExpSynapses(AlphaSynapses(Projection(A, B), 1e-3, reversal=0.0), 1e-3), "projection"),
        (lambda: ExpSynapses(Projection(A, B), torch.ones(2)), "tau_syn"),
        (lambda: ExpSynapses(Projection(A, B), torch.full((3,), torch.nan)), "tau_syn"),
        (lambda: ExpSynapses(Projection(A, B), torch.ones(3, requires_grad=True)), "tau_syn"),
        (lambda: ExpSynapses(Projection(A, B), "1 ms"), "tau_syn"),  # type: ignore[arg-type]  # the point
        (lambda: AlphaSynapses(Projection(A, B), 1e-3, dt=0.0), "dt"),
        (lambda: AlphaSynapses(Projection(A, B), 1e-3, reversal=float("inf")), "reversal"),
        (lambda: Network([A, B], [ExpSynapses(Projection(A, B), 1e-3, dt=1e-3)]), "dt"),
        (
            lambda: Network(
                [A, (c := Population("c", 3, Without(1e-4)))], [ExpSynapses(Projection(A, c), 1e-3, reversal=0.0)]
            ),
            "target",
        ),
    ],
)
def test_refused_synapses(build: Callable[[], object], name: str) -> None:
    """Time constants below a step, of another size or with gradients, another dt, and targets without a membrane."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.name == name
