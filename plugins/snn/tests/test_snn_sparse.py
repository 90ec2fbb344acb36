"""``SparseProjection``: what arrives, when, at what size, and what is refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_programs import SparseWeight
from q4_snn import LI, LIF, Network, Population, Projection, SparseProjection, spikegen

if TYPE_CHECKING:
    from pathlib import Path

SOURCES, TARGETS, SYNAPSES = 30, 50, 700
CELLS = Population("cells", TARGETS, LIF.from_beta(0.9, 100.0))


def draw(targets: int = TARGETS) -> dict[str, Any]:
    """Return random synapses."""
    random = torch.Generator().manual_seed(3)
    return {
        "source": torch.randint(SOURCES, (SYNAPSES,), generator=random),
        "target": torch.randint(targets, (SYNAPSES,), generator=random),
        "weight": 80 + 8 * torch.randn(SYNAPSES, generator=random),
        "delay": torch.randint(1, 6, (SYNAPSES,), generator=random),
        "sources": SOURCES,
        "targets": targets,
        "name": "E to I",
    }


@pytest.mark.parametrize("targets", [TARGETS, 1 << 16, (1 << 16) + 1])
def test_synapses_are_those_that_were_given(targets: int) -> None:
    """Each source has its synapses, with targets and delays exact and weights within half a level of their block."""
    given = draw(targets)
    projection = SparseProjection(**given)
    assert projection.synapses == SYNAPSES
    level = (given["weight"].max() - given["weight"].min()) / 15
    for source in range(SOURCES):
        target, weight, delay = projection.synapses_of(torch.tensor([source]))
        mine = given["source"] == source
        found = sorted(zip(target.tolist(), weight.tolist(), delay.tolist(), strict=True))
        wanted = [(given[name][mine]).tolist() for name in ("target", "weight", "delay")]
        assert sorted((item[0], item[2]) for item in found) == sorted(zip(wanted[0], wanted[2], strict=True))
        assert abs(float(weight.sum()) - sum(wanted[1])) <= len(found) * level * 0.51
    every = projection.synapses_of(torch.arange(SOURCES))[1]
    assert abs(float(every.mean() - given["weight"].mean())) < level / 10


def test_input_arrives_after_its_delay() -> None:
    """The input of each step is the dense sum of what was sent as many steps before as each synapse waits."""
    projection = SparseProjection(**draw())
    target, weight, delay = projection.synapses_of(torch.arange(SOURCES))
    source = projection.weight.with_places(torch.arange(SOURCES))[0]
    dense = torch.zeros(6, SOURCES, TARGETS, dtype=torch.float64)
    dense.index_put_((delay, source, target), weight.double(), accumulate=True)
    spikes = torch.rand((20, SOURCES), generator=torch.Generator().manual_seed(1)) < 0.2
    for step in range(20):
        projection.deliver(spikes[step].nonzero()[:, 0])
        arrived = projection.advance()
        wanted = sum(spikes[step + 1 - wait].double() @ dense[wait] for wait in range(1, min(step + 2, 6)))
        torch.testing.assert_close(arrived.double(), wanted, rtol=1e-5, atol=1e-3)
    assert projection.events == int((spikes * source.bincount(minlength=SOURCES)).sum())
    projection.reset()
    assert (projection.events, float(projection.advance().abs().sum())) == (0, 0)


def test_a_synapse_takes_less_than_2_7_bytes() -> None:
    """A byte of target, one of delay, half a byte of weight, an eighth of scale and offset, and the sources' share."""
    random = torch.Generator().manual_seed(0)
    counts, ones = torch.tensor([[100_000]]), torch.ones(1, 1)
    projection = SparseProjection.fixed_total_number(
        [500], counts, ones, 15 * ones, weight_spread=0.1, delay_spread=0.5, generator=random
    )
    assert projection.bytes_per_synapse == pytest.approx(2 + 0.5 + 4 / 32 + 12 * 500 / 100_000, abs=1e-3)
    assert "100000 synapses of 2.69 bytes" in str(projection)


