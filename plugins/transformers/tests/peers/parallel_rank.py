"""One process of a tensor-parallel model, under torchrun: what it loads, computes and saves, as JSON of rank 0."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from huggingface_models import IDS, load, logits
from torch import distributed

import q4_transformers
from q4_transformers.split import SplitLinear


def main(folder: Path, out: Path) -> None:
    """Load a folder split over all processes, and write what held."""
    model = load(folder, tp_plan="auto")
    with torch.no_grad():
        tokens = model.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)
    split = {name: item for name, item in model.named_modules() if isinstance(item, SplitLinear)}
    rows = [row for row in q4_transformers.explain(model).packed if row.name.endswith(".local")]
    found = {
        "logits": logits(model)[0].double().tolist(),
        "tokens": tokens[0].tolist(),
        "shapes": {name: list(item.local.weight.shape) for name, item in split.items()},
        "explained": len(rows),
    }
    model.save_pretrained(out / "saved")
    gathered: list[object] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, found)
    if distributed.get_rank() == 0:
        (out / "ranks.json").write_text(json.dumps(gathered), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    os._exit(0)  # gloo's threads may outlive Python, which aborts (pytorch issue 190489)
