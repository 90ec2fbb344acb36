"""Networks of actors give what one process gives, whoever they are, late, killed or resumed."""

from __future__ import annotations

import copy
import sys
from concurrent import futures
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import Mock

import pytest
import torch
from pretended_driver import GB10, accept_pretended, pretend

import q4core as q4
from q4_actors import ActorSystem, MutableMode
from q4_nn import STELinear, pack_
from q4_snn import (
    LI,
    LIF,
    STDP,
    CubaLIF,
    Network,
    NonFiniteStateError,
    Poisson,
    Population,
    Projection,
    Recorder,
    SparseProjection,
    spikegen,
)
from q4_snn.actors import ActorNetwork
from q4_snn.engine import PopulationProgram
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECORD = ("a", "a.mem", "b", "b.syn", "out")
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")


@pytest.fixture
def network() -> Iterator[Network]:
    """Give a packed network with a cycle, delays, float synapses too, and a population that reads another twice."""
    torch.manual_seed(0)
    pixels, a = Population("pixels", 40, spikes=True), Population("a", 64, LIF.from_beta(0.9))
    b, out = Population("b", 64, CubaLIF(1e-3, 5e-4, v_leak=0.1)), Population("out", 5, LI(1e-3))
    projections = [
        Projection(pixels, a, format="nf4", bias=True, delay=1),
        Projection(a, b, format="nf4"),
        Projection(b, a, format="nf4", delay=2),
        Projection(a, b, delay=3, name="late"),
        Projection(b, out),
    ]
    made = Network([pixels, a, b, out], projections)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        pack_(made, session)
        yield made


def events(steps: int = 25) -> torch.Tensor:
    """Return random spikes [T, 2, 40]."""
    return spikegen.rate(torch.full((2, 40), 0.3), steps, generator=torch.Generator().manual_seed(1))


def expect_same(found: dict[str, torch.Tensor], network: Network, x: torch.Tensor) -> None:
    """Expect the bits of the network in one process."""
    with torch.no_grad():
        expected, _ = network(x, record=RECORD)
    assert 0.02 < expected["b"].mean() < 0.9
    for name in RECORD:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("actors", [1, 2, 3])
def test_threads(network: Network, actors: int) -> None:
    """One, two or three actors give the bits of the network, in two runs as in one."""
    with ActorSystem("threads") as system:
        crew = ActorNetwork(network, system, batch=2, actors=actors)
        parts = [crew(events()[:9], RECORD), crew(events()[9:], RECORD)]
        assert crew.clock == 25
    expect_same({name: torch.cat([part[name] for part in parts]) for name in RECORD}, network, events())


