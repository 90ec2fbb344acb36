"""Time and memory of opening a model: the first time, from the cache, and in llama.cpp.

Each opening is a process of its own, measured beyond its imports: seconds, seconds of CPU, and anonymous memory (which
no file backs); then seconds and memory up to the first token, which builds the vocabulary and the program. The ways
take turns. Files are in the page cache: what is measured is what is computed and copied.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record, verdict
from benchmarks.child import anonymous_bytes, run_child
from q4_lm import Generation, LanguageModel
from q4_lm.commands.generate import find_model

if TYPE_CHECKING:
    from collections.abc import Sequence

PROCESSES = 10
LIMIT_S = 600
SECONDS, BYTES, LARGE_SECONDS, FIRST_TOKEN_SECONDS = 0.15, 20e6, 0.5, 0.5
"""Targets of a cached SmolLM2-135M, of a cached file of 2 GB, and up to SmolLM2's first token."""
_LARGE = {"layers": 36, "hidden": 2560, "feed_forward": 8192}
_SMALL = {"layers": 2, "hidden": 256, "feed_forward": 512}
_BLOCK, _BLOCK_BYTES = 32, 20
_FIELDS = ("seconds", "cpu_seconds", "anonymous_bytes", "first_token_seconds", "first_token_anonymous_bytes")


def _mapped() -> dict[str, int]:
    """Return what this process has mapped of prepared files, by kind of page, in bytes."""
    found, inside = dict.fromkeys(("Rss", "Pss", "Private_Dirty", "Anonymous"), 0), False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ", maxsplit=1)[0]:
            inside = line.endswith(".q4prep")
        elif inside and name in found:
            found[name] += int(rest.split()[0]) * 1024
    return found


def _open_here(path: str, cache: str) -> dict[str, Any]:
    """Open a model in this process, and generate one token."""
    q4.default_registry().items("q4_architectures")  # plugins are imports
    q4.default_registry().backends()
    before, started, cpu = anonymous_bytes(), time.perf_counter(), time.process_time()
    with LanguageModel.open(path, cache=cache) as model:
        result: dict[str, Any] = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        result |= {
            "anonymous_bytes": anonymous_bytes() - before,
            "state": "off" if model.cached is None else model.cached.state,
        }
        for _ in Generation(model.decoder, model.tokenizer.encode("the capital"), max_tokens=1):
            result["first_token_seconds"] = time.perf_counter() - started
            result["first_token_anonymous_bytes"] = anonymous_bytes() - before
        return result


def _open_llama(path: str) -> dict[str, Any]:
    library: Any = importlib.import_module("llama_cpp")
    library.llama_backend_init()
    before, started, cpu = anonymous_bytes(), time.perf_counter(), time.process_time()
    if not library.llama_model_load_from_file(path.encode(), library.llama_model_default_params()):
        raise SystemExit("llama.cpp could not open the file")
    result = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    return {**result, "anonymous_bytes": anonymous_bytes() - before}


def _open_shared(path: str, cache: str, count: int) -> dict[str, Any]:
    """Open a cached model in several processes, read all of it, and return what each has mapped while all live."""
    torch.set_num_threads(1)  # a process that has started threads can't be forked
    ready, go, end, back = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    for _ in range(count):
        if os.fork():
            continue
        signal.alarm(LIMIT_S)  # should the others fail
        try:
            with LanguageModel.open(path, cache=cache) as model:
                for layer in model.session.layers():
                    for buffer in layer.buffers():
                        buffer.sum()
                os.write(ready[1], b"1")
                os.read(go[0], 1)
                os.write(back[1], (json.dumps(_mapped()) + "\n").encode())
                os.read(end[0], 1)
        finally:
            os._exit(0)
    for pipe in (ready, back):
        os.close(pipe[1])  # so that a process that fails ends the reading
    opened = b""
    while len(opened) < count and (part := os.read(ready[0], count)):
        opened += part
    if len(opened) < count:
        raise SystemExit("a process could not open the model")
    os.write(go[1], b"1" * count)
    with os.fdopen(back[0], encoding="utf-8") as lines:
        found = [json.loads(lines.readline()) for _ in range(count)]
    os.write(end[1], b"1" * count)
    return {"processes": found, "pss_bytes": sum(item["Pss"] for item in found)}


_child = functools.partial(run_child, "benchmarks.opening", limit_s=LIMIT_S)


