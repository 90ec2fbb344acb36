"""Write ``exchange/*.nir`` and ``*.npz``: networks as Norse, SpikingJelly and sinabs export them, and their spikes.

Nothing here imports q4core. Run it in an environment that has them and ``nir``::

    python plugins/snn/tests/golden/make_exchange.py

Each npz has x, uint8 [T, B, n], and the spikes of the last layer, uint8 [T, B, m]. Inputs are three times x.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import nir
import norse.torch as norse
import numpy as np
import sinabs.activation
import sinabs.layers
import sinabs.nir
import torch
from norse.torch.utils.export_nir import to_nir as norse_to_nir
from spikingjelly.activation_based import functional, layer, neuron, nir_exchange
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).with_name("exchange")
STEPS, BATCH, INPUTS, GAIN = 60, 4, 12, 3.0


def store(name: str, graph: nir.NIRGraph, x: torch.Tensor, spikes: torch.Tensor) -> None:
    """Write a network and what it did."""
    if not float(spikes.sum()) >= 10 or float(spikes.max()) > 1:
        message = f"{name}: {float(spikes.sum())} spikes, at most {float(spikes.max())} in a step"
        raise ValueError(message)
    for node in graph.nodes.values():  # nir writes no numbers without a shape, and no shape that is None
        if getattr(node, "input_shape", ()) is None:
            node.input_shape = (4, 3)
        if isinstance(node, nir.Flatten) and node.input_type["input"] is None:
            node.input_type = {"input": np.array([3, 1, 2])}
        for field in ("tau", "tau_mem", "tau_syn", "r", "v_leak", "v_threshold", "v_reset", "w_in"):
            if hasattr(node, field):
                value = getattr(node, field)
                setattr(node, field, np.atleast_1d(value.numpy() if isinstance(value, torch.Tensor) else value))
    nir.write(FOLDER / f"{name}.nir", graph)
    arrays = {"x": x.numpy().astype(np.uint8), "spikes": spikes.numpy().astype(np.uint8)}
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)


def scaled(model: nn.Module, factor: float = 3.0) -> nn.Module:
    """Return a model whose weights are multiplied, so that its neurons fire."""
    for parameter in model.parameters():
        parameter.mul_(factor)
    return model


def of_norse(x: torch.Tensor) -> None:
    """Write three networks of Norse; its sample has no batch, or the graph's input has one."""
    box = norse.LIFBoxParameters(tau_mem_inv=torch.tensor(100.0), v_th=torch.tensor(0.4))
    cells: dict[str, Callable[[], nn.Module]] = {
        "lif": lambda: norse.LIFBoxCell(p=box),
        "cuba": norse.LIFCell,
        "if": norse.IAFCell,
    }
    for name, cell in cells.items():
        model = norse.SequentialState(scaled(nn.Linear(INPUTS, 20)), cell(), scaled(nn.Linear(20, 5)), cell())
        graph, state, found = norse_to_nir(model, x[0, 0]), None, []
        for step in x * GAIN:
            spikes, state = model(step, state)
            found.append(spikes)
        store(f"norse-{name}", graph, x, torch.stack(found))


def of_spikingjelly(x: torch.Tensor) -> None:
    """Write four networks of SpikingJelly, one with a convolution and pooling."""
    cells: dict[str, Callable[[], nn.Module]] = {
        "lif": lambda: neuron.LIFNode(tau=5.0, v_threshold=0.3),
        "if": neuron.IFNode,
        "cuba": lambda: neuron.CUBALIFNode(c_decay=0.6, v_decay=0.8),
    }
    for name, cell in cells.items():
        model = nn.Sequential(scaled(layer.Linear(INPUTS, 20)), cell(), scaled(layer.Linear(20, 5)), cell())
        graph = nir_exchange.export_to_nir(model, x[0], dt=1e-4)
        functional.reset_net(model)
        store(f"spikingjelly-{name}", graph, x, torch.stack([model(step) for step in x * GAIN]))
    model = nn.Sequential(
        scaled(layer.Conv2d(1, 3, 2)), neuron.LIFNode(tau=5.0, v_threshold=0.3), layer.AvgPool2d(2, 1),
        layer.Flatten(), scaled(layer.Linear(6, 5), 6.0), neuron.LIFNode(tau=5.0, v_threshold=0.1),
    )  # fmt: skip
    images = x.view(STEPS, BATCH, 1, 4, 3)
    graph = nir_exchange.export_to_nir(model, images[0], dt=1e-4)
    functional.reset_net(model)
    store("spikingjelly-maps", graph, x, torch.stack([model(step) for step in images * GAIN]))


def of_sinabs(x: torch.Tensor) -> None:
    """Write three networks of sinabs, one with a convolution and pooling, whose neurons fire once in a step at most."""
    once = {"batch_size": BATCH, "spike_fn": sinabs.activation.SingleSpike}
    cells: dict[str, Callable[[], nn.Module]] = {
        "lif": lambda: sinabs.layers.LIFSqueeze(tau_mem=torch.tensor(8.0), spike_threshold=torch.tensor(0.1), **once),
        "if": lambda: sinabs.layers.IAFSqueeze(**once),
    }
    flat = x.transpose(0, 1).reshape(-1, INPUTS) * GAIN
    for name, cell in cells.items():
        model = nn.Sequential(scaled(nn.Linear(INPUTS, 20)), cell(), scaled(nn.Linear(20, 5)), cell())
        store_sinabs(f"sinabs-{name}", model, flat, x)
    model = nn.Sequential(
        scaled(nn.Conv2d(1, 3, 2)), cells["if"](), sinabs.layers.SumPool2d((2, 1)), nn.Flatten(),
        scaled(nn.Linear(6, 5)), cells["if"](),
    )  # fmt: skip
    store_sinabs("sinabs-maps", model, flat.view(-1, 1, 4, 3), x)


def store_sinabs(name: str, model: nn.Sequential, flat: torch.Tensor, x: torch.Tensor) -> None:
    """Write a network of sinabs, which takes samples one after the other."""
    model(flat)
    graph = sinabs.nir.to_nir(model, flat)
    for module in model:
        if hasattr(module, "reset_states"):
            module.reset_states()
    store(name, graph, x, model(flat).view(BATCH, STEPS, -1).transpose(0, 1))


def main() -> None:
    """Write the files."""
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    x = torch.bernoulli(torch.full((STEPS, BATCH, INPUTS), 0.3))
    with torch.no_grad():
        of_norse(x)
        of_spikingjelly(x)
        of_sinabs(x)


if __name__ == "__main__":
    main()
