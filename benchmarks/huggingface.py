"""4-bit models inside transformers: load seconds, memory, prefill and decode, compared with other libraries.

SmolLM2 comes from its GGUF, dequantised, and is quantised by bitsandbytes (NF4, single level) and q4core (NVFP4 and
INT4, in compressed-tensors' own layouts). The random model has hidden size 2048 and 16 layers; the one of experts has
eight in each of 4 layers, and of it memory alone is measured. Each run is a process of its own; the ways take turns.
Seconds of loading are beyond imports, with files in the page cache and proofs of kernels on disk; a model is ready
once it has answered. Memory is the peak of what no file backs.
``Q4_CPU_ISA=avx2`` limits every library to AVX2, as on a machine without AVX-512, and names the result.

``--generate smollm2`` compares ``generate`` of transformers, by programs and by modules, with ``q4 generate`` and
llama.cpp on one GGUF file, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import generate, record, verdict
from benchmarks.child import anonymous_bytes, run_child
from benchmarks.cpu.ours import isa
from benchmarks.style import caption, plt, save, tidy
from q4_lm import Generation, LanguageModel
from q4_lm.commands.generate import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

GROUP = 32
"""In-features to a scale of INT4, which divide those of SmolLM2."""
PROMPT, STEPS, LEAST_STEPS, DECODE_S, LIMIT_S = 128, 16, 3, 6.0, 900
"""Tokens of the prompt; single tokens at most, at least, and the seconds after which no more are begun."""
WAYS = {
    "dense float32": ("dense", "float32", ""),
    "dense bfloat16": ("dense", "bfloat16", ""),
    "q4core NF4": ("nf4", "float32", "q4_transformers"),
    "q4core NF4, cached": ("nf4", "float32", "q4_transformers", "cache"),
    "bitsandbytes NF4": ("nf4", "float32", "bitsandbytes"),
    "bitsandbytes NF4, bfloat16": ("nf4", "bfloat16", "bitsandbytes"),  # for which it has kernels, on CPUs with it
    "q4core NVFP4": ("nvfp4", "float32", "q4_transformers"),
    "compressed-tensors NVFP4": ("nvfp4", "bfloat16", "compressed_tensors"),  # it makes bfloat16 weights in any case
    "q4core INT4": ("int4", "float32", "q4_transformers"),
    "compressed-tensors INT4": ("int4", "float32", "compressed_tensors"),
}
"""Way → folder, dtype, the library that loads it, and the folder of its cache of prepared layers, if it has one."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Variables that limit torch to AVX2."""
NOT_MEASURED = {"GPTQModel": "as its release 7.7.0 asks for torch 2.14.1 or newer, and this project has 2.13"}
LIBRARIES = ("transformers", "bitsandbytes", "compressed-tensors")
TARGETS = (
    ("NF4 decode, times bitsandbytes", "decode", "q4core NF4", "bitsandbytes NF4", 10.0),
    ("NF4 decode, times dense float32", "decode", "q4core NF4", "dense float32", 2.0),
    ("NF4 load, times the dense checkpoint's", "load_seconds", "q4core NF4", "dense float32", 1.2),
    ("NF4 until it has answered, times the dense one's", "ready_seconds", "q4core NF4", "dense float32", 1.0),
    ("NF4 load from a warm cache, times the dense one's", "load_seconds", "q4core NF4, cached", "dense float32", 0.3),
)
"""Target, figure, way, what it is compared with, and the ratio wanted: of seconds at most, else at least."""
ENGINE, PROGRAMS, MODULES = "q4 generate", "transformers, programs", "transformers, modules"
ROUNDS_OF_GENERATE = 12
READY_S = 0.45
"""Target: seconds of the random model in NF4 until it has answered once."""
RANDOM = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32}
EXPERTS = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 16}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_MEMORY = "peak memory of loading experts, times the model's and two experts'"
_FIELDS = ("load_seconds", "ready_seconds", "peak_bytes", "prefill", "decode")


