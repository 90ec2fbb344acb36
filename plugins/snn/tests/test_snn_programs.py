"""Tests of networks as programs: the bits of the loop, for each neuron, delay, batch and number of threads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_nn import pack_
from q4_snn import (
    ALIF,
    IF,
    LI,
    LIF,
    CubaLIF,
    Network,
    NetworkState,
    NonFiniteStateError,
    Population,
    Projection,
    SparseProjection,
)
from q4_snn.runs import NetworkRuns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_snn.neuron import Neuron

HIDDEN, DT = 100, 1e-3
RECORD = ("out", "hidden", "hidden.mem", "far", "pixels")


def _random(low: float, high: float) -> torch.Tensor:
    return low + (high - low) * torch.rand(HIDDEN, generator=torch.Generator().manual_seed(int(1e6 * high)))


NEURONS: dict[str, Any] = {
    "lif": lambda: LIF(10e-3, dt=DT),
    "lif of vectors": lambda: LIF(
        _random(2e-3, 20e-3),
        _random(0.5, 3),
        _random(0, 0.1),
        _random(0.2, 1),
        _random(-0.1, 0.1),
        reset="value",
        dt=DT,
    ),
    "lif, none": lambda: LIF(10e-3, reset="none", dt=DT),
    "lif, delayed": lambda: LIF(10e-3, reset_delay=True, v_threshold=0.8, dt=DT),
    "lif, delayed value": lambda: LIF(
        10e-3, reset_delay=True, reset="value", v_reset=0.1, threshold_inclusive=True, dt=DT
    ),
    "lif, refractory": lambda: LIF(10e-3, t_refractory=_random(0, 5e-3).round(decimals=3), reset="value", dt=DT),
    "cuba": lambda: CubaLIF(10e-3, 5e-3, dt=DT),
    "cuba of vectors": lambda: CubaLIF(10e-3, 5e-3, w_in=_random(0, 1), v_threshold=_random(0.5, 1), dt=DT),
    "cuba, refractory": lambda: CubaLIF(10e-3, 5e-3, t_refractory=3e-3, dt=DT),
    "if": lambda: IF(dt=DT),
    "if, scaled": lambda: IF(100.0, dt=DT),
    "alif": lambda: ALIF(10e-3, 50e-3, 0.2, dt=DT),
    "alif of vectors": lambda: ALIF(
        10e-3, 50e-3, _random(0, 1), v_leak=_random(0, 0.1), v_threshold=_random(0.2, 1), reset="value", dt=DT
    ),
}


@pytest.fixture
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def sparse(source: Population, target: Population, count: int, most: int, scale: float, name: str) -> SparseProjection:
    """Return random synapses."""
    draw = torch.Generator().manual_seed(most)
    first, second = (torch.randint(0, size, (count,), generator=draw) for size in (source.size, target.size))
    weight = scale * torch.randn(count, generator=draw)
    delay = torch.randint(1, most, (count,), generator=draw)
    return SparseProjection(first, second, weight, delay, sources=source, targets=target, name=name)


def network_of(neuron: Neuron, format: str = "nf4") -> Network:  # noqa: A002  # the projection's name
    """Return a packed network with delays, a recurrent population, and dense and sparse synapses."""
    torch.manual_seed(0)
    pixels = Population("pixels", 70, spikes=True)
    hidden, far = Population("hidden", HIDDEN, neuron), Population("far", 33, LIF(10e-3, dt=DT))
    out = Population("out", 10, LI(20e-3, dt=DT))
    dense = [
        Projection(pixels, hidden, format=format, bias=True),
        Projection(hidden, hidden, format="nf4", delay=1),
        Projection(hidden, out, format="nf4"),
        Projection(hidden, far, format="q4_0", delay=3),
    ]
    few = [sparse(far, hidden, 2000, 20, 0.3, "back"), sparse(hidden, hidden, 2000, 7, 0.3, "within")]
    network = Network([pixels, hidden, out, far], [*dense, *few])
    pack_(network, q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")))
    return network


def by_loop(network: Network, *arguments: Any, **options: Any) -> tuple[dict[str, torch.Tensor], NetworkState]:
    """Return what the network gives step by step in torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NetworkRuns, "program", lambda *_: None)
        return network(*arguments, **options)  # type: ignore[no-any-return]


def assert_same(one: tuple[dict[str, torch.Tensor], NetworkState], other: tuple[Any, NetworkState]) -> None:
    """Compare everything bit by bit."""
    for name, found in other[0].items():
        assert torch.equal(one[0][name], found), name
    first, second = one[1], other[1]
    assert first.clock == second.clock
    for kind in ("neurons", "history", "coming"):
        left, right = getattr(first, kind), getattr(second, kind)
        assert left.keys() == right.keys()
        for name, items in right.items():
            pairs = zip(left[name], items, strict=True)
            assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs), (kind, name)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.usefixtures("_threads")
@torch.no_grad()
def test_each_neuron_has_the_bits_of_the_loop(kind: str, batch: int) -> None:
    """So have its states, histories and rings, for one thread and three, over calls that follow one another."""
    network, state = network_of(NEURONS[kind]()), None
    x = (torch.rand(170, batch, 70, generator=torch.Generator().manual_seed(1)) < 0.2).float()
    for part, threads in zip(x.split((65, 5, 100)), (1, 3, 1), strict=True):
        torch.set_num_threads(threads)
        found = network(part, state, RECORD)
        assert network.record.backend == "cpu-native", network.record.reasons
        assert_same(found, by_loop(network, part, state, RECORD))
        state = found[1]
    assert float(found[0]["hidden"].sum()) > 0


