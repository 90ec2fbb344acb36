"""The spiking network of ``actor_snn.py``: leaky integrate-and-fire neurons, and their training on digits.

A part of that example, which needs: pip install "q4core[examples]"
"""

from __future__ import annotations

import torch
from rich.progress import track

from q4_nn import ste_weight

SIZE, DIGITS = 64, 10
HIDDEN = ("a", "b", "c", "d")
SOURCES = {**dict.fromkeys(HIDDEN, ("pixels", *HIDDEN)), "out": HIDDEN}
"""The populations that each population reads."""
LEAK, FORMAT = 0.9, "nf4"  # blocks of 64 lie within one source's rows, so parts are quantised like the whole


def integrate(membrane: torch.Tensor, current: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the membranes after one step, and their spikes, which have a smooth slope for training."""
    membrane = LEAK * membrane + current
    slope = torch.sigmoid(2.0 * (membrane - 1.0))
    spikes = slope + ((membrane >= 1.0).float() - slope).detach()
    return membrane - spikes.detach(), spikes


def input_spikes(images: torch.Tensor, step: int) -> torch.Tensor:
    """Return the pixels' spikes in one step [M, 64]: the brighter, the likelier."""
    return (torch.rand(images.shape, generator=torch.Generator().manual_seed(step)) < images).float()


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int, steps: int = 20) -> dict[str, torch.Tensor]:
    """Return the masters [256, 64 + 256] of ``hidden`` and [10, 256] of ``out``, trained as four-bit weights."""
    generator, width = torch.Generator().manual_seed(0), SIZE * len(HIDDEN)
    shapes = {"hidden": (width, SIZE + width), "out": (DIGITS, width)}
    masters = {name: torch.randn(shape, generator=generator).mul_(0.06) for name, shape in shapes.items()}
    optimiser = torch.optim.Adam([master.requires_grad_() for master in masters.values()], lr=2e-3)
    for epoch in track(range(epochs), "training"):
        for batch in torch.randperm(len(images), generator=generator).split(128):
            hidden, out = (ste_weight(master, FORMAT) for master in masters.values())
            membranes = spikes = torch.zeros(len(batch), width)
            potentials = counts = torch.zeros(len(batch), DIGITS)
            rate = torch.zeros(())
            for step in range(epoch * steps, (epoch + 1) * steps):
                potentials, fired = integrate(potentials, spikes @ out.T)
                seen = torch.cat([input_spikes(images[batch], step), spikes], 1)
                membranes, spikes = integrate(membranes, seen @ hidden.T)
                counts, rate = counts + fired, rate + spikes.mean() / steps
            loss = torch.nn.functional.cross_entropy(0.5 * counts, labels[batch]) + rate  # quiet neurons are cheap
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return {name: master.detach() for name, master in masters.items()}
