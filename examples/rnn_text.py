"""A recurrent network continues text, byte by byte, with four-bit weights, and beats the counts of pairs.

    python examples/rnn_text.py [--steps 400] [--format q4_0] [--picture rnn_text.png]

It learns this project's documentation. The baseline is the best that one byte can say of the next: counts of pairs.
It needs q4-nn, scikit-learn and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from learning import draw, text, windows
from torch import nn

import q4core as q4
from q4_nn import Trainer, build_rnn, pack_

LENGTH, BATCH = 96, 32


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def bigram_loss(learned: torch.Tensor, held_back: torch.Tensor) -> float:
    """Return the loss of counts of pairs, each begun with a twentieth so that no pair is impossible."""
    counts = torch.full((256, 256), 0.05, dtype=torch.float64)
    counts.index_put_((learned[:-1], learned[1:]), torch.ones(len(learned) - 1, dtype=torch.float64), accumulate=True)
    share = counts / counts.sum(1, keepdim=True)
    return float(-share[held_back[:-1], held_back[1:]].log().mean())


def held_back_loss(model: nn.Module, numbers: torch.Tensor) -> float:
    """Return the loss over a held-back text, in pieces."""
    count = (len(numbers) - 1) // LENGTH
    pieces = numbers[: count * LENGTH].view(count, LENGTH)
    following = numbers[1 : count * LENGTH + 1].view(count, LENGTH)
    with torch.no_grad():
        return float(loss_of(model(pieces), following))


def main() -> None:
    """Train, pack, draw, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--picture", type=Path, default=Path("rnn_text.png"))
    options = parser.parse_args()
    learned, held_back = text()
    print(f"counts of pairs: {bigram_loss(learned, held_back):.3f} nats per byte")
    curves = {}
    for name, kind in (("float", None), (options.format, options.format)):
        torch.manual_seed(0)
        model = build_rnn(256, 256, cell="gru", embedding=64, format=kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        trainer = Trainer(model, optimizer, loss_of, max_grad_norm=1.0, scheduler=scheduler)
        curves[name] = trainer.fit(windows(learned, LENGTH, BATCH, options.steps, seed=1)).losses
        model.eval()
        with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
            print(f"gru, {name}: {held_back_loss(model, held_back):.3f} nats per byte")
            if kind is not None:
                pack_(model, session)
                print(f"gru, {name}, packed: {held_back_loss(model, held_back):.3f} nats per byte")
    draw(curves, options.picture, "recurrent network on text", "nats per byte (lower is better)", "update")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
