"""A recurrent circuit of the microcircuit's kind, with sparse synapses: in q4-snn, and as arrays for others.

Four fifths of the neurons excite and one fifth inhibits; a tenth of all pairs is joined, with normal weights and with
delays of each synapse's own. A constant current of its own drives each neuron, and the network makes it irregular. A
step is 0.1 ms. Neurons leak, fire above 1, and go to 0; there is no refractory time, and no synaptic time constant.

``python -m benchmarks.spiking_circuit --child PROBLEM.npz SPIKES.npy`` runs q4-snn's.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import nn

from benchmarks.child import settled_bytes
from q4_snn import LIF, LayerProjection, Network, Population, SparseProjection

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CONNECTED", "STEP_S", "join", "problem"]

CONNECTED, STEP_S, MEMBRANE_S = 0.1, 1e-4, 10e-3
BETA = math.exp(-STEP_S / MEMBRANE_S)
_DRIVE, _DRIVE_SPREAD, _INHIBITION = 1.2, 0.05, 8.0


def join(neurons: int) -> SparseProjection:
    """Return the synapses of a circuit of some neurons; the same ones each time."""
    sizes = [neurons - neurons // 5, neurons // 5]
    counts = torch.tensor([[int(CONNECTED * target * source) for source in sizes] for target in sizes])
    strength = 0.3 * (CONNECTED * sizes[0]) ** -0.5  # so that what arrives varies as much in each size
    weight = torch.tensor([strength, -_INHIBITION * strength]).expand(2, 2)
    delay = torch.tensor([15.0, 7.5]).expand(2, 2)
    draw = torch.Generator().manual_seed(1)
    return SparseProjection.fixed_total_number(
        sizes, counts, weight, delay, weight_spread=0.1, delay_spread=0.5, generator=draw
    )


def problem(neurons: int, blocks: Sequence[int]) -> dict[str, Any]:
    """Return a circuit as arrays, the input of every simulator.

    Args:
        neurons: How many.
        blocks: Steps that are timed together, one block after the other.
    """
    synapses = join(neurons)
    target, weight, delay = synapses.synapses_of(torch.arange(neurons))
    source = synapses.weight.with_places(torch.arange(neurons))[0]
    draw = torch.Generator().manual_seed(2)
    drive = (1 - BETA) * _DRIVE * (1 + _DRIVE_SPREAD * torch.randn(neurons, generator=draw))
    found = {"source": source.int(), "target": target.int(), "weight": weight, "delay": delay.int(), "drive": drive}
    found["start"] = torch.rand(neurons, generator=draw)
    return {name: item.numpy() for name, item in found.items()} | {"neurons": neurons, "beta": BETA, "blocks": blocks}


def network(synapses: SparseProjection) -> Network:
    """Return the circuit as a network, whose input is each neuron's own current."""
    drive = Population("drive", synapses.target_size)
    cells = Population("cells", synapses.target_size, LIF.from_beta(BETA, reset="value", dt=STEP_S))
    own = SparseProjection.of(synapses.weight, sources=cells, targets=cells)
    return Network([drive, cells], [LayerProjection(drive, cells, nn.Identity()), own])


def _run(
    synapses: SparseProjection, drive: torch.Tensor, mem: torch.Tensor, blocks: Sequence[int]
) -> tuple[torch.Tensor, list[float]]:
    """Return the spikes [n, 2], step and neuron, and the seconds of each block; the program is made before."""
    made = network(synapses)
    _, state = made(torch.zeros(64, 1, len(mem)), record=("cells.events",))  # at rest, and nothing on its way
    state = attrs.evolve(state, neurons={"cells": (mem[None],)}, clock=0)
    events, taken, first = [], [], 0
    for count in blocks:
        started = time.perf_counter()
        found, state = made(drive.expand(count, 1, -1), state, record=("cells.events",))
        taken.append(time.perf_counter() - started)
        events.append(found["cells.events"][:, ::2] + torch.tensor([first, 0]))
        first += count
    return torch.cat(events), taken


def main() -> None:
    """Run q4-snn's circuit, write its spikes and print times and bytes."""
    torch.set_num_threads(1)
    with np.load(sys.argv[2]) as file:
        neurons, blocks = int(file["neurons"]), file["blocks"].tolist()
    with torch.no_grad():
        _run(join(20), torch.zeros(20), torch.ones(20) * 2, [3])  # what the libraries take for themselves
        before = settled_bytes()
        with np.load(sys.argv[2]) as file:
            drive, start = torch.from_numpy(file["drive"]), torch.from_numpy(file["start"])
        synapses = join(neurons)
        spikes, taken = _run(synapses, drive, start, blocks)
        held = settled_bytes() - before
    np.save(sys.argv[3], spikes.numpy())
    print(json.dumps({"held_bytes": held, "block_s": taken}))


if __name__ == "__main__":
    main()
