"""Precision with rounded activations: SmolLM2's next tokens over a text, compared with the reference's."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from benchmarks.llama_cpp_model import LlamaModel
from q4_lm import LanguageModel
from q4_lm.commands.generate import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TEXTS = Path(__file__).parents[1] / "LICENSE", Path(__file__).parent / "sentences.txt"
"""English prose that every clone has and that is not edited."""
WINDOW = 512
PRECISIONS: dict[str, tuple[str, torch.dtype | None]] = {
    "q4core, exact": ("exact", None),
    "q4core, int16 activations (default)": ("int16", None),
    "q4core, int8 activations": ("int8", None),
    "q4core, exact, keys and values in float16": ("exact", torch.float16),
    "q4core, exact, keys and values in int8": ("exact", torch.int8),
}
"""Name → how activations are rounded, and what keys and values are held in."""
EXACT = "q4core, exact"
LLAMA = "llama.cpp"
BASE = "q4core, reference"
"""What the others are compared with: weights decoded exactly, products in float32 by torch."""


def _ours(
    path: Path, config: q4.SessionConfig, cache_dtype: torch.dtype | None = None
) -> tuple[LanguageModel, Callable[[Sequence[int]], torch.Tensor]]:
    model = LanguageModel.open(path, config)
    model.decoder.cache_dtype = cache_dtype

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            cache = model.decoder.make_cache(len(tokens))
            return model.decoder(torch.tensor([list(tokens)]), cache)[0].double()  # type: ignore[no-any-return]

    return model, logits


def _windows(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(tokens), WINDOW):
        yield tokens[start : start + WINDOW]


def measure(characters: int) -> dict[str, Any]:
    """Return, for each program, the divergence from the reference and the share of equal next tokens.

    Args:
        characters: How much of the text is read.
    """
    path = find_model("smollm2")
    reference = q4.SessionConfig(device="cpu", activation_precision="exact", compute_path="dequant_matmul_only")
    model, base = _ours(path, reference)
    programs = {
        name: _ours(path, q4.SessionConfig(device="cpu", activation_precision=precision), cache_dtype)[1]
        for name, (precision, cache_dtype) in PRECISIONS.items()
    }
    peer: dict[str, Any] = {"distribution": "llama-cpp-python", "installed": False}
    try:
        llama = LlamaModel(path, WINDOW)
    except ImportError:
        pass
    else:
        peer |= {"installed": True, "version": importlib.metadata.version("llama-cpp-python")}
        programs[LLAMA] = lambda tokens: torch.from_numpy(llama.all_logits(tokens)).double()
    text = "".join(path.read_text(encoding="utf-8") for path in TEXTS)
    tokens = model.tokenizer.encode(text[:characters])
    sums = {name: {"divergence": 0.0, "equal": 0} for name in programs}
    for window in _windows(tokens):
        reference_logs = base(window).log_softmax(-1)
        for name, logits in programs.items():
            own = logits(window).log_softmax(-1)
            sums[name]["divergence"] += float((reference_logs.exp() * (reference_logs - own)).sum())
            sums[name]["equal"] += int((reference_logs.argmax(-1) == own.argmax(-1)).sum())
    count = len(tokens)
    return {
        "file": path.name,
        "text": ", ".join(path.name for path in TEXTS),
        "tokens": count,
        "against": BASE,
        "peers": {LLAMA: peer},
        "programs": {
            name: {"kl_divergence": own["divergence"] / count, "equal_next_tokens": own["equal"] / count}
            for name, own in sums.items()
        },
        "unit": "nats per token; share of tokens",
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``precision.json`` and print a line for each program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks precision", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the text, for development")
    options = parser.parse_args(arguments)
    result = measure(characters=1200 if options.quick else 1_000_000)
    written = record.write("precision", result, folder=record.BUILD if options.quick else record.RESULTS)
    print(f"{result['tokens']} tokens of {result['text']}, against {result['against']}")
    for name, own in result["programs"].items():
        print(f"{name:<42} KL {own['kl_divergence']:.1e}, equal next tokens {own['equal_next_tokens']:.1%}")
    print(f"written: {written}")


if __name__ == "__main__":
    main()
