"""Neurons against the recurrences that NIR and snnTorch state, in float64; their gradients; what they refuse."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

from q4_conformance import Outcome, layer_cases, run_case
from q4_conformance.subjects.layer_type import LayerSubject
from q4_nn import make
from q4_snn import ALIF, IF, LI, LIF, CubaLIF, spikegen, surrogate
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 60
OPTIONS = {"dt", "reset", "threshold_inclusive", "reset_delay", "surrogate"}


def currents(size: int = 7, seed: int = 0) -> torch.Tensor:
    """Return random currents [T, 3, size] in float64, under which neurons fire now and then."""
    return torch.rand(STEPS, 3, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.6


def run(neuron: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return what a neuron gives in each step, and its last state."""
    state: tuple[torch.Tensor, ...] = ()
    given = []
    for current in x:
        out, *rest = neuron(current, *state)
        state = tuple(rest)
        given.append(out)
    return torch.stack(given), state


PARAMETERS: dict[str, Any] = {"r": 2.0, "v_leak": 0.1, "v_threshold": 0.7, "v_reset": -0.2}


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("reset", ["subtract", "value", "none"])
def test_lif(reset: Any, delayed: bool) -> None:
    """Spikes and membranes are those of a loop over NIR's equation, one number at a time."""
    x = currents()
    neuron = LIF(5e-3, dt=1e-3, reset=reset, reset_delay=delayed, **PARAMETERS)
    found, (mem,) = run(neuron, x)
    expected = torch.zeros_like(x)
    last = torch.zeros_like(mem)
    for row in range(x.shape[1]):
        for column in range(x.shape[2]):
            v, fired = 0.1, False
            for step in range(STEPS):
                if delayed and fired and reset == "value":
                    v = -0.2
                drop = 0.7 if delayed and fired and reset == "subtract" else 0.0
                v = v + 1e-3 / 5e-3 * (0.1 - v + 2.0 * float(x[step, row, column])) - drop
                fired = v > 0.7
                expected[step, row, column] = fired
                if fired and not delayed:
                    v = {"subtract": v - 0.7, "value": -0.2, "none": v}[reset]
            last[row, column] = v
    assert 20 < expected.sum() < expected.numel()
    assert torch.equal(found, expected)
    torch.testing.assert_close(mem, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.3, 1.0])
@pytest.mark.parametrize("inclusive", [False, True])
def test_bits_without_gradients(dtype: torch.dtype, threshold: float, inclusive: bool) -> None:
    """Spikes and membranes have the same bits whether or not gradients are recorded, at the threshold too."""
    neuron = LIF.from_beta(0.5, threshold, threshold_inclusive=inclusive)
    x = currents().to(dtype)
    x[0, :, 0] = threshold
    spikes, (mem,) = run(neuron, x)
    with torch.no_grad():
        again, (same,) = run(neuron, x)
    assert spikes[0, :, 0].tolist() == [float(inclusive)] * 3
    assert torch.equal(spikes, again)
    assert torch.equal(mem, same)
    assert again.dtype is dtype


def test_cuba_lif() -> None:
    """The synaptic current decays and charges the membrane in the same step."""
    x = currents()
    neuron = CubaLIF(5e-3, 2e-3, dt=1e-3, w_in=1.5, **PARAMETERS)
    found, (syn, mem) = run(neuron, x)
    i, v = torch.zeros_like(syn), torch.full_like(mem, 0.1)
    for step in range(STEPS):
        i = i + 0.5 * (-i + 1.5 * x[step])
        v = v + 0.2 * (0.1 - v + 2.0 * i)
        fired = (v > 0.7).double()
        assert torch.equal(found[step], fired)
        v = v - 0.7 * fired
    assert found.sum() > 20
    torch.testing.assert_close((syn, mem), (i, v), rtol=1e-12, atol=1e-12)


def test_integrators() -> None:
    """An LI gives its membrane, an IF sums what comes, both by NIR's equations."""
    x = currents()
    found, (mem,) = run(LI(5e-3, 2.0, 0.1, dt=1e-3), x)
    v = torch.full_like(mem, 0.1)
    for current in x:
        v = v + 0.2 * (0.1 - v + 2.0 * current)
    torch.testing.assert_close(mem, v, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[-1], mem)
    spikes, (mem,) = run(IF(500.0, 0.7, dt=1e-3), x)
    torch.testing.assert_close(mem + 0.7 * spikes.sum(0), 0.5 * x.sum(0), rtol=1e-12, atol=1e-12)


def test_adaptation() -> None:
    """Each spike raises the threshold, which falls back; so an adaptive neuron fires less under the same current."""
    x = torch.full((200, 1, 1), 0.5, dtype=torch.float64)
    plain, _ = run(LIF(5e-3, dt=1e-3), x)
    found, (adapt, _) = run(ALIF(5e-3, 50e-3, 0.3, dt=1e-3), x)
    assert 5 < found.sum() < plain.sum()
    times = found.flatten().nonzero().flatten().tolist()
    assert float(adapt) == pytest.approx(sum(0.98 ** (199 - time) for time in times), rel=1e-12)
    assert times[1] - times[0] <= times[-1] - times[-2]


def test_parameters_for_each_neuron() -> None:
    """A parameter [n] gives each neuron what a layer of its own number gives it."""
    x = currents(2).float()
    both, _ = run(LIF(torch.tensor([2e-3, 9e-3]), v_threshold=torch.tensor([0.5, 0.9]), dt=1e-3), x)
    for index, (tau, threshold) in enumerate(((2e-3, 0.5), (9e-3, 0.9))):
        one, _ = run(LIF(tau, v_threshold=threshold, dt=1e-3), x[..., index : index + 1])
        assert torch.equal(both[..., index : index + 1], one)


