"""A layer of spiking neurons in q4-snn and in the torch-based libraries: the same synapses, neurons and numbers.

Each maker takes weights [N, N] and returns the run of a layer from rest: input spikes [T, 1, N] to spikes [T, 1, N],
float32. Synapses are the weights rounded to NF4, stored in four bits by q4-snn and in float32 by the others. A neuron
that passes 1 goes to 0; ``BETA`` of a membrane is left after a step.

``python -m benchmarks.spiking_torch --child NAME SIZE`` prints what a layer adds to its process, in bytes.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING

import torch

import q4core as q4
from benchmarks.child import settled_bytes
from q4_nn import pack_
from q4_snn import LIF, Network, Population, Projection

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[torch.Tensor], torch.Tensor]

__all__ = ["BETA", "OURS", "SIMULATORS", "layer_weight", "rounded"]

BETA = 0.9
OURS = "q4-snn"


def layer_weight(size: int) -> torch.Tensor:
    """Return the synapses before they are rounded, [size, size]: targets, sources."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.1


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers that four bits keep of a weight."""
    return q4.dequantize(q4.quantize(weight, "nf4"))[:, : weight.shape[1]].clone()


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
    layer.weight = torch.nn.Parameter(rounded(weight), requires_grad=False)
    return layer


def _q4_snn(weight: torch.Tensor) -> Run:
    size = len(weight)
    pixels, cells = (
        Population("pixels", size, spikes=True),
        Population("cells", size, LIF.from_beta(BETA, reset="value")),
    )
    network = Network([pixels, cells], [Projection(pixels, cells, format="nf4")])
    network.get_parameter("projections.pixels->cells.synapses.weight").data.copy_(weight)
    pack_(network, q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")))
    return lambda x: network(x)[0]["cells"]


def _snntorch(weight: torch.Tensor) -> Run:
    library = importlib.import_module("snntorch")
    synapses, neurons = _linear(weight), library.Leaky(beta=BETA, reset_mechanism="zero", reset_delay=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        mem, spikes = torch.zeros_like(x[0]), []
        for step in x:
            fired, mem = neurons(synapses(step), mem)
            spikes.append(fired)
        return torch.stack(spikes)

    return run


def _norse(weight: torch.Tensor) -> Run:
    library = importlib.import_module("norse.torch")
    synapses, dt = _linear(weight), 1e-3
    # Its current is of the size of a membrane, not of a step, so all membranes are a tenth of the others' here.
    options = {"tau_mem_inv": torch.tensor((1 - BETA) / dt), "v_th": torch.tensor(1 - BETA)}
    neurons = library.LIFBoxCell(library.LIFBoxParameters(**options), dt=dt)

    def run(x: torch.Tensor) -> torch.Tensor:
        state, spikes = None, []
        for step in x:
            fired, state = neurons(synapses(step), state)
            spikes.append(fired)
        return torch.stack(spikes)

    return run


def _spikingjelly(weight: torch.Tensor, mode: str = "s") -> Run:
    library = importlib.import_module("spikingjelly.activation_based")
    for part in ("functional", "neuron"):
        importlib.import_module(f"spikingjelly.activation_based.{part}")
    neurons = library.neuron.LIFNode(1 / (1 - BETA), decay_input=False, step_mode=mode)
    network = torch.nn.Sequential(_linear(weight), neurons).eval()

    def run(x: torch.Tensor) -> torch.Tensor:
        library.functional.reset_net(network)
        found: torch.Tensor = network(x) if mode == "m" else torch.stack([network(step) for step in x])
        return found

    return run


def _spikingjelly_whole(weight: torch.Tensor) -> Run:
    return _spikingjelly(weight, "m")


SIMULATORS: dict[str, tuple[str, Callable[[torch.Tensor], Run]]] = {
    OURS: ("q4-snn", _q4_snn),
    "snnTorch": ("snntorch", _snntorch),
    "Norse": ("norse", _norse),
    "SpikingJelly": ("spikingjelly", _spikingjelly),
    "SpikingJelly, all steps in one product": ("spikingjelly", _spikingjelly_whole),
}
"""Distribution, and maker of a layer. The last multiplies the spikes of all steps at once, as no feedback can."""


def main() -> None:
    """Make a layer, run it, and print what it added to this process."""
    name, size = sys.argv[2], int(sys.argv[3])
    make = SIMULATORS[name][1]
    torch.set_num_threads(1)
    runs, held = [], 0
    with torch.no_grad():
        for count in (min(512, size // 2), size):  # with the first, a library takes what it needs for itself
            before = settled_bytes()
            runs.append(make(layer_weight(count)))
            runs[-1]((torch.rand(3, 1, count) < 0.01).float())  # noqa: PLR2004  # few spikes
            held = settled_bytes() - before
    print(json.dumps({"held_bytes": held}))


if __name__ == "__main__":
    main()
