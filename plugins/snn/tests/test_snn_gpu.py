"""On a device: networks run as programs there, with the CPU's bits where their synapses are sparse."""

from __future__ import annotations

import pytest
import torch

import q4core as q4
from q4_snn import ALIF, LIF, CubaLIF, Network, NetworkState, Population, Projection, SparseProjection

pytestmark = pytest.mark.gpu


def _sparse(source: Population, target: Population, count: int, seed: int) -> SparseProjection:
    draw = torch.Generator().manual_seed(seed)
    ends = [torch.randint(size, (count,), generator=draw) for size in (source.size, target.size)]
    delay = torch.randint(1, 9, (count,), generator=draw)
    weight = 0.6 * torch.rand(count, generator=draw) - 0.2
    return SparseProjection(ends[0], ends[1], weight, delay, sources=source, targets=target)


def _network() -> Network:
    """Return inputs of spikes, and three populations that are joined in a ring."""
    inputs = Population("input", 300, spikes=True)
    first = Population("first", 500, LIF(10e-3, reset="value", t_refractory=2e-3, dt=1e-3))
    second = Population("second", 200, CubaLIF(10e-3, 5e-3, dt=1e-3))
    third = Population("third", 130, ALIF(10e-3, 20e-3, 0.1, dt=1e-3))
    ends = [(inputs, first), (first, second), (second, third), (third, first)]
    return Network(
        [inputs, first, second, third], [_sparse(*pair, 12 * pair[1].size, seed) for seed, pair in enumerate(ends)]
    )


def _states(state: NetworkState) -> dict[str, torch.Tensor]:
    parts = {f"{name} {index}": item for name, items in state.neurons.items() for index, item in enumerate(items)}
    return {key: item.cpu() for key, item in {**parts, **state.coming}.items()}


def test_a_network_on_the_gpu_has_the_bits_of_the_cpu() -> None:
    """Spikes, membranes and what is on its way are the CPU's, in one run and in two; a backend runs it there."""
    x = (torch.rand(150, 2, 300, generator=torch.Generator().manual_seed(1)) < 0.1).float()
    record = ["first", "second", "third", "first.mem"]
    with torch.no_grad():
        wanted, end = _network()(x, record=record)
        network = _network().cuda()
        found, after = network(x.cuda(), record=record)
        assert network.record.backend == "nf4-cuda", network.record
        one, middle = network(x[:70].cuda(), record=record)
        two, last = network(x[70:].cuda(), middle, record=record)
    assert all(float(wanted[name].mean()) > 0.002 for name in record[:3])
    for name in record:
        assert torch.equal(found[name].cpu(), wanted[name]), name
        assert torch.equal(torch.cat([one[name], two[name]]).cpu(), wanted[name]), name
    for key, item in _states(end).items():
        assert torch.equal(_states(after)[key], item), key
        assert torch.equal(_states(last)[key], item), key


def test_a_packed_layer_on_the_gpu_runs_as_a_program() -> None:
    """Dense synapses have the bits of the layer's own product there, as a loop over the steps gives them."""
    inputs, cells = Population("input", 256, spikes=True), Population("cells", 192, LIF.from_beta(0.9, dt=1e-3))
    dense = Projection(inputs, cells)
    weight = q4.quantize(torch.randn(192, 256, generator=torch.Generator().manual_seed(2)) / 4, "nf4", block_size=64)
    session = q4.Session(q4.SessionConfig(device="cuda", compute_dtype=torch.float32))
    dense.synapses = session.linear(weight)
    network = Network([inputs, cells], [dense])
    x = (torch.rand(40, 1, 256, generator=torch.Generator().manual_seed(3)) < 0.1).float().cuda()
    state, steps = None, []
    with torch.no_grad():
        found, _ = network(x)
        assert network.record.backend == "nf4-cuda", network.record
        for step in x:
            given, state = network.step({"input": step}, state)
            steps.append(given["cells"])
    assert torch.equal(found["cells"], torch.stack(steps))
    assert 0 < float(found["cells"].mean()) < 1