def test_random_synapses_have_their_numbers() -> None:
    """Populations are joined by the numbers of synapses asked for; means and spreads are those asked for."""
    counts = torch.tensor([[0, 30_000], [20_000, 0]])
    weight, delay = torch.tensor([[0.0, -4.0], [1.0, 0.0]]), torch.tensor([[1.0, 8.0], [15.0, 1.0]])
    made = SparseProjection.fixed_total_number(
        [100, 60], counts, weight, delay, weight_spread=0.1, delay_spread=0.2,
        generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    first, others = (100, 159, 1.0, 15, 20_000), (0, 99, -4.0, 8, 30_000)
    for sources, wanted in ((torch.arange(100), first), (torch.arange(100, 160), others)):
        target, strength, steps = made.synapses_of(sources)
        low, high, mean, wait, count = wanted
        assert (int(target.min()), int(target.max()), len(target)) == (low, high, count)
        assert float(strength.mean()) == pytest.approx(mean, rel=0.01)
        assert float(strength.std()) == pytest.approx(abs(mean) * 0.1, rel=0.05)
        assert float(steps.float().mean()) == pytest.approx(wait, rel=0.01)


def test_random_synapses_of_one_population() -> None:
    """They join neurons of a network's population, and each delay may have steps on top."""
    counts, ones = torch.tensor([[900, 0], [300, 40]]), torch.ones(2, 2)
    options: dict[str, Any] = {"weight_spread": 0.1, "delay_spread": 0.5}

    def made(**more: Any) -> SparseProjection:
        draw = torch.Generator().manual_seed(3)
        return SparseProjection.fixed_total_number(
            [30, 10], counts, ones, 200 * ones, **options, generator=draw, **more
        )

    cells = Population("cells", 40, LIF(10e-3))
    plain, later = made(), made(later=3, population=cells)
    assert (later.source, later.target, later.name) == ("cells", "cells", "cells->cells")
    every = torch.arange(40)
    (target, weight, delay), other = plain.synapses_of(every), later.synapses_of(every)
    assert torch.equal(target, other[0])
    assert torch.equal(weight, other[1])
    assert torch.equal(delay.clamp(max=252) + 3, other[2])
    with pytest.raises(q4.ConfigError, match="population must be of 40 neurons"):
        made(population=Population("few", 39, LIF(10e-3)))
    for wrong in (-1, 255, True, 1.0):
        with pytest.raises(q4.InputError, match="later must be"):
            made(later=wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": torch.full((SYNAPSES,), SOURCES)}, "source must be in 0 … 29"),
        ({"target": torch.full((SYNAPSES,), -1)}, "target must be in 0 … 49"),
        ({"delay": torch.zeros(SYNAPSES, dtype=torch.int64)}, "delay must be in 1 … 255"),
        ({"delay": torch.ones(3, dtype=torch.int64)}, "delay must be int64"),
        ({"target": torch.zeros(SYNAPSES)}, "target must be int64"),
        ({"weight": torch.full((SYNAPSES,), torch.nan)}, "weight must be a float32 vector of finite numbers"),
        ({"weight": torch.nn.Parameter(torch.ones(SYNAPSES))}, "weight must be without gradients"),
    ],
)
def test_synapses_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    """Indices and delays out of range, other dtypes and NaN are typed errors that name the projection."""
    with pytest.raises(q4.InputError, match=f"'E to I': {message}"):
        SparseProjection(**draw() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "E.I"}, "projection: name must be a word without"),
        ({"name": "keys"}, "projection: name must be none that torch's"),
        ({"sources": 0}, "sources must be a population, or a positive whole number, got 0"),
        ({"targets": 50.0}, "targets must be a population, or a positive whole number, got 50.0"),
    ],
)
def test_names_and_sizes_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    """A name that no network can keep, and sizes that are no number of neurons, are typed errors."""
    with pytest.raises(q4.ConfigError, match=message):
        SparseProjection(**draw() | change)


