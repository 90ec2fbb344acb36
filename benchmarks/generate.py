"""SmolLM2 as a whole: tokens per second of ``q4 generate`` and of llama.cpp on the same file, in turns."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import q4core as q4
from benchmarks import record, verdict
from benchmarks.cpu.ours import isa
from benchmarks.llama_cpp_model import LlamaModel
from benchmarks.style import caption, plt, save, tidy
from q4_lm import Generation, LanguageModel
from q4_lm.commands.generate import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT, STEPS = 128, 48
DEFAULT, INT8, EXACT = "q4core, int16 (default)", "q4core, int8", "q4core, exact"
LLAMA = "llama.cpp"
TARGETS = {("decode", DEFAULT): 1.0, ("decode", INT8): 1.3, ("prefill", DEFAULT): 2.0, ("prefill", INT8): 2.0}
"""Shares of llama.cpp's tokens per second that are aimed at."""
_TEXT = "The history of the lighthouse begins long before the first towers were built on the rocks of the coast. "
_PARK_SECONDS = 0.02
_LEAST_COSINE = 0.99
_COLORS = {DEFAULT: "#0b6e4f", INT8: "#1f9d74", EXACT: "#8fd0b4", LLAMA: "#d1731f"}

Run = tuple[float, float]
"""Seconds of the prompt, and of the steps."""


def _ours(model: LanguageModel, prompt: Sequence[int]) -> Callable[[int], Run]:
    cache = model.decoder.make_cache(PROMPT + STEPS)  # once, as llama.cpp's context is

    def run(threads: int) -> Run:
        torch.set_num_threads(threads)
        cache.clear()
        generation = Generation(model.decoder, prompt, max_tokens=STEPS + 1, cache=cache)
        for _ in generation:
            pass
        return generation.prefill_seconds, generation.decode_seconds

    return run


