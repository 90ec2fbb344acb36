"""Several sequences at once: tokens per second of all of them, by ``generate_batch``'s program and llama.cpp, in turns.

Prompts have 128 tokens, each its own. Seconds of steps are those after the first token of every sequence: each step is
one token of each, chosen greedily. llama.cpp decodes in parallel, by one call for all sequences. ``Q4_CPU_ISA=avx2``
limits q4core to AVX2, and names the result; llama.cpp takes what it was built for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import q4core as q4
from benchmarks import record, verdict
from benchmarks.cpu.ours import isa
from benchmarks.llama_cpp_model import LlamaBatch
from q4_lm import LanguageModel
from q4_lm.commands.generate import find_model
from q4_lm.generation.decoding import batch_program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PROMPT, STEPS = 128, 48
BATCHES = (1, 4, 16)
ROUNDS, QUICK_ROUNDS = 4, 1
DEFAULT, INT8, LLAMA = "q4core, int16 (default)", "q4core, int8", "llama.cpp"
ALONE = {4: 2.5, 16: 6.0}
"""Batch → the times of batch 1's tokens per second that are aimed at."""
PEER = 1.5
TEXT = "The history of the lighthouse begins long before the first towers were built on the rocks of the coast. "
_PARK_SECONDS = 0.02
_LEAST_COSINE = 0.99

Run = tuple[float, float]
"""Seconds of all prompts, and of the steps."""


class Ours:
    """The program of a batch, over one cache.

    Args:
        model: The model.
        batch: Sequences.
    """

    def __init__(self, model: LanguageModel, batch: int) -> None:
        self._cache = model.decoder.make_batch_cache(PROMPT + STEPS + 1, batch)
        program = batch_program(model.decoder, self._cache)
        if program is None:
            raise SystemExit(f"no backend runs the program of a batch: {model.session.report()}")
        self._program = program

    def rows(self, prompts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """Return the logits after each prompt."""
        self._cache.lengths[:] = [0] * self._cache.batch
        last = [self._program([(row, prompt)], (0,))[0].numpy().copy() for row, prompt in enumerate(prompts)]
        return np.stack(last)

    def run(self, prompts: Sequence[Sequence[int]], steps: int, threads: int) -> Run:
        """Run once with a number of threads."""
        torch.set_num_threads(threads)
        program, rows = self._program, range(self._cache.batch)
        self._cache.lengths[:] = [0] * self._cache.batch
        started = time.perf_counter()
        tokens = []
        for row, prompt in enumerate(prompts):  # each is a run of as many tokens as one takes
            program([(row, prompt)], (0,))
            tokens += program.best()
        prefilled = time.perf_counter()
        for _ in range(steps):
            program([(row, (token,)) for row, token in enumerate(tokens)], rows)
            tokens = program.best()
        return prefilled - started, time.perf_counter() - prefilled


def _cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    a, b = (side.astype(np.float64) - side.mean(-1, keepdims=True) for side in (a, b))
    return float(((a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))).min())


def prompts_of(numbers: Sequence[int], batch: int) -> list[list[int]]:
    """Return a prompt for each sequence: the text from another word on."""
    return [[*numbers[row : row + PROMPT]] for row in range(batch)]