@pytest.mark.parametrize("spiking", [torch.tensor([SOURCES]), torch.tensor([-1]), torch.tensor([0.5])])
def test_a_spike_of_nobody_is_refused(spiking: torch.Tensor) -> None:
    """A source that is not there is a typed error, and nothing is delivered."""
    projection = SparseProjection(**draw())
    with pytest.raises(q4.InputError, match="spiking"):
        projection.deliver(spiking)
    assert float(projection.ring.abs().sum()) == 0


@pytest.mark.parametrize(("count", "delay", "what"), [(0, 1.0, "counts"), (-1, 1.0, "counts"), (5, 0.1, "delay")])
def test_random_synapses_that_cannot_be_are_refused(count: int, delay: float, what: str) -> None:
    """No synapse, a negative number of them, and a mean delay below a step are typed errors."""
    options: dict[str, Any] = {"weight_spread": 0.1, "delay_spread": 0.0, "generator": torch.Generator()}
    with pytest.raises(q4.InputError, match=f"{what} must be"):
        SparseProjection.fixed_total_number(
            [3], torch.tensor([[count]]), torch.ones(1, 1), torch.full((1, 1), delay), **options
        )


def network() -> Network:
    """Return inputs, cells that they reach by sparse synapses and that reach themselves, and a dense read-out."""
    inputs, out = Population("inputs", SOURCES, spikes=True), Population("out", 4, LI(1e-3))
    back = draw() | {"sources": CELLS, "targets": CELLS, "name": None}
    back["source"] = back["source"] + 20
    return Network(
        [inputs, CELLS, out],
        [
            SparseProjection(**draw() | {"sources": inputs, "targets": CELLS, "name": None}),
            SparseProjection(**back),
            Projection(CELLS, out),
        ],
    )


def test_a_network_with_sparse_synapses() -> None:
    """Each sample's cells get what each projection delivers by itself, recurrent ones too, bit for bit."""
    net = network()
    x = spikegen.rate(torch.full((3, SOURCES), 0.1), 30, generator=torch.Generator().manual_seed(1))
    assert net.order == ("inputs", "cells", "out")
    with torch.no_grad():
        found, state = net(x, record=("cells", "cells.mem"))
        parts: Any = net.projections
        first, back, lif = parts["inputs->cells"], parts["cells->cells"], CELLS.neuron
        assert isinstance(lif, LIF)
        for sample in range(3):
            mem, fired = None, torch.zeros(TARGETS)
            for projection in (first, back):
                projection.reset()
            for step in range(30):
                current = first.advance() + back.advance()
                fired, mem = lif(current, mem)
                assert torch.equal(found["cells"][step, sample], fired)
                assert torch.equal(found["cells.mem"][step, sample], mem)
                first.deliver(x[step, sample].nonzero()[:, 0])
                back.deliver(fired.nonzero()[:, 0])
    assert 0.02 < found["cells"].mean() < 0.9
    assert state.clock == 30


