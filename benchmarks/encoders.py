"""Sentences per second of MiniLM: q4core's encoder, alone and in sentence-transformers, compared with other libraries.

Texts go in and vectors come out: each way cuts texts into tokens by the same tokenizer, and pools. All ways take turns
in one process, with as many threads, and a pause between two lets the other's threads park. Sentences have 8 to 128
tokens. ONNX Runtime's model is exported by torch, in float32 and quantised to int8 by its own ``quantize_dynamic``.
``Q4_CPU_ISA=avx2`` limits q4core alone: ONNX Runtime has no such option.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from benchmarks.cpu.ours import isa
from benchmarks.embeddings import EXACT, PACKAGE, folder, halves
from benchmarks.verdict import Verdict, lines
from q4_lm import SentenceEncoder
from q4_nn import convert_linears_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Encode = Callable[[Sequence[str], int], torch.Tensor]

FLOAT32, INT8 = "sentence-transformers, float32", "ONNX Runtime, int8"
SHORTEST, LONGEST, COUNT = 8, 128, 128
"""Tokens of a sentence, and sentences of a pass."""
BATCHES = (1, 32)
PAUSE_S = 0.1
TARGETS = {FLOAT32: 2.0, INT8: 1.3}
"""Way → how many times as many sentences a second the fastest of q4core's ways is to encode."""
LIBRARIES = ("sentence-transformers", "transformers", "onnxruntime", "torch")


def texts(count: int = COUNT) -> list[str]:
    """Return sentences whose lengths in tokens are spread evenly, in random order."""
    with SentenceEncoder.open(folder(), EXACT) as model:
        tokenizer = model.tokenizer
    words = " ".join(line for half in halves() for line in half).split()
    draw = random.Random(1)  # noqa: S311  # no secret
    found = []
    for index in range(count):
        wanted = SHORTEST + (LONGEST - SHORTEST) * index // max(1, count - 1)
        start, text = draw.randrange(len(words)), ""
        for place in range(len(words)):
            longer = f"{text} {words[(start + place) % len(words)]}".strip()
            if len(tokenizer.encode_whole(longer)) > wanted:
                break
            text = longer
        found.append(text)
    draw.shuffle(found)
    return found


def _exported(path: Path) -> None:
    """Write MiniLM as ONNX Runtime reads it: ``float32.onnx`` and ``int8.onnx``."""
    library = importlib.import_module("transformers")
    model = library.AutoModel.from_pretrained(folder(), dtype=torch.float32, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]

    class Features(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(**dict(zip(names, given, strict=True))).last_hidden_state
            return found

    ids, mask = torch.randint(1000, 2000, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "features")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, whose result is compared
        torch.onnx.export(
            Features(),
            (ids, mask, torch.zeros_like(ids)),
            str(path / "float32.onnx"),
            input_names=names,
            output_names=["features"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
    quantization = importlib.import_module("onnxruntime.quantization")
    logging.getLogger().setLevel(logging.ERROR)
    made = (str(path / name) for name in ("float32.onnx", "int8.onnx"))
    quantization.quantize_dynamic(*made, weight_type=quantization.QuantType.QInt8)


def _onnx(path: Path, threads: int) -> Encode:
    library = importlib.import_module("onnxruntime")
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    session = library.InferenceSession(str(path), options)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder())

    def encode(sentences: Sequence[str], batch: int) -> torch.Tensor:
        order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index]))
        found: dict[int, torch.Tensor] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            texts = [sentences[index] for index in chosen]
            given = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="np")
            features = torch.from_numpy(session.run(None, dict(given))[0])
            mask = torch.from_numpy(given["attention_mask"])[..., None]
            pooled = torch.nn.functional.normalize((features * mask).sum(1) / mask.sum(1), dim=-1)
            found |= dict(zip(chosen, pooled, strict=True))
        return torch.stack([found[index] for index in range(len(sentences))])

    return encode


def _inside(**options: Any) -> Encode:
    """Return sentence-transformers' own encoding; of a model that is loaded packed where options are given."""
    library = importlib.import_module("sentence_transformers")
    packed = {}
    if options:
        packed["quantization_config"] = importlib.import_module("q4_transformers").Q4Config(**options)
    model = library.SentenceTransformer(str(folder()), device="cpu", model_kwargs=packed)

    def encode(sentences: Sequence[str], batch: int) -> torch.Tensor:
        return torch.from_numpy(model.encode(list(sentences), batch_size=batch, show_progress_bar=False))

    return encode