def measure(rounds: int, path: Path) -> dict[str, Any]:
    """Return tokens per second by threads, batch and program; llama.cpp is said to be missing where it is."""
    models = {
        name: LanguageModel.open(path, q4.SessionConfig(device="cpu", activation_precision=precision), cache="off")
        for name, precision in ((DEFAULT, "auto"), (INT8, "int8"))
    }
    numbers = models[DEFAULT].tokenizer.encode(TEXT * (PROMPT + max(BATCHES)))
    cores = max(2, torch.get_num_threads())
    threads: dict[str, dict[str, Any]] = {str(count): {} for count in (cores, 1)}
    peer: dict[str, Any] = {"distribution": "llama-cpp-python", "installed": False}
    agreement = 1.0
    for batch in BATCHES:
        prompts = prompts_of(numbers, batch)
        runs: dict[str, Callable[..., Run]] = {}
        logits = []
        for name, model in models.items():
            ours = Ours(model, batch)
            runs[name] = ours.run
            logits.append(ours.rows(prompts))
        rival = None
        try:
            rival = LlamaBatch(path, PROMPT + STEPS + 1, batch)
        except ImportError:
            pass
        else:
            peer |= {"installed": True, "version": importlib.metadata.version("llama-cpp-python")}
            runs[LLAMA] = rival.run
            agreement = min(agreement, _cosine(logits[0], rival.rows(prompts, 0)))
            if not agreement >= _LEAST_COSINE:
                raise SystemExit(f"logits at a cosine of {agreement:.4f} to llama.cpp's, so its speed is meaningless")
        for count, own in threads.items():
            own[str(batch)] = sample(runs, prompts, int(count), rounds)
        if rival is not None:
            rival.close()
    return {
        "file": path.name,
        "prompt": PROMPT,
        "steps": STEPS,
        "peer": peer,
        "cosine_of_logits": agreement,
        "threads": threads,
    }


def sample(
    runs: dict[str, Callable[..., Run]], prompts: Sequence[Sequence[int]], threads: int, rounds: int
) -> dict[str, Any]:
    """Run each program once in each round, after a round that is not counted."""
    before, batch = torch.get_num_threads(), len(prompts)
    rates: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in runs}
    order = random.Random(0)  # noqa: S311  # an order, no secret
    for index in range(rounds + 1):
        for name, run in order.sample(sorted(runs.items()), len(runs)):
            time.sleep(_PARK_SECONDS)  # until the other's workers sleep
            prefill, decode = run(prompts, STEPS, threads)
            if index:
                rates[name]["prefill"].append(batch * PROMPT / prefill)
                rates[name]["decode"].append(batch * STEPS / decode)
    torch.set_num_threads(before)
    return {name: {kind: record.summary(values) for kind, values in own.items()} for name, own in rates.items()}


def judge(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return whether a batch has the asked-for times of batch 1's tokens, and of llama.cpp's at the same batch."""
    found = []
    for threads, batches in result["threads"].items():
        for batch, share in ALONE.items():
            one, many = (batches[str(size)][DEFAULT]["decode"]["median"] for size in (1, batch))
            what, subject = f"{share} of batch 1's tokens per second", f"batch of {batch}, {threads} threads"
            found.append(verdict.Verdict(f"batch of {batch}: {what}", subject, many / one, share, against="batch 1"))
        for batch in ALONE:
            programs = batches[str(batch)]
            peer = programs.get(LLAMA)
            ratio = None if peer is None else programs[DEFAULT]["decode"]["median"] / peer["decode"]["median"]
            target, subject = f"{PEER} of llama.cpp's tokens per second", f"batch of {batch}, {threads} threads"
            found.append(verdict.Verdict(target, subject, ratio, PEER, against=LLAMA))
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``batches-<isa>.json``, and print tokens per second and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks batches", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, for development")
    options = parser.parse_args(arguments)
    result = measure(QUICK_ROUNDS if options.quick else ROUNDS, find_model("smollm2"))
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    result |= {"unit": "tokens per second", "isa": isa(), "environment": record.environment()}
    folder = record.BUILD if options.quick else record.RESULTS
    written = record.write(f"batches-{result['isa']}", result, folder=folder)
    for threads, batches in result["threads"].items():
        for batch, programs in batches.items():
            for name, kinds in programs.items():
                rates = ", ".join(f"{kind} {own['median']:.0f}" for kind, own in kinds.items())
                print(f"{threads} threads  batch {batch:>2}  {name:<24} {rates} tokens/s")
    peer = result["peer"]
    print(f"{LLAMA}: {peer['version'] if peer['installed'] else 'not installed'}")
    for line in verdict.lines(judged):
        print(line)
    print(f"written: {written}")


if __name__ == "__main__":
    main()