def test_a_chunk_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of a cycle wait for each other within one call for a chunk; numbers are read once they are there."""
    counts, run = [], PopulationProgram.run

    def counted(self: PopulationProgram, *arguments: Any, **options: Any) -> int:
        done = run(self, *arguments, **options)
        counts.append(done)
        return done

    monkeypatch.setattr(PopulationProgram, "run", counted)
    torch.manual_seed(0)
    pixels, a = Population("pixels", 64), Population("a", 64, LIF.from_beta(0.9))
    b = Population("b", 64, LIF.from_beta(0.9))
    out = Population("out", 5, LI(1e-3))
    into = Projection(pixels, a, format="nf4"), Projection(a, b, format="nf4", delay=1)
    network = Network(
        [pixels, a, b, out], [*into, Projection(b, a, format="nf4", delay=1), Projection(b, out, format="nf4")]
    )
    x = 8 * torch.rand(96, 2, 64, generator=torch.Generator().manual_seed(1))
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session, torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)
        pack_(network, session)
        with ActorSystem("threads") as system:
            crew = ActorNetwork(network, system, batch=2, actors=2, chunk=32)
            found = crew(x, ("a", "b.mem", "out"))
        monkeypatch.undo()
        assert sum(counts) == 2 * 96
        assert len(counts) <= 2 * 2 * 3  # three chunks of two actors; who is late for long goes on by another call
        expected, _ = network(x, record=("a", "b.mem", "out"))
    assert 0.02 < expected["a"].mean() < 0.9
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@linux
@pytest.mark.slow
def test_killed_processes(network: Network) -> None:
    """Processes that are killed in between are restarted, and the bits are the same."""
    with ActorSystem("processes", restarts=10) as system:
        crew = ActorNetwork(network, system, batch=2, actors=2)
        parts = []
        for part in events(12).split(4):
            next(iter(system.actors.values())).kill()
            parts.append(crew(part, RECORD))
    expect_same({name: torch.cat([part[name] for part in parts]) for name in RECORD}, network, events(12))


def test_resumed(network: Network, tmp_path: Path) -> None:
    """A checkpoint between two runs holds everything: another system goes on from it, bit for bit."""
    with ActorSystem("threads") as system:
        crew = ActorNetwork(network, system, batch=2)
        first = crew(events()[:9], RECORD)
        system.checkpoint(tmp_path / "state")
        crew(events()[9:12])
    with ActorSystem("threads", resume=tmp_path / "state") as system:
        crew = ActorNetwork(network, system, batch=2, actors=3)
        assert crew.clock == 9
        second = crew(events()[9:], RECORD)
    expect_same({name: torch.cat([first[name], second[name]]) for name in RECORD}, network, events())


def test_refractory_neurons_resumed(tmp_path: Path) -> None:
    """Steps that neurons still wait are a part of what actors share, and of a checkpoint; another time is refused."""

    def build(time: float) -> Network:
        torch.manual_seed(0)
        pixels, a = Population("pixels", 40, spikes=True), Population("a", 64, LIF(1e-3, t_refractory=time))
        b = Population("b", 64, CubaLIF(1e-3, 5e-4, t_refractory=torch.arange(64) % 4 * 1e-4))
        out = Population("out", 5, LI(1e-3))
        return Network([pixels, a, b, out], [Projection(pixels, a), Projection(a, b), Projection(b, out)])

    network, names = build(5e-4), ("a", "a.refractory", "b", "b.refractory", "out")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(6)
        whole, _ = network(events(), record=names)
    assert whole["b"].sum() > 50
    with ActorSystem("threads") as system:
        parts = [ActorNetwork(network, system, batch=2, actors=2)(events()[:9], names)]
        system.checkpoint(tmp_path / "state")
    with ActorSystem("threads", resume=tmp_path / "state") as system:
        parts.append(ActorNetwork(network, system, batch=2)(events()[9:], names))
    for name in names:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name
    other = build(4e-4)
    other.load_state_dict(network.state_dict())
    with (
        ActorSystem("threads", resume=tmp_path / "state") as system,
        pytest.raises(InputError, match="neurons and weights of digest"),
    ):
        ActorNetwork(other, system, batch=2)


class Fragile(LIF):
    """Fails in its third step, once."""

    left = 3

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Step, or fail."""
        Fragile.left -= 1
        if Fragile.left == 0:
            raise OSError("once")
        return super().forward(x, *state)


def small(neuron: LIF) -> Network:
    """Return two populations, of which the second needs the first in the same step."""
    torch.manual_seed(0)
    pixels, a, out = Population("pixels", 8), Population("a", 64, neuron), Population("out", 5, LI(1e-3))
    return Network([pixels, a, out], [Projection(pixels, a, format="nf4"), Projection(a, out)])


@pytest.mark.parametrize("runtime", ["threads", "processes"])
def test_sparse_synapses(runtime: Literal["threads", "processes"]) -> None:
    """Actors give the network's bits with sparse and recurrent synapses, spikes on their way between calls included."""
    random = torch.Generator().manual_seed(0)
    pixels, a, out = (
        Population("pixels", 8, spikes=True),
        Population("a", 64, LIF(1e-3)),
        Population("out", 5, LI(1e-3)),
    )

    def sparse(source: Population) -> SparseProjection:
        origin, end = (torch.randint(size, (400,), generator=random) for size in (source.size, a.size))
        steps = torch.randint(1, 5, (400,), generator=random)
        return SparseProjection(origin, end, torch.rand(400, generator=random), steps, sources=source, targets=a)

    network = Network([pixels, a, out], [sparse(pixels), sparse(a), Projection(a, out)])
    x = (torch.rand(9, 2, 8, generator=random) < 0.3).float()
    with ActorSystem(runtime) as system:
        other = copy.deepcopy(network)
        crew = ActorNetwork(other, system, batch=2, actors=2)
        for value in other.parameters():
            value.data.zero_()  # what the network becomes later is nothing to its actors
        found = [crew(part, ("a", "a.mem", "out")) for part in (x[:4], x[4:])]
    with torch.no_grad():
        expected, _ = network(x, record=("a", "a.mem", "out"))
    assert 0.02 < expected["a"].mean() < 0.98
    for name, value in expected.items():
        assert torch.equal(torch.cat([part[name] for part in found]), value)