def _write_large(path: Path, sizes: dict[str, int]) -> Path:
    """Write a Llama of random Q4_1 blocks."""
    import gguf  # noqa: PLC0415  # a package of the tests
    import numpy as np  # noqa: PLC0415  # as above

    hidden, wide, heads = sizes["hidden"], sizes["feed_forward"], sizes["hidden"] // 64
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*(chr(ord("!") + number) for number in range(1000)), "th"]
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.merges", ["t h"])
    rng = np.random.default_rng(0)
    made: dict[tuple[int, int], Any] = {}

    def blocks(rows: int, columns: int) -> Any:
        if (rows, columns) not in made:
            found = rng.integers(0, 256, (rows, columns // _BLOCK, _BLOCK_BYTES), dtype=np.uint8)
            found[..., :4] = np.array([0.01, -0.075], dtype=np.float16).view(np.uint8)
            made[rows, columns] = found.reshape(rows, -1)
        return made[rows, columns]

    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("token_embd.weight", blocks(len(tokens), hidden), raw_dtype=kind)
    for layer in range(sizes["layers"]):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, dtype=np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks(hidden, hidden), raw_dtype=kind)
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            writer.add_tensor(f"blk.{layer}.ffn_{name}.weight", blocks(*shape), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def measure(rounds: int, large: dict[str, int]) -> dict[str, Any]:
    """Return the openings of SmolLM2 and of a large file by way, and what ten processes share."""
    path = find_model("smollm2")
    peer: dict[str, Any] = {"distribution": "llama-cpp-python", "installed": False, "why": "not installed"}
    ways = ["without a cache", "first", "cached"]
    if importlib.util.find_spec("llama_cpp") is not None:
        peer = {"distribution": "llama-cpp-python", "installed": True}
        peer["version"] = importlib.metadata.version("llama-cpp-python")
        ways.append("llama.cpp")
    result: dict[str, Any] = {"file": path.name, "file_bytes": path.stat().st_size, "peers": {"llama.cpp": peer}}
    with tempfile.TemporaryDirectory() as folder:
        cache, big = Path(folder, "cache"), _write_large(Path(folder, "large.gguf"), large)
        _child("open", path, cache)
        _child("open", big, cache)
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        cached_large = []
        for number in range(rounds):
            for way in ways:
                caches = {"without a cache": "off", "first": Path(folder, str(number)), "cached": cache}
                found[way].append(_child("llama", path) if way == "llama.cpp" else _child("open", path, caches[way]))
            cached_large.append(_child("open", big, cache))
        for item in (*found["cached"], *cached_large):
            if item["state"] != "opened":
                raise SystemExit(f"the cached model was not opened from the cache: {item['state']}")
        prepared = max(cache.iterdir(), key=lambda file: file.stat().st_size).stat().st_size
        result |= {
            "ways": {way: _summaries(items) for way, items in found.items()},
            "large": {"file_bytes": big.stat().st_size, "prepared_bytes": prepared, "cached": _summaries(cached_large)},
            "shared": _child("share", path, cache, PROCESSES),
        }
    return result


def _summaries(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {field: record.summary([item[field] for item in items]) for field in _FIELDS if field in items[0]}


def judge(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return which targets are met: those of a cached opening, of a large one, and of the first token."""
    cached, large = result["ways"]["cached"], result["large"]["cached"]
    found = [
        ("cached SmolLM2: seconds", cached["seconds"]["median"], SECONDS),
        ("cached SmolLM2: anonymous bytes", cached["anonymous_bytes"]["median"], BYTES),
        ("cached large file: seconds", large["seconds"]["median"], LARGE_SECONDS),
        ("cached SmolLM2: seconds to the first token", cached["first_token_seconds"]["median"], FIRST_TOKEN_SECONDS),
    ]
    return [verdict.Verdict(what, result["file"], value, limit, is_most=True) for what, value, limit in found]


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``opening.json``, and print medians and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks opening", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round and a small large file, for development")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        kind, path, *rest = options.child
        if kind == "llama":
            result = _open_llama(path)
        else:
            result = _open_here(path, rest[0]) if kind == "open" else _open_shared(path, rest[0], int(rest[1]))
        print(json.dumps(result))
        return
    result = measure(1 if options.quick else 9, _SMALL if options.quick else _LARGE)
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    written = record.write("opening", result, folder=record.BUILD if options.quick else record.RESULTS)
    for way, own in (*result["ways"].items(), ("cached, large", result["large"]["cached"])):
        seconds, cpu, size = (own[field]["median"] for field in _FIELDS[:3])
        print(f"{way:<16} {seconds * 1e3:8.0f} ms ({cpu * 1e3:.0f} ms of CPU), {size / 1e6:7.1f} MB anonymous")
    shared = result["shared"]
    dirty = max(item["Private_Dirty"] for item in shared["processes"])
    print(f"{PROCESSES} processes  {shared['pss_bytes'] / 1e6:8.1f} MB of prepared weights together, {dirty} B private")
    for line in verdict.lines(judged):
        print(line)
    print(f"written: {written}")


if __name__ == "__main__":
    main(sys.argv[1:])
