"""Networks: order, delays, state, training and packing, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_nn import STELinear, pack_
from q4_snn import (
    LI,
    LIF,
    AdEx,
    AlphaSynapses,
    CubaLIF,
    ExpSynapses,
    Network,
    NonFiniteStateError,
    Population,
    Projection,
    spikegen,
)
from q4core import ConfigError, FormatError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 30


def recurrent(kind: str | None = None, *, hidden: int = 20) -> Network:
    """Return a network of an input, a recurrent population with a delay of two steps, and a read-out."""
    torch.manual_seed(0)
    pixels = Population("pixels", 16)
    inner = Population("hidden", hidden, LIF.from_beta(0.9))
    out = Population("out", 4, LI(1e-3))
    projections = [
        Projection(pixels, inner, format=kind, bias=True),
        Projection(inner, inner, format=kind, delay=2),
        Projection(inner, out, format=kind),
    ]
    network = Network([pixels, inner, out], projections)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    return network


def spikes(batch: int = 3, size: int = 16, steps: int = STEPS) -> torch.Tensor:
    """Return random spikes [T, B, size]."""
    return spikegen.rate(torch.full((batch, size), 0.3), steps, generator=torch.Generator().manual_seed(1))


def test_a_loop_by_hand() -> None:
    """A network gives what a loop over its own layers and neurons gives, delays included, bit for bit."""
    network, x = recurrent(), spikes()
    found, state = network(x, record=("hidden", "hidden.mem", "out"))
    parts: Any = [*network.projections.values(), *network.populations.values()]
    (first, back, last), (_, lif, li) = (item.synapses for item in parts[:3]), (item.neuron for item in parts[3:])
    mem = read = None
    fired = [torch.zeros(3, 20), torch.zeros(3, 20)]
    for step in range(STEPS):
        out, mem = lif(first(x[step]) + back(fired[-2]), mem)
        fired.append(out)
        given, read = li(last(out), read)
        assert torch.equal(found["hidden"][step], out)
        assert torch.equal(found["hidden.mem"][step], mem)
        assert torch.equal(found["out"][step], given)
    assert 0.02 < found["hidden"].mean() < 0.9
    assert mem is not None
    assert torch.equal(state.neurons["hidden"][0], mem)
    assert [item.tolist() for item in state.history["hidden"]] == [item.tolist() for item in reversed(fired[-2:])]


def test_state_goes_on() -> None:
    """Two calls with the state between them give what one call gives; a call changes no state that it is given."""
    network, x = recurrent().requires_grad_(requires_grad=False), spikes()
    whole, _ = network(x, record=("hidden", "out"))
    first, state = network(x[:11], record=("hidden", "out"))
    before = copy.deepcopy(dict(state.neurons))
    second, _ = network(x[11:], state, record=("hidden", "out"))
    for name, value in whole.items():
        assert torch.equal(torch.cat([first[name], second[name]]), value)
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], state.neurons[name], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_at_rest(dtype: torch.dtype) -> None:
    """It has what a call without a state begins from, and membranes written to it are where the call begins."""
    network = recurrent().to(dtype)
    rest = network.rest(3, dtype=dtype)
    x = spikes().to(dtype)
    (wanted, after), (found, other) = network(x, record=("hidden.mem", "out")), network(x, rest, ("hidden.mem", "out"))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert (rest.clock, other.clock, after.clock) == (0, STEPS, STEPS)
    rest.neurons["hidden"][0].fill_(0.5)
    moved, _ = network(torch.zeros_like(x), rest, ("hidden.mem",))
    synapses: Any = network.projections["pixels->hidden"].synapses
    first = (0.9 * 0.5 + synapses.bias).expand(3, -1)
    assert torch.allclose(moved["hidden.mem"][0], torch.where(first > 1, first - 1, first))


def test_truncated_backpropagation() -> None:
    """A call from a detached state has the numbers of one run, and the gradients of its own steps alone."""
    network, x = recurrent(), spikes()
    whole, _ = network(x, record=("hidden", "out"))
    first, state = network(x[:11], record=("hidden", "out"))
    assert state.neurons["hidden"][0].requires_grad
    detached = state.detach()
    parts = [*detached.neurons.values(), *detached.history.values()]
    assert not any(item.requires_grad for items in parts for item in items)
    assert detached.clock == 11
    second, after = network(x[11:], detached, record=("hidden", "out"))
    for name, value in whole.items():
        assert torch.equal(torch.cat([first[name], second[name]]), value)
    weights = [*network.parameters()]
    found = torch.autograd.grad(second["out"].sum(), weights, retain_graph=True)
    with torch.no_grad():
        _, copied = network(x[:11])  # where nothing was recorded at all
    expected = torch.autograd.grad(network(x[11:], copied)[0]["out"].sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    through = torch.autograd.grad(network(x[11:], state)[0]["out"].sum(), weights)
    assert not torch.equal(found[0], through[0])
    assert after.neurons["hidden"][0].requires_grad


def test_states_of_neurons_that_wait() -> None:
    """A state without steps to wait is refused by neurons that wait, and the other way around."""
    pixels = Population("pixels", 16)
    networks = [
        Network([pixels, cells], [Projection(pixels, cells)])
        for cells in (Population("cells", 3, LIF(1e-3)), Population("cells", 3, LIF(1e-3, t_refractory=1e-3)))
    ]
    states = [network(spikes())[1] for network in networks]
    for network, state, names in ((networks[0], states[1], "mem"), (networks[1], states[0], "mem, refractory")):
        with pytest.raises(InputError, match=f"population 'cells': state must be the tensors of {names}, got"):
            network(spikes(), state)


def pickled(network: Network) -> Network:
    """Return what comes back from a pickle."""
    found: Network = pickle.loads(pickle.dumps(network))  # noqa: S301  # made here
    return found


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_copies_of_networks(how: Callable[[Network], Network]) -> None:
    """A copy and a pickle of neurons that wait, learn and have time courses give the same bits."""
    torch.manual_seed(0)
    pixels, cells = Population("pixels", 16), Population("cells", 8, AdEx(t_refractory=1e-3))
    share, tau = torch.nn.Parameter(torch.full((8,), 0.9)), torch.nn.Parameter(torch.tensor(1e-3))
    out = Population("out", 8, LIF.from_beta(share, t_refractory=torch.arange(8) * 1e-4))
    parts = [
        ExpSynapses(Projection(pixels, cells), tau, reversal=20.0),
        AlphaSynapses(Projection(cells, out), 1e-3),
        Projection(pixels, out, name="direct"),
    ]
    network = Network([pixels, cells, out], parts)
    other, names = how(network), ("cells.mem", "out", "out.refractory")
    assert [*other.state_dict()] == [*network.state_dict()]
    found, expected = other(spikes(), record=names)[0], network(spikes(), record=names)[0]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert expected["out.refractory"].any()


def test_neurons_that_learn_in_a_network() -> None:
    """Time constants and thresholds are parameters of the network, and an optimiser changes them with the weights."""
    torch.manual_seed(0)
    tau, threshold = torch.nn.Parameter(torch.full((20,), 1e-3)), torch.nn.Parameter(torch.tensor(0.8))
    pixels, hidden = Population("pixels", 16), Population("hidden", 20, LIF(tau, None, 0.0, threshold))
    out = Population("out", 4, LI.from_beta(torch.nn.Parameter(torch.tensor(0.9))))
    network = Network([pixels, hidden, out], [Projection(pixels, hidden, format="nf4"), Projection(hidden, out)])
    names = dict(network.named_parameters())
    neurons = {name for name in names if name.startswith("populations")}
    assert neurons == {
        "populations.hidden.neuron.tau_mem",
        "populations.hidden.neuron.v_threshold",
        "populations.out.neuron.share_of_tau_mem",
    }
    with torch.no_grad():
        names["projections.pixels->hidden.synapses.weight"].mul_(5)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    before = {name: names[name].detach().clone() for name in neurons}
    network(spikes())[0]["out"].square().sum().backward()
    optimiser.step()
    for name in neurons:
        assert (names[name] != before[name]).all(), name
    config = q4.SessionConfig(device="cpu", activation_precision="exact")
    with torch.no_grad(), q4.Session(config) as session:
        trained, _ = network(spikes())
        pack_(network, session)
        torch.testing.assert_close(network(spikes())[0]["out"], trained["out"])
    assert {name for name, _ in network.named_parameters() if name.startswith("populations")} == neurons


def test_the_order_of_populations_does_not_matter() -> None:
    """Populations step in the order that their projections ask for, whichever order they are given in."""
    network, x = recurrent(), spikes()
    populations: Any = [*network.populations.values()]
    turned = Network(populations[::-1], [*network.projections.values()][::-1])
    assert torch.equal(network(x)[0]["out"], turned(x)[0]["out"])
    assert (network.inputs, network.outputs) == (("pixels",), ("out",))


def test_a_delay_in_steps() -> None:
    """A spike arrives as many steps later as the delay says."""
    for delay in range(4):
        pixels, out = Population("pixels", 1), Population("out", 1, LIF.from_beta(0.0, 0.5))
        network = Network([pixels, out], [Projection(pixels, out, delay=delay)])
        torch.nn.init.ones_(next(network.parameters()))
        x = torch.zeros(6, 1, 1)
        x[1] = 1
        assert network(x)[0]["out"].flatten().nonzero().flatten().tolist() == [1 + delay]


def test_training_in_four_bits_and_packing() -> None:
    """Straight-through training lowers the loss; the packed network gives the spikes of the trained one."""
    network = recurrent("nf4")
    x, target = spikes(8), torch.randint(4, (8,), generator=torch.Generator().manual_seed(2))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(network(x[:12])[0]["out"].mean(0), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(isinstance(item.synapses, STELinear) for item in network.projections.values())
    with torch.no_grad():
        trained, _ = network(x, record=("hidden",))
        config = q4.SessionConfig(device="cpu", activation_precision="exact")
        with q4.Session(config) as session:
            names = pack_(network, session).names
            assert names == [f"projections.{name}.synapses" for name in network.projections]
            packed, _ = network(x, record=("hidden",))
    assert (packed["hidden"] != trained["hidden"]).float().mean() < 1e-3  # kernels add in another order


@torch.no_grad()
@pytest.mark.parametrize("size", [64, 71, 69, 1])
def test_spikes_of_another_width_are_refused(size: int) -> None:
    """A projection of packed synapses refuses spikes that are not those of its source, which it fills up to blocks."""
    pixels, hidden = Population("pixels", 70, spikes=True), Population("hidden", 20, LIF.from_beta(0.9))
    projection = Projection(pixels, hidden, format="nf4")
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        pack_(projection, session)
        product = projection.for_run()
        assert product(torch.ones(3, 70)).shape == (3, 20)
        with pytest.raises(InputError, match="must be of shape"):
            product(torch.ones(3, size))


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_steps_ahead_have_the_bits_of_single_steps(precision: str) -> None:
    """A packed network gives in one call what a call for each step gives, rare and frequent inputs in turns."""
    torch.manual_seed(0)
    pixels, hidden = Population("pixels", 70, spikes=True), Population("hidden", 20, LIF.from_beta(0.9))
    network = Network([pixels, hidden], [Projection(pixels, hidden, format="nf4", bias=True)])
    with torch.no_grad():
        next(network.parameters()).mul_(3)
    rates = torch.tensor([0.05, 0.9, 0.0, 0.2]).repeat(10)[:, None, None]
    x = (torch.rand(40, 3, 70, generator=torch.Generator().manual_seed(1)) < rates).float()
    with torch.no_grad(), q4.Session(q4.SessionConfig(device="cpu", activation_precision=precision)) as session:
        pack_(network, session)
        whole, _ = network(x, record=("hidden", "hidden.mem"))
        state = None
        for step in range(40):
            found, state = network(x[step : step + 1], state, record=("hidden", "hidden.mem"))
            assert all(torch.equal(value[0], whole[name][step]) for name, value in found.items())
    assert whole["hidden"].sum() > 50


def test_several_inputs_and_state_by_name() -> None:
    """Inputs go by name; a CubaLIF's current and membrane can both be recorded."""
    a, b, out = Population("a", 2), Population("b", 3), Population("out", 4, CubaLIF(1e-3, 1e-3))
    network = Network([a, b, out], [Projection(a, out), Projection(b, out)])
    given = {"a": torch.rand(5, 2, 2), "b": torch.rand(5, 2, 3)}
    found, _ = network(given, record=("out.syn", "out.mem", "a"))
    assert [tuple(value.shape) for value in found.values()] == [(5, 2, 4), (5, 2, 4), (5, 2, 2)]
    assert torch.equal(found["a"], given["a"])
    with pytest.raises(InputError, match="mapping of inputs a, b"):
        network(given["a"])


