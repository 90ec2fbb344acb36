"""4-bit models inside transformers: load seconds, memory, prefill and decode, beside other libraries on the same files.

SmolLM2 comes from its GGUF, dequantised, and is quantised by bitsandbytes (NF4, single level) and q4core (NVFP4, in
compressed-tensors' own layout). The random model has hidden size 2048 and 16 layers. Each run is a process of its own;
the ways take turns. Seconds of loading are beyond imports, with files in the page cache; memory is the peak of what no
file backs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record, verdict
from benchmarks.child import anonymous_bytes, run_child
from benchmarks.cpu.ours import isa
from benchmarks.style import caption, plt, save, tidy
from q4_nn.generation.command import find_model

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT, STEPS, LIMIT_S = 128, 16, 900
WAYS = {
    "dense float32": ("dense", "float32", False),
    "dense bfloat16": ("dense", "bfloat16", False),
    "q4core NF4": ("nf4", "float32", True),
    "bitsandbytes NF4": ("nf4", "float32", False),
    "q4core NVFP4": ("nvfp4", "float32", True),
    "compressed-tensors NVFP4": ("nvfp4", "bfloat16", False),  # it makes bfloat16 weights, whatever is asked for
}
"""Way → folder, dtype, and whether q4core loads it."""
LIBRARIES = ("transformers", "bitsandbytes", "compressed-tensors")
TARGETS = (
    ("NF4 decode, times bitsandbytes", "decode", "q4core NF4", "bitsandbytes NF4", 10.0),
    ("NF4 decode, times dense float32", "decode", "q4core NF4", "dense float32", 2.0),
    ("NF4 load, times the dense checkpoint's", "load_seconds", "q4core NF4", "dense float32", 1.2),
)
"""Target, figure, way, what it is compared with, and the ratio wanted: of seconds at most, else at least."""
RANDOM = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_FIELDS = ("load_seconds", "peak_bytes", "prefill", "decode")


def _run(folder: str, dtype: str, ours: str, steps: int) -> dict[str, Any]:
    """Load a model in this process, and let it read a prompt and say some tokens."""
    library = importlib.import_module("transformers")
    library.logging.disable_progress_bar()
    options = {"dtype": getattr(torch, dtype)}
    if ours == "True":
        options["quantization_config"] = importlib.import_module("q4_transformers").Q4Config()
        q4.default_registry().backends()  # plugins are imports
    else:
        importlib.import_module("bitsandbytes" if Path(folder).name == "nf4" else "compressed_tensors")
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    started = time.perf_counter()
    model = library.AutoModelForCausalLM.from_pretrained(folder, **options)
    told = {"load_seconds": time.perf_counter() - started}
    tokens = torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model(tokens[:, :2])  # some libraries make their weights at the first call
        done.set()
        thread.join()
        told["peak_bytes"] = max(peak[0], anonymous_bytes()) - before
        started = time.perf_counter()
        found = model(tokens, use_cache=True)
        told["prefill"] = PROMPT / (time.perf_counter() - started)
        model(tokens[:, -1:], past_key_values=found.past_key_values)  # what the first step alone costs
        started = time.perf_counter()
        for _ in range(steps):
            model(tokens[:, -1:], past_key_values=found.past_key_values)
        told["decode"] = steps / (time.perf_counter() - started)
    return told


_child = functools.partial(run_child, "benchmarks.huggingface", limit_s=LIMIT_S)


def _write(folder: Path, sizes: dict[str, int] | None) -> None:
    """Write SmolLM2, or a random model of some sizes, dense and in four bits."""
    library = importlib.import_module("transformers")
    auto = library.AutoModelForCausalLM
    if sizes is None:
        file = find_model("smollm2")
        model = auto.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        model = auto.from_config(library.LlamaConfig(vocab_size=2048, **sizes), dtype=torch.float32)
    model.save_pretrained(folder / "dense")
    del model
    asked = library.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = auto.from_pretrained(folder / "dense", quantization_config=asked, dtype=torch.float32)
    theirs.save_pretrained(folder / "nf4")
    del theirs
    config = importlib.import_module("q4_transformers").Q4Config
    options = config(format="nvfp4", dialect="compressed-tensors-nvfp4", lossy=True)
    ours = auto.from_pretrained(folder / "dense", quantization_config=options, dtype=torch.float32)
    ours.save_pretrained(folder / "nvfp4")


def measure(rounds: int, steps: int, sizes: dict[str, int] | None) -> dict[str, dict[str, Any]]:
    """Return figures by way: seconds, bytes, and tokens per second of the prompt and of single tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _child("write", folder, json.dumps(sizes))
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, (part, dtype, ours) in WAYS.items():
                found[way].append(_child("run", folder / part, dtype, ours, steps))
                print(f"{way}: {found[way][-1]}", flush=True)
    return {
        way: {field: record.summary([item[field] for item in items]) for field in _FIELDS}
        for way, items in found.items()
    }