class Tiring(torch.nn.Module):
    """Synapses over a packed layer, neither of our two: a source that fires gives less for some steps."""

    delay = 1

    def __init__(self, source: Population, target: Population) -> None:
        super().__init__()
        self.name, self.source, self.target = "tiring", source.name, target.name
        self.source_size, self.target_size = source.size, target.size
        self.weights = STELinear(source.size, target.size, format="nf4")

    def coming(self, batch: int) -> torch.Tensor:
        """Return how much each source gives, of another size than the target's input."""
        return torch.ones(batch, self.source_size)

    def forward(self, spikes: torch.Tensor, share: torch.Tensor, clock: int) -> torch.Tensor:
        """Return the current, and write what each source gives from now on."""
        current: torch.Tensor = self.weights(spikes * share) * (1 + clock % 2)
        share.mul_(1 - 0.5 * spikes).lerp_(torch.ones(()), 0.1)
        return current


class Learning(torch.nn.Module):
    """Synapses whose weight a rule changes with each step."""

    name, source, target, source_size, target_size, delay = "learning", "a", "a", 64, 64, 2

    def __init__(self) -> None:
        super().__init__()
        self.rule = STDP(q4.quantize(torch.randn(64, 64) / 4, "nf4"), a_plus=0.2, a_minus=0.2)

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        """Return the current, and learn from the sources that fire together."""
        current = spikes @ q4.dequantize(self.rule.weight).T
        self.rule.step(spikes, (current > current.mean()).float())
        return current


def strange() -> Network:
    """Return a packed network whose first population has projections that are neither of ours into it."""
    torch.manual_seed(0)
    pixels, a, out = (
        Population("pixels", 40, spikes=True),
        Population("a", 64, LIF(1e-3)),
        Population("out", 5, LI(1e-3)),
    )
    network = Network([pixels, a, out], [Tiring(pixels, a), Learning(), Projection(a, out)])
    with torch.no_grad():
        network.get_parameter("projections.tiring.weights.weight").mul_(4)
    return network


@pytest.mark.parametrize("runtime", ["threads", "processes"])
def test_projections_of_others(runtime: Literal["threads", "processes"]) -> None:
    """Every projection with what ``Synapses`` names runs on actors: shared where packed, and with what it keeps."""
    record, x = ("a", "a.mem", "out"), events(12)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session, torch.no_grad():
        network = strange()
        pack_(network, session)
        learning: Any = network.get_submodule("projections.learning")
        with ActorSystem(runtime) as system, pytest.MonkeyPatch.context() as patch:
            share = Mock(side_effect=system.share)
            patch.setattr(system, "share", share)
            found = ActorNetwork(network, system, batch=2, actors=2)(x, record)
            share.assert_called_once_with(network.get_submodule("projections.tiring.weights.layer"))
        before = learning.rule.weight.qdata
        expected, state = network(x, record=record)
        assert not torch.equal(learning.rule.weight.qdata, before)
        assert 0.02 < expected["a"].mean() < 0.98
        for name in record:
            assert torch.equal(found[name], expected[name]), name
        assert state.coming["tiring"].unique().numel() > 10


