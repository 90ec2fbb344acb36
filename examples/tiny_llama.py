"""A tiny Llama is trained with NVFP4 weights on this project's documentation, packed, and continues a sentence.

    python examples/tiny_llama.py [--steps 300] [--format nvfp4] [--picture tiny_llama.png]

It needs q4-nn, scikit-learn and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from learning import draw, text, windows
from torch import nn

import q4core as q4
from q4_nn import Generation, Sampler, Trainer, build_transformer, pack_, to_ste_

LENGTH, BATCH = 128, 16
PROMPT = b"A backend is "


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def held_back_loss(model: nn.Module, numbers: torch.Tensor) -> float:
    """Return the loss over a held-back text, in pieces."""
    count = min((len(numbers) - 1) // LENGTH, 64)
    pieces = numbers[: count * LENGTH].view(count, LENGTH)
    following = numbers[1 : count * LENGTH + 1].view(count, LENGTH)
    with torch.no_grad():
        return float(loss_of(model(pieces), following))


def main() -> None:
    """Train, pack, generate, draw, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--picture", type=Path, default=Path("tiny_llama.png"))
    options = parser.parse_args()
    learned, held_back = text()
    torch.manual_seed(0)
    model = build_transformer(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    to_ste_(model, options.format, skip=("lm_head",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, options.steps, pct_start=0.1)
    trainer = Trainer(model, optimizer, loss_of, max_grad_norm=1.0, scheduler=scheduler)
    losses = trainer.fit(windows(learned, LENGTH, BATCH, options.steps, seed=1)).losses
    model.eval()
    print(f"trained with {options.format} weights: {held_back_loss(model, held_back):.4f} nats per byte")
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        pack_(model, session)
        print(f"packed: {held_back_loss(model, held_back):.4f} nats per byte")
        answer = [*Generation(model, [*PROMPT], max_tokens=120, sampler=Sampler(temperature=0.7, seed=1))]
    print((PROMPT + bytes(answer)).decode(errors="replace"))
    draw({options.format: losses}, options.picture, "a tiny Llama on text", "nats per byte (lower is better)", "update")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