@pytest.mark.parametrize("format", ["fp4", "q4_0", "q4_1", "nvfp4", "q8_0"])
@torch.no_grad()
def test_each_format_has_the_bits_of_the_loop(format: str) -> None:  # noqa: A002  # the projection's name
    """The program's product with spikes is the backend's."""
    network = network_of(LIF(10e-3, dt=DT), format)
    x = (torch.rand(70, 2, 70, generator=torch.Generator().manual_seed(1)) < 0.2).float()
    found = network(x, None, RECORD)
    assert network.record.backend == "cpu-native", network.record.reasons
    assert_same(found, by_loop(network, x, None, RECORD))


@torch.no_grad()
def circuit(neurons: int) -> tuple[Network, torch.Tensor]:
    """Return a sparse circuit, and an input that makes it fire."""
    pixels, cells = (
        Population("pixels", 64, spikes=True),
        Population("cells", neurons, LIF(10e-3, dt=DT, reset="value")),
    )
    few = sparse(cells, cells, 20 * neurons, 16, 0.3, "within")
    network = Network([pixels, cells], [Projection(pixels, cells, format="nf4"), few])
    pack_(network, q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")))
    return network, (torch.rand(2000, 1, 64, generator=torch.Generator().manual_seed(3)) < 0.9).float()


@pytest.mark.usefixtures("_threads")
@torch.no_grad()
def test_a_million_spikes_on_one_to_four_threads() -> None:
    """Not one is another, nor a bit of the state."""
    torch.manual_seed(0)
    network, x = circuit(3000)
    wanted = by_loop(network, x, None, ("cells",))
    assert float(wanted[0]["cells"].sum()) > 1e6
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        assert_same(network(x, None, ("cells",)), wanted)


@torch.no_grad()
def test_what_has_no_operation_keeps_the_loop() -> None:
    """The network's record, and the report of its layers, say why."""
    x = torch.zeros(5, 1, 70)
    network = network_of(LIF(10e-3, dt=DT))
    with torch.enable_grad():
        network(x)
    assert "gradients are recorded" in network.record.reasons[0]
    hidden = network.population("hidden")
    for part in (hidden, hidden.neuron):
        assert part is not None
        handle = part.register_forward_hook(lambda *_: None)
        network(x)
        assert "population 'hidden': it has a hook" in network.record.reasons[0]
        handle.remove()
        network(x)
    assert network.record.backend == "cpu-native"
    network.set_submodule("projections.hidden->out.synapses", torch.nn.Linear(HIDDEN, 10))
    network(x)
    assert "projection 'hidden->out': its synapses are not packed" in network.record.reasons[0]


@torch.no_grad()
def test_parameters_that_change_are_seen() -> None:
    """A number that is set, and a tensor that is written, have their effect on the next call."""
    for kind in ("lif", "lif of vectors"):
        neuron = NEURONS[kind]()
        network = network_of(neuron)
        x = (torch.rand(40, 1, 70, generator=torch.Generator().manual_seed(1)) < 0.2).float()
        before = network(x, None, RECORD)
        if kind == "lif":
            neuron.v_threshold = 0.3
        else:
            neuron.v_threshold.mul_(0.5)
        after = network(x, None, RECORD)
        assert network.record.backend == "cpu-native"
        assert not torch.equal(after[0]["hidden"], before[0]["hidden"])
        assert_same(after, by_loop(network, x, None, RECORD))


@torch.no_grad()
def test_a_membrane_that_is_nan_is_found_with_its_step() -> None:
    """The chunk ends with an error that names the first step after which it is; nothing was changed."""
    network = network_of(LIF(10e-3, dt=DT))
    x = torch.zeros(150, 1, 70)
    _, state = network(x[:10])
    neurons = {name: tuple(item.clone() for item in items) for name, items in state.neurons.items()}
    neurons["hidden"][0][0, 7] = math.nan
    before = [item.clone() for items in state.neurons.values() for item in items]
    with pytest.raises(NonFiniteStateError) as caught:
        network(x, NetworkState(neurons, state.history, state.coming, state.clock))
    assert network.record.backend == "cpu-native"
    assert caught.value.what == "population 'hidden'"
    assert str(caught.value.value) == "NaN or infinity in 1 of 100 neurons after step 10"
    assert all(torch.equal(a, b) for a, b in zip(before, (i for v in state.neurons.values() for i in v), strict=True))


@torch.no_grad()
def test_an_input_of_other_numbers_than_spikes() -> None:
    """It is refused, in any chunk, as the loop does."""
    network, x = network_of(LIF(10e-3, dt=DT)), torch.zeros(150, 1, 70)
    x[140, 0, 3] = 0.5
    with pytest.raises(q4.InputError, match=r"0 and 1 alone.*0\.5"):
        network(x)


@torch.no_grad()
def test_the_rest_of_a_run_is_run_by_its_program() -> None:
    """A few steps make no program, but run by the one that longer calls made: a run's last chunk does, too."""
    network, x = network_of(LIF(10e-3, dt=DT)), (torch.rand(10, 1, 70) < 0.3).float()
    first = network(x[:2])
    assert "fewer than 4 steps" in network.record.reasons[0]
    assert_same(first, by_loop(network, x[:2]))
    network.run(iter(x), chunk=8)
    assert (network.record.backend, network.record.calls) == ("cpu-native", 2)
    longer = network(x)
    assert_same(network(x[:1], longer[1]), by_loop(network, x[:1], longer[1]))
    assert network.record.backend == "cpu-native"
