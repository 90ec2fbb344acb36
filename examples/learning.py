"""What the learning examples share: data that is at hand without a download, and a picture of curves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COLOURS = ("#3465a4", "#4e9a06", "#c17d11", "#75507b")


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


def draw(curves: Mapping[str, Sequence[float]], path: Path, title: str, ylabel: str, xlabel: str = "epoch") -> None:
    """Draw a curve for each name."""
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
        axes.plot(range(1, len(values) + 1), values, label=name, color=colour)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare_on_digits(
    train: Callable[[str | None, int, int], tuple[list[float], float]], about: str, epochs: int, picture: str
) -> None:
    """Train the float network and its four-bit twin from several seeds, draw the first, and say what came out.

    Args:
        train: Format or None, seed and epochs → the loss of each epoch, and the share of right answers.
        about: The example's docstring.
        epochs: Passes over the digits, unless told.
        picture: File's name, unless told.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--picture", type=Path, default=Path(picture))
    options = parser.parse_args()
    curves = {}
    for name, kind in (("float", None), (f"{options.format}, packed", options.format)):
        runs = [train(kind, seed, options.epochs) for seed in range(options.seeds)]
        curves[name] = runs[0][0]
        mean, worst = sum(right for _, right in runs) / len(runs), min(right for _, right in runs)
        print(f"{name}: {mean:.1%} of the held-back digits right (mean of {len(runs)} seeds, worst {worst:.1%})")
    draw(curves, options.picture, "handwritten digits", "training loss (lower is better)")
    print(f"picture: {options.picture}")
