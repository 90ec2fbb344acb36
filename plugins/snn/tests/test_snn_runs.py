"""Long runs: steps from iterators and sources in chunks; recorders of subsets and intervals, in memory and files."""

from __future__ import annotations

import contextlib
import itertools
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from q4_snn import (
    LI,
    LIF,
    Network,
    NonFiniteStateError,
    Poisson,
    Population,
    Projection,
    Recorder,
    Regular,
    SparseProjection,
    connectors,
)
from q4_snn.recorders import events_of
from q4core import CheckpointError, ConfigError, InputError
from tests.support.limits import within

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Run without gradients."""
    with torch.no_grad():
        yield


def network(inputs: int = 1) -> Network:
    """Return one or two inputs, recurrent cells with sparse synapses, and a read-out."""
    torch.manual_seed(0)
    feeds = [Population(f"in{index}", 30, spikes=True) for index in range(inputs)]
    cells, out = Population("cells", 50, LIF(2e-3, dt=1e-4)), Population("out", 4, LI(1e-3))
    back = connectors.fixed_in_degree(cells, cells, 5, generator=torch.Generator().manual_seed(1))
    projections: list[Any] = [Projection(item, cells) for item in feeds]
    with torch.no_grad():
        for item in projections:
            item.synapses.weight.mul_(4)
    projections += [SparseProjection(*back, 0.2, 7, sources=cells, targets=cells), Projection(cells, out)]
    return Network([*feeds, cells, out], projections)


def source(seed: int = 0) -> Poisson:
    """Return a source for an input."""
    return Poisson(30, 800.0, batch=2, seed=seed)


@pytest.mark.parametrize("chunk", [1, 64])
def test_a_run_gives_what_one_call_gives(chunk: int) -> None:
    """Recorded steps and the state are those of ``network(x)``, bit for bit, for sources, iterables and any chunk."""
    net, x = network(), source().draw(0, 150)
    names = ("cells", "cells.mem", "out")
    whole, last = net(x, record=names)
    assert 0.01 < whole["cells"].mean() < 0.5
    for feed, steps in ((source(), 150), (iter(x), None), ({"in0": [*x]}, 150), (({"in0": step} for step in x), None)):
        recorders = [Recorder(name) for name in names]
        state = net.run(feed, recorders=recorders, steps=steps, chunk=chunk)
        for item in recorders:
            assert torch.equal(item.data, whole[item.what])
        assert state is not None
        assert state.clock == 150
        assert torch.equal(state.neurons["cells"][0], last.neurons["cells"][0])
    recorder = Recorder("cells")
    state = net.run(source(), recorders=[recorder], steps=61, chunk=chunk)
    assert net.run(source(), state, recorders=[recorder], steps=89) is not None  # the source goes on at the clock
    assert torch.equal(recorder.data, whole["cells"])


def test_two_inputs() -> None:
    """Several inputs come from several sources, or from steps that are mappings."""
    net = network(2)
    feeds = {"in0": source(), "in1": Regular(30, 3e-3, batch=2)}
    whole, _ = net({name: item.draw(0, 90) for name, item in feeds.items()}, record=("cells",))
    steps = ({"in0": a, "in1": b} for a, b in zip(feeds["in0"], feeds["in1"], strict=False))
    for given in (feeds, steps, {"in0": source(), "in1": iter(feeds["in1"])}):
        recorder = Recorder("cells")
        net.run(given, recorders=[recorder], steps=90, chunk=32)
        assert torch.equal(recorder.data, whole["cells"])


def test_subsets_and_intervals() -> None:
    """A recorder holds the neurons, and each so many steps from a start to a stop, that it was asked for."""
    net = network()
    whole, _ = net(source().draw(0, 100), record=("cells", "cells.mem"))
    chosen: list[dict[str, Any]] = [{"every": 7}, {"every": 10, "start": 3, "stop": 74}]
    for options in [*chosen, {"start": 64, "stop": 65}, {"start": 99}]:
        recorders = [Recorder("cells.mem", neurons=[3, 49, 0], **options), Recorder("cells", events=True, **options)]
        net.run(source(), recorders=recorders, steps=100, chunk=16)
        steps = range(options.get("start", 0), options.get("stop", 100), options.get("every", 1))
        assert torch.equal(recorders[0].data, whole["cells.mem"][[*steps]][..., [3, 49, 0]])
        rows = whole["cells"].nonzero()
        assert torch.equal(recorders[1].data, rows[torch.isin(rows[:, 0], torch.tensor([*steps]))])
        assert recorders[0].rows == len(steps)
    few = Recorder("cells", neurons=[40, 2], events=True)
    net.run(source(), recorders=[few], steps=100)
    rows = whole["cells"].nonzero()
    assert {*map(tuple, few.data.tolist())} == {tuple(row) for row in rows.tolist() if row[2] in {2, 40}}


def test_files(tmp_path: Path) -> None:
    """Files of both kinds hold what memory holds, are there at the end alone, and read by numpy and safetensors."""
    net = network()
    memory = [Recorder("cells.mem", every=3), Recorder("cells", events=True)]
    net.run(source(), recorders=memory, steps=100)
    for suffix in ("npy", "safetensors"):
        paths = [tmp_path / f"mem.{suffix}", tmp_path / f"spikes.{suffix}"]
        with Recorder("cells.mem", every=3, file=paths[0]) as a, Recorder("cells", events=True, file=paths[1]) as b:
            state = net.run(source(), recorders=[a, b], steps=40)
            net.run(source(), state, recorders=[a, b], steps=60)
            assert not any(path.exists() for path in paths)
        for path, item in zip(paths, memory, strict=True):
            if suffix == "npy":
                found = torch.from_numpy(np.load(path))
            else:
                ((name, found),) = load_file(path).items()
                assert name == item.what
            assert torch.equal(found, item.data)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mem.npy", "mem.safetensors", "spikes.npy", "spikes.safetensors",
    ]  # fmt: skip
    with Recorder("cells", events=True, file=tmp_path / "none.npy"):
        pass
    assert np.load(tmp_path / "none.npy").shape == (0, 3)


@contextlib.contextmanager
def full(recorder: Recorder) -> Iterator[Recorder]:
    """Enter a recorder whose disk is full from then on."""
    with recorder as entered, Path("/dev/full").open("wb", buffering=0) as nothing:
        assert entered._out is not None
        entered._out.close()
        entered._out = nothing  # without a buffer
        yield entered


def test_a_file_that_fails(tmp_path: Path) -> None:
    """A run that fails, a disk that is full and a folder that is not there leave nothing, and an old file as it was."""
    net, path = network(), tmp_path / "mem.npy"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(InputError, match="0 and 1 alone"), Recorder("cells.mem", file=path) as recorder:
        net.run([torch.ones(2, 30), torch.ones(2, 30) / 2], recorders=[recorder], chunk=1)
    with pytest.raises(CheckpointError, match="rows must be 1 or more, got 0"), Recorder("cells", file=path):
        pass
    with pytest.raises(CheckpointError, match="file must be one that can be written"):  # noqa: SIM117  # what fails first
        with Recorder("cells", file=tmp_path / "nowhere" / "mem.npy"):
            pass
    with pytest.raises(CheckpointError, match="No space left"), full(Recorder("cells.mem", file=path)) as recorder:
        net.run(source(), recorders=[recorder], steps=3)
    assert path.read_text(encoding="utf-8") == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["mem.npy"]


def test_memory_stays_flat(tmp_path: Path) -> None:
    """A run of many steps into a file needs memory for one chunk, not for all steps."""
    a, b = Population("a", 20_000, spikes=True), Population("b", 20_000, LIF(1e-2))
    net = Network([a, b], [SparseProjection(*connectors.one_to_one(a, b), 0.5, 1, sources=a, targets=b)])
    feed = Poisson(20_000, 20.0)
    with Recorder("b.mem", file=tmp_path / "short.npy") as recorder:
        net.run(feed, recorders=[recorder], steps=300, chunk=64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Recorder("b.mem", file=tmp_path / "mem.npy") as recorder:
        net.run(feed, recorders=[recorder], steps=1000, chunk=64)  # 80 MB of input, and as much of output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB
    assert np.load(tmp_path / "mem.npy", mmap_mode="r").shape == (1000, 1, 20_000)


def test_a_long_run_of_a_small_network() -> None:
    """100,000 steps take less than 10 s of an idle machine, and no more memory than the 10,000 before."""
    noise, cells = Population("noise", 100, spikes=True), Population("cells", 400, LIF(20e-3))
    among = connectors.bernoulli(cells, cells, 0.05, generator=torch.Generator().manual_seed(0))
    into = connectors.fixed_in_degree(noise, cells, 20, generator=torch.Generator().manual_seed(1))
    exciting = SparseProjection(*into, 0.4, 1, sources=noise, targets=cells)
    net = Network([noise, cells], [exciting, SparseProjection(*among, -0.1, 15, sources=cells, targets=cells)])
    state = net.run(Poisson(100, 30.0), steps=10_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spikes = Recorder("cells", events=True, start=109_000)
    with within(10.0):
        state = net.run(Poisson(100, 30.0), state, recorders=[spikes], steps=100_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # KB
    assert state is not None
    assert (state.clock, net.record.backend) == (110_000, "cpu-native")
    assert spikes.rows > 1000


def test_nothing_after_a_membrane_that_is_not_finite() -> None:
    """A run ends with the chunk whose state is not finite; recorders have the chunks before."""
    pixels, out = Population("pixels", 1), Population("out", 1, LI(1e-3))
    net, recorder = Network([pixels, out], [Projection(pixels, out)]), Recorder("out")
    steps = [torch.zeros(1, 1)] * 20 + [torch.full((1, 1), float("inf"))]
    with pytest.raises(NonFiniteStateError):
        net.run(steps, recorders=[recorder], chunk=8)
    assert recorder.rows == 16


def test_runs_that_cannot_be() -> None:
    """Inputs that don't fit, and numbers out of range, are errors that name what and why."""
    one, two = network(), network(2)
    x = source().draw(0, 5)
    calls: list[tuple[Network, Any, dict[str, Any], str]] = [
        (one, source(), {}, "steps must be given"),
        (one, source(), {"steps": 0}, "steps must be a whole number"),
        (one, source(), {"steps": 5, "chunk": 0}, "chunk must be"),
        (one, iter(x), {"steps": 9}, "inputs must be of 9 steps or more"),
        (one, 5, {}, "inputs must be a source"),
        (one, {"other": source()}, {"steps": 5}, "inputs must be a mapping of inputs in0"),
        (one, [torch.ones(2, 30), torch.ones(3, 30)], {}, r"input must be tensors \[B, n\]"),
        (one, [[0.0] * 30], {}, "input must be a tensor"),
        (one, [torch.ones(2, 29)], {}, r"input must be of shape \[B, 30\]"),
        (two, source(), {"steps": 5}, "inputs must be a mapping"),
        (two, iter(x), {}, "inputs must be a mapping"),
        (two, [{"in0": x[0]}], {}, "inputs must be a mapping"),
        (two, {"in0": iter(x), "in1": iter(x[:4])}, {}, "inputs must be of one length"),
        (one, source(), {"steps": 5, "recorders": [Recorder("nobody")]}, "record must be names"),
        (one, source(), {"steps": 5, "recorders": [Recorder("cells", neurons=[50])]}, "neurons must be in 0 … 49"),
        (one, source(), {"steps": 5, "recorders": [Recorder("cells", file="x.npy")]}, "file must be open"),
        (one, source(), {"steps": 5, "recorders": [Recorder("cells.mem", events=True)]}, "value must be of spikes"),
    ]
    for net, inputs, options, message in calls:
        with pytest.raises((ConfigError, InputError), match=message):
            net.run(inputs, **options)
    for options, name in (
        ({"every": 0}, "every"), ({"start": -1}, "start"), ({"start": 5, "stop": 4}, "stop"),
        ({"file": "x.txt"}, "file"), ({"neurons": []}, "neurons"), ({"neurons": [0.5]}, "neurons"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            Recorder("cells", **options)
        assert caught.value.name == name
    assert one.run(iter([])) is None
    with pytest.raises(InputError, match="data must be recorded in memory"):
        _ = Recorder("cells").data
    recorder = Recorder("cells")
    one.run(iter(x), recorders=[recorder])
    with pytest.raises(InputError, match="value must be rows of"):
        one.run(itertools.repeat(x[0, :1], 3), recorders=[recorder])


@pytest.mark.parametrize("shape", [(7, 2, 33), (1, 1, 5), (40, 1, 64), (3, 1, 0)])
def test_events_are_where_numbers_are(shape: tuple[int, int, int]) -> None:
    """Rows are those of ``nonzero``, for any dtype, for views, and for a zero with a sign."""
    spikes = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.1).float()
    if spikes.numel():
        spikes[0, 0, 0] = -0.0
    for given in (spikes, spikes.double(), spikes.half(), spikes[1:], spikes.transpose(0, 1), spikes[..., ::2]):
        assert torch.equal(events_of(given), given.nonzero())


@pytest.mark.parametrize("facts", [{}, {"every": 3, "start": 5}, {"start": 7, "stop": 40}, {"neurons": [9, 3]}])
def test_events_of_a_run(facts: dict[str, Any]) -> None:
    """``record=("cells.events",)`` and recorders find the spikes that the numbers show, whatever the chunks."""
    net, x = network(), torch.stack([*source().draw(0, 60)])
    spikes = net(x, record=("cells",))[0]["cells"]
    assert spikes.sum() > 50
    assert torch.equal(net(x, record=("cells.events",))[0]["cells.events"], spikes.nonzero())
    recorder = Recorder("cells", events=True, **facts)
    net.run(iter(x), recorders=[recorder], chunk=17)
    steps = range(60)[facts.get("start", 0) : facts.get("stop", 60) : facts.get("every", 1)]
    wanted = spikes[[*steps]][..., facts.get("neurons", slice(None))].nonzero()
    wanted[:, 0] = torch.tensor([*steps])[wanted[:, 0]]
    if "neurons" in facts:
        wanted[:, 2] = torch.tensor(facts["neurons"])[wanted[:, 2]]
    assert torch.equal(recorder.data, wanted)
    with pytest.raises(InputError, match="of one that fires"):
        net(x, record=("nobody.events",))