def _logits(model: LanguageModel, prompt: Sequence[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        cache = model.decoder.make_cache(len(prompt))
        logits: np.ndarray[Any, Any] = model.decoder(torch.tensor([list(prompt)]), cache, last_only=True)[0, -1].numpy()
    return logits


def _cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    a, b = a.astype(np.float64) - a.mean(), b.astype(np.float64) - b.mean()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def measure(rounds: int) -> dict[str, Any]:
    """Return tokens per second by threads and program; a llama.cpp that is not installed is said to be missing."""
    path = find_model("smollm2")
    precisions = {DEFAULT: "auto", INT8: "int8", EXACT: "exact"}
    models = {
        name: LanguageModel.open(path, q4.SessionConfig(device="cpu", activation_precision=precision), cache="off")
        for name, precision in precisions.items()
    }
    prompt = models[DEFAULT].tokenizer.encode(_TEXT * PROMPT)[:PROMPT]
    runs = {name: _ours(model, prompt) for name, model in models.items()}
    logits = {name: _logits(model, prompt) for name, model in models.items()}
    peer: dict[str, Any] = {"distribution": "llama-cpp-python"}
    try:
        llama = LlamaModel(path, PROMPT + STEPS + 1)
    except ImportError:
        peer |= {"installed": False, "why": "not installed"}
    else:
        peer |= {"installed": True, "version": importlib.metadata.version("llama-cpp-python")}
        runs[LLAMA] = lambda threads: llama.generate(prompt, STEPS, threads)
        logits[LLAMA] = llama.logits(prompt)
    agreement = {name: _cosine(logits[EXACT], values) for name, values in logits.items()}
    for name, cosine in agreement.items():
        if not cosine >= _LEAST_COSINE:
            raise SystemExit(
                f"{name}: logits at a cosine of {cosine:.4f} to those of {EXACT}, so its speed is meaningless"
            )
    cores = max(2, torch.get_num_threads())
    return {
        "file": path.name,
        "prompt": PROMPT,
        "steps": STEPS,
        "peers": {"llama.cpp": peer},
        "cosine_of_logits": agreement,
        "threads": {str(threads): _sample(runs, threads, rounds) for threads in (cores, 1)},
    }


def _sample(runs: dict[str, Callable[[int], Run]], threads: int, rounds: int) -> dict[str, Any]:
    """Run each program once in each round, after a round that is not counted."""
    before = torch.get_num_threads()
    rates: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in runs}
    order = random.Random(0)  # noqa: S311  # an order, no secret
    for index in range(rounds + 1):
        for name, run in order.sample(sorted(runs.items()), len(runs)):
            time.sleep(_PARK_SECONDS)  # until the other's workers sleep
            prefill, decode = run(threads)
            if index:
                rates[name]["prefill"].append(PROMPT / prefill)
                rates[name]["decode"].append(STEPS / decode)
    torch.set_num_threads(before)
    return {name: {kind: record.summary(values) for kind, values in own.items()} for name, own in rates.items()}


def judge(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return whether we reach the target's share of llama.cpp's speed, for each kind and number of threads."""
    found = []
    for threads, programs in result["threads"].items():
        for (kind, name), share in TARGETS.items():
            peer = programs.get(LLAMA)
            ratio = None if peer is None else programs[name][kind]["median"] / peer[kind]["median"]
            target = f"SmolLM2: {share} of llama.cpp's tokens per second"
            found.append(verdict.Verdict(target, f"{name}, {kind}, {threads} threads", ratio, share, against=LLAMA))
    return found


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw tokens per second of decode and of prefill."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    counts = list(result["threads"])
    for axes, kind in zip(panels, ("decode", "prefill"), strict=True):
        for index, name in enumerate(name for name in _COLORS if name in result["threads"][counts[0]]):
            own = [result["threads"][count][name][kind] for count in counts]
            places = [place + 0.21 * (index - 1.5) for place in range(len(counts))]
            medians = [values["median"] for values in own]
            errors = [
                [values["median"] - values["p10"] for values in own],
                [values["p90"] - values["median"] for values in own],
            ]
            bars = axes.bar(places, medians, 0.2, yerr=errors, color=_COLORS[name], ecolor="#00000088", label=name)
            axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axes.set_xticks(range(len(counts)), ["one thread" if count == "1" else f"{count} threads" for count in counts])
        words = {"decode": f"Decode, {result['steps']} tokens", "prefill": f"Prompt of {result['prompt']} tokens"}
        axes.set_title(words[kind], loc="left", fontweight="bold")
        tidy(axes)
    panels[0].set_ylabel("tokens per second (more is better)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{result['file']}; {caption(result, result['isa'])}", fontsize=9, color="#555555")
    return save(figure, path)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``generate-<isa>.json`` and its picture, and print tokens per second and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks generate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, for development")
    parser.add_argument("--from", metavar="FILE", dest="file", help="draw a stored result again; measure nothing")
    options = parser.parse_args(arguments)
    if options.file is not None:
        written = Path(options.file)
        result = json.loads(written.read_text(encoding="utf-8"))
        print(f"written: {draw(result, written.with_suffix('.png'))}")
        return
    result = measure(rounds=3 if options.quick else 30)
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    result |= {"unit": "tokens per second", "isa": isa(), "environment": record.environment()}
    written = record.write(
        f"generate-{result['isa']}", result, folder=record.BUILD if options.quick else record.RESULTS
    )
    for threads, programs in result["threads"].items():
        for name, kinds in programs.items():
            rates = ", ".join(
                f"{kind} {own['median']:.0f} ({own['p10']:.0f} … {own['p90']:.0f})" for kind, own in kinds.items()
            )
            print(f"{threads} threads  {name:<24} {rates} tokens/s")
    for name, peer in result["peers"].items():
        print(f"{name}: {peer['version'] if peer['installed'] else peer['why']}")
    for line in verdict.lines(judged):
        print(line)
    for path in (written, draw(result, written.with_suffix(".png"))):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
