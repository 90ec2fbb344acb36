"""Picture of ``actor_snn.py``: a raster of spikes and traces of membranes for one image.

A part of that example, which needs: pip install "q4core[examples]"
"""

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
            raster.axhline((index + 1) * SIZE - 0.5, color="#d3d7cf", lw=0.8, zorder=0)
            busiest = membranes[:, int(spikes.sum(0).argmax())].numpy()
            hidden.plot(time_, busiest, color=colors[index], lw=1, label=f"population {name}")
    for digit, trace in enumerate(potentials[:, -DIGITS:].numpy().T):
        is_true = digit == label
        label_text = f"{digit}, the right one" if is_true else "other digits" if digit == (label == 0) else None
        out.plot(time_, trace, color=colors[-1] if is_true else "#888a85", lw=1.5 if is_true else 0.8, label=label_text)
    counts = fired[:, -DIGITS:].sum(0)
    ticks = [*range(0, len(HIDDEN) * SIZE + 1, SIZE), fired.shape[1]]
    raster.set(xlabel="step", ylabel="neuron", yticks=ticks, ylim=(-3, fired.shape[1] + 60))
    raster.set(title=f"{int(fired.sum()):,} spikes; the network says {int(counts.argmax())}")
    out.set(ylabel="membrane", title="the ten digits' neurons")
    hidden.set(xlabel="step", ylabel="membrane", title="each hidden population's busiest neuron")
    for traces in (out, hidden):
        traces.axhline(1.0, color="#2e3436", lw=0.8, ls=":", label="threshold")
        traces.legend(fontsize="x-small", loc="upper left" if traces is hidden else "lower left")
    inset = raster.inset_axes((0.02, 0.84, 0.14, 0.14))
    inset.imshow(image.reshape(8, 8).numpy(), cmap="gray_r")
    inset.set(xticks=[], yticks=[])
    raster.text(0.17, 0.91, f"shown: a {label}", transform=raster.transAxes, va="center")
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
