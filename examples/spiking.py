"""Shared code of the examples of spiking networks: a classifier, its training in float and in four bits, and pictures.

The examples that use it need q4-snn, scikit-learn, matplotlib and rich: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import q4core as q4
from q4_nn import Trainer, pack_
from q4_snn import LI, LIF, Network, Population, Projection, surrogate

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 10


class Classifier(nn.Module):
    """Spikes of a sample in, one number for each class out: the read-out's mean membrane over time."""

    def __init__(
        self, encode: Callable[[torch.Tensor], torch.Tensor], inputs: int, hidden: int, kind: str | None
    ) -> None:
        super().__init__()
        self.encode = encode
        pixels, out = Population("pixels", inputs, spikes=True), Population("out", CLASSES, LI(20e-3, dt=1e-3))
        cells = Population("hidden", hidden, LIF(10e-3, dt=1e-3, surrogate=surrogate.fast_sigmoid(10.0)))
        projections = [Projection(pixels, cells, format=kind, bias=True), Projection(cells, out, format=kind)]
        self.network = Network([pixels, cells, out], projections)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return [B, classes]."""
        membranes: torch.Tensor = self.network(self.encode(samples))[0]["out"]
        return membranes.mean(0)


def train(model: Classifier, samples: torch.Tensor, labels: torch.Tensor, seed: int, epochs: int) -> list[float]:
    """Train with surrogate gradients, and return the loss of each epoch."""
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(samples, labels), 128, shuffle=True, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    return (
        Trainer(model, optimizer, nn.functional.cross_entropy, scheduler=scheduler)
        .fit(loader, epochs=epochs)
        .epoch_losses
    )


def show(network: Network, spikes: torch.Tensor) -> None:
    """Run a sample [T, 1, n], and print each step as it is done: 64 hidden neurons' spikes, and the class ahead."""
    state, total = None, torch.zeros(CLASSES)
    for step, given in enumerate(spikes, 1):
        found, state = network.step({"pixels": given}, state)
        total += found["out"][0]
        print(
            f"{step:3} {''.join(' |'[int(spike)] for spike in found['hidden'][0, :64])} {int(total.argmax())}",
            flush=True,
        )


def draw(given: torch.Tensor, spikes: torch.Tensor, membranes: torch.Tensor, rates: torch.Tensor, path: Path) -> None:
    """Draw a sample's spikes [T, n] and membranes [T, classes], and how often hidden neurons fire in a step."""
    figure, (raster, traces, histogram) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, part, start, colour in (("input", given, 0, "#888a85"), ("hidden", spikes, given.shape[1], "#3465a4")):
        step, neuron = part.numpy().nonzero()
        raster.scatter(step + 1, neuron + start, s=5, marker="|", color=colour, label=name)
    raster.set(xlabel="step (1 ms)", ylabel="neuron", title=f"{int(spikes.sum())} spikes of hidden neurons")
    for label, trace in enumerate(membranes.numpy().T):
        best = label == int(membranes.mean(0).argmax())
        traces.plot(
            range(1, len(trace) + 1), trace, color="#cc0000" if best else "#babdb6", label=label if best else None
        )
    traces.set(xlabel="step (1 ms)", ylabel="membrane", title="read-out; the red one says which class")
    histogram.hist(1000 * rates.numpy(), bins=30, color="#3465a4")
    histogram.set(xlabel="spikes per second", ylabel="neurons", title="firing rates of hidden neurons")
    raster.legend(loc="upper right")
    traces.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare(about: str, data: Callable[..., tuple[torch.Tensor, ...]], encode: Callable[..., torch.Tensor]) -> None:
    """Train float and 4-bit networks from several seeds, print the share of right answers, show and draw one.

    Args:
        about: The example's docstring.
        data: Returns samples and labels to train by, and others.
        encode: Samples → spikes [T, B, n].
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--picture", type=Path, default=Path("spikes.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the steps are too small to share
    samples, labels, test, test_labels = data()
    inputs = encode(test[:1]).shape[-1]
    session = q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact"))
    for kind in (None, options.format):
        right = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = Classifier(encode, inputs, options.hidden, kind)
            train(model, samples, labels, seed, options.epochs)
            if kind is not None:
                pack_(model, session)
            with torch.no_grad():
                right.append(float((model.eval()(test).argmax(1) == test_labels).float().mean()))
        seeds = f"mean of {len(right)} seeds, worst {min(right):.2%}"
        print(
            f"{kind or 'float'} synapses: {sum(right) / len(right):.2%} of the test samples right ({seeds})",
            flush=True,
        )
    with torch.no_grad():
        found = model.network(encode(test), record=("pixels", "hidden", "out"))[0]
        given, spikes, membranes = found.values()
        show(model.network, given[:, :1])
    draw(given[:, 0], spikes[:, 0], membranes[:, 0], spikes.mean((0, 1)), options.picture)
    print(f"picture: {options.picture}")
