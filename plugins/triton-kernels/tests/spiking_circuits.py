"""A circuit of sparse synapses by the kernels, and by q4-snn on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from q4_snn import LIF, SparseProjection
from q4_triton_kernels.spiking import Neurons, Spiking, SynapseTable, word_count
from q4_triton_kernels.target import machine_facts

__all__ = ["BETA", "bits_of", "by_kernels", "on_the_cpu", "synapses_of"]

BETA = 0.9


def synapses_of(neurons: int, count: int, *, seed: int = 0, delays: int = 15, scale: float = 0.3) -> SparseProjection:
    """Return random synapses, some of which share source, target and delay; a third inhibits."""
    draw = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(neurons, (count,), generator=draw) for _ in range(2))
    delay = torch.randint(1, delays + 1, (count,), generator=draw)
    twice = count // 10  # the same places once more, with other weights
    source, target, delay = (torch.cat([item, item[:twice]]) for item in (source, target, delay))
    weight = scale * torch.rand(len(source), generator=draw)
    weight[torch.rand(len(source), generator=draw) < 1 / 3] *= -1.5  # a third
    return SparseProjection(source, target, weight, delay, sources=neurons, targets=neurons)


def on_the_cpu(
    synapses: SparseProjection, cells: LIF, drive: torch.Tensor, mem: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the spikes [steps, n], the membranes after them, and the ring before the last spikes are delivered."""
    synapses.reset()
    found = []
    fired = torch.zeros_like(mem)
    with torch.no_grad():
        for _ in range(steps):
            synapses.deliver(fired.nonzero()[:, 0])
            fired, mem = cells(synapses.advance().add_(drive), mem)
            found.append(fired)
    return torch.stack(found), mem, synapses.ring.clone()


def bits_of(words: torch.Tensor, neurons: int) -> torch.Tensor:
    """Return bits [..., words] as numbers 0 and 1 [..., neurons]."""
    bits = words[..., None] >> torch.arange(64, device=words.device) & 1
    return bits.flatten(-2)[..., :neurons].float()


def by_kernels(
    synapses: SparseProjection,
    cells: LIF,
    drive: torch.Tensor,
    mem: torch.Tensor,
    steps: int,
    *,
    device: str = "cpu",
    chunk: int = 10,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same by the kernels: one graph of ``chunk`` steps, run ``steps / chunk`` times."""
    place, batch, neurons = torch.device(device), 1, len(mem)
    if place.type == "cuda":
        place = torch.device("cuda", torch.cuda.current_device())
    target: Any = machine_facts().target(place)
    spiking = Spiking(target, place)
    table = SynapseTable.of(synapses.weight, place)

    def number(value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=place).reshape(-1).clone()

    words = word_count(neurons)
    state = Neurons(
        mem=mem.to(place).view(batch, neurons).clone(),
        beta=number(cells.beta),
        threshold=number(cells.v_threshold),
        bits=torch.zeros(steps + 1, batch, words, dtype=torch.int64, device=place),
        reset=cells.reset,
        v_reset=number(cells.v_reset),
        inclusive=cells.threshold_inclusive,
    )
    ring = torch.zeros(len(synapses.ring), batch, neurons, device=place)
    clock = torch.zeros(1, dtype=torch.int64, device=place)
    fired = torch.zeros(batch, neurons, dtype=torch.int32, device=place)
    count = torch.zeros(batch, dtype=torch.int32, device=place)
    launches = [
        spiking.list_fired(state.bits, clock, fired, count, delay=1, tick=True),
        spiking.send(table, clock, fired, count, ring, delay=1),
        spiking.advance(state, clock, given=drive.to(place), ring=ring),
    ]
    run = spiking.captured(launches, chunk)
    for _ in range(steps // chunk):
        run()
    assert int(clock) == steps
    return bits_of(state.bits[1:, 0].cpu(), neurons), state.mem[0].cpu(), ring[:, 0].cpu()