def test_what_a_projection_of_others_keeps_is_in_the_checkpoint(tmp_path: Path) -> None:
    """A run goes on from a checkpoint with what was on its way; synapses of other numbers are refused."""
    record, x = ("a", "a.mem"), events(12)

    def made() -> Network:
        network = strange()
        return Network(
            [network.population(name) for name in network.order], [network.get_submodule("projections.tiring")]
        )

    with ActorSystem("threads") as system:
        found = [ActorNetwork(made(), system, batch=2)(x[:5], record)]
        system.checkpoint(tmp_path / "state")
    with ActorSystem("threads", resume=tmp_path / "state") as system:
        found.append(ActorNetwork(made(), system, batch=2)(x[5:], record))
    with torch.no_grad():
        expected, _ = made()(x, record=record)
        other = made()
        other.get_parameter("projections.tiring.weights.weight").mul_(2)
    for name in record:
        assert torch.equal(torch.cat([part[name] for part in found]), expected[name]), name
    with ActorSystem("threads", resume=tmp_path / "state") as system, pytest.raises(InputError, match="of digest"):
        ActorNetwork(other, system, batch=2)


def test_projections_that_lack_something() -> None:
    """A module without a name or size is no projection."""
    with pytest.raises(ConfigError, match=r"projection must be a module with name, .*, got 'a Linear without name, "):
        Network([Population("pixels", 8)], [torch.nn.Linear(8, 8)])


class Counting(torch.nn.Module):
    """Synapses that count what came, in whole numbers of another size and dtype than any state."""

    name, source, target, source_size, target_size, delay = "counting", "pixels", "a", 40, 64, 1

    def coming(self, batch: int) -> torch.Tensor:
        """Return the counts at rest."""
        return torch.zeros(3, batch, dtype=torch.int16)

    def forward(self, spikes: torch.Tensor, counts: torch.Tensor, clock: int) -> torch.Tensor:
        """Return what each sample has of one of three counts."""
        counts[clock % 3] += spikes.sum(1).to(torch.int16)
        return counts[clock % 3, :, None].expand(-1, 64) / 50


def test_what_is_on_its_way_has_any_dtype(tmp_path: Path) -> None:
    """What a projection keeps goes through chunks and checkpoints in its own dtype and shape."""
    record, x = ("a", "a.mem"), events(11)

    def made() -> Network:
        pixels, a = Population("pixels", 40, spikes=True), Population("a", 64, LIF(1e-3))
        return Network([pixels, a], [Counting()])

    with ActorSystem("threads") as system:
        found = [ActorNetwork(made(), system, batch=2, chunk=3)(x[:5], record)]
        system.checkpoint(tmp_path / "state")
    with ActorSystem("threads", resume=tmp_path / "state") as system:
        found.append(ActorNetwork(made(), system, batch=2, chunk=3)(x[5:], record))
    with torch.no_grad():
        expected, _ = made()(x, record=record)
    for name in record:
        assert torch.equal(torch.cat([part[name] for part in found]), expected[name]), name


def test_a_step_that_failed_is_done_again() -> None:
    """An actor that fails once and is restarted does that step, and the bits are the same."""
    x = torch.ones(6, 1, 8)
    with ActorSystem("threads") as system:
        Fragile.left = 3
        found = ActorNetwork(small(Fragile(1e-3)), system, batch=1, actors=2)(x, ("out",))
        assert Fragile.left < 0
    with torch.no_grad():
        assert torch.equal(found["out"], small(LIF(1e-3))(x, record=("out",))[0]["out"])