def ways(path: Path, threads: int, stack: contextlib.ExitStack) -> dict[str, Encode]:
    """Return what encodes sentences, by its name."""
    found: dict[str, Encode] = {FLOAT32: _inside(), "ONNX Runtime, float32": _onnx(path / "float32.onnx", threads)}
    found[INT8] = _onnx(path / "int8.onnx", threads)
    for precision in ("auto", "int8"):
        name = "default" if precision == "auto" else precision
        config = q4.SessionConfig(device="cpu", activation_precision=precision)
        model = stack.enter_context(SentenceEncoder.open(folder(), config, cache="off"))
        convert_linears_(model.encoder, format="nf4", session=model.session, strict=True)
        found[f"q4core NF4, {name}"] = lambda sentences, batch, own=model: own.encode(sentences, batch=batch)  # type: ignore[misc]
        asked = {} if precision == "auto" else {"activation_precision": precision}
        found[f"q4core NF4, {name}, in sentence-transformers"] = _inside(format="nf4", cache="off", **asked)
    return found


def measure(sentences: Sequence[str], rounds: int, threads: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each way, batch and number of threads: seconds of each pass, and cosines to float32."""
    rows: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        _exported(Path(place))
        for count in threads:
            torch.set_num_threads(count)
            encoders = ways(Path(place), count, stack)
            dense = encoders[FLOAT32](sentences, 32).double()
            for batch in BATCHES:
                given = sentences if batch > 1 else sentences[: max(8, len(sentences) // 4)]
                samples: dict[str, list[float]] = {name: [] for name in encoders}
                for turn in range(rounds + 1):
                    for name, encode in encoders.items():
                        time.sleep(PAUSE_S)
                        start = time.perf_counter()
                        vectors = encode(given, batch)
                        if turn:
                            samples[name].append(time.perf_counter() - start)
                        else:
                            cosine = (vectors.double() * dense[: len(given)]).sum(1)
                            row = {"name": name, "batch": batch, "threads": count, "sentences": len(given)}
                            row |= {"mean_cosine": round(float(cosine.mean()), 6)}
                            rows.append(row | {"least_cosine": round(float(cosine.min()), 6)})
                for row in rows[-len(encoders) :]:
                    seconds = samples[row["name"]]
                    row["seconds"] = [round(item, 6) for item in seconds]
                    row["sentences_per_s"] = round(row["sentences"] / statistics.median(seconds), 1)
                    fact = f"{row['sentences_per_s']:8.1f} sentences/s, mean cosine {row['mean_cosine']:.4f}"
                    print(f"{count} threads, batches of {batch:>2}: {row['name']:<48} {fact}")
    torch.set_num_threads(before)
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Return how many times as fast the fastest of q4core's ways is that is as near to float32 as ONNX Runtime's."""
    found = []
    for count, batch in sorted({(row["threads"], row["batch"]) for row in rows}):
        own = {row["name"]: row for row in rows if (row["threads"], row["batch"]) == (count, batch)}
        near = own[INT8]["mean_cosine"]
        near_ones = [row for name, row in own.items() if name.startswith("q4core") and row["mean_cosine"] >= near]
        best = max(near_ones, key=lambda row: row["sentences_per_s"], default=None)
        for name, limit in TARGETS.items():
            ratio = None if best is None else round(best["sentences_per_s"] / own[name]["sentences_per_s"], 3)
            target, subject = (
                f"{limit} times the sentences per second of {name}",
                f"{count} threads, batches of {batch}",
            )
            found.append(Verdict(target, subject, ratio, limit, against=name))
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, print a line for each row and write ``encoders-<instruction set>.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks encoders", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sentences and rounds, for development")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sentences = texts(16 if options.quick else COUNT)
    rows = measure(sentences, 2 if options.quick else 9, (2,) if options.quick else (1, 2))
    judged = verdicts(rows)
    for line in lines(judged):
        print(line)
    result = {
        "model": {"package": PACKAGE, "version": importlib.metadata.version(PACKAGE)},
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "isa": isa(),
        "tokens": [SHORTEST, LONGEST],
        "rows": rows,
        "verdicts": [item.to_json() for item in judged],
        "unit": "seconds of a pass over all sentences; sentences a second by their median; cosine to float32 vectors",
    }
    written = record.write(f"encoders-{isa()}", result, folder=record.BUILD if options.quick else record.RESULTS)
    print(f"written: {written}")


if __name__ == "__main__":
    main()