def judge(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return which targets are met, for each model; those of decoding were set for AVX2 and the random model."""
    found = []
    for model, ways in result["models"].items():
        for target, figure, own, other, limit in TARGETS:
            ratio = ways[own][figure]["median"] / ways[other][figure]["median"]
            is_most = figure == "load_seconds"
            found.append(verdict.Verdict(target, model, ratio, limit, is_most=is_most, against=other))
    return found


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw decode and peak memory by way, a column for each model."""
    models = result["models"]
    figure, table = plt.subplots(2, len(models), figsize=(5.2 * len(models), 5), squeeze=False, layout="constrained")
    for column, (model, ways) in enumerate(models.items()):
        for row, (field, label, scale) in enumerate((("decode", "tokens/s", 1), ("peak_bytes", "MB at most", 1e-6))):
            axes = table[row][column]
            values = [own[field]["median"] * scale for own in ways.values()]
            bars = axes.barh(list(ways), values, color=["#0b6e4f" if "q4core" in way else "#8a8f98" for way in ways])
            axes.bar_label(bars, fmt="%.4g", padding=2)
            axes.invert_yaxis()
            axes.set_xlabel(label)
            axes.margins(x=0.15)
            axes.set_title(model)
            tidy(axes)
    figure.suptitle("4-bit models in transformers")
    figure.supxlabel(caption(result, result["isa"]), fontsize=7)
    return save(figure, path)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``transformers.json`` and its picture, and print medians and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks transformers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small random model and one round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way and model")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        kind, folder, *rest = options.child
        if kind == "write":
            _write(Path(folder), json.loads(rest[0]))
            print("{}")
        else:
            print(json.dumps(_run(folder, rest[0], rest[1], int(rest[2]))))
        return
    models: dict[str, Any] = {"SmolLM2-135M": None, "random, 2048 × 16": RANDOM}
    if options.quick:
        models = {"random, small": SMALL}
    rounds = 2 if options.quick else options.rounds
    result: dict[str, Any] = {
        "isa": isa(),
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "unit": "seconds, bytes of anonymous memory, tokens per second; a prompt of 128, then single tokens",
        "models": {name: measure(rounds, 4 if options.quick else STEPS, sizes) for name, sizes in models.items()},
    }
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    folder = record.BUILD if options.quick else record.RESULTS
    written = record.write("transformers", result, folder=folder)
    draw(json.loads(written.read_text(encoding="utf-8")), folder / "transformers.png")
    for model, ways in result["models"].items():
        for way, own in ways.items():
            seconds, size, prefill, decode = (own[field]["median"] for field in _FIELDS)
            print(f"{model:<18} {way:<25} load {seconds:6.2f} s, {size / 1e6:7.0f} MB, ", end="")
            print(f"prefill {prefill:7.1f}/s, decode {decode:6.2f}/s")
    for line in verdict.lines(judged):
        print(line)
    print(f"written: {written}")


if __name__ == "__main__":
    main(sys.argv[1:])
