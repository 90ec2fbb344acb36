"""A model at long contexts: tokens per second of the prompt and of decode after it, ours and llama.cpp's, in turns.

llama.cpp has its flash attention, and its default cache of float16 numbers; it takes a prompt by the 512 tokens at once
that are its default, too.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import random
import time
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record, verdict
from benchmarks.cpu.ours import isa
from benchmarks.generate import LLAMA, PEERS, TEXT, file_of
from benchmarks.llama_cpp_model import LlamaModel
from q4_lm import Generation, LanguageModel
from q4_programs.cache_rows import row_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.generate import Run

CONTEXTS, STEPS = (512, 2048, 8192), 32
QUICK_CONTEXTS, QUICK_STEPS = (128, 320), 4
ROUNDS, QUICK_ROUNDS, LONG = 5, 1, 4096
"""Rounds of each context, after one that is not counted; one alone from that context on, of minutes each."""
BATCH = 512
"""Tokens of a prompt that llama.cpp takes at once: its default."""
DECODE, PREFILL, MEMORY = 1.75, 2.5, 1.02
"""Shares of llama.cpp's tokens per second that are aimed at; and of the bytes of a cache's numbers, at most."""
OURS: dict[str, tuple[str, torch.dtype | None]] = {
    "q4core, int16 (default)": ("auto", None),
    "q4core, int16, cache of float16": ("auto", torch.float16),
    "q4core, int16, cache of int8": ("auto", torch.int8),
    "q4core, int8": ("int8", None),
}
"""Way → how activations are rounded, and what keys and values are held in."""
_PARK_SECONDS = 0.02


def ours(
    model: LanguageModel, cache_dtype: torch.dtype | None, prompt: Sequence[int], steps: int
) -> tuple[Callable[[int], Run], float]:
    """Return what runs a model of ours once, and its cache's bytes as a share of those of its numbers."""
    config = model.decoder.config
    model.decoder.cache_dtype = cache_dtype
    cache = model.decoder.make_cache(len(prompt) + steps)
    rows = 2 * config.num_hidden_layers * config.num_key_value_heads * cache.capacity
    row_bytes = row_columns(config.head_dim, cache.dtype) * cache.dtype.itemsize  # of int8 with its scale

    def run(threads: int) -> Run:
        torch.set_num_threads(threads)
        cache.clear()
        generation = Generation(model.decoder, prompt, max_tokens=steps + 1, cache=cache)
        for _ in generation:
            pass
        return generation.prefill_seconds, generation.decode_seconds

    return run, cache.nbytes / (rows * row_bytes)


def _sample(
    runs: dict[str, Callable[[int], Run]], threads: int, rounds: int, prompt: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Run each program once in each round, after a round that is not counted."""
    before = torch.get_num_threads()
    rates: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in runs}
    order = random.Random(0)  # noqa: S311  # an order, no secret
    warming = 0 if prompt >= LONG else 1
    for index in range(rounds + 1 if warming else 1):
        for name, run in order.sample(sorted(runs.items()), len(runs)):
            time.sleep(_PARK_SECONDS)  # until the other's workers sleep
            prefill, decode = run(threads)
            if index >= warming:
                rates[name]["prefill"].append(prompt / prefill)
                rates[name]["decode"].append(steps / decode)
    torch.set_num_threads(before)
    return {name: {kind: record.summary(values) for kind, values in own.items()} for name, own in rates.items()}


def measure(contexts: Sequence[int], steps: int, rounds: int, path: Path) -> dict[str, Any]:
    """Return tokens per second by context, threads and program; llama.cpp is said to be missing if it is."""
    models = {
        precision: LanguageModel.open(path, q4.SessionConfig(device="cpu", activation_precision=precision), cache="off")
        for precision in {precision: None for precision, _ in OURS.values()}
    }
    distribution = PEERS[LLAMA][0]
    peer: dict[str, Any] = {"distribution": distribution, "installed": False, "why": "not installed"}
    cores = max(2, torch.get_num_threads())
    found: dict[str, Any] = {}
    for context in contexts:
        count = context - steps  # the last new token is not fed back
        prompt = next(iter(models.values())).tokenizer.encode(TEXT * count)[:count]
        runs, shares = {}, {}
        for name, (precision, cache_dtype) in OURS.items():
            runs[name], shares[name] = ours(models[precision], cache_dtype, prompt, steps)
        try:
            llama = LlamaModel(path, context, batch=min(BATCH, context), has_flash_attention=True)
        except ImportError:
            pass
        else:
            peer = {"installed": True, "version": importlib.metadata.version(distribution)}
            runs[LLAMA] = functools.partial(llama.generate, prompt, steps)
        samples = {str(threads): _sample(runs, threads, rounds, count, steps) for threads in (cores, 1)}
        found[str(context)] = {"prompt": count, "threads": samples, "cache_bytes_over_numbers": shares}
    return {"file": path.name, "steps": steps, "peers": {LLAMA: peer}, "contexts": found}


def judge(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return whether each target is met, for each context, kind and number of threads."""
    found = []
    for context, own in result["contexts"].items():
        for threads, programs in own["threads"].items():
            for name in OURS:
                for kind, share in (("decode", DECODE), ("prefill", PREFILL)):
                    rival = programs.get(LLAMA)
                    ratio = None if rival is None else programs[name][kind]["median"] / rival[kind]["median"]
                    target = f"context of {context}: {share} of {LLAMA}'s tokens per second"
                    subject = f"{name}, {kind}, {threads} threads"
                    found.append(verdict.Verdict(target, subject, ratio, share, against=LLAMA))
        for name, ratio in own["cache_bytes_over_numbers"].items():
            target = f"context of {context}: a cache of {MEMORY} of its numbers' bytes at most"
            found.append(verdict.Verdict(target, name, ratio, MEMORY, is_most=True, against="its numbers"))
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``contexts-<isa>.json``, and print tokens per second and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks contexts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short contexts and one round, for development")
    quick = parser.parse_args(arguments).quick
    sizes = (QUICK_CONTEXTS, QUICK_STEPS, QUICK_ROUNDS) if quick else (CONTEXTS, STEPS, ROUNDS)
    result = measure(*sizes, file_of("smollm2"))
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    result |= {"unit": "tokens per second", "isa": isa(), "environment": record.environment()}
    for context, own in result["contexts"].items():
        for threads, programs in own["threads"].items():
            for name, kinds in programs.items():
                rates = ", ".join(
                    f"{kind} {values['median']:.0f} ({values['p10']:.0f} … {values['p90']:.0f})"
                    for kind, values in kinds.items()
                )
                print(f"context {context}  {threads} threads  {name:<32} {rates} tokens/s")
    for name, facts in result["peers"].items():
        print(f"{name}: {facts['version'] if facts['installed'] else facts['why']}")
    for line in verdict.lines(judged):
        print(line)
    folder = record.BUILD if quick else record.RESULTS
    print(f"written: {record.write('contexts-' + result['isa'], result, folder=folder)}")


if __name__ == "__main__":
    main()