def test_shares_of_snntorch() -> None:
    """A neuron made by beta has it, and one unit of current adds exactly 1."""
    assert LIF.from_beta(0.9).beta == pytest.approx(0.9, rel=1e-15)
    assert LIF.from_beta(0.9)(torch.ones(1))[1].item() == 1.0
    found = CubaLIF.from_alpha_beta(0.5, 0.0)
    assert (found.alpha, found.beta) == (0.5, 0.0)


@pytest.mark.parametrize("inclusive", [False, True])
def test_a_membrane_at_the_threshold(inclusive: bool) -> None:
    """Exactly at the threshold a neuron fires only if that is inclusive."""
    assert bool(LIF.from_beta(0.5, threshold_inclusive=inclusive)(torch.ones(1))[0]) is inclusive


def _primitive_atan(x: torch.Tensor) -> torch.Tensor:
    return torch.atan(torch.pi * x) / torch.pi


@pytest.mark.parametrize(
    ("made", "primitive"),
    [
        (surrogate.atan(2.0), _primitive_atan),
        (surrogate.fast_sigmoid(10.0), lambda x: x / (1 + 10.0 * x.abs())),
        (surrogate.sigmoid(10.0), lambda x: torch.sigmoid(10.0 * x)),
        (surrogate.straight_through(), lambda x: x),
    ],
)
def test_surrogates(made: surrogate.Surrogate, primitive: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Forward is a step; the gradient is the derivative of the smooth function that the surrogate stands for."""
    x = torch.linspace(-1, 1, 41, dtype=torch.float64, requires_grad=True)
    spikes = made(x)
    assert torch.equal(spikes, (x > 0).double())
    (found,) = torch.autograd.grad(spikes.sum(), x)
    (expected,) = torch.autograd.grad(primitive(x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_through_time() -> None:
    """A membrane's gradient to an earlier current is beta to the number of steps: a reset carries none."""
    x = torch.full((5, 1), 0.9, dtype=torch.float64, requires_grad=True)
    spikes, (mem,) = run(LIF.from_beta(0.8), x)
    assert spikes.sum() > 0
    (found,) = torch.autograd.grad(mem.sum(), x)
    torch.testing.assert_close(found[:, 0], 0.8 ** torch.arange(4, -1, -1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: LIF(0.0), "tau_mem"),
        (lambda: LIF(1e-5), "tau_mem"),
        (lambda: LIF(float("nan")), "tau_mem"),
        (lambda: LIF(1e-3, dt=0.0), "dt"),
        (lambda: LIF(1e-3, v_threshold=torch.tensor([1.0, float("inf")])), "v_threshold"),
        (lambda: LIF(torch.ones(2), v_threshold=torch.ones(3)), "v_threshold"),
        (lambda: LIF(1e-3, reset="zero"), "reset"),  # type: ignore[arg-type]  # the point
        (lambda: LIF.from_beta(1.0), "beta"),
        (lambda: make("lif", tau_mem="fast"), "tau_mem"),
    ],
)
def test_refused_parameters(build: Callable[[], object], name: str) -> None:
    """A parameter that is not legal is an error that names it."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.name == name


@pytest.mark.parametrize("value", [torch.nn.Parameter(torch.full((3,), 0.5)), torch.ones((), requires_grad=True)])
def test_parameters_that_would_learn(value: torch.Tensor) -> None:
    """Each parameter of each neuron, and a surrogate's number, is refused where it asks for gradients."""
    needed = {"tau_mem": 0.1, "tau_syn": 0.1, "tau_adapt": 0.1, "adaptation": 0.1}
    builds: list[tuple[Any, dict[str, Any], str]] = []
    for neuron in (LIF, CubaLIF, IF, LI, ALIF):
        names = [name for name in inspect.signature(neuron).parameters if name not in OPTIONS]
        given = {name: needed[name] for name in names if name in needed}
        builds += [(neuron, {**given, name: value}, name) for name in names]
        assert len(names) >= 3
    builds += [(surrogate.atan, {"alpha": value}, "alpha"), (surrogate.sigmoid, {"slope": value}, "slope")]
    builds.append((surrogate.fast_sigmoid, {"slope": value}, "slope"))
    builds.append((LIF.from_beta, {"beta": 0.5, "v_threshold": value}, "v_threshold"))
    for build, arguments, name in builds:
        with pytest.raises(ConfigError) as caught:
            build(**arguments)
        assert caught.value.name == name
    assert LIF(value.detach()).size == (3 if value.dim() else None)


def test_numbers_that_are_not_finite() -> None:
    """NaN in what ``delta`` is given is an error, as in what the other generators are given."""
    for make_spikes in (spikegen.delta, lambda x: spikegen.rate(x, 3), lambda x: spikegen.latency(x, 3)):
        with pytest.raises(InputError) as caught:
            make_spikes(torch.tensor([0.5, float("nan"), 0.1]))
        assert caught.value.name == "x"


def test_refused_states() -> None:
    """A state of another shape, or half a state, and currents for another number of neurons are errors."""
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: LIF(1e-3)(torch.ones(2, 3), torch.ones(2, 4)), "mem"),
        (lambda: CubaLIF(1e-3, 1e-3)(torch.ones(2), torch.ones(2)), "mem"),
        (lambda: LIF(torch.ones(3))(torch.ones(2, 4)), "x"),
    ]
    for call, name in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.name == name


@pytest.mark.parametrize("name", ["lif", "cuba_lif", "li", "if", "alif"])
def test_layer_types(name: str) -> None:
    """The kit's cases of layers pass for each neuron."""
    results = [run_case(case, LayerSubject(name)) for case in layer_cases()]
    assert {result.outcome for result in results} == {Outcome.PASS}, results
