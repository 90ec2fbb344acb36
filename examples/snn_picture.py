"""The picture of ``actor_snn.py``: what one image does, as a raster of spikes and traces of membranes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from snn_network import DIGITS, HIDDEN, SIZE

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def draw(fired: torch.Tensor, potentials: torch.Tensor, image: torch.Tensor, label: int, path: Path) -> None:
    """Draw what one image does: every spike, the membranes of the digits' neurons, and some of the hidden ones'.

    Args:
        fired: Spikes [steps, 256 + 10], the hidden populations first.
        potentials: Membranes, likewise.
        image: [64].
        label: Which digit it is.
        path: Where to.
    """
    figure, panels = plt.subplot_mosaic("ST;SH", figsize=(11, 5.5), layout="constrained", width_ratios=(1.3, 1))
    raster, out, hidden = panels["S"], panels["T"], panels["H"]
    colors = ("#3465a4", "#75507b", "#c17d11", "#4e9a06", "#cc0000")
    time_ = range(1, len(fired) + 1)
    parts = zip((*HIDDEN, "out"), fired.split(SIZE, 1), potentials.split(SIZE, 1), strict=True)
    for index, (name, spikes, membranes) in enumerate(parts):
        step, neuron = spikes.numpy().nonzero()
        raster.scatter(step + 1, neuron + index * SIZE, s=6, marker="|", color=colors[index])
        middle = index * SIZE + spikes.shape[1] / 2
        raster.text(len(time_) + 1.5, middle, name, color=colors[index], va="center")
        if index < len(HIDDEN):
            hidden.plot(time_, membranes[:, int(spikes.sum(0).argmax())].numpy(), color=colors[index], lw=1)
    for digit, trace in enumerate(potentials[:, -DIGITS:].numpy().T):
        color = colors[-1] if digit == label else "#888a85"
        out.plot(time_, trace, color=color, lw=1.5 if digit == label else 0.8)
    raster.set(xlabel="step", ylabel="neuron", ylim=(-6, 5.3 * SIZE), title=f"{int(fired.sum()):,} spikes")
    out.set(ylabel="membrane", title=f"the ten digits' neurons; {label} is true, and red")
    hidden.set(xlabel="step", ylabel="membrane", title="each hidden population's busiest neuron")
    inset = raster.inset_axes((0.02, 0.83, 0.16, 0.16))
    inset.imshow(image.reshape(8, 8).numpy(), cmap="gray_r")
    inset.set(xticks=[], yticks=[])
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
