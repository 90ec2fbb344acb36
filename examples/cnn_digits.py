"""A convolutional network reads handwritten digits with four-bit kernels: trained, packed, and compared with float.

    python examples/cnn_digits.py [--epochs 15] [--seeds 5] [--format nf4] [--picture cnn_digits.png]

It needs q4-nn, scikit-learn (the data) and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import torch
from learning import compare_on_digits
from learning_data import digits
from torch import nn

import q4core as q4
from q4_nn import Trainer, build_cnn, pack_


def train(kind: str | None, seed: int, epochs: int) -> tuple[list[float], float]:
    """Return the loss of each epoch, and the share of right answers of the packed model, or of the float one."""
    torch.manual_seed(seed)
    model = build_cnn((1, 8, 8), [16, 32], 10, format=kind)
    loader, images, labels = digits(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    state = Trainer(model, optimizer, nn.functional.cross_entropy, scheduler=scheduler).fit(loader, epochs=epochs)
    model.eval()
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session, torch.no_grad():
        if kind is not None:
            pack_(model, session)
        return state.epoch_losses, float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    compare_on_digits(train, __doc__, 15, "cnn_digits.png")
