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
OPTIONS = {"dt", "reset", "threshold_inclusive", "reset_delay", "surrogate", "t_refractory"}


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
        (lambda: LIF.from_beta(torch.nn.Parameter(torch.tensor([0.5, 1.0]))), "beta"),
        (lambda: LIF(1e-3, v_reset=torch.nn.Parameter(torch.tensor(0.1))), "v_reset"),
        (lambda: make("lif", tau_mem="fast"), "tau_mem"),
    ],
)
def test_refused_parameters(build: Callable[[], object], name: str) -> None:
    """A parameter that is not legal is an error that names it."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.name == name


REFRACTORY: dict[str, Any] = {"dt": 1e-3, "t_refractory": 4e-3}


@pytest.mark.parametrize("reset", ["subtract", "value", "none"])
@pytest.mark.parametrize("kind", ["lif", "cuba", "if", "alif"])
def test_refractory_time(kind: str, reset: Any) -> None:
    """After a spike a membrane stays where the reset left it, for as many steps; the rest of the neuron goes on."""
    x, options = currents() * 3, {**REFRACTORY, "reset": reset}
    kinds: dict[str, Callable[[], torch.nn.Module]] = {
        "lif": lambda: LIF(5e-3, v_reset=-0.2, **options),
        "cuba": lambda: CubaLIF(5e-3, 2e-3, v_reset=-0.2, **options),
        "if": lambda: IF(v_reset=-0.2, **options),
        "alif": lambda: ALIF(5e-3, 50e-3, 0.3, v_reset=-0.2, **options),
    }
    neuron: Any = kinds[kind]()
    beta, alpha = (1.0 if kind == "if" else 0.8), 0.5
    syn, adapt, mem, left = (torch.zeros_like(x[0]) for _ in range(4))
    state: tuple[torch.Tensor, ...] = ()
    total = 0.0
    for current in x:
        syn = alpha * syn + current
        moved = beta * mem + (syn if kind == "cuba" else current)
        fired = ((moved > 1.0 + (0.3 * adapt if kind == "alif" else 0.0)) & (left == 0)).double()
        mem = torch.where(left > 0, mem, {"subtract": moved - fired, "none": moved}.get(reset, moved))
        mem = torch.where(fired > 0, -0.2, mem) if reset == "value" else mem
        left = torch.where(fired > 0, 4.0, (left - 1).clamp(min=0))
        adapt = 0.98 * adapt + fired
        spikes, *after = neuron(current, *state)
        state = tuple(after)
        assert torch.equal(spikes, fired)
        named = dict(zip(neuron.states, state, strict=True))
        assert torch.equal(named["refractory"], left)
        for name, value in (("mem", mem), ("syn", syn), ("adapt", adapt)):
            if name in named:
                torch.testing.assert_close(named[name], value, rtol=1e-12, atol=1e-12)
        total += float(spikes.sum())
    assert 0.5 * x[0].numel() * STEPS / 5 < total <= x[0].numel() * STEPS / 5 + x[0].numel()


def test_refractory_time_of_each_neuron() -> None:
    """Neurons wait their own numbers of steps, to the nearest; one that waits none is as without the option."""
    x = torch.full((40, 2, 4), 5.0)
    neuron = LIF(5e-3, dt=1e-3, reset="value", t_refractory=torch.tensor([0.0, 1e-3, 1.4e-3, 1.6e-3]))
    found, (_, left) = run(neuron, x)
    assert found[:, 0].sum(0).tolist() == [40, 20, 20, 14]
    assert left.dtype is torch.float32
    assert torch.equal(found[..., 0], run(LIF(5e-3, dt=1e-3, reset="value"), x[..., 0])[0])
    assert LIF(5e-3, t_refractory=0.0).states == ("mem",)
    assert neuron.states == ("mem", "refractory")


def test_gradients_in_a_refractory_time() -> None:
    """What comes while a neuron waits has no gradient; what came before and after has that of the membrane."""
    x = torch.tensor([[1.5], [0.3], [0.4], [0.2], [0.1]], dtype=torch.float64, requires_grad=True)
    spikes, (mem, _) = run(LIF.from_beta(0.5, t_refractory=2e-4), x)
    assert spikes.flatten().tolist() == [1, 0, 0, 0, 0]
    (found,) = torch.autograd.grad(mem.sum(), x, retain_graph=True)
    assert found.flatten().tolist() == [0.25, 0, 0, 0.5, 1]
    (found,) = torch.autograd.grad(spikes[1:3].sum(), x)
    assert not found.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_refractory_time_that_a_dtype_counts(dtype: torch.dtype) -> None:
    """A count of steps is exact in every dtype; where it would not be, the dtype is refused."""
    most = int(2 / torch.finfo(dtype).eps)
    x = torch.zeros(3, dtype=dtype)
    for steps in (most, most + 1):
        neuron = LIF(1.0, dt=0.5, t_refractory=steps * 0.5)
        if steps > most:
            with pytest.raises(InputError, match=f"counts {steps} refractory steps; this one counts {most}"):
                neuron(x)
            continue
        _, _, left = neuron(x + 9)
        assert left.tolist() == [most] * 3
        assert neuron(x, x, left)[2].tolist() == [most - 1] * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"t_refractory": -1e-3}, "t_refractory"),
        ({"t_refractory": 4e-5}, "t_refractory"),
        ({"t_refractory": float("nan")}, "t_refractory"),
        ({"t_refractory": "2 ms"}, "t_refractory"),
        ({"t_refractory": torch.ones(2, 2)}, "t_refractory"),
        ({"t_refractory": torch.nn.Parameter(torch.ones(2))}, "t_refractory"),
        ({"t_refractory": torch.ones(2, requires_grad=True)}, "t_refractory"),
        ({"t_refractory": 1e-3, "reset_delay": True}, "reset_delay"),
    ],
)
def test_refused_refractory_times(options: dict[str, Any], name: str) -> None:
    """A time below 0, of less than half a step, that would learn, or with a delayed reset is an error."""
    with pytest.raises(ConfigError) as caught:
        LIF(1e-2, **options)
    assert caught.value.name == name


NEEDED = {"tau_mem": 0.1, "tau_syn": 0.1, "tau_adapt": 0.1, "adaptation": 0.1}
LEARNED = [
    (neuron, name)
    for neuron in (LIF, CubaLIF, IF, LI, ALIF)
    for name in inspect.signature(neuron).parameters
    if name not in OPTIONS
]


@pytest.mark.parametrize(("neuron", "name"), LEARNED)
@pytest.mark.parametrize("size", [None, 3])
def test_parameters_learn(neuron: Any, name: str, size: int | None) -> None:
    """Each parameter of each neuron learns as an ``nn.Parameter``: a membrane's gradient is what differences show.

    An adaptation acts by spikes alone, which have a surrogate's gradient.
    """
    needed = {key: value for key, value in NEEDED.items() if key in inspect.signature(neuron).parameters}
    value = 40.0 if name == "r" else 0.3
    parameter = torch.nn.Parameter(torch.full(() if size is None else (size,), value, dtype=torch.float64))
    options = {"reset": "value"} if name == "v_reset" else {}
    made = neuron(**needed | {name: parameter}, **options, dt=0.02)
    assert dict(made.named_parameters())[name] is parameter
    assert [*made.state_dict()] == [name]
    assert made.size == size
    x = currents(3)[:6] * 5
    spikes, _ = run(made, x)
    assert bool((spikes == 1).any()) is (neuron is not LI)
    if name == "adaptation":
        (gradient,) = torch.autograd.grad(spikes.sum(), parameter)
        assert bool((gradient != 0).all())
    else:
        assert torch.autograd.gradcheck(lambda _: run(made, x)[1][-1].sum(), parameter)


def test_a_time_constant_that_learns_to_nothing() -> None:
    """One that falls below dt counts as dt, as no step may overshoot; a share outside of 0 … 1 is clipped."""
    tau, beta = torch.nn.Parameter(torch.tensor(1e-3)), torch.nn.Parameter(torch.tensor([0.5, 0.5]))
    lif, other = LIF(tau, 5.0, dt=1e-3), LIF.from_beta(beta)
    with torch.no_grad():
        tau.fill_(-1.0)
        beta.copy_(torch.tensor([-0.1, 1.1]))
        assert lif(torch.ones(1), torch.ones(1))[1].tolist() == [
            pytest.approx(4.0)
        ]  # 0 · 1 + 5 · 1, of which a spike takes 1
        assert torch.as_tensor(other.beta).tolist() == [0.0, 1.0]
        assert torch.as_tensor(other.tau_mem).tolist() == [pytest.approx(1e-4), float("inf")]
    assert [*other.state_dict()] == ["share_of_tau_mem"]


@pytest.mark.parametrize("value", [torch.full((3,), 0.5, requires_grad=True), torch.ones((), requires_grad=True) * 2])
def test_gradients_that_would_get_lost(value: torch.Tensor) -> None:
    """A tensor that asks for gradients but is no ``nn.Parameter`` is refused, and so is a surrogate's number."""
    builds: list[tuple[Any, dict[str, Any], str]] = []
    for neuron, name in LEARNED:
        needed = {key: number for key, number in NEEDED.items() if key in inspect.signature(neuron).parameters}
        builds.append((neuron, {**needed, name: value}, name))
    builds += [(surrogate.atan, {"alpha": value}, "alpha"), (surrogate.sigmoid, {"slope": value}, "slope")]
    builds.append((surrogate.fast_sigmoid, {"slope": value}, "slope"))
    builds.append((LIF.from_beta, {"beta": value}, "beta"))
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
        (lambda: LIF(1e-3)(torch.ones(2), torch.ones(2), torch.ones(2)), "state"),
        (lambda: LIF(1e-3, t_refractory=1e-3)(torch.ones(2), torch.ones(2)), "refractory"),
    ]
    for call, name in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.name == name


@pytest.mark.parametrize("name", ["lif", "cuba_lif", "li", "if", "alif", "adex", "izhikevich"])
def test_layer_types(name: str) -> None:
    """The kit's cases of layers pass for each neuron."""
    results = [run_case(case, LayerSubject(name)) for case in layer_cases()]
    assert {result.outcome for result in results} == {Outcome.PASS}, results
