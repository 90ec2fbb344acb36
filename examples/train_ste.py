"""Train a small network whose weights are four-bit in every forward pass, on real handwritten digits.

    python examples/train_ste.py [--epochs 30] [--format nvfp4] [--picture train_ste.png]

The masters stay in float32; ``linear_ste`` quantises them for each forward pass and passes the gradient straight
through. Draws loss and accuracy to a PNG, and shows that memory ends where it was.

It needs q4-nn, scikit-learn (the data), matplotlib and rich: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import nn

from q4_nn import clear_eval_cache, eval_cache_bytes, linear_ste

HIDDEN = 128
BATCH = 64


class FourBitNetwork(nn.Module):
    """64 pixels → 128 → 10 digits; the masters belong to this module alone."""

    def __init__(self, format_: str) -> None:
        super().__init__()
        self.format = format_
        self.first = nn.Linear(64, HIDDEN)
        self.second = nn.Linear(HIDDEN, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [M, 10] of images [M, 64]."""
        linear = linear_ste
        hidden = torch.relu(linear(x, self.first.weight, self.first.bias, format=self.format))
        return linear(hidden, self.second.weight, self.second.bias, format=self.format)


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (training images, training labels, test images, test labels), shuffled by a fixed seed."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    cut = int(0.8 * len(images))
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def resident_bytes() -> int:
    """Return the memory that this process holds, or 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    except OSError:
        return 0


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of right answers; without gradients the quantised weights come from the eval cache."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(model: nn.Module, epochs: int, data: tuple[torch.Tensor, ...]) -> tuple[list[float], list[float], int]:
    """Return the loss of each epoch, the test accuracy after it, and how much memory grew after the second one."""
    images, labels, test_images, test_labels = data
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    losses, accuracies, settled = [], [], 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("epoch", total=epochs)
        for epoch in range(epochs):
            total = 0.0
            for batch in torch.randperm(len(images), generator=generator).split(BATCH):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += loss.item() * len(batch)
            losses.append(total / len(images))
            accuracies.append(accuracy(model, test_images, test_labels))
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}, accuracy {accuracies[-1]:.1%}")
            if epoch == 1:
                gc.collect()
                settled = resident_bytes()
    gc.collect()
    return losses, accuracies, resident_bytes() - settled if epochs > 1 else 0


def draw(losses: list[float], accuracies: list[float], format_: str, path: Path) -> None:
    """Draw loss and accuracy over the epochs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    epochs = range(1, len(losses) + 1)
    left.plot(epochs, losses, color="#3465a4")
    left.set(xlabel="epoch", ylabel="training loss", yscale="log", title=f"linear_ste, {format_}")
    right.plot(epochs, [100 * value for value in accuracies], color="#4e9a06")
    right.set(xlabel="epoch", ylabel="test accuracy (%)", title=f"{accuracies[-1]:.1%} at the end")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Train, draw, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--picture", type=Path, default=Path("train_ste.png"))
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    torch.manual_seed(0)
    model = FourBitNetwork(options.format)
    losses, accuracies, grown = train(model, options.epochs, digits())
    draw(losses, accuracies, options.format, options.picture)
    cached = eval_cache_bytes()
    clear_eval_cache()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, test accuracy {accuracies[-1]:.1%} with {options.format} weights")
    print(
        f"memory since the second epoch: {grown / 2**20:+.1f} MB; the eval cache held {cached:,} bytes, now given back"
    )
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