def population(name: str, size: int = 3) -> Population:
    """Return a population of LIF neurons."""
    return Population(name, size, LIF(1e-3))


IN, A, B, C = Population("in", 3), population("a"), population("b"), population("c")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: Network([IN, A, B, C], [Projection(A, B), Projection(B, C), Projection(C, B)]),
            ("projections", "b->c->b"),
        ),
        (lambda: Network([IN, A], [Projection(A, A)]), ("projections", "a->a")),
        (lambda: Network([IN, A, population("a")], []), ("populations", "a")),
        (lambda: Network([IN, A, B], [Projection(A, B), Projection(A, B)]), ("projections", "a->b")),
        (lambda: Network([IN, A], [Projection(A, B)]), ("target", "b")),
        (lambda: Network([IN, A, population("b", 4)], [Projection(A, B)]), ("target", 3)),
        (lambda: Network([IN, A, Population("b", 3)], [Projection(A, B)]), ("target", "b")),
        (lambda: Network([A], []), ("populations", [])),
        (lambda: Projection(A, B, delay=-1), ("delay", -1)),
        (lambda: Population("a.b", 3), ("name", "a.b")),
        (lambda: Population("pop", 3), ("name", "pop")),  # torch's modules have such a method
        (lambda: Projection(A, B, name="a.b"), ("name", "a.b")),
        (lambda: Population("a", 0), ("size", 0)),
        (lambda: Population("a", 3, LIF(torch.ones(2))), ("neuron", "for 2")),
    ],
)
def test_refused_networks(build: Callable[[], object], said: tuple[str, object]) -> None:
    """A graph that can't step is refused as it is built; the error names population or projection."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert (caught.value.name, caught.value.value) == said


def test_an_unknown_format() -> None:
    """A projection in no format is a format error."""
    with pytest.raises(FormatError):
        Projection(A, B, format="nf3")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x[:, :, :5], "population 'pixels'"),
        (lambda x: x[0], "network"),
        (lambda x: x[:0], "network"),
        (lambda x: {"pixel": x}, "network"),
    ],
)
def test_refused_inputs(change: Callable[[Any], Any], what: str) -> None:
    """Input of another size or shape is an error that names the population."""
    with pytest.raises(InputError) as caught:
        recurrent()(change(spikes()))
    assert caught.value.what == what


def test_an_input_of_other_numbers_than_spikes() -> None:
    """With ``spikes=True`` anything but 0 and 1 is an error that names the population, whatever is recorded."""
    pixels, out = Population("pixels", 16, spikes=True), population("out")
    network = Network([pixels, out], [Projection(pixels, out)])
    x = spikes()
    x[7, 1, 2] = 0.5
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(InputError, match=r"'pixels': input must be 0 and 1.*0\.5"):
            network(x)


def test_a_population_that_changes_size() -> None:
    """State of a population of another size or kind is an error, and so are synapses that give another size."""
    _, state = recurrent(hidden=21)(spikes())
    with pytest.raises(InputError, match=r"population 'hidden': state must be of shape \[3, 20\]"):
        recurrent()(spikes(), state)
    pixels, x = Population("pixels", 16), spikes()
    one, two = (
        Network([pixels, cells], [Projection(pixels, cells)])
        for cells in (population("cells"), Population("cells", 3, CubaLIF(1e-3, 1e-3)))
    )
    for network, message in ((one, "mem, got '2 tensors'"), (two, "syn, mem, got '1 tensors'")):
        _, state = (two if network is one else one)(x)
        with pytest.raises(InputError, match=f"population 'cells': state must be the tensors of {message}"):
            network(x, state)
    network = recurrent()
    network.set_submodule("projections.hidden->out.synapses", torch.nn.Linear(20, 5))
    with pytest.raises(InputError, match="projection 'hidden->out'"):
        network(spikes())
    with pytest.raises(InputError, match="record"):
        network(spikes(), record=("out.spikes",))


def test_a_membrane_that_is_nan() -> None:
    """It is an error that names the population that it begins in; what was given stays as it was."""
    network, x = recurrent(), spikes()
    _, state = network(x)
    with torch.no_grad():
        network.get_parameter("projections.pixels->hidden.synapses.weight")[7] = torch.nan
    with pytest.raises(NonFiniteStateError) as caught:
        network(x, state)
    assert (caught.value.what, caught.value.name) == ("population 'hidden'", "mem")
    assert caught.value.value == "NaN or infinity in 1 of 20 neurons after step 59"
    assert torch.isfinite(state.neurons["hidden"][0]).all()
