"""Shared code of the learning examples: losses over text, a comparison of two networks, and a picture of curves.

The examples that use it need q4-nn, scikit-learn and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NARROW = 20
COLOURS = ("#3465a4", "#4e9a06", "#c17d11")
LINES = ("-", "--", ":")


def byte_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats per byte of logits [B, T, 256] over the bytes that follow [B, T]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def loss_over(model: nn.Module, numbers: torch.Tensor, length: int, most: int = 256) -> float:
    """Return a model's loss over a text in at most ``most`` pieces of a length."""
    count = min((len(numbers) - 1) // length, most)
    pieces = numbers[: count * length].view(count, length)
    following = numbers[1 : count * length + 1].view(count, length)
    with torch.no_grad():
        return float(byte_loss(model(pieces), following))


def draw(curves: Mapping[str, Sequence[float]], path: Path, title: str, ylabel: str, xlabel: str = "epoch") -> None:
    """Draw a curve for each name, a level where it has one value; a dashed one shows what lies below it."""
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for (name, values), colour, line in zip(curves.items(), COLOURS, LINES, strict=False):
        if len(values) == 1:
            axes.axhline(values[0], label=name, color=colour, linestyle=line)
        else:
            axes.plot(range(1, len(values) + 1), values, label=name, color=colour, linestyle=line)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    values = [value for curve in curves.values() for value in curve]
    is_narrow = max(values) < NARROW * min(values)  # numbers between the powers of ten, too
    axes.yaxis.set_minor_formatter(ScalarFormatter() if is_narrow else NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare_on_digits(
    train: Callable[[str | None, int, int], tuple[list[float], float]], about: str, epochs: int, picture: str
) -> None:
    """Train the float network and its four-bit twin from several seeds, draw the first, and print the results.

    Args:
        train: Format or None, seed and epochs → the loss of each epoch, and the share of right answers.
        about: The example's docstring.
        epochs: Passes over the digits by default.
        picture: File's name by default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--picture", type=Path, default=Path(picture))
    options = parser.parse_args()
    curves = {}
    for name, kind in (("float", None), (options.format, options.format)):
        runs = [train(kind, seed, options.epochs) for seed in range(options.seeds)]
        curves[f"{name} weights, first seed"] = runs[0][0]
        mean, worst = sum(right for _, right in runs) / len(runs), min(right for _, right in runs)
        means = f"mean of {len(runs)} seeds, worst {worst:.1%}"
        print(f"{name}{', packed' if kind else ''}: {mean:.1%} of the held-back digits right ({means})")
    draw(curves, options.picture, "handwritten digits", "training loss (lower is better)")
    print(f"picture: {options.picture}")
