"""A tiny Llama is trained with NVFP4 weights on this project's documentation, packed, and continues a sentence.

    python examples/tiny_llama.py [--steps 800] [--format nvfp4] [--picture tiny_llama.png]

It needs q4-nn, scikit-learn and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from learning import byte_loss, draw, loss_over
from learning_data import text, windows
from torch import nn

import q4core as q4
from q4_lm import Generation, Sampler, build_transformer
from q4_nn import Trainer, pack_, to_ste_

LENGTH, BATCH = 128, 16
PROMPT = b"A backend is "


def train(kind: str, steps: int, learned: torch.Tensor) -> tuple[nn.Module, list[float]]:
    """Return a trained model whose blocks have four-bit weights, and the loss of each update."""
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
    to_ste_(model, kind, skip=("lm_head",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    trainer = Trainer(model, optimizer, byte_loss, max_grad_norm=1.0, scheduler=scheduler)
    losses = trainer.fit(windows(learned, LENGTH, BATCH, steps, seed=1)).losses
    return model.eval(), losses


def main() -> None:
    """Train, pack, generate, draw, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--picture", type=Path, default=Path("tiny_llama.png"))
    options = parser.parse_args()
    learned, held_back = text()
    model, losses = train(options.format, options.steps, learned)
    print(f"trained with {options.format} weights: {loss_over(model, held_back, LENGTH):.4f} nats per byte")
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        pack_(model, session)
        print(f"packed: {loss_over(model, held_back, LENGTH):.4f} nats per byte")
        answer = [*Generation(model, [*PROMPT], max_tokens=120, sampler=Sampler(temperature=0.7, seed=1))]
    print((PROMPT + bytes(answer)).decode(errors="replace"))
    curves = {f"{options.format} weights": losses}
    draw(curves, options.picture, "a tiny Llama on text", "nats per byte (lower is better)", "update")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
