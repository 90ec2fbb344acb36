"""Data for the learning examples that needs no download: handwritten digits, and this project's pages.

The examples that use it need q4-nn, scikit-learn and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def digits(seed: int) -> tuple[DataLoader, torch.Tensor, torch.Tensor]:
    """Return batches of 64 of 1,437 handwritten digits [B, 1, 8, 8], and 360 others with their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(images[train], labels[train]), 64, shuffle=True, generator=generator)
    return loader, images[test], labels[test]


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return this project's documentation as bytes, int64: nine tenths to learn from, one tenth held back."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    data = b"".join(page.read_bytes() for page in pages)
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64)
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:]


def windows(numbers: torch.Tensor, length: int, batch: int, steps: int, seed: int) -> DataLoader:
    """Return ``steps`` batches of random pieces of a text with, for each position, the byte that follows."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(numbers) - length - 1, (steps * batch,), generator=generator)
    pieces = numbers[starts[:, None] + torch.arange(length + 1)]
    return DataLoader(TensorDataset(pieces[:, :-1], pieces[:, 1:]), batch)
