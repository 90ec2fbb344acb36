"""A spiking network with 4-bit synapses classifies digits by when their pixels fire: the brighter, the earlier.

    python examples/snn_digits.py [--epochs 30] [--seeds 5] [--format nf4] [--picture spikes.png]

It needs q4-snn, scikit-learn (the data) and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from spiking import compare

from q4_snn import spikegen

STEPS = 16


def digits() -> tuple[torch.Tensor, ...]:
    """Return 1,437 digits [B, 64] with their labels, and 360 others."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def encode(images: torch.Tensor) -> torch.Tensor:
    """Return one spike for each pixel [T, B, 64], linearly in its brightness; none for dark ones."""
    return spikegen.latency(images, STEPS, threshold=0.1, linear=True)


if __name__ == "__main__":
    compare(__doc__, digits, encode)