def _run(folder: str, dtype: str, library: str, cache: str = "") -> dict[str, Any]:
    """Load a model in this process, and time a prompt and some tokens."""
    auto = _warm(folder)
    options = {"dtype": getattr(torch, dtype)}
    if library:
        module = importlib.import_module(library)
    if library == "bitsandbytes" and os.environ.get("Q4_CPU_ISA") == "avx2":
        module.nn.modules.has_avx512bf16 = lambda: False  # it asks the CPU itself
    if library == "q4_transformers":
        options["quantization_config"] = module.Q4Config(cache=str(Path(folder).parent / cache) if cache else "off")
        q4.default_registry().backends()  # plugins are imports
    with _Peak() as peak:
        started = time.perf_counter()
        model = auto.from_pretrained(folder, **options)
        result: dict[str, Any] = {"load_seconds": time.perf_counter() - started}
        if cache:
            result["cache"] = model.hf_quantizer.cache_state
        tokens = torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            model(tokens[:, :2])  # some libraries make their weights at the first call
        result["ready_seconds"] = time.perf_counter() - started
    result["peak_bytes"] = peak.bytes
    with torch.inference_mode():
        started = time.perf_counter()
        found = model(tokens, use_cache=True)
        result["prefill"] = PROMPT / (time.perf_counter() - started)
        model(tokens[:, -1:], past_key_values=found.past_key_values)  # what the first step alone costs
        started, steps, seconds = time.perf_counter(), 0, 0.0
        while steps < LEAST_STEPS or (steps < STEPS and seconds < DECODE_S):
            model(tokens[:, -1:], past_key_values=found.past_key_values)
            steps, seconds = steps + 1, time.perf_counter() - started
        result["decode"] = steps / seconds
    return result


def _write_experts(folder: Path, sizes: dict[str, int]) -> None:
    """Write a random Mixtral with eight experts in each layer, dense in bfloat16 and in NF4."""
    library = _write_first(folder)
    auto = library.AutoModelForCausalLM
    config = library.MixtralConfig(vocab_size=2048, num_local_experts=8, **sizes)
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder / "dense")
    del model
    options = importlib.import_module("q4_transformers").Q4Config(format="nf4")
    auto.from_pretrained(folder / "dense", quantization_config=options).save_pretrained(folder / "nf4")


def _load_experts(folder: str, format_: str) -> dict[str, Any]:
    """Load a model of experts in this process, quantising it where a format is given, and return what that takes.

    ``expert_bytes`` are those of an expert as the checkpoint has it.
    """
    auto, ours = _warm(folder), importlib.import_module("q4_transformers")
    options = ours.Q4Config(format=format_ or None, cache="off")
    q4.default_registry().backends()  # plugins are imports, and so is PEFT, which is asked for where there are experts
    importlib.import_module("q4_transformers.peft").keep_names_of_experts()
    with _Peak() as peak:
        started = time.perf_counter()
        model = auto.from_pretrained(folder, quantization_config=options)
        seconds = time.perf_counter() - started
    rows = ours.explain(model).rows
    experts = [row for row in rows if ".experts" in row.name]
    packed = [row for row in experts if row.backend is not None]
    own = "bytes_before" if format_ else "bytes_after"
    return {
        "load_seconds": seconds,
        "peak_bytes": peak.bytes,
        "model_bytes": sum(row.bytes_after for row in rows),
        "expert_bytes": sum(getattr(row, own) for row in packed if ".layers.0.mlp.experts.0." in row.name),
        "packed_expert_layers": len(packed),
        "dense_expert_modules": len(experts) - len(packed),
    }


class _Peak:
    """The most memory that no file backs, inside a block, beyond what there was before."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._note()

    def _note(self) -> None:
        self.bytes = max(self.bytes, anonymous_bytes() - self._before)

    def __enter__(self) -> Self:
        self._before = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._note()


_child = functools.partial(run_child, "benchmarks.huggingface", limit_s=LIMIT_S)


def _warm(folder: str) -> Any:
    """Load the small model next to a folder, as a process's first one imports much; return the class."""
    library = importlib.import_module("transformers")
    library.logging.disable_progress_bar()
    library.AutoModelForCausalLM.from_pretrained(Path(folder).parent / "first")
    return library.AutoModelForCausalLM


def _write_first(folder: Path) -> Any:
    """Write that small model; return the library."""
    library = importlib.import_module("transformers")
    model = library.AutoModelForCausalLM.from_config(library.LlamaConfig(vocab_size=64, **SMALL))
    model.save_pretrained(folder / "first")
    return library


