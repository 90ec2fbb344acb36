"""AdEx and Izhikevich's neurons against NEST and Brian2, an independent integration, and differences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from q4_actors import ActorSystem
from q4_snn import AdEx, ExpSynapses, Izhikevich, Network, Population, Projection, spikegen, surrogate
from q4_snn.actors import ActorNetwork
from q4core import ConfigError
from tests.support.simulators import case, run

if TYPE_CHECKING:
    from collections.abc import Callable


def test_adex_of_brian() -> None:
    """Membranes, adaptations and spikes are those of Brian2's Euler steps of the published equations."""
    theirs = case("brian_adex")
    fired, (adapt, mem) = run(
        AdEx(dt=theirs["dt"] * 1e-3), torch.full((len(theirs["v"]),), theirs["params"]["drive"], dtype=torch.float64)
    )
    assert fired == theirs["fired"]
    assert len(fired) == 3
    torch.testing.assert_close(mem, theirs["v"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(adapt, theirs["w"], rtol=1e-9, atol=1e-12)


def test_adex_of_nest() -> None:
    """Three spikes in 45 ms come when NEST's do, up to Euler's error, which falls with the step.

    NEST integrates by an adaptive Runge-Kutta method; its spikes are at most a step of 0.01 ms late.
    """
    theirs = case("nest_adex")
    errors = []
    for dt in (0.04, 0.02):
        neuron = AdEx(dt=dt * 1e-3, threshold_inclusive=True)
        fired, _ = run(neuron, torch.full((round(45 / dt),), theirs["params"]["I_e"] * 1e-3, dtype=torch.float64))
        assert len(fired) == 3
        pairs = zip(fired, theirs["fired"], strict=False)
        errors.append(max(abs((a + 1) * dt - (b + 1) * theirs["dt"]) for a, b in pairs))
    assert errors[0] < 0.5
    assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.15)


def exact_adex(current: float, ms: float, dt: float) -> list[float]:
    """Return the times of spikes in ms by the classical Runge-Kutta method, in plain Python."""
    c, g, el, vt, delta, a, tau, b = 281.0, 30.0, -70.6, -50.4, 2.0, 4.0, 144.0, 80.5

    def slopes(v: float, w: float) -> tuple[float, float]:
        v = min(v, 20.0)  # within a step it may be far above
        rise = g * delta * math.exp((v - vt) / delta)
        return (-g * (v - el) + rise - w + current) / c, (a * (v - el) - w) / tau

    v, w, times = el, 0.0, []
    for step in range(round(ms / dt)):
        first = slopes(v, w)
        second = slopes(v + dt / 2 * first[0], w + dt / 2 * first[1])
        third = slopes(v + dt / 2 * second[0], w + dt / 2 * second[1])
        last = slopes(v + dt * third[0], w + dt * third[1])
        v, w = (
            value + dt / 6 * (first[at] + 2 * second[at] + 2 * third[at] + last[at]) for at, value in enumerate((v, w))
        )
        if v > 20.0:
            times.append((step + 1) * dt)
            v, w = el, w + b
    return times


def test_adex_by_runge_kutta() -> None:
    """Spikes go to those of a fourth-order integration of the published equations, in pA, nS and pF."""
    exact, errors = exact_adex(800.0, 60.0, 0.005), []
    for dt in (0.04, 0.02):
        fired, _ = run(AdEx(dt=dt * 1e-3), torch.full((round(60 / dt),), 0.8, dtype=torch.float64))
        assert len(fired) == len(exact) == 2
        errors.append(max(abs((a + 1) * dt - b) for a, b in zip(fired, exact, strict=True)))
    assert errors[0] < 0.5
    assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("name", ["nest_izhikevich", "brian_izhikevich"])
def test_izhikevich(name: str) -> None:
    """Membranes, recoveries and spikes are those of NEST and of Brian2, regular and fast spiking, step for step."""
    theirs = case(name)
    facts = theirs["params"]
    is_nest = name == "nest_izhikevich"
    neuron = Izhikevich(facts["a"], facts["b"], -65.0, 8.0 if is_nest else 2.0, dt=theirs["dt"] * 1e-3)
    current = facts["I_e"] if is_nest else facts["drive"]
    fired, (recovery, mem) = run(neuron, torch.full((len(theirs["v"]),), current, dtype=torch.float64))
    assert fired == theirs["fired"]
    assert len(fired) >= 2
    torch.testing.assert_close(mem, theirs["v"], rtol=1e-7, atol=1e-7)  # where v² runs away, so do roundings
    torch.testing.assert_close(recovery, theirs["u"], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("numbers", "most", "ends"),
    [
        ((0.02, 0.2, -65.0, 8.0), 30, "adapts"),  # regular spiking
        ((0.02, 0.2, -50.0, 2.0), 90, "bursts"),  # chattering
        ((0.1, 0.2, -65.0, 2.0), 90, "steady"),  # fast spiking
    ],
)
def test_published_firing_patterns(numbers: Any, most: int, ends: str) -> None:
    """Under a constant current regular cells adapt, chattering ones burst, and fast ones fire evenly: the paper's."""
    fired, _ = run(Izhikevich(*numbers), torch.full((5000,), 10.0, dtype=torch.float64))
    intervals = np.diff(fired) * 0.1
    assert 10 <= len(fired) <= most
    if ends == "adapts":
        assert intervals[0] < 0.6 * intervals[-1]
    elif ends == "bursts":
        assert intervals[5:].max() > 5 * intervals[5:].min()
    else:
        assert intervals[3:].max() / intervals[3:].min() < 1.1


def test_refractory_adex() -> None:
    """While it waits the membrane stays at the reset, and the adaptation follows it."""
    x = torch.full((400,), 2.0, dtype=torch.float64)
    fired, (adapt, mem, waits) = run(AdEx(t_refractory=2e-3), x)
    first = fired[0]
    assert mem[first : first + 21].tolist() == [-70.6] * 21
    assert waits[first : first + 22].tolist() == [*range(20, -1, -1), 0]
    decay = 1 - 1e-4 / 144e-3
    assert float(adapt[first + 20]) == pytest.approx(float(adapt[first]) * decay**20, rel=1e-12)
    assert mem[first + 21] > -70.6


@pytest.mark.parametrize("kind", [AdEx, Izhikevich])
def test_gradients(kind: Any) -> None:
    """Each parameter learns, and its gradient, as that of the currents, is what differences of the membranes show."""
    names: tuple[str, ...] = ("a", "b", "c", "d", "v_threshold")
    if kind is AdEx:
        names = ("tau_mem", "tau_adapt", "r", "a", "b", "delta_t", "v_leak", "v_rheobase", "v_threshold", "v_reset")
    plain = kind()
    values = {name: getattr(plain, "v_reset" if name == "c" else name) for name in names}
    learned = {name: torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for name, value in values.items()}
    neuron = kind(**learned, surrogate=surrogate.Surrogate(torch.zeros_like))  # differences show no surrogate
    assert {*neuron.state_dict()} == {"v_reset" if name == "c" else name for name in names}
    x = torch.full((14, 2), 20.0 if kind is AdEx else 40.0, dtype=torch.float64, requires_grad=True)
    start = tuple(torch.full((2,), value, dtype=torch.float64) for value in (0.1, -50.0))

    def states(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.stack(run_spikes(neuron, x, start))

    free = [item for name, item in learned.items() if name != "v_threshold"]
    assert torch.autograd.gradcheck(states, (x, *free), eps=1e-6, atol=1e-4, rtol=1e-3)
    neuron.surrogate = surrogate.straight_through()
    gradients = torch.autograd.grad(states(x).sum(), [*learned.values()])
    assert all(bool(torch.isfinite(item).all() & (item != 0).all()) for item in gradients)


def run_spikes(neuron: Any, x: torch.Tensor, state: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the sums of spikes and of both states in each step."""
    found = []
    for current in x:
        spikes, *after = neuron(current, *state)
        state = (*after,)
        found.append(spikes.sum() + after[0].sum() + after[1].sum())
    return found


def test_networks_and_actors(tmp_path: Any) -> None:
    """In a network with conductances, on actors and from a checkpoint they give the same bits."""
    torch.manual_seed(0)
    pixels, cells = Population("pixels", 16, spikes=True), Population("cells", 12, AdEx(t_refractory=1e-3))
    out = Population("out", 5, Izhikevich())
    inner = Projection(pixels, cells)
    parts: list[Any] = [ExpSynapses(inner, 2e-3, reversal=0.0), Projection(cells, out, delay=1)]
    network = Network([pixels, cells, out], parts)
    with torch.no_grad():
        for projection, scale in ((inner, 0.05), (parts[1], 600)):
            next(projection.parameters()).abs_().mul_(scale)
    x = spikegen.rate(torch.full((2, 16), 0.3), 300, generator=torch.Generator().manual_seed(1))
    names = ("cells", "cells.mem", "cells.adapt", "cells.refractory", "out", "out.mem", "out.recovery")
    with torch.no_grad():
        whole, _ = network(x, record=names)
    assert min(whole["cells"].sum(), whole["out"].sum()) > 10
    with ActorSystem("threads") as system:
        halves = [ActorNetwork(network, system, batch=2, actors=2)(x[:150], names)]
        system.checkpoint(tmp_path / "state")
    with ActorSystem("threads", resume=tmp_path / "state") as system:
        halves.append(ActorNetwork(network, system, batch=2)(x[150:], names))
    for name in names:
        assert torch.equal(torch.cat([half[name] for half in halves]), whole[name]), name


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: AdEx(delta_t=0.0), "delta_t"),
        (lambda: AdEx(delta_t=0.5), "v_threshold"),
        (lambda: AdEx(tau_mem=1e-5), "tau_mem"),
        (lambda: AdEx(v_reset=float("nan")), "v_reset"),
        (lambda: AdEx(a=torch.ones(2), b=torch.ones(3)), "b"),
        (lambda: Izhikevich(dt=2e-3), "dt"),
        (lambda: Izhikevich(a=torch.ones(2, requires_grad=True)), "a"),
    ],
)
def test_refused_parameters(build: Callable[[], object], name: str) -> None:
    """A slope that is no number above 0, an exponential that overflows, steps too long, and lost gradients."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.name == name
