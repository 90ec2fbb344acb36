"""One busy core next to q4core: the rate of all threads next to a spinning process, over that of one calm thread.

The two take turns in pairs whose order alternates, in one process: prompts and decode of two models, of one inside
transformers and at a long context, batches of sequences, and sentences. ``waiting`` has machines that are busier.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import batches, contexts, encoders, generate, huggingface, record
from benchmarks.cpu.ours import isa
from benchmarks.embeddings import folder
from benchmarks.verdict import Verdict, lines
from benchmarks.waiting import burners
from q4_lm import LanguageModel, SentenceEncoder
from q4_nn import convert_linears_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Rates = dict[str, float]
    """What is measured, such as ``"decode"`` → units of it a second."""

LEAST = 0.8
"""Target: the rate next to a busy core, over that of one calm thread."""
PAIRS, QUICK_PAIRS = 9, 1
CONTEXT, STEPS = 2048, 32
SENTENCES = {1: 16, 32: 64}
"""Batch → sentences of a pass."""
_PARK_SECONDS = 0.02


def _rates(run: Callable[[int], generate.Run], threads: int, *, prompt: int, steps: int) -> Rates:
    prefill, decode = run(threads)
    return {"prompt": prompt / prefill, "decode": steps / decode}


def _batch_rates(ours: batches.Ours, prompts: Sequence[Sequence[int]], threads: int) -> Rates:
    _, decode = ours.run(prompts, batches.STEPS, threads)
    return {"decode": len(prompts) * batches.STEPS / decode}


def _sentence_rates(model: SentenceEncoder, texts: Sequence[str], batch: int, threads: int) -> Rates:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    model.encode(texts, batch=batch)
    return {"sentences": len(texts) / (time.perf_counter() - start)}


def subjects() -> Iterator[tuple[str, Callable[[int], Rates]]]:
    """Return what is measured, one after another: its name, and what runs it once with a number of threads."""
    importlib.import_module("transformers").logging.disable_progress_bar()
    config = q4.SessionConfig(device="cpu")
    sizes = {"prompt": generate.PROMPT, "steps": generate.STEPS}
    for name, (title, _) in generate.MODELS.items():
        model = LanguageModel.open(generate.file_of(name), config, cache="off")
        prompt = model.tokenizer.encode(generate.TEXT * generate.PROMPT)[: generate.PROMPT]
        yield title, functools.partial(_rates, generate.ours(model, prompt), **sizes)
        found, _ = importlib.import_module("q4_transformers").load(generate.file_of(name), cache="off")
        yield f"{title} in transformers", functools.partial(_rates, huggingface.generator(found, prompt), **sizes)
    model = LanguageModel.open(generate.file_of("smollm2"), config, cache="off")
    numbers = model.tokenizer.encode(generate.TEXT * CONTEXT)
    long = {"prompt": CONTEXT - STEPS, "steps": STEPS}
    run, _ = contexts.ours(model, None, numbers[: long["prompt"]], STEPS)
    yield f"SmolLM2, context of {CONTEXT:,}", functools.partial(_rates, run, **long)
    for batch in batches.ALONE:
        prompts = batches.prompts_of(numbers, batch)
        yield f"SmolLM2, batch of {batch}", functools.partial(_batch_rates, batches.Ours(model, batch), prompts)
    with SentenceEncoder.open(folder(), config, cache="off") as encoder:
        convert_linears_(encoder.encoder, format="nf4", session=encoder.session, strict=True)
        for batch, count in SENTENCES.items():
            run_once = functools.partial(_sentence_rates, encoder, encoders.texts(count), batch)
            yield f"MiniLM, batches of {batch}", run_once


def measure(run: Callable[[int], Rates], pairs: int) -> dict[str, dict[str, Any]]:
    """Return, for each rate, those of one calm thread, those of all threads next to a busy core, and their ratios."""
    threads = max(2, torch.get_num_threads())
    calm: dict[str, list[float]] = {}
    crowded: dict[str, list[float]] = {}
    run(threads)
    for pair in range(pairs):
        for is_busy in sorted((False, True), reverse=pair % 2 == 1):
            with burners(int(is_busy)):
                time.sleep(_PARK_SECONDS)
                for name, rate in run(threads if is_busy else 1).items():
                    (crowded if is_busy else calm).setdefault(name, []).append(rate)
    torch.set_num_threads(threads)
    return {
        name: {
            "one calm thread": record.summary(rates),
            "next to a busy core": record.summary(crowded[name]),
            "ratio": record.summary([busy / alone for busy, alone in zip(crowded[name], rates, strict=True)]),
        }
        for name, rates in calm.items()
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, print a line for each rate and write ``busy-<instruction set>.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks busy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair of each, for development")
    options = parser.parse_args(arguments)
    found, judged = {}, []
    for subject, run in subjects():
        found[subject] = measure(run, QUICK_PAIRS if options.quick else PAIRS)
        for name, own in found[subject].items():
            ratio = own["ratio"]["median"]
            calm = own["one calm thread"]["median"]
            print(f"{subject:<32} {name:<10} {calm:8.1f}/s on one calm thread, {ratio:.2f} of it next to a busy core")
            target = f"{LEAST} of one calm thread"
            judged.append(Verdict(target, f"{subject}, {name}", ratio, LEAST, against="one calm thread"))
    for line in lines(judged):
        print(line)
    result = {"unit": "tokens or sentences per second", "isa": isa(), "threads": max(2, torch.get_num_threads())}
    result |= {"subjects": found, "verdicts": [item.to_json() for item in judged]}
    written = record.write(f"busy-{isa()}", result, folder=record.BUILD if options.quick else record.RESULTS)
    print(f"written: {written}")


if __name__ == "__main__":
    main()