def _write(folder: Path, sizes: dict[str, int] | None) -> None:
    """Write SmolLM2, or a random model of some sizes, dense and in four bits."""
    library = _write_first(folder)
    auto = library.AutoModelForCausalLM
    if sizes is None:
        file = find_model("smollm2")
        read = auto.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        del read.config.quantization_config  # GGUF's, which can't be saved
        model = auto.from_config(read.config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        del read
    else:
        torch.manual_seed(0)
        model = auto.from_config(library.LlamaConfig(vocab_size=2048, **sizes), dtype=torch.float32)
    model.save_pretrained(folder / "dense")
    _write_int4(model, folder / "int4")
    del model
    asked = library.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = auto.from_pretrained(folder / "dense", quantization_config=asked, dtype=torch.float32)
    theirs.save_pretrained(folder / "nf4")
    del theirs
    config = importlib.import_module("q4_transformers").Q4Config
    options = config(format="nvfp4", dialect="compressed-tensors-nvfp4", lossy=True)
    ours = auto.from_pretrained(folder / "dense", quantization_config=options, dtype=torch.float32)
    ours.save_pretrained(folder / "nvfp4")


def _write_int4(model: Any, folder: Path) -> None:
    """Write a model in symmetric INT4: transformers' loader fails on packed zero points with an error of shape."""
    state = model.state_dict()
    state["lm_head.weight"] = state["lm_head.weight"].clone()  # what is there is listed as dense, tied or not
    weights = {
        name: q4.quantize(state.pop(f"{name}.weight"), "int4", block_size=GROUP, name=name, symmetric=True)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    model.config.save_pretrained(folder)
    q4.save_checkpoint(folder, weights, dialect="compressed-tensors-int4", dense=state)


def measure(rounds: int, sizes: dict[str, int] | None) -> dict[str, dict[str, Any]]:
    """Return figures by way: seconds, bytes, and tokens per second of the prompt and of single tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["Q4_CACHE"] = str(folder / "proofs")  # for the children
        _child("write", folder, json.dumps(sizes))
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for part, *rest in (way for way in WAYS.values() if "q4_transformers" in way):
            _child("run", folder / part, *rest)  # proves kernels, and fills the cache
        for _ in range(rounds):
            for way, (part, *rest) in WAYS.items():
                found[way].append(_child("run", folder / part, *rest))
                print(f"{way}: {found[way][-1]}", flush=True)
                assert found[way][-1].get("cache", "opened") == "opened"
    return {
        way: {field: record.summary([item[field] for item in items]) for field in _FIELDS}
        for way, items in found.items()
    }


def measure_experts(sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return what loading a model of experts takes, packed or quantised meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _child("write-experts", folder, json.dumps(sizes))
        found = {
            "a checkpoint in NF4": _child("experts", folder / "nf4", ""),
            "quantised to NF4 while loading": _child("experts", folder / "dense", "nf4"),
        }
    for way, facts in found.items():
        print(f"experts, {way}: {facts}", flush=True)
    return found


def measure_generate(rounds: int, model: str) -> dict[str, Any]:
    """Return tokens per second by threads and way, all of which read one file and, but for llama.cpp, give one text."""
    importlib.import_module("transformers").logging.disable_progress_bar()
    ours, path = importlib.import_module("q4_transformers"), generate.file_of(model)
    own = LanguageModel.open(path, q4.SessionConfig(device="cpu"), cache="off")
    prompt = own.tokenizer.encode(generate.TEXT * generate.PROMPT)[: generate.PROMPT]
    runs = {ENGINE: generate.ours(own, prompt)}
    texts = {ENGINE: [*Generation(own.decoder, prompt, max_tokens=generate.STEPS + 1)]}
    for way, programs in ((PROGRAMS, True), (MODULES, False)):
        found, _ = ours.load(path, ours.Q4Config(programs=programs, cache="off"))
        runs[way] = generator(found, prompt)
        texts[way] = _new_tokens(found, prompt)
    assert texts[ENGINE] == texts[PROGRAMS] == texts[MODULES], texts
    with contextlib.suppress(ImportError):
        peer = generate.LlamaModel(path, generate.PROMPT + generate.STEPS + 1)
        runs[generate.LLAMA] = functools.partial(peer.generate, prompt, generate.STEPS)
    counts = {str(count): generate.sample(runs, count, rounds) for count in (max(2, torch.get_num_threads()), 1)}
    return {"model": model, "file": path.name, "threads": counts}


def _new_tokens(model: Any, prompt: Sequence[int], streamer: Any = None) -> list[int]:
    """Return the tokens that transformers generates after a prompt, as many as are measured."""
    library = importlib.import_module("transformers")
    count = generate.STEPS + 1
    options = library.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options, streamer=streamer)
    return list(found[0, len(prompt) :].tolist())


def generator(model: Any, prompt: Sequence[int]) -> Callable[[int], generate.Run]:
    """Return what generates once by transformers with a number of threads."""

    def run(threads: int) -> generate.Run:
        torch.set_num_threads(threads)
        clock = _Clock()
        started = time.perf_counter()
        _new_tokens(model, prompt, clock)
        return clock.times[1] - started, clock.times[-1] - clock.times[1]

    return run


class _Clock:
    """A streamer of transformers that notes when it was given the prompt, and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def judge_generate(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return whether transformers decodes nearly as fast as our own engine, and faster than llama.cpp."""
    found = []
    for threads, ways in result["threads"].items():
        for other, share in ((ENGINE, 0.8), (generate.LLAMA, 1.3)):
            ratio = ways[PROGRAMS]["decode"]["median"] / ways[other]["decode"]["median"] if other in ways else None
            target = f"{share} of the tokens per second of {other}"
            what = f"{result['model']}, {threads} threads"
            found.append(verdict.Verdict(target, what, ratio, share, against=other))
    return found


def _main_generate(model: str, *, is_quick: bool) -> None:
    result = measure_generate(2 if is_quick else ROUNDS_OF_GENERATE, model)
    judged = judge_generate(result)
    result |= {"unit": "tokens per second", "isa": isa(), "verdicts": [one.to_json() for one in judged]}
    result["versions"] = {name: importlib.metadata.version(name) for name in LIBRARIES[:1]}
    folder = record.BUILD if is_quick else record.RESULTS
    written = record.write(f"transformers-generate-{model}-{result['isa']}", result, folder=folder)
    for threads, ways in result["threads"].items():
        for way, kinds in ways.items():
            rates = ", ".join(f"{kind} {own['median']:.1f}" for kind, own in kinds.items())
            print(f"{threads} threads  {way:<26} {rates} tokens/s")
    for line in verdict.lines(judged):
        print(line)
    print(f"written: {written}")


def judge(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return which targets are met; those of decoding were set for AVX2 and the random model."""
    found = []
    for model, ways in result["models"].items():
        for target, figure, own, other, limit in TARGETS:
            if figure == "decode" and (result["isa"] != "avx2" or not model.startswith("random")):
                continue
            ratio = ways[own][figure]["median"] / ways[other][figure]["median"]
            is_most = figure.endswith("_seconds")
            found.append(verdict.Verdict(target, model, ratio, limit, is_most=is_most, against=other))
        if model.startswith("random"):
            ready = ways["q4core NF4"]["ready_seconds"]["median"]
            found.append(
                verdict.Verdict(f"{READY_S} s until NF4 has answered once", model, ready, READY_S, is_most=True)
            )
    for way, facts in result["experts"].items():
        limit = facts["model_bytes"] + 2 * facts["expert_bytes"]
        ratio = facts["peak_bytes"] / limit
        found.append(verdict.Verdict(_MEMORY, way, ratio, 1.0, is_most=True, against=f"{limit / 1e6:.0f} MB"))
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
    """Measure, write ``transformers-<isa>.json`` and its picture, and print medians and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks transformers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small random models and two rounds, for development")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way and model")
    parser.add_argument("--generate", choices=generate.MODELS, help="compare ways to generate with this model alone")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        kind, folder, *rest = options.child
        if kind.startswith("write"):
            (_write if kind == "write" else _write_experts)(Path(folder), json.loads(rest[0]))
            print("{}")
        else:
            print(json.dumps((_run if kind == "run" else _load_experts)(folder, *rest)))
        return
    if options.generate:
        _main_generate(options.generate, is_quick=options.quick)
        return
    name = isa()
    os.environ |= {"Q4_CACHE": "off", **(AVX2 if name == "avx2" else {})}  # for the children
    models: dict[str, Any] = {"SmolLM2-135M": None, "random, 2048 × 16": RANDOM}
    if options.quick:
        models = {"random, small": SMALL}
    rounds = 2 if options.quick else options.rounds
    result: dict[str, Any] = {
        "isa": name,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "not_measured": NOT_MEASURED,
        "unit": "seconds, bytes of anonymous memory, tokens per second; a prompt of 128, then single tokens",
        "experts": measure_experts(SMALL if options.quick else EXPERTS),
        "models": {name: measure(rounds, sizes) for name, sizes in models.items()},
    }
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    folder = record.BUILD if options.quick else record.RESULTS
    written = record.write(f"transformers-{name}", result, folder=folder)
    draw(json.loads(written.read_text(encoding="utf-8")), written.with_suffix(".png"))
    for model, ways in result["models"].items():
        for way, own in ways.items():
            loaded, ready, size, prefill, decode = (own[field]["median"] for field in _FIELDS)
            print(f"{model:<18} {way:<27} load {loaded:6.2f} s, ready {ready:6.2f} s, {size / 1e6:6.0f} MB, ", end="")
            print(f"prefill {prefill:7.1f}/s, decode {decode:6.2f}/s")
    for library, reason in NOT_MEASURED.items():
        print(f"{library}: not measured, {reason}")
    for line in verdict.lines(judged):
        print(line)
    print(f"written: {written}")


if __name__ == "__main__":
    main(sys.argv[1:])
