"""A recurrent network continues text, byte by byte, with four-bit weights, and beats the counts of pairs.

    python examples/rnn_text.py [--steps 200] [--seeds 5] [--format q4_0] [--picture rnn_text.png]

It learns this project's documentation. The baseline is the best that one byte can say of the next: counts of pairs.
It needs q4-nn, scikit-learn and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from learning import byte_loss, draw, loss_over
from learning_data import text, windows

import q4core as q4
from q4_nn import Trainer, build_rnn, pack_

LENGTH, BATCH = 96, 32
Trained = tuple[list[float], float, float]


def bigram_loss(learned: torch.Tensor, held_back: torch.Tensor) -> float:
    """Return the loss of counts of pairs, each begun with a twentieth so that no pair is impossible."""
    counts = torch.full((256, 256), 0.05, dtype=torch.float64)
    counts.index_put_((learned[:-1], learned[1:]), torch.ones(len(learned) - 1, dtype=torch.float64), accumulate=True)
    share = counts / counts.sum(1, keepdim=True)
    return float(-share[held_back[:-1], held_back[1:]].log().mean())


def train(kind: str | None, seed: int, steps: int, learned: torch.Tensor, held_back: torch.Tensor) -> Trained:
    """Return the loss of each update, and that over the held-back text: trained, and packed."""
    torch.manual_seed(seed)
    model = build_rnn(256, 256, cell="gru", embedding=64, format=kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    trainer = Trainer(model, optimizer, byte_loss, max_grad_norm=1.0, scheduler=scheduler)
    losses = trainer.fit(windows(learned, LENGTH, BATCH, steps, seed)).losses
    trained = loss_over(model.eval(), held_back, LENGTH)
    if kind is None:
        return losses, trained, trained
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        pack_(model, session)
        return losses, trained, loss_over(model, held_back, LENGTH)


def main() -> None:
    """Train, pack, draw, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--picture", type=Path, default=Path("rnn_text.png"))
    options = parser.parse_args()
    learned, held_back = text()
    pairs = bigram_loss(learned, held_back)
    print(f"counts of pairs: {pairs:.3f} nats per byte")
    curves = {}
    for name, kind in (("float", None), (options.format, options.format)):
        runs = [train(kind, seed, options.steps, learned, held_back) for seed in range(options.seeds)]
        curves[f"{name} weights, first seed"] = runs[0][0]
        for at, word in ((1, ""), *(() if kind is None else ((2, ", packed"),))):
            mean = sum(run[at] for run in runs) / len(runs)
            print(f"gru, {name}{word}: {mean:.3f} nats per byte (mean of {len(runs)} seeds)")
    curves["counts of pairs, held-back text"] = [pairs]
    draw(curves, options.picture, "recurrent network on text", "nats per byte (lower is better)", "update")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