def test_sparse_state_goes_on() -> None:
    """Two calls, and single steps, give what one call gives; what is on its way is part of the state that stays."""
    net = network()
    x = spikegen.rate(torch.full((2, SOURCES), 0.1), 20, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole, _ = net(x, record=("cells", "out"))
        first, state = net(x[:7], record=("cells", "out"))
        for _ in range(2):  # the state that a call was given is not changed
            second, _ = net(x[7:], state, record=("cells", "out"))
            for name, value in whole.items():
                assert torch.equal(torch.cat([first[name], second[name]]), value)
        for step in range(7, 20):
            given, state = net.step({"inputs": x[step]}, state)
            assert torch.equal(given["cells"], whole["cells"][step])
        with pytest.raises(q4.InputError, match=r"'inputs->cells': state must be of shape \[6, 2, 50\]"):
            net(x, type(state)(state.neurons, state.history))
        with pytest.raises(q4.InputError, match=r"projection 'other': state must be of shape None"):
            net(x, type(state)(state.neurons, state.history, {**state.coming, "other": torch.zeros(1)}))


def test_sparse_synapses_do_not_train() -> None:
    """Gradients that would end at them are refused, as are sources that give other numbers than spikes."""
    net = network()
    x = torch.ones(3, 1, SOURCES)
    with pytest.raises(q4.InputError, match=r"'inputs->cells': spikes .* don't train.*no_grad"):
        net(x.requires_grad_())
    with pytest.raises(q4.ConfigError, match="sources must be a population of spikes"):
        SparseProjection(**draw() | {"sources": Population("plain", SOURCES), "targets": CELLS})
    with pytest.raises(q4.InputError, match="'inputs': input must be 0 and 1 alone"), torch.no_grad():
        net.step({"inputs": x[0] / 2})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_spikes_of_other_dtypes(dtype: torch.dtype) -> None:
    """Spikes of another dtype get the float32 currents, rounded to it; a network of it keeps its weights."""
    projection = SparseProjection(**draw())
    spikes = (torch.rand((9, 2, SOURCES), generator=torch.Generator().manual_seed(4)) < 0.3).float()
    other = copy.deepcopy(projection).to(dtype)
    rings = projection.coming(2), other.coming(2)
    for step, given in enumerate(spikes):
        wanted, found = projection(given, rings[0], step), other(given.to(dtype), rings[1], step)
        assert found.dtype is dtype
        assert torch.equal(found, wanted.to(dtype))
    assert torch.equal(*rings)
    net = network()
    x = spikegen.rate(torch.full((2, SOURCES), 0.1), 10, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = net(x, record=("cells",))[0]["cells"]
        if dtype is torch.float64:
            net.double()
            assert torch.equal(net(x.double(), record=("cells",))[0]["cells"], wanted.double())


def test_loaded_synapses_are_checked() -> None:
    """A state of another module's is taken; what its numbers make illegal is a typed error at the next use."""
    projection, other = SparseProjection(**draw()), SparseProjection(**draw() | {"weight": torch.ones(SYNAPSES)})
    other.load_state_dict(projection.state_dict())
    for copied in (other, copy.deepcopy(projection), pickle.loads(pickle.dumps(projection))):  # noqa: S301  # our own
        pairs = zip(copied.weight.tensors(), projection.weight.tensors(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
        assert all(one is two for one, two in zip(copied.weight.tensors(), copied.packed.buffers(), strict=True))
    state = {name: value.clone() for name, value in projection.state_dict().items()}
    state["packed.gaps"][1:] = 255
    other.load_state_dict(state)
    with pytest.raises(q4.InputError, match="gaps must be"):
        other.deliver(torch.tensor([1]))


def test_synapses_that_are_there_already(tmp_path: Path) -> None:
    """A weight of a file is a projection without a copy; one of other sizes is refused."""
    given = SparseProjection(**draw())
    weight = SparseWeight.load(given.weight.save(tmp_path / "synapses.safetensors"))
    made = SparseProjection.of(weight, sources=SOURCES, targets=TARGETS)
    assert made.weight is weight
    for projection in (given, made):
        projection.deliver(torch.arange(SOURCES))
    assert torch.equal(given.ring, made.ring)
    with pytest.raises(q4.InputError, match="weight must be of 30 sources and 51 targets"):
        SparseProjection.of(weight, sources=SOURCES, targets=TARGETS + 1)


PIECES = """
import torch
from q4_snn import SparseProjection

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def make(size, count):
    return SparseProjection.fixed_total_number(
        [size], torch.tensor([[count]]), torch.ones(1, 1), torch.full((1, 1), 15.0), weight_spread=0.1,
        delay_spread=0.5, generator=torch.Generator().manual_seed(0))

make(2_000, 1_000_000)
before = peak()
made = make(7_000, 10_000_000)
assert made.synapses == 10_000_000
print(peak() - before - made.weight.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read as Linux states them")
def test_random_synapses_are_made_in_pieces() -> None:
    """Ten million synapses grow a process that made some by no more than what is stored of them and a little."""
    found = subprocess.run([sys.executable, "-c", PIECES], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 32 << 20  # their float32 weights alone are 40 MB