@pytest.mark.parametrize("runtime", ["threads", pytest.param("processes", marks=linux)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_membrane_that_is_not_finite(bad: float, runtime: Literal["threads", "processes"]) -> None:
    """The error names population and step; all states stay those of the chunk's start, from where calls go on."""
    x, spoilt = torch.rand(10, 1, 8), torch.rand(10, 1, 8)
    spoilt[6] = bad
    with ActorSystem(runtime, restarts=1) as system:
        crew = ActorNetwork(small(LIF(1e-3)), system, batch=1, actors=2, chunk=4)
        found = [crew(x[:4], ("a", "out"))]
        for _ in range(3):  # no actor is the worse for it
            with pytest.raises(NonFiniteStateError, match=r"population 'a': mem must be finite, .* after step 6'"):
                crew(spoilt[4:], ("a", "a.mem"))
            assert crew.clock == 4
        found.append(crew(x[4:], ("a", "out")))
    with torch.no_grad():
        expected, _ = small(LIF(1e-3))(x, record=("a", "out"))
    for name, value in expected.items():
        assert torch.equal(torch.cat([part[name] for part in found]), value), name


def test_checkpoint_of_other_populations(tmp_path: Path) -> None:
    """A population that the checkpoint does not know is refused: it would begin in the midst of others' steps."""
    with ActorSystem("threads") as system:
        ActorNetwork(small(LIF(1e-3)), system, batch=1)(torch.ones(3, 1, 8))
        system.checkpoint(tmp_path / "state")
    torch.manual_seed(0)  # so that the others are as they were
    pixels, a, b = Population("pixels", 8), Population("a", 64, LIF(1e-3)), Population("b", 5, LI(1e-3))
    other = Network([pixels, a, b], [Projection(pixels, a, format="nf4"), Projection(a, b)])
    with (
        ActorSystem("threads", resume=tmp_path / "state") as system,
        pytest.raises(ConfigError, match="steps must be those of one run"),
    ):
        ActorNetwork(other, system, batch=1)


@pytest.mark.parametrize("runtime", ["threads", pytest.param("processes", marks=linux)])
def test_two_threads(network: Network, runtime: Literal["threads", "processes"]) -> None:
    """Calls of two threads run one after the other: together they give what one run gives."""
    with ActorSystem(runtime) as system:
        crew = ActorNetwork(network, system, batch=2, actors=2)
        x = torch.ones(20, 2, 40)
        with futures.ThreadPoolExecutor(2) as pool:
            found = [item["b.syn"] for item in pool.map(lambda part: crew(part, ("b.syn",)), (x, x))]
        assert crew.clock == 40
    with torch.no_grad():
        expected = network(torch.cat([x, x]), record=("b.syn",))[0]["b.syn"]
    first = next(index for index, item in enumerate(found) if torch.equal(item, expected[:20]))
    assert torch.equal(found[1 - first], expected[20:])


def test_two_threads_that_stream(network: Network) -> None:
    """A run of many chunks is one turn: its source draws the spikes of the steps that it does, and others wait."""
    source, recorders = Poisson(40, 300.0, dt=1e-3, batch=2, seed=1), [Recorder("b.syn"), Recorder("b.syn")]
    with ActorSystem("threads") as system:
        crew = ActorNetwork(network, system, batch=2, actors=2)
        with futures.ThreadPoolExecutor(2) as pool:
            for run in [pool.submit(crew.run, source, recorders=[one], steps=40, chunk=4) for one in recorders]:
                run.result()
        assert crew.clock == 80
    with torch.no_grad():
        expected = network(source.draw(0, 80), record=("b.syn",))[0]["b.syn"]
    found = [one.data for one in recorders]
    assert torch.equal(torch.cat(found), expected) or torch.equal(torch.cat(found[::-1]), expected)


@pytest.mark.parametrize("what", ["weight", "bias", "neuron", "synapse"])
def test_checkpoint_of_other_weights(what: str, tmp_path: Path) -> None:
    """A checkpoint goes on with equal neurons and weights alone, packed or not."""

    def made() -> Network:
        torch.manual_seed(0)
        pixels, a, b = (
            Population("pixels", 64, spikes=True),
            Population("a", 64, LIF(1e-3)),
            Population("b", 5, LI(1e-3)),
        )
        one = torch.tensor([0])
        sparse = SparseProjection(one, one, torch.ones(1), one + 1, sources=pixels, targets=b)
        projections = [Projection(pixels, a, format="nf4", bias=True), Projection(a, b, format="nf4"), sparse]
        return Network([pixels, a, b], projections)

    with ActorSystem("threads") as system:
        ActorNetwork(made(), system, batch=1)(torch.ones(3, 1, 64))
        system.checkpoint(tmp_path / "state")
    equal, other = made(), made()
    with torch.no_grad():
        match what:
            case "weight":
                other.get_parameter("projections.a->b.synapses.weight")[0, 0] += 5
            case "bias":
                other.get_parameter("projections.pixels->a.synapses.bias")[0] += 1
            case "neuron":
                other.population("a").neuron = LIF(1e-3, v_threshold=2.0)
            case "synapse":
                other.get_buffer("projections.pixels->b.packed.levels").add_(1)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        pack_(equal, session)
        with ActorSystem("threads", resume=tmp_path / "state") as system:
            assert ActorNetwork(equal, system, batch=1).clock == 3
    name = "a" if what in {"bias", "neuron"} else "b"
    rule = f"'{name}': source must be the checkpoint's neurons and weights of digest"
    with ActorSystem("threads", resume=tmp_path / "state") as system, pytest.raises(InputError, match=rule):
        ActorNetwork(other, system, batch=1)


def test_state_in_unified_memory(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU that shares the CPU's memory, states lie there, in place, and the bits are the same."""
    accept_pretended(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    case = pretend(GB10)
    options: dict[str, Any] = {"device": "cuda:0", "unified_memory": "require_unified", "providers": [case.provider]}
    with ActorSystem("threads") as system:
        crew = ActorNetwork(network, system, batch=2, actors=3, **options)
        assert all(tensor.placement.action == "promoted" for tensor in system._tensors.values() if tensor.placement)
        assert {tensor.mode for tensor in system._tensors.values()} == {MutableMode.IN_PLACE}
        found = crew(events(), RECORD)
    expect_same(found, network, events())


@linux
def test_unified_memory_needs_threads(network: Network) -> None:
    """Processes can't share a GPU's memory, which is an error where it is required."""
    with ActorSystem("processes") as system, pytest.raises(q4.UnifiedMemoryError, match="belongs to one process"):
        ActorNetwork(network, system, batch=2, unified_memory="require_unified")


def test_refused(network: Network) -> None:
    """Too many actors, another batch and another size are errors, after which the right arguments will do."""
    with ActorSystem("threads") as system:
        with pytest.raises(ConfigError, match="actors must be 1 … 3"):
            ActorNetwork(network, system, batch=2, actors=4)
        with pytest.raises(ConfigError, match="batch must be a positive whole number"):
            ActorNetwork(network, system, batch=0)
        crew = ActorNetwork(network, system, batch=2)
        with pytest.raises(InputError, match="population 'pixels'"):
            crew(events()[:, :1])
        with pytest.raises(InputError, match="record"):
            crew(events(), ("c",))
        assert crew.clock == 0


def test_spikes_alone(network: Network) -> None:
    """A packed projection from neurons that fire runs event-driven, where the backend has such a product."""
    item = network.get_submodule("projections.a->b")
    assert isinstance(item, Projection)
    layer = item.synapses
    assert isinstance(layer, q4.Q4Linear)
    product = q4.spikes.SpikeProduct(layer)
    before = product.record.sparse + product.record.dense
    x = torch.zeros(1, 64).index_fill_(1, torch.tensor([3]), 1.0)
    with torch.no_grad():
        found = item.for_run()(x)
        assert product.record.sparse + product.record.dense == before + 1
        torch.testing.assert_close(found[0], item.dense_weight()[:, 3], rtol=1e-6, atol=1e-7)
        assert item.for_run() is not item
    assert item.for_run() is item


@pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")
def test_actors_share_sparse_synapses() -> None:
    """Processes have the synapses in memory that they share: none grows by a part of them, and the bits are equal."""
    random = torch.Generator().manual_seed(0)
    cells = Population("cells", 2_000, LIF.from_beta(0.9, 40.0))
    pixels = Population("pixels", 2_000, spikes=True)
    count = 8_000_000
    source, target = (torch.randint(2_000, (count,), generator=random) for _ in range(2))
    sparse = SparseProjection(source, target, torch.rand(count), 1 + source % 3, sources=pixels, targets=cells)
    del source, target
    network, x = Network([pixels, cells], [sparse]), (torch.rand(5, 1, 2_000, generator=random) < 0.02).float()
    with ActorSystem("processes") as system:
        crew = ActorNetwork(network, system, batch=1)
        found = crew(x, ("cells", "cells.mem"))
        (memory,) = system.memory_report().values()
    assert memory.shared_bytes > sparse.weight.nbytes / 4  # whatever its sources were, it read some of each page
    assert memory.private_bytes < 400 << 20
    with torch.no_grad():
        wanted = network(x, record=("cells", "cells.mem"))[0]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
