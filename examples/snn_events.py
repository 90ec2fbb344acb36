"""A spiking network with 4-bit synapses classifies digits by the events of a camera that moves over them.

    python examples/snn_events.py [--epochs 30] [--seeds 5] [--format nf4] [--picture spikes.png]

The data are made here as N-MNIST was recorded: the camera makes three saccades, a triangle, and each of its pixels
reports when it gets brighter (one input) or darker (another). Each sample starts elsewhere.

It needs q4-snn, scikit-learn (the digits) and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import torch
from snn_digits import digits
from spiking import compare

from q4_snn import spikegen

SIDE, STEPS = 12, 18


def record(images: torch.Tensor, seed: int) -> torch.Tensor:
    """Return events, bool [B, T, 2 · 12 · 12], of digits [B, 64] seen by a camera that moves."""
    corners = torch.tensor([(0.0, 0.0), (1.0, 2.0), (2.0, 0.0), (0.0, 0.0)]) * 1.5  # pixels of a digit
    times = torch.linspace(0, 3, STEPS + 1)
    low = times.long().clamp_max(2)
    path = torch.lerp(corners[low], corners[low + 1], (times - low)[:, None])
    start = torch.rand(len(images), 1, 2, generator=torch.Generator().manual_seed(seed)) * 1.5 - 1.5
    shift = (path + start) / 4  # of half a digit
    y, x = torch.meshgrid(*[torch.linspace(-1.25, 1.25, SIDE)] * 2, indexing="ij")
    grid = torch.stack([x, y], -1) + shift[:, :, None, None] - 0.25  # [B, T + 1, side, side, 2]
    frames = torch.nn.functional.grid_sample(images.view(-1, 1, 8, 8), grid.flatten(1, 2), align_corners=False).view(
        len(images), STEPS + 1, SIDE * SIDE
    )
    change = spikegen.delta(frames.transpose(0, 1), threshold=0.12, off_spike=True)[1:].transpose(0, 1)
    return torch.cat([change > 0, change < 0], -1)


def data() -> tuple[torch.Tensor, ...]:
    """Return events of 1,437 digits with their labels, and of 360 others, each seen three times."""
    images, labels, test, test_labels = digits()
    return record(images, 0), labels, record(test.repeat(3, 1), 1), test_labels.repeat(3)


def encode(events: torch.Tensor) -> torch.Tensor:
    """Return spikes [T, B, 288]."""
    return events.float().transpose(0, 1)


if __name__ == "__main__":
    compare(__doc__, data, encode)
